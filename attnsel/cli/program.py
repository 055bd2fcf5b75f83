"""Another program run inside a command of attnsel's, as ``python`` itself would run it."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Collection
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from attnsel.cli.output import FOUND, INTERRUPTED
from attnsel.errors import InvalidInput

FAILED = 1  # what Python exits with after an exception

WITH_VALUE: dict[str, frozenset[str]] = {
    "run": frozenset(),
    "watch": frozenset({"--gpu", "--out", "--output"}),
}
"""The commands that run a program, and their flags that take the word behind them."""


def own_words(words: list[str], with_value: Collection[str] = ()) -> list[str]:
    """A command's arguments with a ``--`` before the program: none of the program's flags is taken for ours.

    ``with_value``: flags of the command that take the word behind them.
    """
    for place, word in enumerate(words):
        if word == "--":
            return words
        if place and words[place - 1] in with_value:
            continue
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


def enter(program: str, module: bool, arguments: tuple[str, ...]) -> None:
    """sys.argv and sys.path as python itself would set them. Raises InvalidInput where nothing is to run."""
    _set_paths(program, module, arguments)
    _check(program, module)


def _set_paths(program: str, module: bool, arguments: tuple[str, ...]) -> None:
    sys.argv[:] = [program, *arguments]
    if getattr(sys.flags, "safe_path", False):
        return  # python -P: no folder of the program's
    if module:
        sys.path[0] = os.getcwd()
    elif os.path.isfile(program):
        sys.path[0] = str(Path(program).resolve().parent)


def execute(program: str, module: bool, hidden: str | None = None) -> int:
    """The program as ``__main__``, which it stays: what it made lives as long as under ``python`` itself, and
    is destroyed with the interpreter, in the same order.

    Its exceptions are told as python does: without the frames above it, and without those of files in the
    folder ``hidden``, which the program did not call.
    """
    try:
        code, names = _loaded(program, module)
        main = ModuleType("__main__")
        vars(main).update(names, __builtins__=builtins)
        if sys.version_info < (3, 14):
            vars(main)["__annotations__"] = {}
        _replaced.append(sys.modules["__main__"])
        sys.modules["__main__"] = main
        exec(code, vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        error = error.with_traceback(_below(error.__traceback__))
        if hidden is not None:
            _hide(error, hidden)
        # As python does, which keeps what the frames of the traceback hold until it exits.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return FOUND


_replaced: list[ModuleType] = []
"""The ``__main__`` that a program took the place of: that of the command, whose frames still run."""


def _loaded(program: str, module: bool) -> tuple[CodeType, dict[str, Any]]:
    """The program's code, and what its ``__main__`` has before its first line."""
    spec = None
    if module:
        spec = importlib.util.find_spec(program)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{program}.__main__")
    else:
        file = os.path.abspath(program)
        if pkgutil.get_importer(file) is None:
            names = {"__file__": file, "__package__": None, "__spec__": None}
            return _script(file), {
                **names,
                "__cached__": None,
                "__loader__": SourceFileLoader("__main__", file),
            }
        sys.path[: 0 if getattr(sys.flags, "safe_path", False) else 1] = [file]  # a folder, or a ZIP file
        spec = importlib.machinery.PathFinder.find_spec("__main__", [file])
    code = getattr(spec.loader, "get_code", _no_code)(spec.name) if spec is not None else None
    if spec is None or code is None:
        raise ImportError(f"no code object available for {program}")
    if module and spec.origin is not None:
        sys.argv[0] = spec.origin
    return code, {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__package__": spec.parent,
        "__spec__": spec,
        "__loader__": spec.loader,
    }


def _no_code(name: str) -> None:
    """Of a loader that has none."""


def _script(file: str) -> CodeType:
    """The code of a file, compiled or not."""
    with io.open_code(file) as opened:
        code: CodeType | None = pkgutil.read_code(opened)
    if code is not None:
        return code
    with io.open_code(file) as opened:
        return compile(opened.read(), file, "exec", dont_inherit=True)


def _below(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's own first frame on."""
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return tb


def _hide(error: BaseException, folder: str) -> None:
    """Takes the frames of a folder's files out of the tracebacks of an error and those that led to it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        one.__traceback__ = _outside(one.__traceback__, folder)


def _outside(tb: TracebackType | None, folder: str) -> TracebackType | None:
    kept = []
    while tb is not None:
        if not tb.tb_frame.f_code.co_filename.startswith(folder + os.sep):
            kept.append(tb)
        tb = tb.tb_next
    for first, following in zip(kept, [*kept[1:], None], strict=True):
        first.tb_next = following
    return kept[0] if kept else None
