"""The way of a call leaves a file where a kernel refused, was wrong, or nothing could run.

Only with ``replay_dir``; at most ``MOST_FILES`` of a process, one for each question, kernel and kind. That a
file cannot be written is one warning and never the call's error.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attnsel import debug
from attnsel._version import __version__
from attnsel.base.processes import ForkSafeLock
from attnsel.decision import Selection
from attnsel.environment import Environment
from attnsel.errors import caller, in_words, printable, short
from attnsel.params import AttentionParams
from attnsel.runtime.call import Call
from attnsel.runtime.replay_file import MOST_VALUES, Generator, Happened, ReplayFile, TensorRecord
from attnsel.verdicts.reasons import WRONG_NUMBERS, Refusal

MOST_FILES = 16
_LINE = 64  # bytes: what allocators align to
_PRIVATE = {"debug_file", "replay_dir"}  # settings that name folders of the user's

_left: set[tuple[AttentionParams, str, str]] = set()
_lock = ForkSafeLock()


class ReplayFileWarning(UserWarning):
    """A file of ATTNSEL_REPLAY_DIR cannot be written."""


def leave_refusals(call: Call, refusals: Sequence[Refusal], then: Selection) -> None:
    """A file for each refusal of one call, which ``then`` ran, or nothing did."""
    for refusal in refusals:
        wrong = refusal.code == WRONG_NUMBERS
        happened = Happened(
            kind="wrong numbers" if wrong else "refused",
            candidate=refusal.candidate,
            message=short(refusal.message, str, 4000),
            code=refusal.code,
            likely=refusal.likely,
            then=then.backend or "",
        )
        _leave(call, happened, refusal.params, then.environment)


def leave_nothing_runs(call: Call, selection: Selection) -> None:
    """A file for a call that no candidate takes."""
    reasons = [
        f"{candidate.name}: {', '.join(dict.fromkeys(reason.code for reason in candidate.reasons))}"
        for candidate in selection
    ]
    happened = Happened(
        kind="nothing runs",
        candidate=selection.policy.backend or "",
        message=short("; ".join(reasons), str, 4000),
    )
    _leave(call, happened, selection.params, selection.environment)


def _leave(call: Call, happened: Happened, params: AttentionParams, environment: Environment) -> None:
    key = (params, happened.candidate, happened.kind)
    with _lock:
        if key in _left or len(_left) >= MOST_FILES:
            return
        _left.add(key)
    try:
        _write(call, happened, params, environment)
    except Exception as error:  # whatever it is, the call itself goes on
        message = f"no replay file in {short(call.settings.replay_dir)}: {in_words(error)}"
        with contextlib.suppress(Exception):
            if debug.is_logging_rank(call.settings):
                warnings.warn(printable(message), ReplayFileWarning, stacklevel=caller().stacklevel)


def _write(call: Call, happened: Happened, params: AttentionParams, environment: Environment) -> None:
    folder = call.settings.replay_dir
    assert folder is not None
    about = debug.process_record()
    readable = _readable(call.q)
    file = ReplayFile(
        attnsel=__version__,
        time=about["time"],
        rank=about["rank"],
        happened=happened,
        config=call.config.text,
        params=params,
        settings=call.settings.replace(
            policy=call.settings.policy.replace(figures=None), **dict.fromkeys(_PRIVATE)
        ),
        environment=environment,
        generator=_generator(call.q.device, readable),
        tensors=tuple(_records(dict(_tensors(call)), readable)),
        max_seqlen_q=call.extras.max_seqlen_q,
        max_seqlen_kv=call.extras.max_seqlen_kv,
    )
    os.makedirs(folder, exist_ok=True)
    what = happened.candidate or "nothing"
    stem = f"rank{about['rank']}-{os.getpid()}-{happened.kind.replace(' ', '-')}-{what}"
    number = 0
    while os.path.lexists(path := os.path.join(folder, f"{stem}-{number}.json")):
        number += 1
    _put(path, (json.dumps(file.as_dict(), indent=1) + "\n").encode())


def _put(path: str, data: bytes) -> None:
    """Whole, or not at all; never over another file."""
    handle, made = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".replay-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        try:
            os.link(made, path)
        except OSError:  # a file system without links
            if os.path.lexists(path):
                raise
            os.replace(made, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(made)


# ---- what is kept of tensors --------------------------------------------------------------------------


def _readable(q: Tensor) -> bool:
    """Whether numbers may be looked at now: not where there are none, nor while a CUDA graph is captured."""
    if isinstance(q, FakeTensor) or q.device.type == "meta":
        return False
    return not (q.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _tensors(call: Call) -> Iterator[tuple[str, Tensor]]:
    yield from (("q", call.q), ("k", call.k), ("v", call.v))
    extras = call.extras
    if isinstance(extras.attention_mask, Tensor):
        yield "attention_mask", extras.attention_mask
    elif extras.attention_mask is not None:
        yield from zip(("attention_mask.q", "attention_mask.kv"), extras.attention_mask, strict=True)
    for name, value in extras._asdict().items():
        if isinstance(value, Tensor) and name != "attention_mask":
            yield name, value


def _records(tensors: dict[str, Tensor], readable: bool) -> Iterator[TensorRecord]:
    bases = _bases(tensors) if readable else {}
    for number, (name, t) in enumerate(tensors.items()):
        storage, base = bases.get(name, (number, 0))
        offset = (t.data_ptr() - base) // t.element_size() if bases else 0
        about: dict[str, Any] = {"name": name, "dtype": str(t.dtype).removeprefix("torch.")}
        yield TensorRecord(
            shape=tuple(t.shape),
            stride=tuple(t.stride()),
            device=t.device.type,
            storage=storage,
            storage_offset=offset,
            requires_grad=t.requires_grad,
            **about,
            **(_contents(t) if readable else {}),
        )


def _bases(tensors: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Of each tensor which memory it is a view of, and the address where what is used of that begins."""
    shared: dict[tuple[int, torch.dtype], list[str]] = {}
    for name, t in tensors.items():
        shared.setdefault((t.untyped_storage().data_ptr(), t.dtype), []).append(name)
    return {
        name: (number, min(tensors[one].data_ptr() for one in names) // _LINE * _LINE)
        for number, names in enumerate(shared.values())
        for name in names
    }


def _contents(t: Tensor) -> dict[str, Any]:
    if t.dtype in (torch.int32, torch.int64):
        return {"values": tuple(t.flatten().tolist())} if t.numel() <= MOST_VALUES else {}
    if t.dtype != torch.bool or not t.numel():
        return {}
    found: dict[str, Any] = {"hidden": round(float(t.float().mean()), 6)}
    if t.dim() == 4 and t.shape[1:3] == (1, 1) and t.shape[0] <= MOST_VALUES:
        lengths = (~t).sum((1, 2, 3))
        rows = torch.arange(t.shape[-1], device=t.device)
        if torch.equal(t[:, 0, 0], rows >= lengths[:, None]):  # padding at the end
            found["lengths"] = tuple(lengths.tolist())
    return found


def _generator(device: torch.device, readable: bool) -> Generator:
    if not readable:
        return Generator()
    if device.type != "cuda":
        return Generator(initial_seed=torch.initial_seed())
    state = torch.cuda.get_rng_state(device).tolist()
    return Generator(initial_seed=torch.cuda.initial_seed(), state=tuple(state))
