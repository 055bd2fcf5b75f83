"""PyTorch's scaled-dot-product kernels, called through their aten ops.

Each op is looked up when first needed, so importing works on every build, and its schema is compared with
the arguments passed here instead of trusting a version number. The arguments used exist since 2.5; calls met
the schemas and shape functions of releases from 2.6 on (benchmarks/results/torch-versions.json).

Which ops have a backward of their own (torch 2.13 ``derivatives.yaml``; none has a second derivative)

    ============================================  =========  ====  ===================================
    op                                            q, k, v    mask  lse given back
    ============================================  =========  ====  ===================================
    _scaled_dot_product_flash_attention (CUDA)    yes        none  float32 [b, h, s_q]
    _scaled_dot_product_efficient_attention       yes        yes   float32 [b, h, s_q rounded up to 32]
    _scaled_dot_product_cudnn_attention           yes        no    float32 [b, h, s_q, 1], 3-D before 2.9
    _scaled_dot_product_flash_attention_for_cpu   yes        no    float32, or float64, [b, h, s_q]
    _scaled_dot_product_attention_math            composite  yes   no: its second result is P, not lse
    ============================================  =========  ====  ===================================

No op is differentiable through lse: that needs ``run.backward`` and its ``dlse``.

Dropout draws its own random numbers per call (efficient, flash and cuDNN from the CUDA generator, returned as
a seed and an offset for the backward; math from torch's generator with ``F.dropout``), so the entries
dropped differ between kernels although their rate does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends import rows
from attnsel.backends.sdpa.plan import Traits

FLASH_CUDA = Traits(
    "sdpa.flash",
    "cuda",
    causal="bottom_right",  # FA2's corner; F.sdpa hides it by refusing is_causal with s_q != s_kv
    takes_mask=False,
    equal_head_dims=True,
    head_dim_room=192,  # above, sm86 to sm89 and sm12x lack kernels
)
FLASH_CPU = Traits(
    "sdpa.flash",
    "cpu",
    mask_with_causal=True,
    dropout=False,
    dead_rows_zero=True,
    wide_mask=True,
    equal_head_dims=True,
)
EFFICIENT = Traits(
    "sdpa.efficient",
    "cuda",
    mask_with_causal=True,  # kernel_forward.h adds the bias, then applies the causal mask
    mask_grad=True,
    native_gqa=False,  # from 2.14 on the kernel groups heads itself; rule SDPA204 holds for all
)
CUDNN = Traits("sdpa.cudnn", "cuda", head_dim_room=128)
VARLEN = replace(FLASH_CUDA, kernel="sdpa.varlen")  # the same kernels by another op: varlen.py
MATH = Traits(
    "sdpa.math",
    "",
    mask_grad=True,  # with a causal flag beside a mask the op raises
    returns_lse=False,
    dead_rows_zero=True,
    wide_mask=True,
)

TRAITS = (FLASH_CUDA, FLASH_CPU, EFFICIENT, CUDNN, MATH)
NAMES = ("sdpa.flash", "sdpa.efficient", "sdpa.cudnn", "sdpa.math")

_FORWARD = {
    FLASH_CUDA: (
        "_scaled_dot_product_flash_attention",
        "query key value dropout_p is_causal return_debug_mask",
    ),
    FLASH_CPU: ("_scaled_dot_product_flash_attention_for_cpu", "query key value dropout_p is_causal"),
    EFFICIENT: (
        "_scaled_dot_product_efficient_attention",
        "query key value attn_bias compute_log_sumexp dropout_p is_causal",
    ),
    CUDNN: (
        "_scaled_dot_product_cudnn_attention",
        "query key value attn_bias compute_log_sumexp dropout_p is_causal",
    ),
    MATH: (
        "_scaled_dot_product_attention_math",
        "query key value attn_mask dropout_p is_causal dropout_mask",
    ),
}
_BACKWARD = {
    FLASH_CUDA: (
        "_scaled_dot_product_flash_attention_backward",
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
        "philox_seed philox_offset",
    ),
    FLASH_CPU: (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "grad_out query key value out logsumexp dropout_p is_causal",
    ),
    EFFICIENT: (
        "_scaled_dot_product_efficient_attention_backward",
        "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p "
        "grad_input_mask is_causal",
    ),
    CUDNN: (
        "_scaled_dot_product_cudnn_attention_backward",
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k "
        "max_q max_k dropout_p is_causal",
    ),
}
_KEYWORD_ONLY = {FLASH_CPU: {"attn_mask", "scale"}, MATH: {"scale", "enable_gqa"}}


class Forward(NamedTuple):
    """One forward: ``lse`` as the op shapes it, ``rng`` what its backward replays dropout from."""

    out: Tensor
    lse: Tensor | None
    rng: tuple[Tensor, ...]  # (seed, offset), empty on CPU


def resolve(kernel: str, device_type: str) -> Traits:
    """The op behind a kernel name on a device type. Raises ValueError when there is none."""
    if kernel not in NAMES:
        raise ValueError(f"kernel must be one of {', '.join(NAMES)}; got {kernel!r}")
    for traits in TRAITS:
        if traits.kernel == kernel and traits.device in ("", device_type):
            return traits
    raise ValueError(f"{kernel} has no implementation for device type {device_type!r}")


@cache
def forward_op(traits: Traits) -> Callable[..., Any]:
    """The op as a callable. torch's own binding is about 2 us cheaper per call than ``torch.ops``."""
    name, arguments = _FORWARD[traits]
    overload = checked_op(name, arguments.split(), _KEYWORD_ONLY.get(traits, {"scale"}))
    return getattr(torch, name, overload)


