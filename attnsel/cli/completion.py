"""``attnsel completion``: a shell's script that completes commands, flags and what a flag takes."""

from __future__ import annotations

import pkgutil
import re
from typing import Annotated, Literal

from cyclopts import Parameter

from attnsel.base.rows import read_rows
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
    script = pkgutil.get_data("attnsel.cli", f"data/completion.{shell}")  # docs/tools/completions.py makes it
    assert script is not None, "attnsel.cli is not read from files"
    print(_with_gpus(script.decode()), end="")
    return FOUND


GPUS = "@GPUS@"
"""Where a script names all of them: a new card is a row of data, and nothing is made again."""


def _with_gpus(script: str) -> str:
    names = [row["name"].replace(" ", "") for row in read_rows("attnsel", "gpus", folder="environment/")]

    def in_its_quotes(found: re.Match[str]) -> str:
        quote = found[1]
        return " ".join(f"{quote}{name}{quote}" for name in names)

    return re.sub(rf"([\"']?){GPUS}\1", in_its_quotes, script)
