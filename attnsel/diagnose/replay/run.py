"""A call of a file again: on a candidate, beside attention by its definition in float64."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnsel.errors import InvalidInput, NoBackendError, in_words, short
from attnsel.runtime.bind import contract_call, to_contract
from attnsel.runtime.call import Call, Config, Extras, read_config
from attnsel.runtime.dispatch import attend, clear_cache, make_call
from attnsel.runtime.inputs import params_of
from attnsel.runtime.reference import (
    Difference,
    Numbers,
    RowBlock,
    SequenceSpan,
    compute,
    differences,
    of_kv,
    sequences_of,
    unit_of,
)
from attnsel.runtime.replay_file import Generator, ReplayFile, TensorRecord
from attnsel.settings import current, override
from attnsel.verdicts.reasons import REFUSED

if TYPE_CHECKING:
    from attnsel.backends.contract import Inputs, Spec


# --------------------------------------------------------------------------------------------------------
# The tensors of a call again: shapes, strides, offsets and shared memory of the file; numbers from a seed.
#
# The same seed gives the same numbers on every device, and in the program of ``script.py``.


_MASK = ("attention_mask", "attention_mask.q", "attention_mask.kv")


class Built(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    extras: Extras


def load_data(path: Path, file: ReplayFile) -> dict[str, Tensor]:
    """The numbers that were kept; none where there are none. Raises InvalidInput."""
    if not file.data:
        return {}
    beside = path.parent / file.data
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files that torch did not write: they are refused
            held = torch.load(beside, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes the reader raise
        raise InvalidInput("data", str(beside), f"cannot be read: {in_words(error)}") from None
    if not isinstance(held, dict) or not all(isinstance(t, Tensor) for t in held.values()):
        raise InvalidInput("data", str(beside), "must hold tensors by name")
    return {str(name): t for name, t in held.items()}


def build(file: ReplayFile, device: torch.device, seed: int, data: dict[str, Tensor]) -> Built:
    """Raises InvalidInput where the file lacks what the call needs, or asks for more memory than there is."""
    _check_size(file)
    made: dict[str, Tensor] = {}
    for number in dict.fromkeys(record.storage for record in file.tensors):
        views = [record for record in file.tensors if record.storage == number]
        memory = _memory(views, number, seed)
        for record in views:
            made[record.name] = _view(record, memory, data.get(record.name))
    placed = _placed(made, file, device)
    mask: Any = placed.pop("attention_mask", None)
    if "attention_mask.q" in placed:
        mask = (placed.pop("attention_mask.q"), placed.pop("attention_mask.kv", None))
    extras = Extras(attention_mask=mask)
    others: dict[str, Any] = {name: t for name, t in placed.items() if name not in "qkv"}
    others |= {"max_seqlen_q": file.max_seqlen_q, "max_seqlen_kv": file.max_seqlen_kv}
    return Built(placed["q"], placed["k"], placed["v"], extras._replace(**others))


def _check_size(file: ReplayFile) -> None:
    spans: dict[int, int] = {}
    for record in file.tensors:
        itemsize: int = getattr(torch, record.dtype).itemsize
        spans[record.storage] = max(spans.get(record.storage, 0), record.span * itemsize)
    total = sum(spans.values())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else total
    if total > pages:
        raise InvalidInput("tensors", f"{total} bytes", "are more than this machine has memory")


def _memory(views: list[TensorRecord], number: int, seed: int) -> Tensor:
    """The memory that these tensors are views of, on the CPU."""
    dtype: torch.dtype = getattr(torch, views[0].dtype)
    if any(getattr(torch, view.dtype) != dtype for view in views):
        raise InvalidInput("tensors", [view.name for view in views], "share memory and differ in dtype")
    count = max(view.span for view in views)
    if not dtype.is_floating_point:
        return torch.zeros(count, dtype=dtype)
    generator = torch.Generator().manual_seed(seed * 100 + number)
    return torch.randn(count, generator=generator).to(dtype)


def _view(record: TensorRecord, memory: Tensor, data: Tensor | None) -> Tensor:
    view = memory.as_strided(record.shape, record.stride, record.storage_offset)
    if data is not None:
        _fill(record, view, data)
    elif record.values is not None:
        _fill(record, view, torch.tensor(record.values).reshape(record.shape))
    elif record.name in _MASK:
        _fill(record, view, _mask(record))
    elif not view.is_floating_point() and view.numel():
        raise InvalidInput(
            f"{record.name}.values", None, "were not kept, and the call is another without them"
        )
    if record.name == "alibi_slopes" and data is None:
        view.abs_()
    return view


def _fill(record: TensorRecord, view: Tensor, values: Tensor) -> None:
    for dim, stride in enumerate(record.stride):
        if stride == 0 and record.shape[dim] > 1:  # its entries are the same memory
            view, values = view.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    if tuple(values.shape) != tuple(view.shape):
        said = f"must have the shape {tuple(view.shape)}"
        raise InvalidInput(f"data of {record.name}", short(tuple(values.shape)), said)
    view.copy_(values)


def _mask(record: TensorRecord) -> Tensor:
    """Padding at the end as it was; of other masks as many entries, at random, and never a whole row."""
    if record.lengths is not None and len(record.shape) == 4 and len(record.lengths) == record.shape[0]:
        hidden = torch.arange(record.shape[-1]) >= torch.tensor(record.lengths)[:, None]
        return hidden[:, None, None].expand(record.shape)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.rand(record.shape, generator=generator) < (record.hidden or 0.0)
    if record.shape and record.shape[-1]:
        hidden[..., 0] = False
    return hidden


def _placed(made: dict[str, Tensor], file: ReplayFile, device: torch.device) -> dict[str, Tensor]:
    """On the device, with the memory that they share there too; leaves where gradients are wanted.

    What was one tensor under two names (lengths of queries and of keys) is one again: kernels take that for
    equal lengths.
    """
    memories: dict[int, Tensor] = {}
    views: dict[Any, Tensor] = {}
    placed: dict[str, Tensor] = {}
    for record in file.tensors:
        memory = made[record.name]._base
        assert memory is not None
        if record.storage not in memories:
            memories[record.storage] = memory.to(device)
        where = (record.storage, record.shape, record.stride, record.storage_offset)
        key = (record.name, *where) if record.name in "qkv" else where
        if key not in views:
            view = memories[record.storage].as_strided(*where[1:])
            views[key] = view.requires_grad_(record.requires_grad and view.is_floating_point())
        placed[record.name] = views[key]
    return placed


What = Literal["agrees", "wrong numbers", "refused", "error", "not tried"]

_CHANGES = 4  # of the inputs at random, to measure what rounding explains
_MOST_PAIRS = 1 << 28  # scores that are computed in float64, five times, and differentiated


class Figure(NamedTuple):
    """One result: the worst row's error and what rounding explains, both against the row's size."""

    result: str
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.error <= self.allowed


class Outcome(NamedTuple):
    """What happened this time. ``as_recorded``: the same as in the file; None where that was not tried."""

    what: What
    candidate: str
    device: str
    seed: int
    said: str
    figures: tuple[Figure, ...]
    as_recorded: bool | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        # Numbers that are not finite are no JSON.
        figures = [
            {**figure._asdict(), "error": figure.error if math.isfinite(figure.error) else None}
            for figure in self.figures
        ]
        return {**self._asdict(), "figures": figures, "notes": list(self.notes)}


class _Ran(NamedTuple):
    """Results as the contract has them: out, and gradients by name."""

    candidate: str
    call: Call
    results: dict[str, Tensor]
    dout: Tensor | None


class _Failed(NamedTuple):
    what: What
    said: str


def replay(
    file: ReplayFile, *, backend: str | None, device: torch.device, seed: int, data: dict[str, Tensor]
) -> Outcome:
    """Build the tensors, run the candidate, compare. What kernels refused in this process is forgotten.

    Raises InvalidInput where the file holds no call.
    """
    built = build(file, device, seed, data)
    name = backend or file.happened.candidate or None
    config = _config(file).replace(backend=name)
    notes = [] if data else ["the numbers are random: the file has none"]
    policy = file.settings.policy
    if name:  # what kept it from being chosen is not what is asked now
        policy = policy.replace(backend=None, memory_limit=None, allow=(), deny=())
    with (
        _alone(),
        override(policy=policy, selfcheck="0", check=file.settings.check, debug=0, replay_dir=None),
    ):
        _restore(file.generator, device)
        found = _attempt(config, built)
        if isinstance(found, _Ran) and config.attention_dropout:
            notes.append("numbers are compared without dropout: each kernel drops other entries")
            found = _attempt(config.replace(attention_dropout=0.0), built)
        if isinstance(found, _Failed):
            candidate = name or ""
            same = _as_recorded(file, found.what, candidate)
            return Outcome(found.what, candidate, str(device), seed, found.said, (), same, tuple(notes))
        figures, left_out = _compare(found)
    what: What = "agrees" if all(figure.right for figure in figures) else "wrong numbers"
    same = _as_recorded(file, what, found.candidate)
    return Outcome(what, found.candidate, str(device), seed, "", figures, same, (*notes, *left_out))


def _as_recorded(file: ReplayFile, what: What, candidate: str) -> bool | None:
    """Whether this is what the file is about; None where it could not be tried."""
    recorded = file.happened
    if what == "not tried":
        return True if recorded.kind == "nothing runs" else None
    return recorded.kind == what and recorded.candidate == candidate


def _config(file: ReplayFile) -> Config:
    try:
        return read_config(json.dumps({**file.static, "replayable": False, "label": ""}))
    except InvalidInput:
        raise
    except Exception as error:  # fields that there are not, or of another kind
        raise InvalidInput("config", short(file.config), f"is no call: {in_words(error)}") from None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    clear_cache()
    try:
        yield
    finally:
        clear_cache()


def _restore(generator: Generator, device: torch.device) -> None:
    """The generator as it was when the call was made; on another kind of device its seed alone."""
    try:
        state = torch.tensor(list(base64.b64decode(generator.state)), dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
    except (RuntimeError, TypeError, ValueError):
        torch.manual_seed(generator.initial_seed)


def _attempt(config: Config, built: Built) -> _Ran | _Failed:
    """The call, and its gradients where the recorded one had any."""
    q, k, v, extras = built
    holder: dict[str, Any] = {}
    try:
        made = attend(config, q, k, v, extras, holder)
        out = made[0] if isinstance(made, tuple) else made
        wanted = {f"d{n}": t for n, t in zip("qkv", (q, k, v), strict=True) if t.requires_grad}
        call = make_call(config, q, k, v, extras, current())
        dout, grads = None, {}
        if wanted and out.requires_grad:
            noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
            dout = noise.to(out.device, out.dtype)
            grads = dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), dout), strict=True))
        if q.device.type == "cuda":
            torch.cuda.synchronize(q.device)
    except InvalidInput:
        raise
    except NoBackendError as error:
        return _no_backend(error, config.backend)
    except Exception as error:
        return _Failed("error", in_words(error))
    ran = holder["_last"].selection
    heads = (ran.params.num_heads, ran.params.head_dim_v)

    def contract(t: Tensor) -> Tensor:
        return to_contract(config, t.unflatten(-1, heads) if config.flatten_heads else t)

    results = {"out": contract(out.detach()), **{name: to_contract(config, t) for name, t in grads.items()}}
    return _Ran(ran.backend, call, results, None if dout is None else contract(dout))


def _no_backend(error: NoBackendError, name: str | None) -> _Failed:
    selection = error.selection
    reasons = selection[name].reasons if name else ()
    when_run = [str(reason.observed) for reason in reasons if reason.code == REFUSED]
    if when_run:
        return _Failed("refused", short(when_run[0], str, 2000))
    if name:
        told = "; ".join(f"{reason.code} {reason.message}" for reason in reasons[:3])
    else:
        told = "; ".join(f"{one.name}: {one.reasons[0].code}" for one in selection if one.reasons)
    return _Failed("not tried", short(told, str, 2000))


# ---- beside the definition ----------------------------------------------------------------------------


def _compare(ran: _Ran) -> tuple[tuple[Figure, ...], tuple[str, ...]]:
    """The worst row of every result, over as many sequences as float64 takes in reasonable time."""
    p = params_of(ran.call)
    spec, inputs = contract_call(ran.call, p, dropout=False)
    worst: dict[str, Difference] = {}
    spans = [s for s in sequences_of(spec, inputs) if s.len_q > 0 and s.len_kv > 0]
    pairs, compared = 0, 0
    for s in spans:
        pairs += s.len_q * s.len_kv * p.num_heads
        if compared and pairs > _MOST_PAIRS:
            break
        compared += 1
        for found in _of_sequence(ran, spec, inputs, s):
            if found.name not in worst or found.ratio > worst[found.name].ratio:
                worst[found.name] = found
    figures = (worst[name] for name in ran.results if name in worst)
    notes = () if compared == len(spans) else (f"{compared} of {len(spans)} sequences were compared",)
    return tuple(Figure(d.name, d.error, d.allowed) for d in figures), notes


def _of_sequence(ran: _Ran, spec: Spec, inputs: Inputs, s: SequenceSpan) -> list[Difference]:
    """All rows of a sequence, as self-check compares a few: by ``tiled``, here in float64."""
    block, unit = RowBlock(s, range(s.len_q)), unit_of(inputs.q)
    actual: Numbers = {
        name: [block.of_q(t, spec.packed) if name in ("out", "dq") else of_kv(t, spec.packed, s)]
        for name, t in ran.results.items()
    }
    douts = None if ran.dout is None else [block.of_q(ran.dout, spec.packed)]

    def numbers(unit: float, seed: int) -> Numbers:
        return compute(spec, inputs, [block], douts, unit, seed=seed, least=torch.float64)

    changed = [numbers(unit, seed) for seed in range(1, _CHANGES + 1)]
    # Rows that see no key are not judged: kernels differ in them.
    return differences(actual, numbers(0.0, 0), changed, unit, [block], biased=True)
