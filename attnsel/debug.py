"""Telling what was chosen: once per distinct selection, on rank 0, at the level that was asked for."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from attnsel._version import __version__
from attnsel.backends.registry import CANDIDATES
from attnsel.base.processes import ForkSafeLock
from attnsel.base.records import stamped
from attnsel.errors import Caller, SuspiciousCall, caller, printable, short
from attnsel.report.answer import one_line
from attnsel.report.copy_advice import advice, is_spared
from attnsel.report.short import report_document, selection_record
from attnsel.report.text import to_text
from attnsel.report.words import on_gpu
from attnsel.settings import Settings
from attnsel.verdicts.requirements import size

if TYPE_CHECKING:
    from attnsel.selection.view import SelectionView

logger = logging.getLogger("attnsel")


class SlowPathWarning(UserWarning):
    """A GPU call landed on a candidate that is right and slow."""


class FallbackWarning(UserWarning):
    """A chosen kernel refused when it ran, or gave wrong numbers, and the next candidate took over."""


class DebugFileWarning(UserWarning):
    """The file that choices were to be written to cannot be written."""


class SelfCheckWarning(UserWarning):
    """A kernel that should have been compared with ``tiled`` could not be."""


class HintWarning(UserWarning):
    """What was asked may not be what was meant (``attnsel rules --family HINT``): where the numbers are then
    probably wrong, by default; of everything else under ATTNSEL_DEBUG."""


class CopyWarning(UserWarning):
    """A tensor is copied on every call, which another layout or size of the caller's would spare.

    Silenced like any warning: ``warnings.simplefilter("ignore", attnsel.debug.CopyWarning)``.
    """


class Suspicion(NamedTuple):
    """Why a call was probably meant otherwise. ``kind``: of calls of one kind it is said once."""

    code: str
    text: str
    kind: tuple[Any, ...] = ()


_lock = ForkSafeLock()
_announced: set[Any] = set()
_MOST_REMEMBERED = 4096  # selections; far above what one program meets


def announce(
    selection: SelectionView, settings: Settings, label: str = "", suspicions: Sequence[Suspicion] = ()
) -> None:
    """Say what was selected, if these settings ask for it and it was not said before; and ``suspicions`` in
    any case. Raises SuspiciousCall for them under ATTNSEL_STRICT."""
    for one in suspicions:
        _warn_of_mistake(one, settings, label)
    if selection.backend is not None and selection[selection.backend].adaptations:
        _warn_copies(selection, settings, label)
    slow = is_slow_path(selection)
    if not settings.debug and not slow:
        return
    key = (selection.params, selection.environment, selection.policy, selection.evidence, settings.debug)
    if not _is_news(key, settings):
        return
    if settings.debug == 0:
        _warn(one_line(selection), SlowPathWarning)
        return
    _emit(_text(selection, settings, label), settings)
    said = {one.code for one in suspicions}
    for remark in selection.hints:
        if remark.code not in said:
            _warn_hint(Suspicion(remark.code, remark.message), settings, label)


def _warn_of_mistake(one: Suspicion, settings: Settings, label: str) -> None:
    """With the way to be told no more; as an error at every call of a strict process."""
    if settings.strict and not _is_silenced(one.code, settings):
        whose = f"{printable(label)}: " if label else ""
        raise SuspiciousCall(f"{whose}{one.text} [{one.code}]", one.code)
    quiet = f"{one.text}. Meant so: ATTNSEL_SILENCE={one.code}"
    _warn_hint(one._replace(text=quiet), settings, label)


def _warn_hint(one: Suspicion, settings: Settings, label: str) -> None:
    """One warning per module, hint and kind of call, whatever the sizes."""
    if not _is_silenced(one.code, settings) and _is_news(("hint", label, one.code, one.kind), settings):
        whose = f"{printable(label)}: " if label else ""
        _warn(f"{whose}{one.text} [{one.code}]", HintWarning)


def _is_silenced(code: str, settings: Settings) -> bool:
    return code in settings.silence or "all" in settings.silence


def announce_handed_over(function: str, reason: str, settings: Settings) -> None:
    """Say once per reason that PyTorch's own function takes a call of this drop-in for it.

    In words, also where choices are written as JSON: a line there is a choice.
    """
    if _is_news(("handed over", function, reason), settings):
        text = f"attnsel: {function}: PyTorch's own takes it: {printable(reason)}"
        _emit(text, settings if settings.debug_format == "text" else settings.replace(debug_file=None))


def _is_news(key: Any, settings: Settings) -> bool:
    """Whether this is to be said here and was not; it counts as said from now on."""
    with _lock:
        if key in _announced or not is_logging_rank(settings):
            return False
        if len(_announced) >= _MOST_REMEMBERED:
            _announced.clear()
        _announced.add(key)
    return True


def _warn_copies(selection: SelectionView, settings: Settings, label: str) -> None:
    """One warning per module and kind of copy, whatever the sizes: with the line that would avoid it."""
    p, name = selection.params, selection.backend
    assert name is not None
    for adaptation in selection[name].adaptations:
        if not is_spared(adaptation):
            continue
        key = (label, name, adaptation.name, tuple(field for field, _ in adaptation.changes))
        if not _is_news(key, settings):
            continue
        whose = f"{printable(label)}: " if label else ""
        what = f"{name} {adaptation.text} on every call ({size(adaptation.bytes)})"
        _warn(f"{whose}{what}: {advice(adaptation, p, _user_of(label, caller()))}", CopyWarning)


def _user_of(label: str, found: Caller) -> Caller:
    """The caller; of compiled code, which enters at an operator, by the label of flash_attn's functions."""
    compiled = found.module.startswith("attnsel.runtime") and label.startswith("flash_attn_")
    return found._replace(module="attnsel.flash_attn", function=label) if compiled else found


