"""PyTorch's FlashAttention-2 as its own op takes it: with lengths, windows and pages.

``aten::_flash_attention_forward`` is what ``torch.nn.attention.varlen`` (2.10) and nested tensors call; every
wheel since 2.6 has it. F.sdpa reaches the same kernels through another op, which has no argument for any of
these. Dense q, k and v are [b, s, h, d] there, packed ones [t, h, d].

    =====================  =============================================================================
    what                   how the op has it
    =====================  =============================================================================
    window                 window_size_left and _right, -1 for no bound, from the bottom-right diagonal of
                           each sequence; ``is_causal`` stands for a right bound of 0 and overrides it
    lengths                ``cum_seq_q``, ``cum_seq_k``; padding and gaps are sequences too
                           (backends/rows.py)
    pages (2.12)           ``block_table`` and ``seqused_k``, forward only
    lse                    float32 [b, h, s]; packed [h, t], before 2.8 [n, h, longest]; +inf, not -inf, for
                           rows without a key
    random numbers         two tensors, of another kind in 2.6 (seed, offset) than later (both in the first);
                           the backward takes them as they came
    rows in no sequence    are not written
    =====================  =============================================================================

Sources: schemas and shape functions of the wheels 2.6, 2.8, 2.10, 2.11 and 2.13; flash_api.cpp of PyTorch at
03b7c19d. ``seqused_k`` and ``alibi_slopes`` are not passed on by the backward, and ``seqused_k`` not by dense
calls, without a word: nothing here gives them there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnsel.backends.checks import Five, added
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.flash_attention.kernel import FlashCall, Forward, Kernel, Package
from attnsel.backends.rows import bottom_right_window, check_open_right, longest_rows

from .guards import violations
from .ops import VARLEN, checked_op

_KEYWORDS = {"scale", "window_size_left", "window_size_right"}


@cache
def forward_op() -> Callable[..., Any]:
    names = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
    return checked_op("_flash_attention_forward", names.split(), _KEYWORDS)


@cache
def backward_op() -> Callable[..., Any]:
    # Between is_causal and the keywords: what the forward drew its random numbers from, under two names.
    names = "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    state = "rng_state unused" if _one_random_state() else "philox_seed philox_offset"
    return checked_op("_flash_attention_backward", [*names.split(), *state.split()], _KEYWORDS)


@cache
def _one_random_state() -> bool:
    return "rng_state" in _names_of("_flash_attention_backward")


@cache
def _names_of(op: str) -> frozenset[str]:
    return frozenset(a.name for a in getattr(torch.ops.aten, op).default._schema.arguments)


def _as_batch(spec: Spec, inputs: Inputs) -> Inputs:
    """q, k and v as [b, h, s, d], for guards that look at types, heads, strides and addresses."""
    q, k, v = inputs[:3]
    if spec.packed:
        q = q.transpose(0, 1).unsqueeze(0)
    if inputs.block_table is not None:
        q, k, v = q[:1], k[:1], v[:1]
    elif spec.packed:
        k, v = (t.transpose(0, 1).unsqueeze(0) for t in (k, v))
    seed, offset = inputs.dropout_seed, inputs.dropout_offset
    return Inputs(q, k, v, softmax_offset=inputs.softmax_offset, dropout_seed=seed, dropout_offset=offset)


PAGE_MULTIPLE = 256
"""Of a page's rows. Source: TORCH_CHECK in mha_varlen_fwd of flash_api.cpp, "must be divisible by 256"."""


def _check_pool(inputs: Inputs) -> None:
    if "block_table" not in _names_of("_flash_attention_forward"):
        raise ValueError(f"sdpa.varlen: block_table: the op of torch {torch.__version__} takes no pages")
    if inputs.k.shape[2] % PAGE_MULTIPLE:
        raise ValueError(
            f"sdpa.varlen: block_table: a page must have a multiple of {PAGE_MULTIPLE} rows; "
            f"got {inputs.k.shape[2]}"
        )
    for name, t in (("k", inputs.k), ("v", inputs.v)):
        if t.stride(0) * t.element_size() % 16:
            raise ValueError(f"sdpa.varlen: {name}: pages must begin at multiples of 16 bytes")


