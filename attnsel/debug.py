"""Telling what was chosen: once per distinct selection, on rank 0, at the level that was asked for."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

from attnsel.candidates import CANDIDATES
from attnsel.report import one_line
from attnsel.settings import Settings

if TYPE_CHECKING:
    from attnsel.select import Selection

logger = logging.getLogger("attnsel")


class SlowPathWarning(UserWarning):
    """A GPU call landed on a candidate that is right and slow."""


class FallbackWarning(UserWarning):
    """A chosen kernel refused when it ran, or gave wrong numbers, and the next candidate took over."""


class SelfCheckWarning(UserWarning):
    """A kernel that should have been compared with ``tiled`` could not be."""


_lock = threading.Lock()
_told: set[Any] = set()
_MOST_REMEMBERED = 4096  # selections; far above what one program meets


def announce(selection: Selection, settings: Settings, label: str = "") -> None:
    """Say what was selected, if these settings ask for it and it was not said before."""
    slow = is_slow_path(selection)
    if not settings.debug and not slow:
        return
    key = (selection.params, selection.environment, selection.policy, selection.evidence, settings.debug)
    with _lock:
        if key in _told or not speaks(settings):
            return
        if len(_told) >= _MOST_REMEMBERED:
            _told.clear()
        _told.add(key)
    if settings.debug == 0:
        warnings.warn(one_line(selection), SlowPathWarning, stacklevel=2)
        return
    _emit(_text(selection, settings, label), settings)


def is_slow_path(selection: Selection) -> bool:
    """A GPU call that lands on a last resort."""
    name = selection.backend
    return (
        name is not None
        and CANDIDATES[name].last_resort
        and selection.environment.device.type
        in (
            "cuda",
            "rocm",
        )
    )


def speaks(settings: Settings) -> bool:
    """Whether this rank is one that speaks."""
    return settings.debug_ranks == "all" or _rank() == 0


def warn_fallback(candidate: str, message: str, settings: Settings, *, wrong: bool = False) -> None:
    """One warning when a prepared kernel refuses after all, with the library's own words, or is ``wrong``."""
    if speaks(settings):
        what = "gave other numbers than tiled" if wrong else "refused when it ran"
        warnings.warn(
            f"{candidate} {what}: {message}; the next candidate runs",
            FallbackWarning,
            stacklevel=2,
        )


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "0")  # set by torchrun before the process group exists
    return int(text) if text.isdecimal() else 0


def _text(selection: Selection, settings: Settings, label: str) -> str:
    if settings.debug_format == "json":
        record = {"event": "selection", "label": label, "rank": _rank(), **selection.as_dict()}
        return json.dumps(record)
    prefix = f"{label}: " if label else ""
    if settings.debug == 1:
        return f"attnsel: {prefix}{one_line(selection)}"
    return f"attnsel: {prefix}selected {selection.backend}\n{selection.report()}\n"


def _emit(text: str, settings: Settings) -> None:
    if settings.debug_file:
        # One write of whole lines in append mode: several processes may share the file.
        with open(settings.debug_file, "a", encoding="utf-8") as file:
            file.write(text + "\n")
        return
    if logger.hasHandlers():
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)
        logger.info(text)
        return
    print(text, file=sys.stderr, flush=True)
