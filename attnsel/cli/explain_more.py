"""The real libcudnn's answer beside the rules', for one question: asked, compared, printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from attnsel.backends.cudnn.ask.client import GraphAnswer, Library
from attnsel.backends.cudnn.ask.libraries import Missing, device_json
from attnsel.backends.cudnn.graph import backward, forward, planned
from attnsel.cli.form import Form
from attnsel.cli.output import FOUND, NO_BACKEND, bar, complain, unwound
from attnsel.cli.question import Question
from attnsel.diagnose.logs.answer import Stated, explained
from attnsel.diagnose.logs.calls import gather
from attnsel.diagnose.logs.report import log_document, nothing_known, short_log_document
from attnsel.diagnose.text_files import HEAD, TAIL, lines_of, opened
from attnsel.environment import Environment
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput, UnsupportedArgument
from attnsel.params import AttentionParams
from attnsel.report.document import Item
from attnsel.selection.evaluate import findings
from attnsel.verdicts.reasons import Reason
from attnsel.verdicts.requirements import size

# ---- The rules beside the real thing: one question put to both, and what to call the outcome -----------


Outcome = Literal["agree", "false accept", "false reject", "known bug", "unknown", "no answer"]

# Codes about what is installed here, which is not about what a library can do.
_NOT_THE_LIBRARY = "INSTALL"


class Heard(Protocol):
    """What the real thing said of one question."""

    @property
    def supported(self) -> bool | None: ...

    @property
    def words(self) -> str:
        """Why not, in a line; "" where it is supported."""

    @property
    def crashed(self) -> bool:
        """It died of the question."""


class Verdict(NamedTuple):
    """What the rules say of a candidate; ``reasons`` without those about what is installed."""

    eligible: bool
    reasons: tuple[Reason, ...]

    @property
    def refusing(self) -> tuple[str, ...]:
        """Codes of plain refusals: neither known bugs nor doubts."""
        return tuple(r.code for r in self.reasons if not r.unknown and not r.code.startswith("BUG"))

    @property
    def bugs(self) -> tuple[str, ...]:
        return tuple(r.code for r in self.reasons if r.code.startswith("BUG"))

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.code for r in self.reasons))


class LibraryAnswer(NamedTuple):
    """The library on one question: each graph's answer, or why there is no graph to ask about."""

    answers: Mapping[str, GraphAnswer]  # forward, and backward for training
    inexpressible: str | None = None

    @property
    def supported(self) -> bool | None:
        if self.inexpressible is not None:
            return False
        said = [answer.supported for answer in self.answers.values()]
        return False if False in said else (None if None in said else True)

    @property
    def crashed(self) -> bool:
        return any(answer.crashed for answer in self.answers.values())

    @property
    def words(self) -> str:
        """Why not, in a line; "" where it is supported."""
        if self.inexpressible is not None:
            return self.inexpressible
        unsupported = [f"{name}: {a.words}" for name, a in self.answers.items() if a.supported is not True]
        return "; ".join(unsupported)


def by_rules(p: AttentionParams, env: Environment, candidate: str = "cudnn") -> Verdict:
    reasons = tuple(r for r in findings(p, env)[candidate] if not r.code.startswith(_NOT_THE_LIBRARY))
    return Verdict(not reasons, reasons)


def by_library(
    library: Library, p: AttentionParams, device: dict[str, Any], build: bool = False
) -> LibraryAnswer:
    """Both graphs of a training call, whatever the first answer is; the forward's of an inference."""
    try:
        call = planned(p)
    except UnsupportedArgument as error:
        return LibraryAnswer({}, str(error))
    answers = {"forward": library.ask(forward(call), device, build=build)}
    if p.is_training:
        answers["backward"] = library.ask(backward(call), device, build=build)
    return LibraryAnswer(answers)


def outcome(verdict: Verdict, asked: Heard) -> Outcome:
    """A rule that refuses where the library accepts is a false reject, unless it names a known bug."""
    if asked.supported is None:
        return "no answer"
    if verdict.refusing:
        return "false reject" if asked.supported else "agree"
    if verdict.bugs:
        return "known bug" if asked.supported else "agree"
    if verdict.reasons:
        return "unknown"
    return "agree" if asked.supported else "false accept"


_OLDEST = Version(9, 8)
_SAID = {
    "agree": "The rules agree",
    "false accept": "The rules disagree: they accept",
    "false reject": "The rules disagree: they refuse",
    "known bug": "The rules refuse it as a known bug, which compiles and is wrong",
    "unknown": "The rules do not know",
    "no answer": "There is nothing to compare with the rules",
}


@dataclass(frozen=True)
class NotAsked:
    """Why nothing was asked, in a sentence; ``missing`` is the thing that is not there."""

    missing: str
    message: str

    def as_dict(self) -> dict[str, Any]:
        return {"missing": self.missing, "message": self.message}

    def told(self) -> Item:
        return Item(mark="!", text=f"libcudnn was not asked: {self.message}")


