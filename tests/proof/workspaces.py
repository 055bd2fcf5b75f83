"""cuDNN's workspace as libcudnn's plans have it, beside the estimate that a choice rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.cli.explain_more import LibraryAnswer
from attnsel.environment import Environment
from attnsel.params import AttentionParams

ALLOWED = 1 << 20
"""Bytes by which an estimate may be off: what a decoding forward keeps for its parts, descriptors."""

ALLOWED_SHARE = 0.01


class WorkspaceMismatch(NamedTuple):
    """One call whose plans take something else. ``planned`` None: the library accepts, and builds no plan."""

    gpu: str
    params: AttentionParams
    planned: int | None
    estimated: int

    def as_dict(self) -> dict[str, Any]:
        stated = self.params.model_dump(mode="json")
        return {**self._asdict(), "params": stated}


@dataclass
class Workspaces:
    """What came out so far, for questions that rules and library accept."""

    compared: int = 0
    exact: int = 0
    below: int = 0  # the estimate, by more than is allowed
    above: int = 0
    not_built: int = 0
    largest: int = 0  # bytes, of the plans
    disagreements: list[WorkspaceMismatch] = field(default_factory=list)

    @property
    def agree(self) -> int:
        return self.compared - self.below - self.above

    def add(self, gpu: str, p: AttentionParams, env: Environment, asked: LibraryAnswer) -> None:
        """Compare one question that both accept."""
        model = CANDIDATES["cudnn"].memory
        assert model is not None
        estimated = model(p, env)[1]
        sizes = [answer.workspace for answer in asked.answers.values()]
        built = [size for size in sizes if size is not None]
        if len(built) < len(sizes):
            self.not_built += 1
            self.disagreements.append(WorkspaceMismatch(gpu, p, None, estimated))
            return
        planned = max(built, default=0)
        self.compared += 1
        self.exact += planned == estimated
        self.largest = max(self.largest, planned)
        off = estimated - planned
        if abs(off) <= max(ALLOWED, ALLOWED_SHARE * planned):
            return
        self.below += off < 0
        self.above += off > 0
        self.disagreements.append(WorkspaceMismatch(gpu, p, planned, estimated))

    def as_dict(self) -> dict[str, Any]:
        counts = ("compared", "agree", "exact", "below", "above", "not_built", "largest")
        return {
            **{name: getattr(self, name) for name in counts},
            "disagreements": [one.as_dict() for one in self.disagreements],
        }
