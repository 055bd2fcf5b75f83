"""What processes that multiprocessing spawns do before they import the program's main module.

Only what is unpickled with multiprocessing's preparation data runs before that.
"""

from __future__ import annotations

import multiprocessing.spawn
from pathlib import Path
from typing import Any

_HOME = str(Path(__file__).resolve().parents[2])  # a child's sys.path is not its parent's yet
_stdlib_preparation = multiprocessing.spawn.get_preparation_data
_first: dict[str, str] = {}  # a line of code by the module that wants it run


def first_in_children(module: str, code: str) -> None:
    """From now on spawned processes begin with ``code``; a second one of the same ``module`` replaces it."""
    _first[module] = code
    multiprocessing.spawn.get_preparation_data = _preparation


def no_longer_in_children(module: str) -> None:
    """Undo ``first_in_children``."""
    _first.pop(module, None)
    if not _first and multiprocessing.spawn.get_preparation_data is _preparation:
        multiprocessing.spawn.get_preparation_data = _stdlib_preparation


def _preparation(name: str) -> dict[str, Any]:
    return {**_stdlib_preparation(name), "attnsel": _InChild()}


class _InChild:
    """Unpickling it runs the code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("\n".join([f"import sys; sys.path.append({_HOME!r})", *_first.values()]),)
