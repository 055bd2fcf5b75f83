"""``attnsel prove``: the GPU tests and the kernel benchmark on this machine, into one file."""

from __future__ import annotations

import math
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

import attnsel
from attnsel.backends.registry import CANDIDATES
from attnsel.cli.output import BAD_INPUT, complain
from attnsel.errors import InvalidInput

_KINDS = ("forward", "backward", "decode")


def prove(
    *,
    out: Annotated[
        Path | None, Parameter(help="the file; gpu-NAME.json in the current folder if left out")
    ] = None,
    budget: Annotated[float, Parameter(help="seconds in all")] = 540.0,
    device: Annotated[
        Literal["cuda", "cpu"],
        Parameter(help="cpu: a rehearsal on Triton's interpreter, which proves nothing"),
    ] = "cuda",
    only: Annotated[str, Parameter(help="tests with one of these words in their name, by commas")] = "",
    jobs: Annotated[int, Parameter(help="test processes; as many as cores and the card's memory allow")] = 0,
    quick: Annotated[bool, Parameter(negative="", help="few cases of the benchmark")] = False,
    kind: Annotated[str, Parameter(help="benchmark: forward, backward, decode; all if left out")] = "",
    kernel: Annotated[str, Parameter(help="benchmark: candidates beside sdpa.flash; all if left out")] = "",
) -> int:
    """Run attnsel's GPU tests on this card, then its kernel benchmark, and write one JSON file.

    It needs no checkout, but pytest, numpy and hypothesis beside torch. Tests run side by side; one that
    fails runs a second time, alone, and both outcomes are kept. The file is written all the while, so that
    Ctrl-C, or the end of the budget, leaves what was done. Whoever contributes it to attnsel makes the
    features whose tests passed *proven* on that architecture: their first call is then no longer compared.

    The file holds device, versions, date, commit or digest of the sources (sources), state (complete, not
    complete, interrupted), tests (summary, flakes, rows) and kernels (rows).

    Exit code: 0 every test passed and the benchmark ran, 2 bad input or something is missing, 4 a test failed
    or was not finished, 130 interrupted.
    """
    if not (math.isfinite(budget) and budget > 0):
        raise InvalidInput("--budget", budget, "must be a positive number of seconds")
    if jobs < 0:
        raise InvalidInput("--jobs", jobs, "must be positive, or 0 for as many as fit")
    if out is not None:
        _check_place(out)
    words = ["--quick"] if quick else []
    for flag, text, allowed in (("--kind", kind, _KINDS), ("--kernel", kernel, tuple(CANDIDATES))):
        for word in filter(None, map(str.strip, text.split(","))):
            if word not in allowed:
                raise InvalidInput(flag, word, f"allowed: {', '.join(allowed)}")
            words += [flag, word]
    suite = _suite()
    if suite is None:
        complain("the GPU tests are not part of this installation: take a wheel or a checkout of attnsel")
        return BAD_INPUT
    sys.path[:0] = [str(suite / "benchmarks")]
    missing: str = import_module("needed").missing()
    if missing:
        complain(missing)
        return BAD_INPUT
    session = import_module("gpu_session")
    code: int = session.run(session.Options(device, out, budget, only, jobs, tuple(words)))
    return code


def _check_place(out: Path) -> None:
    """Before minutes are spent on what could then not be written."""
    if out.is_dir():
        raise InvalidInput("--out", str(out), "must be a file, not a folder")
    if not out.absolute().parent.is_dir():
        raise InvalidInput("--out", str(out), "its folder does not exist")
    if not os.access(out.absolute().parent, os.W_OK):
        raise InvalidInput("--out", str(out), "its folder cannot be written")


def _suite() -> Path | None:
    """Where tests/gpu and benchmarks lie: inside an installed package, beside it in a checkout."""
    package = Path(attnsel.__file__).resolve().parent
    roots = (package / "_suite", package.parent)
    return next((root for root in roots if (root / "benchmarks" / "gpu_session.py").is_file()), None)
