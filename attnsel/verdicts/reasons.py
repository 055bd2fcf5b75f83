"""The values a decision is made of: what a rule found, and what it would have wanted instead."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from attnsel.base.model import lazy
from attnsel.base.records import json_fields
from attnsel.environment import COMPONENTS
from attnsel.errors import printable
from attnsel.params import AttentionParams
from attnsel.verdicts.requirements import Requirement

Verdict = Literal["eligible", "unknown", "refused"]
Status = Literal["active", "preview", "deprecated"]

EVIDENCE: dict[str, str] = {
    "library": "checked against the real libcudnn",
    "compiler": "checked with the real Triton compiler",
    "source": "read in the component's source",
    "documented": "documented by the component's makers",
    "reported": "reported in an issue",
    "measured": "seen in a test of ours",
    "executed": "its PTX was executed on a CPU, off-GPU",
    "policy": "you asked for it",
    "runtime": "the kernel itself refused in this process",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Page:
    """What is said about a rule of any kind: its code, its text and what it rests on.

    ``doc``: its docstring, whose parts are told apart when somebody reads them.
    """

    code: str
    name: str
    doc: str
    evidence: str
    module: str
    when_text: str = ""
    status: Status = "active"
    replaced_by: str = ""

    @property
    def family(self) -> str:
        return self.code.rstrip("0123456789")

    @property
    def title(self) -> str:
        return self._parts[0].rstrip(".")

    @property
    def text(self) -> str:
        return self._parts[1].strip()

    @property
    def source(self) -> str:
        return " ".join(self._parts[2].split())

    @lazy
    def _parts(self) -> tuple[str, str, str]:
        """Its first line, the rest of it, and where that says it comes from."""
        title, _, text = inspect.cleandoc(self.doc).partition("\n")
        source = re.search(r"^Source: (.+?)(?=\n[A-Z]\w+:|\Z)", text, re.MULTILINE | re.DOTALL)
        if not source:
            raise ValueError(f"{self.code}: the docstring needs a line 'Source: …'")
        return title, text, source[1]


class Violation(NamedTuple):
    """A rule's objection: this field has this value, and would need to be that."""

    field: str
    observed: Any
    required: Requirement
    note: str = ""


class Unknown(NamedTuple):
    """A rule cannot tell: nobody has looked, or no source says. Neither yes nor no."""

    field: str
    observed: Any
    required: Requirement
    note: str = ""


@json_fields(
    "name", "text", "bytes", "flops", ("changes", lambda a: dict(a.changes)),
    ("avoids", lambda a: [reason.code for reason in a.avoids]),
)  # fmt: skip
class Adaptation(NamedTuple):
    """An exact change of the call that lets a candidate run it, and what it costs every time.

    ``changes``: fields and the values they are brought to, where a change can be made in several ways.
    ``avoids``: the reasons against the candidate that it answers; empty for one that is made because it is
    free.
    """

    name: str
    text: str
    bytes: int  # memory that the change makes in a forward
    flops: int = 0  # operations that the kernel does more, forward and, in training, backward
    changes: tuple[tuple[str, Any], ...] = ()
    avoids: tuple[Reason, ...] = ()


class RankKey(NamedTuple):
    """All that preferences may read of a candidate and of the question.

    So little of it that equal rankings are common, and remembered.
    """

    name: str
    verdict: Verdict
    overhead: int  # what adaptations add, in sixteenths of the attention's own work
    unproven: bool  # a kernel of ours that no result shows running here
    large_scores: bool  # one [b, h, s_q, s_kv] tensor is more than a GiB
    executed: bool = False  # its PTX was, for such calls
    growing: bool = False  # each call has another length: a cache that grows, prompts of all lengths
    copies_padding: bool = False  # padded rows are copied, as zeros or away, because it takes no lengths
    f_sdpa: int = 0  # its place in the order in which F.sdpa tries kernels, where F.sdpa is what runs
    planned: bool = False  # attnsel judges such a call of it and does not run it
    order: Any = None  # of kernel families, for such calls (rules/orders.py); None: the architecture's


