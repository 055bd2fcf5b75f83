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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.checks import Five, added, check_gradients, check_tensors
from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.rows import (
    Form,
    bottom_right_window,
    check_open_right,
    check_rows,
    check_rows_given,
    longest_rows,
    lse_of_forward,
)
from attnsel.backends.sdpa.ops import with_lse_gradient

from .guards import violations
from .ops import VARLEN, above_zero, checked_op
from .run import readable

_FORWARD = (
    "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
    {"scale", "window_size_left", "window_size_right"},
)
_BACKWARD = (
    "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal",
    {"scale", "window_size_left", "window_size_right"},
)


class Window(NamedTuple):
    """The op's own arguments for what is visible."""

    is_causal: bool
    left: int
    right: int

    @property
    def arguments(self) -> dict[str, int]:
        return {"window_size_left": self.left, "window_size_right": self.right}


@cache
def forward_op() -> Callable[..., Any]:
    names, keywords = _FORWARD
    return checked_op("_flash_attention_forward", names.split(), keywords)


@cache
def backward_op() -> Callable[..., Any]:
    # Between is_causal and the keywords: what the forward drew its random numbers from, under two names.
    names, keywords = _BACKWARD
    state = "rng_state unused" if _one_random_state() else "philox_seed philox_offset"
    return checked_op("_flash_attention_backward", [*names.split(), *state.split()], keywords)


@cache
def _one_random_state() -> bool:
    return "rng_state" in _names_of("_flash_attention_backward")


@cache
def _names_of(op: str) -> frozenset[str]:
    return frozenset(a.name for a in getattr(torch.ops.aten, op).default._schema.arguments)


def prepare(spec: Spec, inputs: Inputs) -> None:
    """Raises ValueError, naming the argument, for what the op cannot take or would misunderstand."""
    check_tensors(spec, inputs)
    check_rows_given(spec, inputs)
    if inputs.block_table is not None:
        _check_pool(inputs)
    broken = list(violations(VARLEN, replace(spec, packed=False), _as_batch(spec, inputs)))
    broken += [
        f"{name}: the op has no argument for it" for name in _WITHOUT if getattr(inputs, name) is not None
    ]
    if spec.q_offset or spec.kv_offset:
        broken.append("q_offset, kv_offset: the op has no argument for them")
    if broken:
        raise ValueError("sdpa.varlen: " + "; ".join(broken))
    window_of(spec, inputs)
    check_rows("sdpa.varlen", spec, inputs)


_WITHOUT = ("attn_mask", "bias", "alibi_slopes")


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


def window_of(spec: Spec, inputs: Inputs) -> Window:
    """What is visible in the op's words. Raises ValueError where it has none for it."""
    left, right = bottom_right_window("sdpa.varlen", spec, inputs)
    check_open_right("sdpa.varlen", left, right, *longest_rows(spec, inputs))
    return Window(left < 0 and right == 0, left, right)


# ---- forward and backward ---------------------------------------------------------------------------


def forward(spec: Spec, inputs: Inputs) -> Result:
    """The contract's forward. Raises as ``prepare`` does."""
    prepare(spec, inputs)
    with torch.no_grad():
        form = Form(spec, inputs, _lse_by_sequence())
        q, k, v = form.qkv()
        window = window_of(spec, inputs)
        factor, scale = above_zero(VARLEN, spec.softmax_scale)
        out, lse, *random, _ = forward_op()(
            q if factor == 1.0 else q * factor,
            k,
            v,
            *form.lengths(),
            spec.dropout_p,
            window.is_causal,
            False,
            scale=scale,
            **window.arguments,
            **form.pages(),
        )
        if not (spec.need_lse or spec.need_grad):
            return Result(form.out(out), None, None, tuple(random))
        # Of a real row, only one without a key has +inf.
        lse = lse.masked_fill_(lse == torch.inf, -torch.inf)
        return Result(form.out(out), form.lse(lse), None, tuple(random))


def backward(spec: Spec, inputs: Inputs, result: Result, dout: Tensor, dlse: Tensor | None = None) -> Grads:
    """The contract's backward, from ``result.out`` and ``result.lse`` (which may be merged ones).

    ``dlse`` costs copies of q, k, v, out and dout, head_dim widened. Raises ValueError as ``prepare`` does,
    and for a forward without ``lse``, or with dropout and without ``saved``.
    """
    prepare(spec, inputs)
    given_lse = lse_of_forward(spec, result)
    check_gradients(spec, inputs, result, dout, dlse)
    with torch.no_grad():
        form = Form(spec, inputs, _lse_by_sequence())
        five = Five(*form.qkv(), form.rows(result.out), form.rows(dout))
        # exp(score - lse) is to be 0 in a row without a key, where -inf would make NaN.
        lse = form.lse_of_op(given_lse.masked_fill(given_lse == -torch.inf, torch.inf))
        random = result.saved or _no_random_state(inputs.q.device)
        window = window_of(spec, inputs)
        factor, scale = above_zero(VARLEN, spec.softmax_scale)
        parts: list[tuple[Any, ...]] = []
        for q, k, v, out, dout in (
            [five] if dlse is None else with_lse_gradient(VARLEN, five, form.lse_rows(dlse))
        ):
            grads = backward_op()(
                readable(VARLEN, dout),
                q if factor == 1.0 else q * factor,
                k,
                v,
                readable(VARLEN, out),
                lse,
                *form.lengths(),
                spec.dropout_p,
                window.is_causal,
                *random,
                scale=scale,
                **window.arguments,
            )
            parts.append(grads)
        dq, dk, dv = (grad.narrow(-1, 0, inputs.q.shape[-1]) for grad in added(parts))
        return Grads(form.out(dq if factor == 1.0 else dq * factor), form.kv_grad(dk), form.kv_grad(dv))


def bind(spec: Spec, inputs: Inputs) -> Callable[..., Tensor] | None:
    """A call that PyTorch differentiates itself, for dense batches without lengths; None for others."""
    prepare(spec, inputs)
    lengths = inputs.seqlens_q is not None or inputs.seqlens_kv is not None
    if spec.packed or lengths or inputs.block_table is not None:
        return None
    op, window, dropout_p = forward_op(), window_of(spec, inputs), spec.dropout_p
    factor, scale = above_zero(VARLEN, spec.softmax_scale)
    s_q, s_kv = inputs.q.shape[2], inputs.k.shape[2]
    is_causal, (left, right) = window.is_causal, window[1:]

    def call(q: Tensor, k: Tensor, v: Tensor, *others: None) -> Tensor:
        if any(other is not None for other in others):
            raise ValueError("this call was bound for q, k and v alone")
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if factor != 1.0:
            q = q * factor
        out: Tensor = op(
            q, k, v, None, None, s_q, s_kv, dropout_p, is_causal, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )[0]  # fmt: skip
        return out.transpose(1, 2)

    return call


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
