"""Which kernel family is ahead of which, by the kind of call: the order by speed, with its published figures.

An architecture has an order of families; where sources contradict each other they stand together. The rows
of data/orders.csv change it for calls of a kind, each a rule with a page. What was measured of such calls
is found, not listed: ``attnsel.pages.figures``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from attnsel.base.rows import read_rows
from attnsel.environment import Environment
from attnsel.environment.versions import Versions
from attnsel.params import AttentionParams
from attnsel.rules.api import Placing, archs_of, gate_text, gates_of

BY_SPEED = "PREF005"
"""The preference that reads the order: where a row put one family before another, its rule is named."""

Families = tuple[tuple[str, ...], ...]
"""The fastest first; those that stand together are contested, and PREF013 says which of them goes first."""

_FLASH_FIRST: Families = (("flash",), ("cudnn",), ("flash3",), ("flash4",), ("efficient",))
_ADA: Families = (("cudnn", "flash"), ("flash3",), ("flash4",), ("efficient",))
_HOPPER: Families = (("flash3", "cudnn"), ("flash4",), ("flash",), ("efficient",))
_BLACKWELL: Families = (("cudnn", "flash4"), ("flash",), ("flash3",), ("efficient",))
_RTX_50: Families = (("cudnn", "flash"), ("flash4",), ("flash3",), ("efficient",))
_RTX_50_TRAINING: Families = (("flash", "cudnn"), ("flash4",), ("flash3",), ("efficient",))


def _base(arch: int | None, training: bool) -> Families:
    """The order of an architecture, whatever else is asked."""
    if arch is None or arch < 90:
        return _ADA if arch in (86, 89) else _FLASH_FIRST
    if arch < 120:
        return _HOPPER if arch < 100 else _BLACKWELL
    return _RTX_50_TRAINING if training else _RTX_50


class Call(NamedTuple):
    """All that the order may depend on: so little of a question that few are told apart."""

    training: bool
    deterministic: bool
    window: bool
    causal: bool
    head_dim: int  # the larger of the two
    few_queries: bool
    short: bool

    @classmethod
    def of(cls, p: AttentionParams) -> Call:
        head_dim = max(p.head_dim_qk, p.head_dim_v)
        asked = lengths(p.max_seqlen_q, p.max_seqlen_kv)
        return cls(p.is_training, p.deterministic, p.windowed, p.causal, head_dim, *asked)


def lengths(queries: int, keys: int) -> tuple[bool, bool]:
    """All that they change about the order: whether so few queries go over so many keys that a kernel which
    does not split the keys leaves the GPU idle, and whether there are too few to have been measured."""
    return 0 < queries * 16 <= keys, 0 < queries <= 512


@dataclass(frozen=True, eq=False, kw_only=True)
class Lead(Placing):
    """A row of data/orders.csv: ``first`` goes before all of ``over``, or ``last`` behind all of them, for
    the calls that have what is ``asked``."""

    first: str
    last: str
    over: tuple[str, ...]
    arch: frozenset[int]
    when: tuple[Versions, ...]
    asked: tuple[tuple[str, bool], ...]
    head_dims: tuple[int, int]

    def concerns(self, call: Call, arch: int | None) -> bool:
        low, high = self.head_dims
        alike = low <= call.head_dim <= high and all(getattr(call, name) == yes for name, yes in self.asked)
        return alike and arch in self.arch

    def open(self, env: Environment) -> bool:
        return all(getattr(env, gate.component) in gate for gate in self.when)


class Order:
    """The places of families for calls of a kind. One object for one order: it is compared as such.

    ``measured``: candidates, the fastest first, where such a call was measured on this machine.
    """

    __slots__ = ("_codes", "_places", "_size", "measured")

    def __init__(
        self, families: Families, codes: dict[tuple[str, str], str], measured: tuple[str, ...] = ()
    ) -> None:
        self._codes, self._size, self.measured = codes, len(families), measured
        places = ((name, (n, at)) for n, group in enumerate(families) for at, name in enumerate(group))
        self._places = dict(places)

    def place(self, family: str) -> tuple[int, int]:
        """A family's place, and the place among contested ones; behind all for one that is none."""
        return self._places.get(family, (self._size, 0))

    def code(self, above: str, below: str) -> str | None:
        """The row that put one family before another, if one did."""
        return self._codes.get((above, below))


def order_of(call: Call, env: Environment, measured: tuple[str, ...] = ()) -> Order:
    """The order for calls of a kind on a machine; ``measured``: candidates that were timed there."""
    arch = env.arch
    rows = tuple([lead for lead in LEADS if lead.concerns(call, arch) and lead.open(env)])
    return ordered(arch, call.training, rows, measured)


@lru_cache(maxsize=1024)
def ordered(
    arch: int | None,
    training: bool = False,
    rows: tuple[Lead, ...] = (),
    measured: tuple[str, ...] = (),
) -> Order:
    """An architecture's order, changed by some rows, the later ones on top."""
    groups = [list(together) for together in _base(arch, training)]
    codes: dict[tuple[str, str], str] = {}
    for lead in rows:
        moved = lead.first or lead.last
        before = {family: place for place, group in enumerate(groups) for family in group}
        groups = [left for group in groups if (left := [family for family in group if family != moved])]
        among = [place for place, group in enumerate(groups) if not set(lead.over).isdisjoint(group)]
        place = min(among) if lead.first else max(among) + 1
        for other in (family for group in groups[place:] if lead.first for family in group):
            if other in lead.over or before[other] <= before[moved]:
                codes[moved, other] = lead.code
        for other in (family for group in groups[:place] if lead.last for family in group):
            if other in lead.over or before[other] >= before[moved]:
                codes[other, moved] = lead.code
        groups.insert(place, [moved])
    return Order(tuple(map(tuple, groups)), codes, measured)


def _lead(row: dict[str, str]) -> Lead:
    low, _, high = (row["head_dim"] or "0-4096").partition("-")
    when, arch = gates_of(row["when"]), archs_of(row["arch"])
    return Lead(
        code=row["code"],
        name=row["name"],
        doc=f"{row['title']}\n\nWhy: {row['why']}\nSource: {row['source']}",
        evidence="reported",
        module=__name__,
        when_text=gate_text(when, arch, ()),
        short=row["below"],
        first=row["first"],
        last=row["last"],
        over=tuple(row["over"].split()),
        arch=arch,
        when=when,
        asked=tuple((name, row[name] == "yes") for name in Call._fields if row.get(name) in ("yes", "no")),
        head_dims=(int(low), int(high)),
    )


LEADS = tuple(map(_lead, read_rows("attnsel.rules", "orders")))
"""The rows; rules/preferences.py registers them as rules."""
