"""How ranks may exchange what they hold, a line each. No torch.

Whoever plans, judges or runs an exchange reads its record and asks for no name. One that moves data in a way
of its own needs that in ``context_parallel/passes.py``; what limits it is in ``rules/context_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from attnsel.errors import InvalidInput

CpCommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]


class ExchangeRecord(NamedTuple):
    """``swaps_heads``: ranks of a group hand each other their rows of some heads (all-to-all), so that each
    has some heads of all the group's rows. ``keys``: whether keys and values then travel around a ring block
    by block, are gathered by every rank, or stay where they are (the group is all ranks)."""

    swaps_heads: bool
    keys: Literal["ring", "gathered", ""]

    @property
    def nested(self) -> bool:
        """Two groups: heads are swapped in the inner one, keys go between the inner ones."""
        return self.swaps_heads and bool(self.keys)


EXCHANGES: dict[str, ExchangeRecord] = {
    "p2p": ExchangeRecord(swaps_heads=False, keys="ring"),
    "all_gather": ExchangeRecord(swaps_heads=False, keys="gathered"),
    "a2a": ExchangeRecord(swaps_heads=True, keys=""),
    "a2a+p2p": ExchangeRecord(swaps_heads=True, keys="ring"),
}


def exchange_named(cp_comm_type: str) -> ExchangeRecord:
    """Raises InvalidInput."""
    if cp_comm_type not in EXCHANGES:
        raise InvalidInput("cp_comm_type", cp_comm_type, f"must be one of {', '.join(EXCHANGES)}")
    return EXCHANGES[cp_comm_type]


def exchanges(test: Callable[[ExchangeRecord], bool]) -> tuple[str, ...]:
    """The names of those whose records pass ``test``."""
    return tuple(name for name, record in EXCHANGES.items() if test(record))
