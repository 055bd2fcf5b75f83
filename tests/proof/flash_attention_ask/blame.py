"""Whose words an error is: the package's, its compiler's, attnsel's own, or nobody's.

A refusal is what the package says no to by itself: an assert, a ``raise``, a name that is not there on one
path. Where a stand-in could not answer, or torch could not do without a GPU what it does with one, nothing
was learnt.
"""

from __future__ import annotations

import ast
import linecache
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

import attnsel.backends
from attnsel.errors import UnsupportedArgument
from flash_attention_ask.standins import StandIn

_BACKENDS = Path(attnsel.backends.__file__).resolve().parent
_CALLS = Path(__file__).resolve().with_name("calls.py")
_NO_GPU = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
_NO_GPU_WORDS = ("not compiled with CUDA", "libcuda", "driver library", "meta tensor", "FakeTensor")
_OWN_MISTAKES = (UnboundLocalError, NameError)  # of a package on one of its paths: no stand-in causes them
_LONGEST = 400  # characters of a message that are kept


class Verdict(NamedTuple):
    """``supported`` False for a refusal, None where nothing was learnt. ``where``: file and line in the
    package, or in attnsel's backend."""

    supported: bool | None
    words: str
    where: str


def judged(error: BaseException, package: Path, real: bool) -> Verdict:
    """``real``: whether the package's compiler is the real one."""
    root = _root(error)
    frames = traceback.extract_tb(root.__traceback__)
    theirs = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    ours = [frame for frame in frames if _of_attnsel(frame.filename)]
    words = _words(root, theirs[-1] if theirs else None)
    where = getattr(root, "where", "") or (_place(theirs[-1]) if theirs else "")
    if _nothing_learnt(root, words):
        return Verdict(None, words, where)
    if hasattr(root, "where"):  # the described device's own word (package_cute.Refused)
        return Verdict(False, words, where)
    if not theirs:
        refused = isinstance(root, (ValueError, UnsupportedArgument, RuntimeError)) and bool(ours)
        return Verdict(False if refused else None, words, _place(ours[-1]) if ours else "")
    if real or frames[-1] is not theirs[-1]:
        # The compiler speaks for the package, and torch of what the package made of the tensors.
        return Verdict(False if real or _is_torch(frames[-1]) else None, words, where)
    said = isinstance(root, _OWN_MISTAKES) or _is_check(theirs[-1].filename, theirs[-1].lineno or 0)
    return Verdict(False if said else None, words, where)


def _root(error: BaseException) -> BaseException:
    """What was raised first: attnsel's backend wraps what packages raise."""
    while error.__cause__ is not None and error.__cause__.__traceback__ is not None:
        error = error.__cause__
    return error


def _nothing_learnt(error: BaseException, words: str) -> bool:
    if isinstance(error, (StandIn, *_NO_GPU, ImportError)):
        return True
    return any(sign in words for sign in _NO_GPU_WORDS)


def _words(error: BaseException, frame: traceback.FrameSummary | None) -> str:
    """The message; of an assertion without one, its source line."""
    text = " ".join(str(error).split())
    if not text and frame is not None:
        text = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    if not isinstance(error, (AssertionError, ValueError, RuntimeError, NotImplementedError)):
        text = f"{type(error).__name__}: {text}"
    return text[:_LONGEST] or type(error).__name__


def _place(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _of_attnsel(name: str) -> bool:
    path = Path(name)
    return path.is_relative_to(_BACKENDS) or path == _CALLS


def _is_torch(frame: traceback.FrameSummary) -> bool:
    return "torch" in Path(frame.filename).parts


def _is_check(name: str, line: int) -> bool:
    """Whether the statement at that line is an assert or a raise."""
    return any(first <= line <= last for first, last in _checks(name))


@lru_cache(maxsize=64)
def _checks(name: str) -> tuple[tuple[int, int], ...]:
    try:
        tree: Any = ast.parse(Path(name).read_text())
    except (OSError, SyntaxError):
        return ()
    found = (node for node in ast.walk(tree) if isinstance(node, (ast.Assert, ast.Raise)))
    return tuple((node.lineno, node.end_lineno or node.lineno) for node in found)
