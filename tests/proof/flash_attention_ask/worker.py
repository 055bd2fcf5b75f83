"""The child process that runs a package's code and answers one question after another.

Started by ``client``, with its settings as an argument. It exchanges JSON lines: first who it is
({"ready": …} or {"missing": …}), then one answer per line read. What packages print goes to standard error.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch._subclasses.fake_tensor import FakeTensorMode

from attnsel.base.processes import answering
from attnsel.params import AttentionParams
from flash_attention_ask import package_cute
from flash_attention_ask.blame import Verdict, judged
from flash_attention_ask.calls import Called, call, on_meta

_GENERATIONS = {"flash_attn.2": 2, "flash_attn.3": 3}
_ARCH, _SM_COUNT = 90, 132  # until a question says otherwise


class Asked(Protocol):
    """A package in this process."""

    @property
    def compiler(self) -> str | None:
        """The release of what builds its kernels; None where nothing does."""

    def ask(self, p: AttentionParams, question: dict[str, Any]) -> tuple[Called, Verdict]:
        """One question, put to attnsel's backend with the package under it."""


class Cute:
    """FlashAttention 4, on fake tensors."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.package = package_cute.install(Path(settings["source"]), _ARCH, _SM_COUNT, settings["standins"])
        self.compiler = self.package.compiler

    def ask(self, p: AttentionParams, question: dict[str, Any]) -> tuple[Called, Verdict]:
        self.package.describe(question["arch"], question["sm_count"])
        # A kernel that was built before hides checks that only stand before a build.
        for depth in dict.fromkeys(("check", question["depth"])):
            self.package.go_to(depth)
            with FakeTensorMode(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                called = call("flash_attn.4", p)
            if called.error is not None:
                return called, judged(called.error, self.package.folder, self.compiler is not None)
        return called, Verdict(True, "", "")


class Cpp:
    """FlashAttention 2 or 3, whose checks in C++ are compiled; on tensors of device meta."""

    compiler = None

    def __init__(self, settings: dict[str, Any]) -> None:
        self.backend = settings["backend"]
        self.folder = Path(settings["source"])
        package_cpp = import_module("flash_attention_ask.package_cpp")
        self.package = package_cpp.install(self.folder, _GENERATIONS[self.backend], _ARCH, _SM_COUNT)

    def ask(self, p: AttentionParams, question: dict[str, Any]) -> tuple[Called, Verdict]:
        self.package.describe(question["arch"], question["sm_count"])
        made: list[Called] = []

        def run() -> None:
            made.append(call(self.backend, p, on_meta))
            if made[0].error is not None:
                raise made[0].error

        said = self.package.ask(run)
        called = made[0]
        if said.supported is None and called.error is not None:
            return called, judged(called.error, self.folder, True)
        if said.supported:
            for failure in self.package.failures(said.launches):
                return called, Verdict(False, failure.words, _short(failure.where))
        return called, Verdict(said.supported, " ".join(said.words.split()), _short(said.where))


def _short(where: str) -> str:
    """file:line without the folder."""
    return where.rpartition("/")[-1]


def installed(settings: dict[str, Any]) -> Asked:
    """The package of a backend in this process. Raises what importing it raises."""
    return Cute(settings) if settings["backend"] == "flash_attn.4" else Cpp(settings)


def answered(package: Asked, question: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    called, verdict = package.ask(AttentionParams.model_validate(question["params"]), question)
    return {**verdict._asdict(), "stage": called.stage, "seconds": time.perf_counter() - began}


def main(settings: dict[str, Any]) -> None:
    tell = answering()
    try:
        package = installed(settings)
    except Exception as error:  # of whatever the package imports and does when it is imported
        tell({"missing": "package", "message": f"{type(error).__name__}: {error}"})
        return
    tell({"ready": {"compiler": package.compiler}})
    for line in sys.stdin:
        tell(answered(package, json.loads(line)))