@json_fields(
    "code", ("verdict", lambda r: "unknown" if r.unknown else "refused"), "field",
    "observed", "required", "message", ("title", "rule.title"),
    "evidence", "source",
)  # fmt: skip
class Reason(NamedTuple):
    """Why a candidate cannot run (or nobody knows). Texts are made when they are read."""

    rule: Page
    finding: Violation | Unknown

    @property
    def code(self) -> str:
        return self.rule.code

    @property
    def field(self) -> str:
        return self.finding.field

    @property
    def observed(self) -> Any:
        return self.finding.observed

    @property
    def required(self) -> str:
        return str(self.finding.required)

    @property
    def evidence(self) -> str:
        return self.rule.evidence

    @property
    def source(self) -> str:
        return self.rule.source

    @property
    def unknown(self) -> bool:
        return isinstance(self.finding, Unknown)

    def noted(self, note: str) -> Reason:
        """The same with a note behind it."""
        both = f"{self.finding.note}; {note}" if self.finding.note else note
        return Reason(self.rule, self.finding._replace(note=both))

    @property
    def message(self) -> str:
        finding = self.finding
        observed = finding.observed
        if observed is None:
            observed = "not installed" if finding.field in COMPONENTS else "not given"
        text = f"{self.rule.title} — {finding.field} is {observed}, needs {finding.required}"
        return f"{text} ({finding.note})" if finding.note else text

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"<Reason {self.code}: {printable(self.message)}>"


@json_fields(
    "name", "verdict", "eligible", "executable", "plan_only", "unproven", "executed_off_gpu", "placed_by",
    "adaptations", "reasons",
)  # fmt: skip
class Candidate(NamedTuple):
    """One candidate's verdict on one question.

    ``reasons`` say why not (or why nobody knows). ``adaptations`` are exact changes that make it
    eligible. ``plan_only`` says why attnsel cannot run it itself yet; None when it can.
    ``unproven``: no committed result shows it right for such calls on this architecture;
    ``executed_off_gpu``: its PTX was executed for them. ``placed_by`` is the code of the preference that put
    it below the one above.
    """

    name: str
    verdict: Verdict
    reasons: tuple[Reason, ...]
    adaptations: tuple[Adaptation, ...]
    plan_only: str | None
    unproven: bool
    executed_off_gpu: bool = False
    placed_by: str | None = None

    @property
    def eligible(self) -> bool:
        return self.verdict == "eligible"

    @property
    def executable(self) -> bool:
        return self.plan_only is None

    def __repr__(self) -> str:
        why = ", ".join(dict.fromkeys(reason.code for reason in self.reasons))
        return f"<Candidate {self.name}: {self.verdict}{f' ({why})' if why else ''}>"


# --------------------------------------------------------------------------------------------------------
# What running has taught this process: kernels that refused a call, or gave wrong numbers for it.


REFUSED = "RUNTIME001"
WRONG_NUMBERS = "RUNTIME002"


class Refusal(NamedTuple):
    """A kernel refused this very call when it was prepared or launched, in these words.

    ``likely``: codes of rules that may explain it, the likeliest first. ``code`` RUNTIME002: it ran, and its
    numbers were wrong.
    """

    candidate: str
    params: AttentionParams
    message: str
    likely: tuple[str, ...] = ()
    code: str = REFUSED

    @property
    def hint(self) -> str:
        return f"closest to {', '.join(self.likely)}" if self.likely else ""


@dataclass(frozen=True)
class Evidence:
    """What this process has found by running. Immutable: a new finding makes a new one."""

    refusals: tuple[Refusal, ...] = ()
    many_lengths: bool = False  # the call came in many lengths already, and this is a new one

    def plus(self, refusal: Refusal) -> Evidence:
        return self if refusal in self.refusals else replace(self, refusals=(*self.refusals, refusal))

    def of_many_lengths(self) -> Evidence:
        return self if self.many_lengths else replace(self, many_lengths=True)


NO_EVIDENCE = Evidence()
