"""A described call made by attnsel's own backend: its Spec and Inputs, of tensors that have no memory."""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attnsel.backends.checks import default_slopes
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.cudnn.graph import Strided, layouts
from attnsel.errors import UnsupportedArgument
from attnsel.params import AttentionParams

MODULES = {"flash_attn.2": "two", "flash_attn.3": "three", "flash_attn.4": "four"}
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class Factory(Protocol):
    def __call__(self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: Any) -> Tensor:
        """A tensor on the described GPU."""


class Called(NamedTuple):
    """How far a call came: "prepare", "forward", "backward" or "done", and what stopped it."""

    stage: str
    error: Exception | None


def _on(device: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: Any) -> Tensor:
    last = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
    buffer = torch.empty(offset + last, dtype=dtype, device=device)
    return buffer.as_strided(shape, stride, offset) if math.prod(shape) else buffer.new_empty(shape)


on_cuda = partial(_on, "cuda")  # without memory inside a FakeTensorMode
on_meta = partial(_on, "meta")  # for packages that take these for tensors on the GPU


def call(backend: str, p: AttentionParams, make: Factory = on_cuda) -> Called:
    """Ask attnsel's backend, and through it the package: forward, and backward for training."""
    module = import_module(f"attnsel.backends.flash_attention.{MODULES[backend]}")
    kernel, stage = module.KERNEL, "prepare"
    try:
        spec, inputs = described(p, make)
        kernel.prepare(spec, inputs)
        stage = "forward"
        result = kernel.forward(spec, inputs)
        if p.is_training:
            stage = "backward"
            out = torch.empty_like(result.out)
            dlse = torch.empty_like(result.lse) if p.return_lse else None
            kernel.backward(spec, inputs, result, out, dlse)
    except Exception as error:  # packages raise many types, and each of them is an answer
        return Called(stage, error)
    return Called("done", None)


def described(p: AttentionParams, make: Factory = on_cuda) -> tuple[Spec, Inputs]:
    """What the runtime would hand to a kernel (runtime/bind.py) for a call like this.

    Raises UnsupportedArgument for what it would hand to none.
    """
    if p.context_parallel:
        raise UnsupportedArgument("cp_size: a kernel knows one rank only")
    if p.fp8_attention:
        raise UnsupportedArgument("dtype: attnsel has no scales for FlashAttention's FP8")
    q, k, v = (
        _tensor(p, name, memory, make) for name, memory in zip(("q", "k", "v"), layouts(p), strict=True)
    )
    return _spec(p), Inputs(q, k, v, **_lengths(p, make), **_scores(p, q, make))


def _spec(p: AttentionParams) -> Spec:
    left, right = p.window_size
    return Spec(
        packed=p.qkv_format == "thd",
        softmax_scale=1.0 / math.sqrt(p.head_dim_qk),
        window_left=left,
        window_right=right,
        bottom_right=bool(p.bottom_right_diagonal),
        softcap=p.softcap,
        softmax_type=p.softmax_type,
        dropout_p=p.attention_dropout if p.dropout else 0.0,
        deterministic=p.deterministic,
        return_max_logit=p.return_max_logit,
        need_lse=p.return_lse,
        need_grad=p.is_training,
    )


def _tensor(p: AttentionParams, name: str, memory: Strided, make: Factory) -> Tensor:
    """[b, h, s, d], or [t, h, d]; pages are [pages, g, page_size, d]."""
    dtype = _DTYPES[p.dtype]
    given = getattr(p.tensors, name)
    offset = 0 if given is None or given.alignment >= 16 else given.alignment // dtype.itemsize
    (b, h, s, d), (step_b, step_h, step_s, step_d) = memory
    packed = p.qkv_format == "thd" and (name == "q" or not p.layout.paged)
    if packed:
        return make((b * s, h, d), (step_s, step_h, step_d), offset, dtype)
    return make((b, h, s, d), (step_b, step_h, step_s, step_d), offset, dtype)


def _lengths(p: AttentionParams, make: Factory) -> dict[str, Any]:
    """What says how long the sequences are."""

    def whole(*shape: int) -> Tensor:
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return make(shape, strides, 0, torch.int32)

    b, packed = p.batch_size, p.qkv_format == "thd"
    made: dict[str, Any] = {}
    if packed:
        made |= {"cu_seqlens_q": whole(b + 1), "max_seqlen_q": p.max_seqlen_q}
        made["max_seqlen_kv"] = p.max_seqlen_kv
        if not p.layout.paged:
            made["cu_seqlens_kv"] = made["cu_seqlens_q"] if p.same_lengths else whole(b + 1)
        if p.pad_between_seqs:
            made["cu_seqlens_q_padded"] = whole(b + 1)
            same = p.same_lengths
            made["cu_seqlens_kv_padded"] = made["cu_seqlens_q_padded"] if same else whole(b + 1)
    if p.page_size is not None:
        made["block_table"] = whole(b, -(-p.max_seqlen_kv // p.page_size))
        made["max_seqlen_kv"] = p.max_seqlen_kv
        made["seqlens_kv"] = whole(b)
        if p.padding and not packed:
            made["seqlens_q"] = whole(b)
    elif p.padding and not packed:
        made["seqlens_q"] = whole(b)
        made["seqlens_kv"] = made["seqlens_q"] if p.same_lengths else whole(b)
    return made


def _scores(p: AttentionParams, q: Tensor, make: Factory) -> dict[str, Any]:
    """What is added to the scores or hides some of them."""

    def dense(shape: tuple[int, ...], dtype: Any) -> Tensor:
        return make(shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), 0, dtype)

    b, h, s_q, s_kv = p.batch_size, p.num_heads, p.max_seqlen_q, p.max_seqlen_kv
    made: dict[str, Any] = {}
    if p.attn_mask_type == "arbitrary":
        mask = p.tensors.mask
        made["attn_mask"] = dense((b, 1, s_q, s_kv) if mask is None else mask.shape, torch.bool)
    if p.has_bias:
        kind = p.core_attention_bias_shape or "1hss"
        sizes = {"b": b, "h": h}
        shape = (sizes.get(kind[0], 1), sizes.get(kind[1], 1), 1 if kind == "111s" else s_q, s_kv)
        made["bias"] = dense(shape, q.dtype)
        if p.is_training and p.core_attention_bias_requires_grad:
            made["bias"].requires_grad_()
    if p.core_attention_bias_type == "alibi":
        slopes = p.alibi_slopes_shape
        made["alibi_slopes"] = (
            default_slopes(h, q.device) if slopes is None else dense(tuple(slopes), torch.float32)
        )
    if p.softmax_type == "learnable":
        made["softmax_offset"] = dense((h,), torch.float32)
    if p.dropout:
        made["dropout_seed"] = dense((), torch.int64)
        made["dropout_offset"] = dense((), torch.int64)
    return made