@dataclass(frozen=True)
class Comparison:
    """Both answers. ``wanted``: the version that was stated, where another one is here."""

    verdict: Verdict
    asked: LibraryAnswer
    judge: str
    versions: dict[str, str]
    wanted: Version | None
    gpu: str
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        kind = outcome(self.verdict, self.asked)
        return {
            "judge": self.judge,
            **self.versions,
            "supported": self.asked.supported,
            "inexpressible": self.asked.inexpressible,
            "rules": {"eligible": self.verdict.eligible, "codes": list(self.verdict.codes)},
            "outcome": kind,
            "agree": kind == "agree",
            "answers": {name: answer.as_dict() for name, answer in self.asked.answers.items()},
            "notes": self.notes,
        }

    def told(self) -> Item:
        """Whom was asked, what each graph got, and whether the rules agree."""
        who = "libcudnn {cudnn} (frontend {cudnn_frontend}) for the {gpu}"
        if self.judge == "frontend":
            who = (
                "cudnn-frontend {cudnn_frontend}, as if cuDNN {cudnn} were there, for the {gpu}: its own "
                "checks only, a library this old cannot be asked without its GPU"
            )
        remarks = list(self.notes)
        if self.wanted is not None:
            remarks.append(f"not cuDNN {self.wanted}, which was stated: it is not here")
        below = [Item(mark="!", text=remark) for remark in remarks]
        if self.asked.inexpressible is not None:
            below.append(Item(mark="✖", text=f"there is no graph for it: {self.asked.inexpressible}"))
        for name, answer in self.asked.answers.items():
            mark = {True: "✔", False: "✖", None: "?"}[answer.supported]
            text, tag = answer.words, answer.stage
            if answer.supported:
                text, tag = ", ".join(answer.engines) or "passes", ""
                if answer.workspace is not None:
                    text += f" · workspace {size(answer.workspace)} ({answer.workspace} bytes)"
                elif answer.stage == "build_plans":
                    text += f" · the plan does not build here: {answer.words}"
            more = ("remembered",) if answer.remembered else ()
            below.append(Item(text, mark, label=name, tag=tag, more=more))
        codes = ", ".join(self.verdict.codes)
        agreement = _SAID[outcome(self.verdict, self.asked)]
        below.append(Item(f"{agreement}: {codes}." if codes else f"{agreement}."))
        return Item(f"Asked {who.format(**self.versions, gpu=self.gpu)}:", below=tuple(below))


def ask(p: AttentionParams, env: Environment, cudnn_lib: str | None) -> Comparison | NotAsked:
    """Ask about ``p`` on the GPU of ``env``. The rules are judged at the versions that answer."""
    device = env.device
    if device.type != "cuda" or device.arch is None:
        return NotAsked("gpu", f"the question is about {device.name or device.type}; name a GPU with --gpu")
    try:
        described = device_json(device.arch, device.name, device.memory, device.sm_count)
    except ValueError as error:
        return NotAsked("gpu", str(error))
    stated = env.cudnn if env.cudnn is not None and "cudnn" not in env.assumed else None
    pretend = str(stated) if stated is not None and stated < _OLDEST and cudnn_lib is None else None
    try:
        with unwound(), Library(cudnn_lib, pretend=pretend) as library:
            versions = library.versions()
            asked = by_library(library, p, described, build=True)
            notes = library.notes
    except Missing as missing:
        return NotAsked(missing.what, str(missing))
    there = env.replace(**versions, assumed=tuple(n for n in env.assumed if n not in versions))
    differs = stated is not None and str(stated) != versions["cudnn"]
    return Comparison(
        by_rules(p, there),
        asked,
        "frontend" if pretend else "library",
        versions,
        stated if differs else None,
        device.name or f"sm{device.arch}",
        notes,
    )


# ---- ``attnsel explain --from-log``: a pasted log or error, and what is behind it ----------------------


def explain_log(path: Path, question: Question, short: bool, form: Form) -> int:
    """Explain every call in a log. Raises InvalidInput."""
    if question.from_file:
        raise InvalidInput("--params", None, "cannot go with --from-log: both say what the call is")
    with opened(path, "--from-log") as (file, size), bar("reading", size) as progress:
        found = gather(lines_of(file, progress, size))
        if size > HEAD + TAIL:
            complain(
                f"of {size >> 20} MiB the first {HEAD >> 20} and the last {TAIL >> 20} were read: "
                "give the part that matters by itself for the rest"
            )
    if found.unread:
        complain(
            f"{found.unread} lines in the middle, all different, were not read: "
            "give the part that matters by itself for these"
        )
    if not found.calls:
        for line in nothing_known():
            complain(line)
        return NO_BACKEND
    stated = Stated(
        question.params,
        question.place.changes,
        question.place.environment,
        question.policy,
        question.lying.of,
    )
    answered = explained(found, stated)
    form.print(lambda: (short_log_document if short else log_document)(answered), answered.as_dict)
    return FOUND