class Varlen(Package):
    name = "sdpa.varlen"
    without = ("attn_mask", "bias", "alibi_slopes")
    room = 192  # as ``FLASH_CUDA`` has it

    @property
    def lse_by_sequence(self) -> bool:
        return _lse_by_sequence()

    def window(self, spec: Spec, inputs: Inputs) -> tuple[int, int]:
        if inputs.block_table is not None:
            _check_pool(inputs)
        broken = list(violations(VARLEN, replace(spec, packed=False), _as_batch(spec, inputs)))
        given = [name for name in self.without if getattr(inputs, name) is not None]
        broken += [f"{name}: the op has no argument for it" for name in given]
        if spec.q_offset or spec.kv_offset:
            broken.append("q_offset, kv_offset: the op has no argument for them")
        if broken:
            raise ValueError("sdpa.varlen: " + "; ".join(broken))
        left, right = bottom_right_window(self.name, spec, inputs)
        check_open_right(self.name, left, right, *longest_rows(spec, inputs))
        return left, right

    def forward(self, call: FlashCall, need_lse: bool) -> Forward:
        pages = {}
        if call.block_table is not None:
            pages = {"seqused_k": call.seqused_kv, "block_table": call.block_table}
        out, lse, *random, _ = forward_op()(*call[:3], *_settings(call), False, **_keywords(call), **pages)
        return Forward(out, lse, tuple(random))

    def backward(
        self, call: FlashCall, five: Five, lse: Tensor, saved: tuple[Any, ...], dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """``dlse`` costs copies of q, k, v, out and dout, head_dim widened."""
        # exp(score - lse) is to be 0 in a row without a key, where -inf would make NaN.
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        random = saved or _no_random_state(lse.device)
        parts = []
        for q, k, v, out, dout in self.parts(five, dlse):
            settings, keywords = _settings(call), _keywords(call)
            parts.append(backward_op()(dout, q, k, v, out, lse, *settings, *random, **keywords))
        dq, dk, dv = added(parts)
        return dq, dk, dv, None

    def public(self, call: FlashCall) -> Callable[[Tensor, Tensor, Tensor], Any]:
        op, settings, keywords = forward_op(), _settings(call), _keywords(call)
        return lambda q, k, v: op(q, k, v, *settings, False, **keywords)


def _settings(call: FlashCall) -> tuple[Any, ...]:
    """What stands between the tensors and what one of the two ops has alone."""
    lengths = (call.cu_seqlens_q, call.cu_seqlens_kv, call.max_seqlen_q, call.max_seqlen_kv)
    return (*lengths, call.dropout_p, call.causal)


def _keywords(call: FlashCall) -> dict[str, Any]:
    bounds = {"window_size_left": call.window_left, "window_size_right": call.window_right}
    return {"scale": call.softmax_scale, **bounds}


def _no_random_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """What a backward without dropout takes in their place, and does not read."""
    if _one_random_state():
        return (
            torch.zeros(2, dtype=torch.uint64, device=device),
            torch.zeros((), dtype=torch.uint64, device=device),
        )
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return zero, zero


@cache
def _lse_by_sequence() -> bool:
    """Whether a packed call's lse is [n, h, longest]; this torch's own shape function is asked."""
    q = torch.empty(8, 1, 64, dtype=torch.float16, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    lse: Tensor = forward_op()(q, q, q, cu, cu, 8, 8, 0.0, False, False)[1]
    return lse.dim() == 3


KERNEL = Kernel(Varlen())
prepare, forward, backward, bind = KERNEL.prepare, KERNEL.forward, KERNEL.backward, KERNEL.bind
