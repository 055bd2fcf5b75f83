"""The contract's two functions: allocate, launch, reduce what programs left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from attnsel.backends.checks import (
    check_gradients,
    is_transformed,
    made_current,
    raise_if_transformed,
    stream_of,
)
from attnsel.backends.contract import Grads, Inputs, Result, Spec, Steps
from attnsel.backends.tiled.tiles import empty_like_rows, four_dims
from attnsel.backends.triton import launch as _launch
from attnsel.backends.triton.blocks import Tiles
from attnsel.backends.triton.launch import (
    ROWS_BLOCK,
    Buffers,
    Launch,
    LaunchCall,
    backward_launches,
    choose_splits,
    decode_launches,
    head_shares,
    make_call,
    make_parts,
    same_tensor,
    tile_count,
    triton_is_among,
)

# ---- Launches remembered by the signature of a call: the second of its kind only swaps tensors ---------
# Between a call and its launch lie some hundred arguments, and Triton looks at each of them at every launch
# to find the compiled kernel. They follow from the ``Spec``, from shapes, strides, dtypes and alignments of
# the tensors, and from which of those are one: with the same of all that, the same compiled kernels get the
# same numbers and other tensors.


# Releases whose source was read: there a compiled kernel's own launch takes what Triton's gives it, constants
# included. In 3.2 it takes no constants.
_RELEASES = ((3, 3), (3, 9))
# Arguments of kernels -> the tensors that each may be, the first that there is: fields of ``Inputs`` and of
# ``Result``, and what a pass allocates.
_SOURCES = {
    "Q": ("q",), "K": ("k",), "V": ("v",), "Bias": ("bias",), "Mask": ("attn_mask",),
    "Slopes": ("alibi_slopes",), "Sinks": ("softmax_offset",), "LenQ": ("seqlens_q",),
    "LenKV": ("seqlens_kv",), "CuQ": ("cu_seqlens_q",), "CuKV": ("cu_seqlens_kv",),
    "StartQ": ("cu_seqlens_q_padded",), "StartKV": ("cu_seqlens_kv_padded",), "Seed": ("dropout_seed",),
    "Offset": ("dropout_offset",), "Table": ("block_table",),
    "Out": ("out",), "Lse": ("lse",), "MaxLogit": ("max_logit",),
    "PartOut": ("part_out",), "PartLse": ("part_lse",), "PartPeak": ("part_peak",),
    "DOut": ("dout",), "DLse": ("dlse",), "Lse2": ("lse2",), "Delta": ("delta",),
    "DQ": ("dq",), "DK": ("parts_k", "dk"), "DV": ("parts_v", "dv"), "DBias": ("dbias",),
    "DSinks": ("dsinks",),
}  # fmt: skip


class Made(NamedTuple):
    """A tensor that a pass allocates. ``fill``: what its elements begin with; None: anything."""

    tensor: Tensor
    fill: float | None = None


class _Memory(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None


class _Recorded(NamedTuple):
    """One launch without its tensors."""

    launch: Callable[..., Any]  # of the compiled kernel, over its grid
    arguments: tuple[Any, ...]
    slots: tuple[tuple[int, int], ...]  # places among the arguments, and which tensor goes there


class Pass(NamedTuple):
    """All that a forward, or a backward, does: what it allocates, by name, and what it launches."""

    memory: dict[str, _Memory]
    launches: tuple[_Recorded, ...]


def place_for(name: str, spec: Spec, inputs: Inputs, more: tuple[Tensor | None, ...] = ()) -> list[Pass]:
    """Where the pass of such a call is kept: an empty list until ``record`` has put it there.

    ``name``: forward or backward; ``more``: tensors beside the inputs.
    """
    i = inputs
    alike = same_tensor(i.seqlens_q, i.seqlens_kv), same_tensor(i.cu_seqlens_q, i.cu_seqlens_kv)
    wants = i.bias is not None and i.bias.requires_grad
    try:
        return _place((name, spec, alike, wants, *map(_told, inputs), *map(_told, more)))
    except RuntimeError:  # a tensor without strides or memory: whoever checks the call says so
        return []


def _told(v: Any) -> Any:
    """Of a tensor what launches follow from, of anything else itself."""
    if v is None or not isinstance(v, Tensor):
        return v
    return v.shape, v.stride(), v.dtype, v.data_ptr() & 15, v.get_device()


@lru_cache(maxsize=4096)
def _place(key: tuple[Any, ...]) -> list[Pass]:
    return []


def record(
    place: list[Pass],
    launched: list[tuple[Launch, Any]],
    given: Mapping[str, Tensor | None],
    made: Mapping[str, Made],
) -> None:
    """Keep a pass: its launches, each with the kernel that Triton compiled and launched for it.

    ``given``: the call's tensors by name, in the order in which ``again`` will get them. A pass with a tensor
    that is neither given nor made, such as a copy of one, is not kept: the next call would need another.
    """
    if place or not remembers():
        return
    tensors = [*given.items(), *((name, one.tensor) for name, one in made.items())]
    where = {name: number for number, (name, t) in enumerate(tensors) if t is not None}
    recorded = []
    for launch, kernel in launched:
        slots = []
        for number, (name, value) in enumerate(launch.args.items()):
            if isinstance(value, Tensor):
                source = next((where[s] for s in _SOURCES.get(name, ()) if s in where), None)
                held = None if source is None else tensors[source][1]
                if source is None or held is None or held.data_ptr() != value.data_ptr():
                    return
                slots.append((number, source))
        if kernel is None:
            return
        arguments = tuple(None if isinstance(value, Tensor) else value for value in launch.args.values())
        recorded.append(_Recorded(kernel[(launch.programs, 1, 1)], arguments, tuple(slots)))
    memory = {name: _Memory(tuple(t.shape), t.stride(), t.dtype, fill) for name, (t, fill) in made.items()}
    place.append(Pass(memory, tuple(recorded)))


def again(kept: Pass, given: tuple[Any, ...], device: torch.device) -> dict[str, Tensor]:
    """Allocate and launch, on the current device and stream; what was allocated, by name."""
    made = {}
    for name, (shape, stride, dtype, fill) in kept.memory.items():
        made[name] = t = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if fill is not None:
            t.fill_(fill)
    tensors, stream = (*given, *made.values()), stream_of(device)
    for launch, arguments, slots in kept.launches:
        filled = list(arguments)
        for number, source in slots:
            filled[number] = tensors[source]
        launch(*filled, stream=stream)
    return made


def forget() -> None:
    _place.cache_clear()


def remembers() -> bool:
    """Whether launches are remembered with the installed Triton."""
    return triton_is_among(_RELEASES)


NEG_INF = float("-inf")


def forward(
    spec: Spec,
    inputs: Inputs,
    *,
    tiles: Tiles | None = None,
    splits: int | None = None,
) -> Result:
    """Attention as the contract states it; ``tiles`` overrides the table.

    Short queries are decoded: their keys are split over programs. ``splits`` overrides over how many, up to
    ``blocks.MAX_SPLITS``, for queries of any length; 0 means the kernel for long queries.

    ``out`` has q's dtype and memory order, ``[b, h, s_q, e]`` (packed ``[t_q, h, e]``); ``lse`` always.
    Rows that see no key give 0 and -inf (with sinks the sink's logit); padded rows, and packed rows of no
    sequence, 0 and -inf.

    Raises ValueError, before any launch, for a dtype, head dimension, stride or architecture that the kernels
    do not have, and for what is missing from ``inputs``.
    """
    arch, device = _arch(inputs.q), inputs.q.device
    place = None
    if arch is not None and tiles is None and splits is None:
        place = place_for("forward", spec, inputs)
        if place:
            with made_current(device):
                done = again(place[0], inputs, device)
            largest = done.get("max_logit")
            return Result(done["out"], done["lse"], None if largest is None else _largest(largest))
    _launch.check(spec, inputs)
    call = make_call(spec, inputs, tiles)
    made = _results(call)
    launches = _forward_launches(call, arch, _processors(device), made, splits)
    launched = [(launch, _run(launch, device, arch)) for launch in launches]
    if place is not None:
        record(place, launched, inputs._asdict(), made)
    largest = made["max_logit"].tensor if "max_logit" in made else None
    return Result(made["out"].tensor, made["lse"].tensor, None if largest is None else _largest(largest))


def _results(call: LaunchCall) -> dict[str, Made]:
    """Memory for out and lse."""
    q, packed = call.inputs.q, call.spec.packed
    shape = (call.heads, q.shape[0]) if packed else q.shape[:3]
    out, lse = empty_like_rows(q, call.e), torch.empty(shape, dtype=torch.float32, device=q.device)
    if not packed:
        return {"out": Made(out), "lse": Made(lse)}
    # Rows of no sequence are nobody's to write.
    return {"out": Made(out.zero_(), 0.0), "lse": Made(lse.fill_(NEG_INF), NEG_INF)}


def _forward_launches(
    call: LaunchCall,
    arch: int | None,
    processors: int,
    made: dict[str, Made],
    splits: int | None = None,
) -> list[Launch]:
    """In the order they run. To ``made`` comes what they hand on: ``max_logit`` [h, b, tiles or rows], if
    asked for, and the parts of split keys.
    """
    out, lse = made["out"].tensor, made["lse"].tensor
    splits = choose_splits(call, arch, processors, splits)
    block = call.block("decode" if splits else "forward", arch)
    largest = None
    if call.spec.return_max_logit:
        rows = call.longest_q if splits else tile_count(call.longest_q, block.m)
        largest = torch.empty((call.heads, call.batch, rows), dtype=torch.float32, device=out.device)
        made["max_logit"] = Made(largest)
    if not splits:
        return [_launch.forward_launch(call, arch, out, lse, largest, block)]
    parts = make_parts(call, splits, block)
    for name, t in () if parts is None else (("out", parts.out), ("lse", parts.lse), ("peak", parts.peak)):
        if t is not None:
            made[f"part_{name}"] = Made(t)
    return decode_launches(call, out, lse, largest, parts, block)


def prepare(spec: Spec, inputs: Inputs) -> None:
    """Compile and load all that a forward, and with ``spec.need_grad`` a backward, would launch; run nothing.

    A backward that turns out not to compile after its forward has run is too late for another kernel.
    Nothing is allocated on the device. Raises what ``forward`` and ``backward`` would, before either runs.
    """
    _launch.check(spec, inputs)
    arch, device = _arch(inputs.q), inputs.q.device
    empty = {id(value): _without_data(value) for value in inputs}  # what is one tensor stays one
    call = make_call(spec, Inputs(*[empty[id(value)] for value in inputs]))
    made = _results(call)
    out, lse = made["out"].tensor, made["lse"].tensor
    launches = _forward_launches(call, arch, _processors(device), made)
    if spec.need_grad:
        launches += backward_launches(
            call, arch, Result(out, lse), None, _buffers(call, out, arch, _processors(device))
        )
    if arch is not None:
        for launch in launches:
            _compile(launch, device, arch)


def bind(spec: Spec, inputs: Inputs) -> Callable[..., Tensor] | Steps | None:
    """``forward`` for inference on dense q, k and v alone, or both directions: from the second call on what
    the first launched, with other tensors. None for other calls, and where nothing is remembered. Raises as
    ``prepare`` does."""
    others = any(t is not None for t in inputs[3:])
    if spec.packed or others or is_transformed() or not (_arch(inputs.q) and remembers()):
        return None
    prepare(spec, inputs)
    device, place = inputs.q.device, place_for("forward", spec, inputs)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise_if_transformed()
        given = Inputs(q, k, v)
        if not place:
            out, lse, *_ = forward(spec, given)
            assert lse is not None
            return out, lse
        with made_current(device):
            made = again(place[0], given, device)
        return made["out"], made["lse"]

    def differentiated(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
    ) -> tuple[Tensor, ...]:
        given = Inputs(q, k, v)
        more = out, lse, _rows_contiguous(dout), None
        kept = place_for("backward", spec, given, more)
        if not kept:
            return backward(spec, given, Result(out, lse), dout)[:3]
        with made_current(device):
            return _gradients(given, again(kept[0], (*given, *more), device))[:3]

    return Steps(attended, differentiated) if spec.need_grad else lambda q, k, v: attended(q, k, v)[0]


def _without_data(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return empty.requires_grad_(value.requires_grad)


def _processors(device: torch.device) -> int:
    """Streaming multiprocessors; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def _largest(partial: Tensor) -> Tensor:
    """[h, b, tiles or rows] to [h]; -inf where there is nothing."""
    if partial.shape[1] * partial.shape[2] == 0:
        return partial.new_full(partial.shape[:1], NEG_INF)
    return partial.amax((1, 2))


def backward(
    spec: Spec,
    inputs: Inputs,
    result: Result,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
) -> Grads:
    """Gradients of ``(out * dout).sum() + (lse * dlse).sum()``; ``tiles`` overrides the table.

    ``result`` may hold an ``out`` and ``lse`` merged from several parts of the keys. The bias's gradient is
    made when ``inputs.bias.requires_grad``, summed over what the bias broadcasts over, one tile at a time.

    Raises ValueError as ``forward`` does, and without ``result.lse``.
    """
    arch, device = _arch(inputs.q), inputs.q.device
    result = result._replace(out=_rows_contiguous(result.out))
    dout = _rows_contiguous(dout)
    given = {**inputs._asdict(), "out": result.out, "lse": result.lse, "dout": dout, "dlse": dlse}
    place = None
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        if arch is not None and tiles is None:
            place = place_for("backward", spec, inputs, (result.out, result.lse, dout, dlse))
            if place:
                with made_current(device):
                    return _gradients(inputs, again(place[0], tuple(given.values()), device))
        _check_backward(spec, inputs, result, dout, dlse)
        call = make_call(spec, inputs, tiles)
        buffers = _buffers(call, dout, arch, _processors(device))
        launches = backward_launches(call, arch, result, dlse, buffers)
        launched = [(launch, _run(launch, device, arch)) for launch in launches]
        made = _made(buffers, spec.packed)
        if place is not None:
            record(place, launched, given, made)
        return _gradients(inputs, {name: one.tensor for name, one in made.items()})


def _check_backward(spec: Spec, inputs: Inputs, result: Result, dout: Tensor, dlse: Tensor | None) -> None:
    if inputs.block_table is not None:
        raise ValueError("keys and values in pages (block_table) have no backward")
    _launch.check(spec, inputs)
    if max(inputs.q.shape[-1], inputs.v.shape[-1]) > 256:
        raise ValueError("the backward stops at head_dim 256")
    if result.lse is None:
        raise ValueError("the backward needs result.lse")
    check_gradients(spec, inputs, result, dout, dlse)


def _made(buffers: Buffers, packed: bool) -> dict[str, Made]:
    """What ``_buffers`` allocated, by name."""
    fill = 0.0 if packed else None
    parts_k, parts_v = buffers.parts or (None, None)
    every = {
        "lse2": (buffers.lse2, None),
        "delta": (buffers.delta, None),
        "dq": (buffers.dq, fill),
        "dk": (buffers.dk, fill),
        "dv": (buffers.dv, fill),
        "dbias": (buffers.dbias, 0.0),
        "dsinks": (buffers.dsinks, 0.0),
        "parts_k": (parts_k, fill),
        "parts_v": (parts_v, fill),
    }
    return {name: Made(t, of) for name, (t, of) in every.items() if t is not None}


def _gradients(inputs: Inputs, made: Mapping[str, Tensor]) -> Grads:
    """Gradients of what the passes left."""
    dsinks = dbias = None
    if "dsinks" in made and inputs.softmax_offset is not None:
        dsinks = made["dsinks"].sum((1, 2)).to(inputs.softmax_offset.dtype)
    if "dbias" in made and inputs.bias is not None:
        dbias = made["dbias"].view(inputs.bias.shape)
    if "parts_k" in made:
        for name in "kv":
            made[f"d{name}"].copy_(made[f"parts_{name}"].sum(0))
    return Grads(made["dq"], made["dk"], made["dv"], dbias, dsinks)


def _rows_contiguous(t: Tensor) -> Tensor:
    """Rows the kernels can load: an expanded or transposed gradient is copied."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _buffers(call: LaunchCall, dout: Tensor, arch: int | None, processors: int) -> Buffers:
    spec, i = call.spec, call.inputs
    q, device = i.q, i.q.device
    per_row = (call.heads, q.shape[0]) if spec.packed else q.shape[:3]
    dq, dk, dv = (empty_like_rows(t, t.shape[-1]) for t in (q, i.k, i.v))
    parts, shares = None, head_shares(call, arch, processors)
    if shares > 1:
        make = torch.zeros if spec.packed else torch.empty  # rows of no sequence are not written
        of_k, of_v = (make((shares, *t.shape), dtype=torch.float32, device=device) for t in (dk, dv))
        parts = of_k, of_v
    if spec.packed:
        for grad in (dq, dk, dv):
            grad.zero_()
    dbias = dsinks = None
    if i.bias is not None and i.bias.requires_grad:
        dbias = torch.zeros(four_dims(i.bias).shape, dtype=i.bias.dtype, device=device)
    if spec.softmax_type == "learnable":
        shape = (call.heads, call.batch, tile_count(call.longest_q, ROWS_BLOCK))
        dsinks = torch.zeros(shape, dtype=torch.float32, device=device)
    return Buffers(
        dout=dout,
        lse2=torch.empty(per_row, dtype=torch.float32, device=device),
        delta=torch.empty(per_row, dtype=torch.float32, device=device),
        dq=dq,
        dk=dk,
        dv=dv,
        dbias=dbias,
        dsinks=dsinks,
        parts=parts,
    )


_capability = lru_cache(maxsize=64)(torch.cuda.get_device_capability)


def _arch(q: Tensor) -> int | None:
    """90 for compute capability 9.0; None where the interpreter runs."""
    if q.device.type == "cpu":
        return None
    if q.device.type != "cuda":
        raise ValueError(f"the Triton kernels run on CUDA and (interpreted) CPU tensors, got {q.device.type}")
    major, minor = _capability(q.device)
    arch = major * 10 + minor
    if arch < 80 and q.dtype != torch.float16:
        raise ValueError(f"on sm{arch} the Triton kernels compute in float16 only, got {q.dtype}")
    return arch


def _run(launch: Launch, device: torch.device, arch: int | None) -> Any:
    """The compiled kernel, where one was launched."""
    if launch.programs == 0:
        return None
    if arch is None:
        from attnsel.backends.triton import (
            compiler as interpret,  # patches the interpreter, for CPU tensors alone
        )

        interpret.launch(launch.kernel, (launch.programs,), launch.args)
        return None
    with _around(launch, device, arch):
        return launch.kernel[(launch.programs,)](**launch.args, **launch.block.options)


def _compile(launch: Launch, device: torch.device, arch: int) -> None:
    with _around(launch, device, arch):
        compiled = launch.kernel.warmup(grid=(launch.programs,), **launch.args, **launch.block.options)
        # Loading it finds what the device lacks: shared memory, registers.
        _ = compiled.run


@contextlib.contextmanager
def _around(launch: Launch, device: torch.device, arch: int) -> Iterator[None]:
    """The device, and what a kernel needs beside it. Triton's own errors come out as RuntimeError."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(made_current(device))
        if arch == 75:
            from attnsel.backends.triton.compiler import (
                tensor_cores,  # private parts of Triton, for this card alone
            )

            stack.enter_context(tensor_cores())
        try:
            yield
        except TritonError as error:
            raise RuntimeError(f"Triton refuses the {launch.name} kernel on sm{arch}: {error}") from error
