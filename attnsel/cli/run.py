"""``attnsel run``: a program written for flash_attn, where there is no flash_attn."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from attnsel.cli.output import BAD_INPUT, complain
from attnsel.cli.program import enter, execute


def run(
    program: Annotated[str, Parameter(help="a script, a folder with a `__main__.py`, or with -m a module")],
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, help="the program's own")],
    module: Annotated[
        bool, Parameter(name=["-m", "--module"], negative="", show_default=False, help="a module, not a file")
    ] = False,
    force: Annotated[
        bool, Parameter(negative="", show_default=False, help="also over a flash_attn that works here")
    ] = False,
    sdpa: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="also put attnsel in place of torch.nn.functional.scaled_dot_product_attention",
        ),
    ] = False,
    transformers: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help='also register attn_implementation="attnsel" with transformers, and let '
            '"flash_attention_2" load, on attnsel\'s functions',
        ),
    ] = False,
    quiet: Annotated[
        bool,
        Parameter(name=["-q", "--quiet"], negative="", show_default=False, help="do not say what is done"),
    ] = False,
) -> int:
    """Run a program that imports flash_attn, unchanged, with attnsel's functions under that name.

    The name is taken where the real package is not installed or refuses a GPU of this machine (a T4, say);
    where it works, the program gets the real one. Everything after the program goes to the program: write
    attnsel's own flags before it.

        attnsel run train.py --lr 3e-4
        attnsel run -m package.train --lr 3e-4
        torchrun --nproc-per-node 2 -m attnsel run train.py

    --sdpa and --transformers do more: torch.nn.functional.scaled_dot_product_attention is attnsel's until the
    program ends, and models of transformers load attn_implementation="attnsel" or "flash_attention_2".

    Processes that the program makes through multiprocessing have all of it too; other programs that it starts
    do not.

    Exit code: the program's own; 1 after an exception; 2 where there is nothing to run.
    """
    enter(program, module, arguments)
    try:
        from attnsel.integrations import program as other_libraries  # needs torch

        done = other_libraries.put_in_place(force=force, sdpa=sdpa, transformers=transformers)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        complain(f"{error.name} is not installed here, and this program's attention runs on it")
        return BAD_INPUT
    if done and not quiet:
        complain(done)
    try:
        return execute(program, module)
    finally:
        other_libraries.put_back(sdpa=sdpa, transformers=transformers)
