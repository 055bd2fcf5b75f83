"""The child process that runs a package's code and answers one question after another.

Started by ``client``, with its settings as an argument. It exchanges JSON lines: first who it is
({"ready": …} or {"missing": …}), then one answer per line read. What packages print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Protocol

from torch._subclasses.fake_tensor import FakeTensorMode

from attnsel.backends.flash_attention.ask import package_cute
from attnsel.backends.flash_attention.ask.blame import judged
from attnsel.backends.flash_attention.ask.calls import call
from attnsel.params import AttentionParams


class Package(Protocol):
    """A package that was made importable. ``real``: with all that it is compiled by."""

    folder: Path
    real: bool
    version: str

    def describe(self, arch: int, sm_count: int) -> None:
        """The GPU of the questions that come."""

    def go_to(self, depth: str) -> None:
        """How far they go."""


def installed(settings: dict[str, Any]) -> Package:
    """The package of a backend in this process. Raises what importing it raises."""
    folder = Path(settings["source"])
    if settings["backend"] == "flash_attn.4":
        return package_cute.install(folder, 90, 132, settings["standins"])
    from attnsel.backends.flash_attention.ask import package_cpp

    generation = 2 if settings["backend"] == "flash_attn.2" else 3
    made: Package = package_cpp.install(folder, generation, 90, 132)
    return made


def answered(backend: str, package: Package, question: dict[str, Any]) -> dict[str, Any]:
    """One question, put to attnsel's backend with the package under it."""
    p = AttentionParams.model_validate(question["params"])
    package.describe(question["arch"], question["sm_count"])
    began = time.perf_counter()
    said: dict[str, Any] = {}
    for depth in dict.fromkeys(("check", question["depth"])):
        package.go_to(depth)
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            called = call(backend, p)
        said = {"supported": True, "stage": called.stage, "words": "", "where": ""}
        if called.error is not None:
            said |= judged(called.error, package.folder, package.real)._asdict()
            break
    return {**said, "seconds": time.perf_counter() - began}


def main(settings: dict[str, Any]) -> None:
    # Compilers print where they like: answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(said: dict[str, Any]) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    try:
        package = installed(settings)
    except Exception as error:  # of whatever the package imports and does when it is imported
        tell({"missing": "package", "message": f"{type(error).__name__}: {error}"})
        return
    tell({"ready": {"compiler": package.version, "real": package.real}})
    for line in sys.stdin:
        tell(answered(settings["backend"], package, json.loads(line)))
