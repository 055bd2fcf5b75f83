"""Which candidates there are: a line each for attnsel's own; plug-ins join when they are first needed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from attnsel.verdicts.record import CandidateRecord

BUILT_IN = ("cudnn", "triton", "sdpa", "flash_attention", "tiled")
"""Folders of backends/ whose ``candidate.py`` declares ``CANDIDATES``. Reports list them in this order."""

OLDEST_TORCH = (2, 6)  # what attnsel runs on; older ones can be planned for

CANDIDATES: dict[str, CandidateRecord] = {
    record.name: record
    for folder in BUILT_IN
    for record in import_module(f"attnsel.backends.{folder}.candidate").CANDIDATES
}


def complete() -> None:
    """Let the candidates of plug-ins join, if that has not happened yet. By name: they stand above."""
    import_module("attnsel.plugins").load_plugins()


class Selector(NamedTuple):
    """Candidates by what their records say: a rule about these is about one that is added later, too."""

    test: Callable[[CandidateRecord], bool]

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are there now."""
        return tuple(name for name, record in CANDIDATES.items() if self.test(record))


def where(test: Callable[[CandidateRecord], bool]) -> Selector:
    """The candidates whose records pass ``test``."""
    return Selector(test)


def needing(component: str) -> Selector:
    """The candidates that need a component to be installed."""
    return where(lambda record: component in record.needs)


def running(library: str) -> Selector:
    """The candidates whose kernels are a library's: its bugs are theirs."""
    return where(lambda record: record.library == library)


every = where(lambda record: True)
