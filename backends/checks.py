"""What every kernel of the contract asks of its tensors before it reads one: the checks of the module, for
those who call a kernel directly.

Kernels take strides as they are; what they cannot see is a tensor that is smaller than another says. They
would read, or write, other memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

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


# ---- The slopes ALiBi uses when none are given ---------------------------------------------------------


def default_slopes(num_heads: int, device: torch.device) -> Tensor:
    """float32 [h]: a geometric sequence that ends at 2^-8 for a power of two of heads.

    Other head counts take the slopes of the next lower power of two, then every other slope of the next
    higher one. Source: "Train Short, Test Long" (Press et al., 2022), section 3 and its reference code;
    TransformerEngine computes the same.

    Remembered, but for what is made while a CUDA graph is captured: its memory is the graph's, and holds the
    slopes only once the graph has run.
    """
    place = _place(num_heads, device)
    if place:
        return place[0]
    with torch.inference_mode(False):  # autograd could not save an inference tensor later
        slopes = _computed(num_heads, device)
    if type(slopes) is Tensor and not capturing(device):  # nor one without memory
        place.append(slopes)
    return slopes


def is_default(slopes: Tensor) -> bool:
    """Whether a tensor came from ``default_slopes``, which kernels may then compute themselves."""
    return getattr(slopes, _MARK, False)


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_transformed() -> bool:
    """Whether a transform (vmap, jvp, torch.func.grad) sees the operators now: what a kernel refuses then
    says nothing about plain calls, and what is launched on addresses alone would miss it."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def raise_if_transformed() -> None:
    """What a call that was bound for plain tensors raises inside a transform."""
    if is_transformed():
        raise RuntimeError("this call was bound for plain tensors: no transform sees through it")


def made_current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """``torch.cuda.device``, which takes microseconds, where another one is current."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _AS_IT_IS
    return torch.cuda.device(device)


_AS_IT_IS = contextlib.nullcontext()

# As Triton and torch.compile ask for it: the stream's number alone, without an object around it.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_of(device: torch.device) -> int:
    """The current stream of a CUDA device, as the driver knows it; 0 where the device is a stand-in."""
    if device.type != "cuda":
        return 0
    if _raw_stream is None or device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


_MARK = "_attnsel_default_slopes"


@lru_cache(maxsize=64)
def _place(num_heads: int, device: torch.device) -> list[Tensor]:
    return []


def _computed(num_heads: int, device: torch.device) -> Tensor:
    """On the device: nothing is copied to it, which a capture does not allow."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = torch.arange(1, power + 1, dtype=torch.float64, device=device) * (-8.0 / power)
    rest = torch.arange(num_heads - power, dtype=torch.float64, device=device)
    slopes = torch.cat((first, (2.0 * rest + 1.0) * (-4.0 / power))).exp2_().float()
    setattr(slopes, _MARK, True)
    return slopes


# ---- A gradient of lse, for kernels whose backward takes none ------------------------------------------


class Five(NamedTuple):
    """What one plain backward differentiates."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    dout: Tensor


def with_lse_gradient(
    five: Five, dlse: Tensor | None, *, multiple: int, room: int | None, equal_head_dims: bool
) -> list[Five]:
    """Inputs whose plain backwards, one or two, add up to that of (dout, dlse); dv is the first one's alone.
    Without ``dlse`` those that are given.

    The kernels compute dS = P * (dout.v - dout.out). Extra columns, 0 in v, -dlse in out and 1 in dout, leave
    dout.v alone and add +dlse; 16-bit types carry dlse in three columns, whose sum has 24 bits or more. Where
    the kernel's head_dim has no room for them, they are a backward of their own, of v = 0.

    ``multiple``: of a head_dim. ``room``: a head_dim that every release and GPU has a kernel for; None: any.
    ``equal_head_dims``: q and k are widened with v.
    """
    if dlse is None:
        return [five]
    q, k, v, out, dout = five
    columns, rest = [], -dlse.to(torch.promote_types(out.dtype, torch.float32))
    for _ in range(3 if out.element_size() == 2 else 1):
        columns.append(rest.to(out.dtype))
        rest = rest - columns[-1]
    width = -(-(v.shape[-1] + len(columns)) // multiple) * multiple - v.shape[-1]
    pad = torch.nn.functional.pad
    extra = torch.stack(columns, -1)
    if room is not None and v.shape[-1] + width > room:
        rest_of_row = (0, v.shape[-1] - len(columns))
        minus_dlse, ones = pad(extra, rest_of_row), pad(torch.ones_like(extra), rest_of_row)
        return [five, Five(q, k, torch.zeros_like(v), minus_dlse, ones)]
    if equal_head_dims:
        q, k = pad(q, (0, width)), pad(k, (0, width))
    out = pad(torch.cat((out, extra), -1), (0, width - len(columns)))
    dout = pad(torch.cat((dout, torch.ones_like(extra)), -1), (0, width - len(columns)))
    return [Five(q, k, pad(v, (0, width)), out, dout)]


def added(parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """What the backwards of ``with_lse_gradient`` give together: dq and dk of all, the rest of the first."""
    dq, dk, *others = parts[0]
    for more_dq, more_dk, *_ in parts[1:]:
        dq, dk = dq + more_dq, dk + more_dk
    return (dq, dk, *others)


# ---- Where rows begin in memory: what 128-bit loads want, and what a copy mends ------------------------


ALIGNMENT = 16  # bytes; 128-bit loads of FlashAttention, CUTLASS and cuDNN


def misalignment(t: Tensor) -> str | None:
    """What keeps a kernel from reading the rows of ``t`` [..., d] 16 bytes at once, behind its name."""
    size = t.element_size()
    if _address(t) % ALIGNMENT:
        return f" must start at a multiple of {ALIGNMENT} bytes; off by {_address(t) % ALIGNMENT}"
    for dim in range(t.dim() - 1):
        if t.shape[dim] > 1 and t.stride(dim) * size % ALIGNMENT:
            return f".stride({dim}) must be a multiple of {ALIGNMENT // size}; got {t.stride(dim)}"
    return None


def _address(t: Tensor) -> int:
    """Where the first element lies, in bytes; for fake tensors as if storage began at 0."""
    if type(t) in (Tensor, torch.nn.Parameter):
        return t.data_ptr()
    return int(t.storage_offset()) * t.element_size()


def readable(t: Tensor) -> Tensor:
    """``t`` [..., d], an out or its gradient, or a copy where rows cannot be read 16 bytes at once."""
    if t.stride(-1) == 1 and misalignment(t) is None:
        return t
    return t.clone(memory_format=torch.contiguous_format)


LARGEST_LSE = 4096.0  # in float32 the sum of a row is known to 1/4096 there


def sum_is_lost(lse: Tensor) -> bool:
    """Whether rounding took the sums from a log-sum-exp: a row's peak is so large that it says nothing else.

    Where looking costs nothing: on a CPU, outside transforms. Rows that see nothing have -inf, and are right.
    """
    if type(lse) is not Tensor or lse.device.type != "cpu":
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(lse):
        return False
    largest = float(torch.linalg.vector_norm(lse.detach(), torch.inf))
    return largest > LARGEST_LSE and bool((lse.isfinite() & (lse.abs() > LARGEST_LSE)).any())
