"""``attnsel completion``: a shell's script that completes commands, flags and what a flag takes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from attnsel.cli import COMMANDS, build_app
from attnsel.cli.flags import FLAGS, Flag
from attnsel.cli.output import FOUND

Shell = Literal["bash", "zsh", "fish"]


def completion(
    shell: Annotated[Shell, Parameter(help="the shell that reads it")],
    /,
) -> int:
    """A script that completes commands, flags, GPUs and the values that a flag knows.

    bash: `eval "$(attnsel completion bash)"` in ~/.bashrc

    zsh: `attnsel completion zsh > DIR/_attnsel`, DIR being in fpath

    fish: `attnsel completion fish > ~/.config/fish/completions/attnsel.fish`
    """
    app = build_app(())
    for name, (target, _) in COMMANDS.items():
        module, _, function = target.partition(":")
        command = getattr(importlib.import_module(module), function)
        del app[name]
        app.command(_with_choices(command), name=name)
    print(app.generate_completion(prog_name="attnsel", shell=shell))
    return FOUND


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
    if flag.choices:
        return parameter.replace(annotation=Annotated[Literal[flag.choices] | None, about])
    if flag.negative:
        return parameter.replace(annotation=Annotated[bool, about], default=False)
    return parameter
