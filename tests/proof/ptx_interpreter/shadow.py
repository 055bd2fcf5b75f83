"""A byte of notes for every byte of memory, read and written a word at a time."""

from __future__ import annotations

import numpy as np

from ptx_interpreter.lanes import ONES
from ptx_interpreter.numbers import Array, u1, u2, u4, u8

# Words by size. No integer of numpy has 16 bytes: a complex number is moved, never compared.
WORD = {1: u1, 2: u2, 4: u4, 8: u8, 16: np.complex128}


def word(byte: int, size: int) -> Array:
    """A word whose bytes are all ``byte``."""
    return np.full(size, byte, u1).view(WORD[size])[0]


def equal(a: Array, b: Array) -> Array:
    """Whether words have the same bits; those of 16 bytes would compare as floats."""
    if a.dtype.itemsize < 16:
        return a.view(f"u{a.dtype.itemsize}") == b.view(f"u{a.dtype.itemsize}")
    x, y = (np.ascontiguousarray(v).view(u8).reshape(-1, 2) for v in (a, b))
    return (x == y).all(1)


class Shadow:
    """``at``: byte places, multiples of ``size``; marks are dictionaries of words by size (``Lanes``)."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, u1)

    def _words(self, at: Array, size: int) -> list[Array]:
        unit = min(size, 8)
        view: Array = self.bytes.view(WORD[unit])
        return [view[(at + k) // unit] for k in range(0, size, unit)]

    def any(self, at: Array, size: int) -> Array:
        """Lanes with a note on one of their bytes."""
        found = [each != 0 for each in self._words(at, size)]
        return found[0] if len(found) == 1 else found[0] | found[1]

    def all_ones(self, at: Array, size: int) -> Array:
        good = [each == ONES[min(size, 8)] for each in self._words(at, size)]
        return good[0] if len(good) == 1 else good[0] & good[1]

    def others(self, at: Array, size: int, bits: dict[int, Array]) -> Array:
        """Lanes on whose bytes somebody left a bit that is not theirs."""
        rest = ~bits[min(size, 8)]
        found = [(each & rest) != 0 for each in self._words(at, size)]
        return found[0] if len(found) == 1 else found[0] | found[1]

    def mark(self, at: Array, size: int, mask: Array | None, bits: dict[int, Array]) -> None:
        """Add each lane's bits."""
        unit = min(size, 8)
        own = bits[unit]
        if mask is not None:
            at, own = at[mask], own[mask]
        for k in range(0, size, unit):
            np.bitwise_or.at(self.bytes.view(WORD[unit]), (at + k) // unit, own)

    def put(self, at: Array, size: int, byte: int) -> None:
        self.bytes.view(WORD[size])[at // size] = word(byte, size)


class LaneShadow(Shadow):
    """Which lane of a warp touched a byte: 1 + the lane, 255 for several."""

    SEVERAL = 255

    def clash(self, at: Array, size: int, mask: Array | None, marks: dict[int, Array]) -> Array:
        """Lanes at whose bytes another lane has been."""
        own = marks[min(size, 8)]
        found = np.zeros(len(at), bool)
        for each in self._words(at, size):
            found |= (each != 0) & (each != own)
        if mask is not None:
            found &= mask
        if found.any():  # the bytes of a word may differ
            which = np.flatnonzero(found)
            each = self.bytes[at[which][:, None] + np.arange(size)]
            found[which] = ((each != 0) & (each != marks[1][which][:, None])).any(1)
        return found

    def note(self, at: Array, size: int, mask: Array | None, marks: dict[int, Array], several: bool) -> None:
        """Leave each lane's mark; with ``several``, who was there before is not forgotten."""
        unit = min(size, 8)
        own = marks[unit]
        if mask is not None:
            at, own = at[mask], own[mask]
        view: Array = self.bytes.view(WORD[unit])
        for k in range(0, size, unit):
            index = (at + k) // unit
            before = view[index]
            view[index] = own
            if several:
                crowded = (view[index] != own) | ((before != 0) & (before != own))
                view[index[crowded]] = word(self.SEVERAL, unit)
