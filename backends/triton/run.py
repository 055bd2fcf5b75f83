"""The contract's two functions: allocate, launch, reduce what programs left behind."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.tiled.sequences import empty_like_rows, four_dims

from . import launch as _launch
from .blocks import Tiles
from .launch import ROWS_BLOCK, Buffers, Call, Launch, make_call, tile_count
from .launch_decode import choose_splits, decode_launches, make_parts

NEG_INF = float("-inf")


def forward(spec: Spec, inputs: Inputs, *, tiles: Tiles | None = None, splits: int | None = None) -> Result:
    """Attention as the contract states it; ``tiles`` overrides the table.

    Short queries are decoded: their keys are split over programs. ``splits`` overrides over how many, up to
    ``blocks.MAX_SPLITS``, for queries of any length; 0 means the kernel for long queries.

    ``out`` has q's dtype and memory order, ``[b, h, s_q, e]`` (packed ``[t_q, h, e]``); ``lse`` always.
    Rows that see no key give 0 and -inf (with sinks the sink's logit); padded rows, and packed rows of no
    sequence, 0 and -inf.

    Raises ValueError, before any launch, for a dtype, head dimension, stride or architecture that the kernels
    do not have, and for what is missing from ``inputs``.
    """
    _launch.check(spec, inputs)
    call, q = make_call(spec, inputs, tiles), inputs.q
    arch = _arch(q)
    out = empty_like_rows(q, call.e)
    lse = torch.empty(
        (call.heads, q.shape[0]) if spec.packed else q.shape[:3], dtype=torch.float32, device=q.device
    )
    if spec.packed:
        # Rows of no sequence are nobody's to write.
        out.zero_()
        lse.fill_(NEG_INF)
    block = call.block("decode", arch)
    splits = choose_splits(call, block, _processors(q.device), splits)
    if not splits:
        block = call.block("forward", arch)
    partial = None
    if spec.return_max_logit:
        programs = call.longest_q if splits else tile_count(call.longest_q, block.m)
        partial = torch.empty((call.heads, call.batch, programs), dtype=torch.float32, device=q.device)
    if splits:
        launches = decode_launches(call, out, lse, partial, make_parts(call, splits, block), block)
    else:
        launches = [_launch.forward_launch(call, arch, out, lse, partial, block)]
    for launch in launches:
        _run(launch, q.device, arch)
    return Result(out, lse, None if partial is None else _largest(partial))


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
    if inputs.block_table is not None:
        raise ValueError("keys and values in pages (block_table) have no backward")
    _launch.check(spec, inputs)
    if max(inputs.q.shape[-1], inputs.v.shape[-1]) > 256:
        raise ValueError("the backward stops at head_dim 256")
    if result.lse is None:
        raise ValueError("the backward needs result.lse")
    with torch.no_grad(), torch.autocast(inputs.q.device.type, enabled=False):
        call = make_call(spec, inputs, tiles)
        arch = _arch(inputs.q)
        result = result._replace(out=_rows_contiguous(result.out))
        buffers = _buffers(call, _rows_contiguous(dout))
        for launch in _launch.backward_launches(call, arch, result, dlse, buffers):
            _run(launch, inputs.q.device, arch)
        dsinks = None
        if buffers.dsinks is not None and inputs.softmax_offset is not None:
            dsinks = buffers.dsinks.sum((1, 2)).to(inputs.softmax_offset.dtype)
        dbias = None
        if buffers.dbias is not None and inputs.bias is not None:
            dbias = buffers.dbias.view(inputs.bias.shape)
        return Grads(buffers.dq, buffers.dk, buffers.dv, dbias, dsinks)


def _rows_contiguous(t: Tensor) -> Tensor:
    """Rows the kernels can load: an expanded or transposed gradient is copied."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _buffers(call: Call, dout: Tensor) -> Buffers:
    spec, i = call.spec, call.inputs
    q, device = i.q, i.q.device
    per_row = (call.heads, q.shape[0]) if spec.packed else q.shape[:3]
    dq, dk, dv = (empty_like_rows(t, t.shape[-1]) for t in (q, i.k, i.v))
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
    )


def _arch(q: Tensor) -> int | None:
    """90 for compute capability 9.0; None where the interpreter runs."""
    if q.device.type == "cpu":
        return None
    if q.device.type != "cuda":
        raise ValueError(f"the Triton kernels run on CUDA and (interpreted) CPU tensors, got {q.device.type}")
    major, minor = torch.cuda.get_device_capability(q.device)
    arch = major * 10 + minor
    if arch < 80 and q.dtype != torch.float16:
        raise ValueError(f"on sm{arch} the Triton kernels compute in float16 only, got {q.dtype}")
    return arch


def _run(launch: Launch, device: torch.device, arch: int | None) -> None:
    if launch.programs == 0:
        return
    if arch is None:
        from . import interpret

        interpret.launch(launch.kernel, (launch.programs,), launch.args)
        return
    from .turing import tensor_cores

    hook = tensor_cores() if arch == 75 else contextlib.nullcontext()
    with torch.cuda.device(device), hook:
        launch.kernel[(launch.programs,)](
            **launch.args,
            num_warps=launch.block.warps,
            num_stages=launch.block.stages,
            enable_fp_fusion=True,  # off by default from Triton 3.10 on
        )
