"""``attnsel run``: a program written for flash_attn, where there is no flash_attn."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path
from types import TracebackType
from typing import Annotated

from cyclopts import Parameter

from attnsel.cli.output import BAD_INPUT, FOUND, INTERRUPTED, complain
from attnsel.errors import InvalidInput

FAILED = 1  # what Python exits with after an exception


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
    transformers: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help='also register attn_implementation="attnsel" with transformers',
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

    Processes that the program makes through multiprocessing have the name too; other programs that it starts
    do not.

    Exit code: the program's own; 1 after an exception; 2 where there is nothing to run.
    """
    _enter(program, module, arguments)
    _check(program, module)
    try:
        _prepare(force, transformers, quiet)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        complain(f"{error.name} is not installed here, and this program's attention runs on it")
        return BAD_INPUT
    return _execute(program, module)


def own_words(words: list[str]) -> list[str]:
    """``run``'s arguments with a ``--`` before the program: none of the program's flags is taken for ours."""
    for place, word in enumerate(words):
        if word == "--":
            return words
        if not word.startswith("-"):
            return [*words[:place], "--", *words[place:]]
    return words


def _check(program: str, module: bool) -> None:
    """Raises InvalidInput where there is nothing to run."""
    if module:
        if not all(program.split(".")) or program == "__main__":
            raise InvalidInput("program", program, "must be the name of a module, such as package.train")
        try:
            found = importlib.util.find_spec(program) is not None
        except ModuleNotFoundError as error:
            if error.name is None or not f"{program}.".startswith(f"{error.name}."):
                raise  # a package of that name imports something that is missing
            found = False
        if not found:
            raise InvalidInput("program", program, "there is no such module")
        return
    if not os.path.exists(program):
        raise InvalidInput("program", program, "there is no such file")
    if os.path.isdir(program) and not (Path(program) / "__main__.py").is_file():
        raise InvalidInput("program", program, "must be a file, or a folder with a __main__.py")


def _enter(program: str, module: bool, arguments: tuple[str, ...]) -> None:
    """sys.argv and sys.path as python itself would set them."""
    sys.argv[:] = [program, *arguments]
    if getattr(sys.flags, "safe_path", False):
        return  # python -P: no folder of the program's
    if module:
        sys.path[0] = os.getcwd()
    elif os.path.isfile(program):
        sys.path[0] = str(Path(program).resolve().parent)


def _prepare(force: bool, transformers: bool, quiet: bool) -> None:
    from attnsel.debug import is_logging_rank
    from attnsel.flash_attn.shim import install
    from attnsel.settings import current

    installed = install(force=force)
    message = str(installed or "flash_attn is the real package: it works here")
    if transformers:
        from attnsel.integrations.transformers import register

        message += f'; transformers knows attn_implementation="{register()}"'
    if not quiet and is_logging_rank(current()):
        complain(message)


def _execute(program: str, module: bool) -> int:
    """The program as ``__main__``. Its exceptions are message as python does: without the frames above it."""
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        error = error.with_traceback(_below(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return FOUND


def _below(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's own first frame on."""
    while tb is not None and tb.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        tb = tb.tb_next
    return tb
