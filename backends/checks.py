"""What every kernel of the contract asks of its tensors before it reads one: the checks of the module, for
those who call a kernel directly.

Kernels take strides as they are; what they cannot see is a tensor that is smaller than another says. They
would read, or write, other memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Result, Spec

_LENGTHS = (torch.int32, torch.int64)
_PACKED = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def check_tensors(spec: Spec, inputs: Inputs) -> None:
    """ValueError naming the first tensor that does not fit the others; only metadata is read."""
    q, k, v = inputs[:3]
    paged = inputs.block_table is not None
    rank = 3 if spec.packed else 4
    rank_kv = 4 if paged else rank
    if q.dim() != rank or k.dim() != rank_kv or v.dim() != rank_kv:
        wanted = f"{rank}, {rank_kv} and {rank_kv}"
        raise ValueError(f"q, k and v must have {wanted} dimensions, got {q.dim()}, {k.dim()}, {v.dim()}")
    device = q.device
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.layout != torch.strided or t.is_nested:
            raise ValueError(f"{name} must be dense and strided, got {_kind(t)}")
        if t.device != device:
            raise ValueError(f"{name} is on {t.device}, q on {device}")
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    h, g, gv = shape_q[1], shape_k[1], shape_v[1]
    if (h % g if g else h) or gv != g:
        raise ValueError(f"{h} query heads do not divide over {g} key and {gv} value heads")
    d, dk, e = shape_q[-1], shape_k[-1], shape_v[-1]
    if d != dk:
        raise ValueError(f"q and k differ in head_dim: {d} and {dk}")
    if d == 0 or e == 0:
        raise ValueError(f"head dimensions must be above 0, got {d} and {e}")
    if shape_k[:-1] != shape_v[:-1]:
        raise ValueError(f"k and v must have the same rows, got {list(shape_k)} and {list(shape_v)}")
    if rank == 4 and not paged and shape_q[0] != shape_k[0]:
        raise ValueError(f"q, k and v must have one batch size, got {shape_q[0]} and {shape_k[0]}")
    dtype = q.dtype
    if k.dtype != dtype or v.dtype != dtype or not dtype.is_floating_point:
        raise ValueError(f"q, k and v must share a floating-point dtype, got {dtype}, {k.dtype}, {v.dtype}")
    if not math.isfinite(spec.softmax_scale):
        raise ValueError(f"softmax_scale must be finite, got {spec.softmax_scale}")
    for other in inputs[3:]:
        if other is not None:
            _check_others(spec, inputs)
            break


def _kind(t: Tensor) -> str:
    return "nested" if t.is_nested else str(t.layout)


def _check_others(spec: Spec, inputs: Inputs) -> None:
    """Masks, biases, slopes, sinks and lengths against q and k."""
    b, h, device = _batch(spec, inputs), inputs.q.shape[1], inputs.q.device
    for name, t in zip(inputs._fields, inputs, strict=True):
        if not isinstance(t, Tensor):
            continue
        if t.layout != torch.strided or t.is_nested:
            raise ValueError(f"{name} must be dense and strided, got {_kind(t)}")
        if t.device != device and not name.startswith("dropout"):
            raise ValueError(f"{name} is on {t.device}, q on {device}")
    for name, t in (("attn_mask", inputs.attn_mask), ("bias", inputs.bias)):
        if t is not None:
            _check_pairs(name, t, spec, inputs, b)
    mask, bias, slopes, sinks = inputs[3:7]
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"attn_mask must be bool (True = masked out), got {mask.dtype}")
    if bias is not None and not bias.dtype.is_floating_point:
        raise ValueError(f"bias must be of a floating-point dtype, got {bias.dtype}")
    if slopes is not None and tuple(slopes.shape) not in ((h,), (b, h)):
        raise ValueError(f"alibi_slopes must be [{h}] or [{b}, {h}], got {list(slopes.shape)}")
    if sinks is not None and tuple(sinks.shape) != (h,):
        raise ValueError(f"softmax_offset must be [{h}], got {list(sinks.shape)}")
    for name, t in (("seqlens_q", inputs.seqlens_q), ("seqlens_kv", inputs.seqlens_kv)):
        if t is not None and (tuple(t.shape) != (b,) or t.dtype not in _LENGTHS):
            raise ValueError(f"{name} must be int32 [{b}], got {t.dtype} {list(t.shape)}")
    for name in _PACKED if spec.packed else ():
        t = getattr(inputs, name)
        if t is not None and (tuple(t.shape) != (b + 1,) or t.dtype not in _LENGTHS):
            raise ValueError(f"{name} must be int32 [{b + 1}], got {t.dtype} {list(t.shape)}")


def _check_pairs(name: str, t: Tensor, spec: Spec, inputs: Inputs, b: int) -> None:
    """A mask or bias: broadcastable to [b, h, s_q, s_kv]; for packed calls no smaller than any sequence."""
    full = (b, inputs.q.shape[1], _longest_q(spec, inputs), _longest_kv(spec, inputs))
    at_least = spec.packed or inputs.block_table is not None
    sizes = (1,) * (4 - t.dim()) + tuple(t.shape)
    fits = t.dim() <= 4 and all(
        n == 1 or n == m or (at_least and dim > 1 and n >= m)
        for dim, (n, m) in enumerate(zip(sizes, full, strict=True))
    )
    if not fits:
        raise ValueError(f"{name} must broadcast to {list(full)}, got {list(t.shape)}")


def check_gradients(spec: Spec, inputs: Inputs, result: Result, dout: Tensor, dlse: Tensor | None) -> None:
    """ValueError where what goes into a backward has not the shapes that the forward gave."""
    q, e = inputs.q, inputs.v.shape[-1]
    rows = (q.shape[1], q.shape[0]) if spec.packed else tuple(q.shape[:3])
    for name, t, shape in (
        ("result.out", result.out, (*q.shape[:-1], e)),
        ("dout", dout, (*q.shape[:-1], e)),
        ("result.lse", result.lse, rows),
        ("dlse", dlse, rows),
    ):
        if t is not None and (tuple(t.shape) != shape or t.device != q.device):
            raise ValueError(f"{name} must be {list(shape)} on {q.device}, got {list(t.shape)} on {t.device}")


def _batch(spec: Spec, inputs: Inputs) -> int:
    if not spec.packed:
        return inputs.q.shape[0]
    return 0 if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.numel() - 1


def _longest_q(spec: Spec, inputs: Inputs) -> int:
    if not spec.packed:
        return inputs.q.shape[2]
    return _longest(inputs.max_seqlen_q, inputs.cu_seqlens_q)


def _longest_kv(spec: Spec, inputs: Inputs) -> int:
    if inputs.block_table is not None:
        return inputs.max_seqlen_kv or 0
    return _longest(inputs.max_seqlen_kv, inputs.cu_seqlens_kv) if spec.packed else inputs.k.shape[2]


def _longest(given: int | None, cu_seqlens: Tensor | None) -> int:
    """The longest sequence, or 0 where finding out would wait for a GPU."""
    if given is not None:
        return given
    if cu_seqlens is None or cu_seqlens.device.type != "cpu" or cu_seqlens.numel() < 2:
        return 0
    return max(0, int((cu_seqlens[1:] - cu_seqlens[:-1]).max()))
