"""9.7.14.5: matrices of a warp in registers, and in shared memory in rows of 16 bytes.

Lane 4g + t of a warp holds of an 8 x 8 matrix of 16-bit elements row g, columns 2t and 2t + 1.
"""

from __future__ import annotations

import numpy as np

from ptx_interpreter.lanes import WARP, both
from ptx_interpreter.numbers import Array, f4, from_bf16, u2, u4
from ptx_interpreter.shared_memory import SharedMemory
from ptx_interpreter.warps import Warps

_ROW = 16  # bytes


def widen(kind: str, bits: Array) -> Array:
    """f16, bf16 (uint16) or tf32 (uint32) to float32."""
    if kind == "f16":
        return bits.view(np.float16).astype(f4)
    return from_bf16(bits) if kind == "bf16" else (bits & u4(0xFFFFE000)).view(f4)


class Matrices:
    def __init__(self, shared: SharedMemory, warps: Warps) -> None:
        self.shared, self.warps, self.lanes = shared, warps, shared.lanes

    def load(self, address: Array, count: int, trans: bool, mask: Array | None, line: int) -> list[Array]:
        """ldmatrix (9.7.14.5.15): lanes 8j to 8j + 7 give the addresses of the rows of matrix j."""
        self.warps.whole(mask, line)
        giving = both(mask, self.lanes.lane < 8 * count)
        at, given = self.shared.locate(address, _ROW, giving, line)
        self.shared.check_read(at, _ROW, given, line, collective=True)
        words = self.shared.data.view(np.complex128)[at // _ROW]
        rows = words.view(u4).reshape(-1, 4, 8, 4)[:, :count]  # [warp, matrix, row, pair of columns]
        if trans:
            halves = np.ascontiguousarray(rows).view(u2).reshape(-1, count, 8, 8)
            rows = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(u4)
        return [np.ascontiguousarray(rows[:, j]).reshape(-1) for j in range(count)]

    def store(
        self, address: Array, values: tuple[Array, ...], trans: bool, mask: Array | None, line: int
    ) -> None:
        """stmatrix (9.7.14.5.16)."""
        self.warps.whole(mask, line)
        giving = both(mask, self.lanes.lane < 8 * len(values))
        at, given = self.shared.locate(address, _ROW, giving, line)
        rows = np.zeros((self.lanes.n // WARP, 4, 8, 4), u4)
        for j, value in enumerate(values):
            rows[:, j] = value.reshape(-1, 8, 4)
        if trans:
            halves = rows.view(u2).reshape(-1, 4, 8, 8)
            rows = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(u4)
        self.shared.write(at, rows.reshape(-1, 4).view(np.complex128).reshape(-1), _ROW, given, line)

    def multiply(
        self,
        kind: str,
        a: tuple[Array, ...],
        b: tuple[Array, ...],
        c: tuple[Array, ...],
        mask: Array | None,
        line: int,
    ) -> Array:
        """mma m16n8k*: A row-major, B column-major, accumulators float32 (9.7.14.5.7 and .8).

        Lane 4g + t holds of A rows g and g + 8 (registers 0 and 1, then the next part of k), of B column g,
        of C rows g (registers 0, 1) and g + 8 (2, 3), columns 2t and 2t + 1.
        """
        self.warps.whole(mask, line)
        w = self.lanes.n // WARP
        per, bits = (1, u4) if kind == "tf32" else (2, u2)  # elements in a register
        x = widen(kind, np.stack(a).reshape(-1).view(bits)).reshape(len(a) // 2, 2, w, 8, 4, per)
        x = x.transpose(2, 1, 3, 0, 4, 5).reshape(w, 16, -1)
        y = widen(kind, np.stack(b).reshape(-1).view(bits)).reshape(len(b), w, 8, 4, per)
        y = y.transpose(1, 0, 3, 4, 2).reshape(w, -1, 8)
        z = np.stack(c).view(f4).reshape(2, 2, w, 8, 4).transpose(2, 0, 3, 4, 1).reshape(w, 16, 8)
        d = np.matmul(x, y) + z
        fragments = d.reshape(w, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
        return np.ascontiguousarray(fragments).reshape(4, self.lanes.n).view(u4)
