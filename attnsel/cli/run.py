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
        _prepare(force, sdpa, transformers, quiet)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        complain(f"{error.name} is not installed here, and this program's attention runs on it")
        return BAD_INPUT
    try:
        return execute(program, module)
    finally:
        _undo(sdpa, transformers)


def _prepare(force: bool, sdpa: bool, transformers: bool, quiet: bool) -> None:
    from attnsel.debug import is_logging_rank
    from attnsel.flash_attn.shim import install
    from attnsel.settings import current

    installed = install(force=force)
    message = str(installed or "flash_attn is the real package: it works here")
    if sdpa:
        from attnsel.f_sdpa import shim

        shim.install()
        message += "; F.scaled_dot_product_attention is attnsel's"
    if transformers:
        from attnsel.base.spawned import first_in_children
        from attnsel.integrations.transformers import register

        first_in_children(register.__module__, f"from {register.__module__} import register; register()")
        message += f'; transformers knows attn_implementation="{register()}"'
        if installed:
            from attnsel.integrations.transformers_flash import resolve

            message += f' and loads "{resolve()}" on attnsel\'s functions'
    if not quiet and is_logging_rank(current()):
        complain(message)


def _undo(sdpa: bool, transformers: bool) -> None:
    """What the flags put into other libraries goes when the program has ended."""
    if sdpa:
        from attnsel.f_sdpa.shim import uninstall

        uninstall()
    if transformers:
        from attnsel.base.spawned import no_longer_in_children
        from attnsel.integrations.transformers import register
        from attnsel.integrations.transformers_flash import undo

        undo()
        no_longer_in_children(register.__module__)
