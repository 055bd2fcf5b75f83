"""The scripts that ``attnsel completion`` prints, made from the commands and their flags.

    python docs/tools/completions.py        # writes attnsel/cli/data/completion.bash, .zsh and .fish

Shells ask for them when they start: making them takes all commands, printing them none.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

if __name__ == "__main__":  # they are about this checkout
    _ROOT = Path(__file__).resolve().parents[2]
    sys.path[1:1] = [str(_ROOT), str(_ROOT / "tests/support")]

from attnsel.cli import COMMANDS, build_app
from attnsel.cli.completion import GPUS, Shell
from attnsel.cli.flags import FLAGS, Flag
from attnsel.cli.output import FOUND
from attnsel.environment.gpus import catalogue
from paths import ROOT


def path_of(shell: Shell) -> Path:
    return ROOT / "attnsel" / "cli" / "data" / f"completion.{shell}"


def script(shell: Shell) -> str:
    app = build_app(())
    for name, (target, _) in COMMANDS.items():
        module, _, function = target.partition(":")
        command = getattr(importlib.import_module(module), function)
        del app[name]
        app.command(_with_choices(command), name=name)
    return f"{app.generate_completion(prog_name='attnsel', shell=shell)}\n"


def _with_choices(command: Callable[..., int]) -> Callable[..., int]:
    """The same command, as far as a shell is told: what a flag may be stands in its type, where it is read
    by a model otherwise."""
    flags = {flag.parameter.name: flag for flag in FLAGS}
    signature = inspect.signature(command, eval_str=True)

    def told(**given: Any) -> int:
        return FOUND

    told.__name__, told.__doc__ = command.__name__, command.__doc__
    told.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            _chosen_from(parameter, flags[parameter.name]) if parameter.name in flags else parameter
            for parameter in signature.parameters.values()
        ],
        return_annotation=int,
    )
    return told


def _chosen_from(parameter: inspect.Parameter, flag: Flag) -> inspect.Parameter:
    (about,) = parameter.annotation.__metadata__
    choices = flag.choices() if callable(flag.choices) else flag.choices
    if flag.parameter.name == "gpu":
        cards = {card.name.replace(" ", "") for card in catalogue().values()}
        choices = (GPUS, *(choice for choice in choices if choice not in cards))
    if choices:
        return parameter.replace(annotation=Annotated[Literal[choices] | None, about])
    if flag.negative:
        return parameter.replace(annotation=Annotated[bool, about], default=False)
    return parameter


if __name__ == "__main__":
    for each in get_args(Shell):
        path_of(each).write_text(script(each), encoding="utf-8")
