"""Calls counted by place, kernel and question, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

from attnsel.diagnose.watching.record import Api, Materialised, Site
from attnsel.params import AttentionParams

MOST_SHAPES = 12
"""Questions kept apart for one place and kernel: generation asks a new one with every token."""
MOST_PLACES = 2_000


class Seen(NamedTuple):
    """What an observer says of a call: the fields of :class:`Site` that are not counted."""

    api: Api
    forward: str
    params: AttentionParams | None = None
    switches: tuple[str, ...] = ()
    unread: str = ""
    candidate: str = ""
    compiled: bool = False
    materialised: tuple[Materialised, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Tally:
    """The counts of one site. ``extra``: what an observer of time or memory keeps with it, by its name."""

    where: str
    seen: Seen
    calls: int = 0
    backward: str = ""
    backward_calls: int = 0
    notes: dict[str, None] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  # shortest and longest s_kv, of shapes put together here
    others: int = 0  # calls of other shapes among ``calls``
    extra: dict[str, Any] = field(default_factory=dict)

    def count_backward(self, *_: Any) -> None:
        """A hook for an autograd node: that it ran. Changes no gradient."""
        self.backward_calls += 1

    def site(self) -> Site:
        seen, notes = self.seen, [*self.seen.notes, *self.notes]
        if self.others:
            low, high = self.lengths
            notes.append(f"{self.others} of these calls have other shapes, with s_kv from {low} to {high}")
        return Site(
            where=self.where,
            calls=self.calls,
            backward=self.backward,
            backward_calls=self.backward_calls,
            **{**seen._asdict(), "notes": tuple(dict.fromkeys(notes))},
            **{name: value for name, value in self.extra.items() if name in Site.model_fields},
        )


class Book:
    """All tallies of a session."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Any, ...], dict[Any, Tally]] = {}
        self._lock = Lock()
        self.dropped = 0  # calls at places beyond MOST_PLACES

    def tally(self, where: str, seen: Seen) -> Tally:
        """The tally where calls like this are counted: its own, or the last one of a place with many shapes.

        The caller adds to ``calls``; calls of a shape that has no tally of its own are counted as ``others``.
        """
        with self._lock:
            name = (where, seen.api, seen.forward, seen.compiled)
            if name not in self._groups and len(self._groups) >= MOST_PLACES:
                self.dropped += 1
                name = ("elsewhere", seen.api, seen.forward, seen.compiled)
            group = self._groups.setdefault(name, {})
            asked = seen.params, seen.switches
            tally = group.get(asked)
            if tally is None and len(group) < MOST_SHAPES:
                tally = group[asked] = Tally(name[0], seen)
            if tally is not None:
                return tally
            last = next(reversed(group.values()))
            last.others += 1
            _widen(last, seen.params)
            return last

    def tallies(self) -> Iterator[Tally]:
        for group in list(self._groups.values()):
            yield from list(group.values())

    def sites(self) -> tuple[Site, ...]:
        """As records, in the order in which they were first seen."""
        return tuple(tally.site() for tally in self.tallies() if tally.calls)

    def clear(self) -> None:
        with self._lock:
            self._groups.clear()


def _widen(tally: Tally, params: AttentionParams | None) -> None:
    lengths = [p.max_seqlen_kv for p in (tally.seen.params, params) if p is not None]
    lengths += tally.lengths
    tally.lengths[:] = [min(lengths, default=0), max(lengths, default=0)]