@cache
def backward_op(traits: Traits) -> Callable[..., Any]:
    """The op's explicit backward; math has none."""
    name, arguments = _BACKWARD[traits]
    keywords = _KEYWORD_ONLY.get(traits, {"scale"})
    return checked_op(name, arguments.split(), keywords)


def checked_op(name: str, positional: list[str], keywords: set[str]) -> Callable[..., Any]:
    """The default overload of an aten op whose schema takes these arguments.

    Raises RuntimeError when this torch lacks the op, orders its arguments otherwise or requires more.
    """
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        raise RuntimeError(f"aten::{name} does not exist in torch {torch.__version__}")
    overload = packet.default
    arguments = overload._schema.arguments
    names = [a.name for a in arguments]
    rest = arguments[len(positional) :]
    unknown = [a.name for a in rest if a.name not in keywords and not a.has_default_value()]
    if names[: len(positional)] != positional or not keywords <= {a.name for a in rest} or unknown:
        raise RuntimeError(
            f"aten::{name} of torch {torch.__version__} has other arguments: {overload._schema}"
        )
    return overload


def shielded_math_op(device_type: str) -> Callable[..., Any]:
    """The math op outside autocast: it is composite, and its products would run in the low precision."""
    op = forward_op(MATH)
    if not torch.amp.is_autocast_available(device_type):
        return op
    is_autocast_enabled = torch.is_autocast_enabled

    def shielded(*args: Any, **kwargs: Any) -> Any:
        if is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                return op(*args, **kwargs)
        return op(*args, **kwargs)

    return shielded


def above_zero(traits: Traits, scale: float) -> tuple[float, float]:
    """(factor of q, scale above 0): the same scores, for the fused kernels.

    FlashAttention 2 takes a row's maximum before it scales, and flash on CPU scales the -inf that it hides
    keys with: both want the scale above 0.
    """
    return (1.0, scale) if traits is MATH else rows.above_zero(scale)


def _times(t: Tensor, factor: float) -> Tensor:
    return t if factor == 1.0 else t * factor


def run_forward(
    traits: Traits,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    want_lse: bool = True,
) -> Forward:
    """One call of the op on q [b, h, s_q, d], k [b, g, s_kv, d], v [b, g, s_kv, e] and a folded mask.

    Differentiable as the table above says. out [b, h, s_q, e].
    """
    op = forward_op(traits)
    factor, scale = above_zero(traits, scale)
    q = _times(q, factor)
    if traits is FLASH_CPU:
        out, lse = op(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        return Forward(out, lse, ())
    if traits is MATH:
        gqa = q.shape[1] != k.shape[1]
        op = shielded_math_op(q.device.type)
        out, _ = op(q, k, v, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=gqa)
        return Forward(out, None, ())
    if traits is EFFICIENT:
        out, lse, seed, offset = op(q, k, v, mask, want_lse, dropout_p, is_causal, scale=scale)
        return Forward(out, lse, (seed, offset))
    if traits is CUDNN:
        result = op(q, k, v, mask, want_lse, dropout_p, is_causal, scale=scale)
    else:
        result = op(q, k, v, dropout_p, is_causal, False, scale=scale)
    # Between lse and seed: lengths of nested tensors, then s_q and s_kv, as tensors from torch's binding.
    out, lse, _cu_q, _cu_k, _max_q, _max_k, seed, offset, _debug = result
    return Forward(out, lse, (seed, offset))


def run_backward(
    traits: Traits,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    forward: Forward,
    *,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    mask_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dmask) of a fused op; ``forward.lse`` in the op's own shape."""
    factor, scale = above_zero(traits, scale)
    q, dmask = _times(q, factor), None
    op = backward_op(traits)
    out, lse, rng = forward
    lengths = (None, None, q.shape[2], k.shape[2])
    if traits is FLASH_CPU:
        dq, dk, dv = op(dout, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale)
    elif traits is EFFICIENT:
        needed = [True, True, True, mask_grad]
        dq, dk, dv, dmask = op(dout, q, k, v, mask, out, lse, *rng, dropout_p, needed, is_causal, scale=scale)
    elif traits is CUDNN:
        dq, dk, dv = op(dout, q, k, v, out, lse, *rng, mask, *lengths, dropout_p, is_causal, scale=scale)
    else:
        dq, dk, dv = op(dout, q, k, v, out, lse, *lengths, dropout_p, is_causal, *rng, scale=scale)
    return _times(dq, factor), dk, dv, dmask


# ---- What an op gives back and its backward takes: its own lse -----------------------------------------


HEAD_DIM_MULTIPLE = 8  # of flash, efficient and cuDNN on CUDA: 16 bytes of half precision
LSE_MULTIPLE = 32  # kAlignLSE of the memory-efficient kernels


def plain_lse(lse: Tensor, s_q: int) -> Tensor:
    """An op's lse as the contract's [b, h, s_q]."""
    return lse.squeeze(3) if lse.dim() == 4 else lse.narrow(2, 0, s_q)


def op_lse(traits: Traits, lse: Tensor) -> Tensor:
    """The contract's lse as the op's backward reads it."""
    if traits is EFFICIENT:
        return torch.nn.functional.pad(lse, (0, -lse.shape[2] % LSE_MULTIPLE), value=torch.inf)
    if traits is FLASH_CPU:
        return lse
    lse = lse.contiguous()
    return lse.unsqueeze(3) if traits is CUDNN and cudnn_lse_dims() == 4 else lse


@cache
def cudnn_lse_dims() -> int:
    """Dimensions of the cuDNN op's lse: [b, h, s] before torch 2.9, whose backward appends one itself, then
    [b, h, s, 1]. This torch's own shape function is asked."""
    q = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="meta")
    return int(forward_op(CUDNN)(q, q, q, None, True, 0.0, False)[1].dim())