def _warn(text: str, category: type[Warning]) -> None:
    """A warning at the line that called attnsel."""
    warnings.warn(text, category, stacklevel=caller().stacklevel)


def is_slow_path(selection: SelectionView) -> bool:
    """A GPU call that lands on a last resort."""
    name = selection.backend
    return name is not None and CANDIDATES[name].last_resort and on_gpu(selection.environment)


def is_logging_rank(settings: Settings) -> bool:
    """Whether this rank is one that logs."""
    return settings.debug_ranks == "all" or _rank() == 0


def warn_fallback(candidate: str, message: str, settings: Settings, *, wrong: bool = False) -> None:
    """One warning when a prepared kernel refuses after all, with the library's own words, or is ``wrong``."""
    if is_logging_rank(settings):
        what = "gave other numbers than tiled" if wrong else "refused when it ran"
        _warn(f"{candidate} {what}: {printable(message)}; the next candidate runs", FallbackWarning)


def _rank() -> int:
    return _of_this_job("get_rank", "RANK", 0)


def _world_size() -> int:
    return max(1, _of_this_job("get_world_size", "WORLD_SIZE", 1))


def _of_this_job(function: str, variable: str, alone: int) -> int:
    """What torch.distributed says, or the variable that torchrun sets before the process group exists."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(getattr(distributed, function)())
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and len(text) < 10 else alone


def process_record() -> dict[str, Any]:
    """Which process speaks, and when: what tells the lines of many ranks apart."""
    return {
        "rank": _rank(),
        "world_size": _world_size(),
        "host": platform.node(),
        "pid": os.getpid(),
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "attnsel": __version__,
    }


def _text(selection: SelectionView, settings: Settings, label: str) -> str:
    if settings.debug_format == "json":
        record = {"event": "selection", "label": label, **process_record(), **selection_record(selection)}
        return json.dumps(stamped("debug", record))
    prefix = f"{printable(label)}: " if label else ""
    if _world_size() > 1:
        prefix = f"[rank {_rank()} of {_world_size()}] {prefix}"
    if settings.debug == 1:
        return f"attnsel: {prefix}{one_line(selection)}"
    return f"attnsel: {prefix}selected {selection.backend}\n{to_text(report_document(selection))}\n"


def _emit(text: str, settings: Settings) -> None:
    if settings.debug_file:
        try:
            # One write of whole lines in append mode: several processes may share the file.
            with open(_named(settings.debug_file), "a", encoding="utf-8") as file:
                file.write(text + "\n")
            return
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            _warn_unwritten(settings.debug_file, error, settings)
    if logger.hasHandlers():
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)
        logger.info(text)
        return
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # full or closed: no reason to fail a call
            print(text, file=sys.stderr, flush=True)


def _named(file: str) -> str:
    """The file's name, with ``{rank}``, ``{host}`` and ``{pid}`` replaced: on many nodes one each."""
    if "{" not in file:
        return file
    for name, value in (("rank", _rank()), ("host", platform.node()), ("pid", os.getpid())):
        file = file.replace(f"{{{name}}}", str(value))
    return file


def _warn_unwritten(file: str, error: Exception, settings: Settings) -> None:
    """Once per file: what was meant for it goes where it goes without one."""
    if _is_news(("debug_file", file), settings):
        why = getattr(error, "strerror", None) or error
        where = "its lines go to the logger or to standard error"
        _warn(f"ATTNSEL_DEBUG_FILE {short(file)} cannot be written ({why}): {where}", DebugFileWarning)
