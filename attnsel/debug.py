"""Telling what was chosen: once per distinct selection, on rank 0, at the level that was asked for."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnsel._lock import ForkSafeLock
from attnsel._schemas import stamped
from attnsel.candidates import CANDIDATES
from attnsel.errors import printable, short
from attnsel.layout import FORMATS
from attnsel.report import one_line
from attnsel.selection.requirements import size
from attnsel.settings import Settings

if TYPE_CHECKING:
    from attnsel.params import AttentionParams
    from attnsel.selection.select import Selection
    from attnsel.selection.verdict import Adaptation

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
    """What was asked may not be what was meant (``attnsel rules --family HINT``). Under ATTNSEL_DEBUG."""


class CopyWarning(UserWarning):
    """A tensor is copied on every call, which another layout or size of the caller's would spare.

    Silenced like any warning: ``warnings.simplefilter("ignore", attnsel.debug.CopyWarning)``.
    """


_lock = ForkSafeLock()
_announced: set[Any] = set()
_MOST_REMEMBERED = 4096  # selections; far above what one program meets


def announce(selection: Selection, settings: Settings, label: str = "") -> None:
    """Say what was selected, if these settings ask for it and it was not said before."""
    if selection.backend is not None and selection[selection.backend].adaptations:
        _warn_copies(selection, settings, label)
    slow = is_slow_path(selection)
    if not settings.debug and not slow:
        return
    key = (selection.params, selection.environment, selection.policy, selection.evidence, settings.debug)
    if not _is_news(key, settings):
        return
    if settings.debug == 0:
        warnings.warn(one_line(selection), SlowPathWarning, stacklevel=2)
        return
    _emit(_text(selection, settings, label), settings)
    for remark in selection.hints:
        warn_hint(remark.code, remark.message, settings, label)


def warn_hint(code: str, message: str, settings: Settings, label: str = "") -> None:
    """One warning per module and hint, whatever the sizes."""
    if _is_news(("hint", label, code), settings):
        whose = f"{printable(label)}: " if label else ""
        warnings.warn(f"{whose}{message} [{code}]", HintWarning, stacklevel=3)


def _is_news(key: Any, settings: Settings) -> bool:
    """Whether this is to be said here and was not; it counts as said from now on."""
    with _lock:
        if key in _announced or not is_logging_rank(settings):
            return False
        if len(_announced) >= _MOST_REMEMBERED:
            _announced.clear()
        _announced.add(key)
    return True


def _warn_copies(selection: Selection, settings: Settings, label: str) -> None:
    """One warning per module and kind of copy, whatever the sizes: with the line that would avoid it."""
    p, name = selection.params, selection.backend
    assert name is not None
    for adaptation in selection[name].adaptations:
        if adaptation.name not in _SPARED:
            continue
        key = (label, name, adaptation.name, tuple(field for field, _ in adaptation.changes))
        if not _is_news(key, settings):
            continue
        whose = f"{printable(label)}: " if label else ""
        warnings.warn(
            f"{whose}{name} {adaptation.text} on every call ({size(adaptation.bytes)}): "
            f"{_SPARED[adaptation.name](adaptation, p)}",
            CopyWarning,
            stacklevel=2,
        )


def _dense_copy(a: Adaptation, p: AttentionParams) -> str:
    names = [name for name, _ in a.changes]
    lines = "; ".join(f"{name} = {name}.contiguous()" for name in names)
    return f"call {lines} once before, or make the projection emit {p.qkv_format} in dense memory"


def _wider_heads(a: Adaptation, p: AttentionParams) -> str:
    (field, to), *_ = a.changes
    if field == "head_dim_qk":
        scale = f"softmax_scale={p.head_dim_qk} ** -0.5"
        return f"make the projections of q and k {to} wide per head, zero weights in the rest, with {scale}"
    return f"make the projection of v {to} wide per head, zero weights in the rest, and cut the output back"


def _longer_batches(a: Adaptation, p: AttentionParams) -> str:
    lengths = ", ".join(str(n) for n in dict.fromkeys(to for _, to in a.changes))
    return f"pad to {lengths} rows where batches are made, and leave the result so long"


def _repeated_heads(a: Adaptation, p: AttentionParams) -> str:
    groups = dict(a.changes).get("num_gqa_groups", p.num_heads)
    copies, axis = groups // p.num_gqa_groups, FORMATS[p.qkv_format].heads
    return f"where k and v are kept, keep k.repeat_interleave({copies}, dim={axis}), and v alike"


def _padded_batch(a: Adaptation, p: AttentionParams) -> str:
    return "give a padded batch: qkv_format='bshd' with the same cu_seqlens"


# What a caller can do about each copy.
_SPARED: dict[str, Callable[[Adaptation, AttentionParams], str]] = {
    "contiguous": _dense_copy,
    "pad_head_dim_qk": _wider_heads,
    "pad_head_dim_v": _wider_heads,
    "pad_sequence": _longer_batches,
    "expand_gqa": _repeated_heads,
    "unpack": _padded_batch,
}


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


def is_logging_rank(settings: Settings) -> bool:
    """Whether this rank is one that logs."""
    return settings.debug_ranks == "all" or _rank() == 0


def warn_fallback(candidate: str, message: str, settings: Settings, *, wrong: bool = False) -> None:
    """One warning when a prepared kernel refuses after all, with the library's own words, or is ``wrong``."""
    if is_logging_rank(settings):
        what = "gave other numbers than tiled" if wrong else "refused when it ran"
        warnings.warn(
            f"{candidate} {what}: {printable(message)}; the next candidate runs",
            FallbackWarning,
            stacklevel=2,
        )


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "0")  # set by torchrun before the process group exists
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _text(selection: Selection, settings: Settings, label: str) -> str:
    if settings.debug_format == "json":
        record = {"event": "selection", "label": label, "rank": _rank(), **selection.as_dict()}
        return json.dumps(stamped("debug", record))
    prefix = f"{printable(label)}: " if label else ""
    if settings.debug == 1:
        return f"attnsel: {prefix}{one_line(selection)}"
    return f"attnsel: {prefix}selected {selection.backend}\n{selection.report()}\n"


def _emit(text: str, settings: Settings) -> None:
    if settings.debug_file:
        try:
            # One write of whole lines in append mode: several processes may share the file.
            with open(settings.debug_file, "a", encoding="utf-8") as file:
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


def _warn_unwritten(file: str, error: Exception, settings: Settings) -> None:
    """Once per file: what was meant for it goes where it goes without one."""
    if _is_news(("debug_file", file), settings):
        why = getattr(error, "strerror", None) or error
        warnings.warn(
            f"ATTNSEL_DEBUG_FILE {short(file)} cannot be written ({why}): its lines go to the logger or to "
            "standard error",
            DebugFileWarning,
            stacklevel=2,
        )
