"""The real libcudnn's answer beside the rules', for one question: asked, compared, printed."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from attnsel.backends.cudnn.ask.client import Library
from attnsel.backends.cudnn.ask.device import device_json
from attnsel.backends.cudnn.ask.libraries import Missing
from attnsel.cli.library import Asked, Verdict, by_library, by_rules, outcome
from attnsel.cli.output import unwound
from attnsel.environment import Environment
from attnsel.environment.versions import Version
from attnsel.params import AttentionParams
from attnsel.verdicts.requirements import size

_OLDEST = Version(9, 8)
_SAID = {
    "agree": "The rules agree.",
    "false accept": "The rules disagree: they accept.",
    "false reject": "The rules disagree: they refuse",
    "known bug": "The rules refuse it as a known bug, which compiles and is wrong",
    "unknown": "The rules do not know",
    "no answer": "There is nothing to compare with the rules.",
}


@dataclass(frozen=True)
class NotAsked:
    """Why nothing was asked, in a sentence; ``missing`` is the thing that is not there."""

    missing: str
    message: str

    def as_dict(self) -> dict[str, Any]:
        return {"missing": self.missing, "message": self.message}

    def report(self, width: int) -> str:
        return "\n" + _fold(f"libcudnn was not asked: {self.message}", width, "! ", "  ")


@dataclass(frozen=True)
class Comparison:
    """Both answers. ``wanted``: the version that was stated, where another one is here."""

    verdict: Verdict
    asked: Asked
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

    def report(self, width: int) -> str:
        cudnn, frontend = self.versions["cudnn"], self.versions["cudnn_frontend"]
        if self.judge == "library":
            who = f"libcudnn {cudnn} (frontend {frontend}) for the {self.gpu}"
        else:
            who = (
                f"cudnn-frontend {frontend}, as if cuDNN {cudnn} were there, for the {self.gpu}: its own "
                "checks only, a library this old cannot be asked without its GPU"
            )
        lines = ["", _fold(f"Asked {who}:", width, "  ", "  ")]
        lines += [_fold(note, width, "! ", "  ") for note in self.notes]
        if self.wanted is not None:
            lines.append(
                _fold(f"not cuDNN {self.wanted}, which was stated: it is not here", width, "! ", "  ")
            )
        if self.asked.inexpressible is not None:
            lines.append(
                _fold(f"there is no graph for it: {self.asked.inexpressible}", width, "    ✖ ", "      ")
            )
        for name, answer in self.asked.answers.items():
            mark = {True: "✔", False: "✖", None: "?"}[answer.supported]
            text = f"{mark} {name:<9}"
            if answer.supported:
                text += ", ".join(answer.engines) or "passes"
                if answer.workspace is not None:
                    text += f" · workspace {size(answer.workspace)} ({answer.workspace} bytes)"
                elif answer.stage == "build_plans":
                    text += f" · the plan does not build here: {answer.words}"
            else:
                text += f"{answer.words}  [{answer.stage}]"
            if answer.remembered:
                text += " · remembered"
            lines.append(_fold(text, width, "    ", "               "))
        lines.append(_fold(self._agreement(), width, "  ", "  "))
        return "\n".join(lines)

    def _agreement(self) -> str:
        kind = outcome(self.verdict, self.asked)
        text = _SAID[kind]
        if not text.endswith("."):
            text += f": {', '.join(self.verdict.codes)}."
        elif self.verdict.codes and kind == "agree":
            text = f"The rules agree: {', '.join(self.verdict.codes)}."
        return text


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


def _fold(text: str, width: int, lead: str, indent: str) -> str:
    return textwrap.fill(text, width, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False)
