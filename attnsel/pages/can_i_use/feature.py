"""What a feature is: a name, words, and what it changes in a question; and how one is asked about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.selection.inquiry import Inquiry
from attnsel.verdicts.evidence import NO_EVIDENCE
from attnsel.verdicts.verdict import Candidate

Half = Literal["bf16", "fp16"]
Mode = Literal["training", "inference"]
BOTH: tuple[Mode, ...] = ("training", "inference")
TRAINING: tuple[Mode, ...] = ("training",)
INFERENCE: tuple[Mode, ...] = ("inference",)


@dataclass(frozen=True, eq=False)
class Feature:
    """One feature.

    name: its address and its word on the command line. title: a few words. about: a sentence or two.
    changes: fields of AttentionParams that differ from the default question. also: other words for it, with
    blanks between. modes: whether a cell asks for training, for inference or for both. policy: fields of
    Policy, where the question has a limit. group: the heading that it stands under.
    """

    name: str
    title: str
    about: str
    changes: Mapping[str, Any]
    also: str = ""
    modes: tuple[Mode, ...] = BOTH
    policy: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    _params: dict[tuple[Mode, Half], AttentionParams] = field(default_factory=dict, repr=False)

    @cached_property
    def limits(self) -> Policy:
        """The policy of the question."""
        return Policy(**self.policy)

    def params(self, mode: Mode, half: Half = "bf16") -> AttentionParams:
        """The question. ``half``: its element type, unless the feature is one."""
        made = self._params.get((mode, half))
        if made is None:
            made = self._params[mode, half] = AttentionParams(**self.asked(mode, half))
        return made

    def asked(self, mode: Mode, half: Half = "bf16") -> dict[str, Any]:
        """The fields of the question that differ from the default one."""
        fields = dict(self.changes)
        if half != "bf16":
            fields.setdefault("dtype", half)
        if mode == "inference":
            fields["is_training"] = False
        return fields

    @property
    def words(self) -> tuple[str, ...]:
        """What it may be called: its name first."""
        return (self.name, *self.also.split())


def ask(feature: Feature, mode: Mode, kernel: str, env: Environment) -> Candidate:
    """What the engine says of one kernel, as part of what ``select`` says of all."""
    return Inquiry(feature.params(mode, half_on(env.arch)), env, feature.limits, NO_EVIDENCE).judge(kernel)


def half_on(arch: int | None) -> Half:
    """The 16-bit element type that a GPU of this architecture computes in."""
    return "fp16" if arch is not None and arch < 80 else "bf16"
