"""``attnsel replay``: a call that fell back, was refused or came out wrong, again."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from attnsel.backends.registry import CANDIDATES, complete
from attnsel.base.schemas import stamped
from attnsel.base.suggestions import candidate_suggestion
from attnsel.cli.flags import Json
from attnsel.cli.output import BAD_INPUT, FOUND, NO_BACKEND, complain, print_json, print_text, text_width
from attnsel.errors import InvalidInput, short
from attnsel.report import params_words
from attnsel.report.text import fold
from attnsel.runtime.replay_file import ReplayFile, read_file

if TYPE_CHECKING:
    import torch

    from attnsel.diagnose.replay.run import Outcome

FAILED = 1
_CODES = {"agrees": FOUND, "not tried": NO_BACKEND}


def replay(
    file: Annotated[Path, Parameter(name="FILE", help="a file of ATTNSEL_REPLAY_DIR")],
    /,
    *,
    backend: Annotated[
        str | None, Parameter(help="run this candidate instead of the one the file is about")
    ] = None,
    device: Annotated[
        str | None, Parameter(help="cpu, cuda or cuda:1; else where the call was, if that is here")
    ] = None,
    seed: Annotated[int, Parameter(help="of the random numbers, where the file has none")] = 0,
    script: Annotated[
        Path | None,
        Parameter(
            allow_leading_hyphen=True,
            help="write a program that needs torch alone, for an upstream issue; - prints it",
        ),
    ] = None,
    force: Annotated[
        bool, Parameter(negative="", show_default=False, help="also over a file that is there")
    ] = False,
    json: Json = False,
) -> int:
    """Run a call again that fell back, was refused or came out wrong.

    With ATTNSEL_REPLAY_DIR=FOLDER a kernel that refuses when it runs, or fails its self-check, and a call
    that nothing can run, leave a file there: parameters, shapes, strides, offsets, lengths, seeds, settings
    and versions; the tensors' numbers only with ATTNSEL_REPLAY_DATA=1. Here the tensors are built again, the
    candidate runs, and its output and gradients are compared with attention by its definition in float64.

        attnsel replay FILE
        attnsel replay FILE --backend sdpa.math
        attnsel replay FILE --script issue.py

    Exit code: 0 it runs and the numbers agree; 1 it fails, as recorded or otherwise; 2 bad input; 3 it
    cannot be tried here: no such GPU or package, or a rule refuses it.
    """
    held = read_file(file)
    name = _candidate(backend)
    if script is not None:
        from attnsel.diagnose.replay.script import program  # for this flag alone

        return _write(script, program(held, name, seed), force)
    if not find_spec("torch"):
        complain("torch is not installed here, and a call runs on it")
        return BAD_INPUT
    from attnsel.diagnose.replay.run import load_data  # needs torch
    from attnsel.diagnose.replay.run import replay as run_again  # needs torch

    place = _device(device, held)
    if not -(2**40) < seed < 2**40:
        raise InvalidInput("--seed", seed, "must be a number of at most twelve digits")
    outcome = run_again(held, backend=name, device=place, seed=seed, data=load_data(file, held))
    if json:
        print_json(
            stamped("replayed", {"happened": held.happened.model_dump(mode="json"), **outcome.as_dict()})
        )
    else:
        print_text("\n".join(_lines(held, outcome, text_width())))
    return _CODES.get(outcome.what, FAILED)


def _candidate(name: str | None) -> str | None:
    if name is not None and name not in CANDIDATES:
        complete()
        if name not in CANDIDATES:
            meant = candidate_suggestion(name, CANDIDATES)
            raise InvalidInput("--backend", name, meant or f"allowed: {', '.join(CANDIDATES)}")
    return name


def _device(asked: str | None, file: ReplayFile) -> torch.device:
    """Where it runs. Raises InvalidInput for what is not here."""
    import torch

    recorded = next((tensor.device for tensor in file.tensors if tensor.name == "q"), "cpu")
    name = asked or (recorded if recorded in ("cpu", "cuda") else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInput("--device", name, "must be cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput("--device", name, "must be cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        if asked:
            raise InvalidInput("--device", name, "is not on this machine")
        complain("the call was on a GPU, and there is none here: it runs on the CPU")
        return torch.device("cpu")
    return device


def _lines(file: ReplayFile, outcome: Outcome, width: int) -> list[str]:
    happened, what = file.happened, outcome.what
    said = {
        "agrees": f"{outcome.candidate} runs, and its numbers agree with float64.",
        "wrong numbers": f"{outcome.candidate} runs, and its numbers are wrong.",
        "refused": f"{outcome.candidate} refuses this call when it runs.",
        "error": f"{outcome.candidate or 'The call'} fails.",
        "not tried": f"{outcome.candidate or 'Nothing'} cannot run this call here.",
    }[what]
    again = {
        True: "As recorded.",
        False: "Not as recorded.",
        None: "So nothing is shown about what was recorded.",
    }
    lines = [*fold(f"{said} {again[outcome.as_recorded]}", width), ""]
    lines += fold(" ".join(params_words(file.params)), width)
    env = file.environment
    lines += fold(f"recorded: {env.device.name or env.device.type}, torch {env.torch}, {file.time}", width)
    then = f"; then {happened.then} ran" if happened.then else ""
    who = "" if happened.kind == "nothing runs" else f"{happened.candidate} "
    lines += fold(f"then: {who}{_KIND[happened.kind]}{then}", width, "  ", "    ")
    lines += fold(happened.message, width, "    ", "    ") if happened.message else []
    lines += fold(f"now: on {outcome.device}, seed {outcome.seed}", width, "  ", "    ")
    lines += fold(outcome.said, width, "    ", "    ") if outcome.said else []
    for figure in outcome.figures:
        mark = "✔" if figure.right else "✖"
        lines.append(
            f"    {mark} {figure.result}: off by {figure.error:.2g}, rounding explains {figure.allowed:.2g}"
        )
    return lines + [line for note in outcome.notes for line in fold(f"({note})", width, "  ", "    ")]


_KIND = {
    "refused": "refused when it ran",
    "wrong numbers": "gave wrong numbers",
    "nothing runs": "nothing could run it",
}


def _write(path: Path, text: str, force: bool) -> int:
    """Whole or not at all, and over nothing unless asked."""
    if str(path) == "-":
        print(text, end="")
        return FOUND
    if not force and os.path.lexists(path):
        raise InvalidInput("--script", str(path), "is there already; --force writes over it")
    try:
        handle, made = tempfile.mkstemp(dir=path.parent, prefix=".attnsel-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(made, 0o644)
            os.replace(made, path)
        except BaseException:
            os.unlink(made)
            raise
    except OSError as error:
        raise InvalidInput("--script", str(path), error.strerror or str(error)) from None
    print_text(f"wrote {short(str(path), str)}: python {short(str(path), str)}")
    return FOUND
