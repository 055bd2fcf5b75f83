"""``attn_implementation="attnsel"`` for Hugging Face transformers, 4.5x and 5.x.

    from attnsel.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnsel")

Every attention layer then goes through the selector: causal and bidirectional, sliding windows, soft-capped
scores, sinks, grouped heads, unequal head dimensions, padding on either side, packed sequences, prefill and
cached decode.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from attnsel.errors import InvalidInput
from attnsel.functional import attention
from attnsel.integrations.visibility import Pattern, Visible, as_lengths, can_read, visible

# Arguments that models pass to every attention function and that do not change attention.
_IGNORED = frozenset(
    {
        "cache_position",
        "input_ids",
        "inputs_embeds",
        "labels",
        "layer_idx",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "return_dict",
        "seq_idx",  # for state space layers
        "target_dtype",  # what flash_attention_2 casts float32 to; attnsel casts under autocast only
        "use_cache",
    }
)


def register(name: str = "attnsel") -> str:
    """Make ``attn_implementation=name`` known to transformers; returns the name.

    One of transformers' own names, such as ``"sdpa"``, is replaced: for programs that have it hard-coded.
    Calling it again changes nothing. Raises InvalidInput for ``"eager"``, which models do not look up.
    """
    if name == "eager":
        raise InvalidInput("name", name, "must be another: models run their own eager code")
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, visible)
    return name


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Visible | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [b, s_q, h, e] of q [b, h, s_q, d], k [b, g, s_kv, d], v [.., e].

    attention_mask: what :func:`attnsel.integrations.visibility.visible` made; or bool [b, s_kv], True = real;
        or [b, 1, s_q, s_kv], bool (True = sees) or floating (added to the scores), then applied alone.
    sliding_window: keys a row sees, itself included; used where the mask has no window of its own.
    s_aux: sinks, one logit per head. cu_seq_lens_*, max_length_*: packed sequences, as
        DataCollatorWithFlattening makes them; a single row of restarting position_ids is packed too.

    Raises InvalidInput naming an argument that it does not know.
    """
    _refuse_unknown(others)
    shared: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "attention_dropout": dropout,
        "softmax_type": "vanilla" if s_aux is None else "learnable",
        "softmax_offset": s_aux,
        "deterministic": bool(deterministic),
    }
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    given = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        _refuse_lengths_beside_a_mask(given)
        return _masked(q, k, v, attention_mask, shared), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seen = _visibility(attention_mask, causal, sliding_window, q, k, position_ids, given)
    if seen.packed:
        return _packed(q, k, v, seen, shared), None
    return _dense(q, k, v, seen, shared), None


def _refuse_unknown(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is None or value is False or name in _IGNORED:
            continue
        allowed = "must be left out: attnsel does not know what it asks of attention"
        if name == "output_attentions":
            allowed = "must be False: weights come from attn_implementation='eager' alone"
        raise InvalidInput(name, value, allowed)


def _visibility(
    mask: Tensor | Visible | None,
    causal: bool,
    sliding_window: int | None,
    q: Tensor,
    k: Tensor,
    position_ids: Tensor | None,
    given: tuple[Any, ...],
) -> Visible:
    """Visibility from the argument that defines it. Raises InvalidInput where two contradict each other."""
    left = -1 if sliding_window is None else int(sliding_window) - 1
    # Without causality transformers' flash path applies the window to both sides.
    pattern = Pattern(causal, left, -1 if causal else left)
    if any(value is not None for value in given):
        # A packed mask was derived from position_ids and means the same lengths.
        if isinstance(mask, Tensor) or (
            isinstance(mask, Visible) and mask.cu_seqlens_q is not None and not mask.packed
        ):
            _refuse_lengths_beside_a_mask(given)
        return _flattened(pattern, q, k, given)
    if isinstance(mask, Visible):
        if (mask.seqlen_q, mask.seqlen_kv) != (q.shape[1], k.shape[1]):
            raise InvalidInput(
                "attention_mask",
                f"for {mask.seqlen_q} rows and {mask.seqlen_kv} keys",
                f"must be for {q.shape[1]} rows and {k.shape[1]} keys",
            )
        if mask.cu_seqlens_q is not None or not mask.causal:
            return mask
        left, right = mask.window or (-1, -1)
        mask, pattern = None, Pattern(True, left, right)
    if mask is None and position_ids is not None and pattern.causal and _may_restart(position_ids, q, k):
        pattern = pattern._replace(sequences=_sequences(position_ids))
    seen = None
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        seen = as_lengths(pattern, None if mask is None else mask.to(torch.bool), q.shape[1], k.shape[1])
    if seen is None:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInput(
            "attention_mask", shape, "must be [b, 1, s_q, s_kv], or [b, s_kv] without holes between real keys"
        )
    return seen


def _refuse_lengths_beside_a_mask(given: tuple[Any, ...]) -> None:
    if any(value is not None for value in given):
        raise InvalidInput("cu_seq_lens_q", "a tensor", "must be left out when an attention_mask is given")


def _flattened(pattern: Pattern, q: Tensor, k: Tensor, given: tuple[Any, ...]) -> Visible:
    """Packed sequences from the lengths of a data collator."""
    cu_q, cu_k, longest_q, longest_k = given
    for name, value in (("cu_seq_lens_q", cu_q), ("cu_seq_lens_k", cu_k)):
        if value is None:
            raise InvalidInput(name, None, "must be given with the other arguments of packed sequences")
    return Visible(
        pattern.causal,
        None if pattern.left == pattern.right == -1 else (pattern.left, pattern.right),
        q.shape[1],
        k.shape[1],
        packed=True,
        cu_seqlens_q=cu_q.to(torch.int32),
        cu_seqlens_kv=cu_q.to(torch.int32) if cu_k is cu_q else cu_k.to(torch.int32),
        longest=None if longest_q is None or longest_k is None else max(int(longest_q), int(longest_k)),
    )


# ---- packed by position_ids ------------------------------------------------------------------------------

_last_read: tuple[weakref.ref[Tensor], int, Tensor | None] | None = None  # all layers get the same tensor


def _may_restart(position_ids: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether position_ids make one row several sequences, on the conditions of transformers' flash path."""
    if q.shape[0] != 1 or q.shape[1] != k.shape[1] or position_ids.shape != (1, q.shape[1]):
        return False
    return q.shape[1] > 1 and can_read(position_ids) and _sequences(position_ids) is not None


def _sequences(position_ids: Tensor) -> Tensor | None:
    """[1, s] index of the sequence of each row, None for a single one. Waits for a GPU, once per tensor."""
    global _last_read
    if _last_read is not None:
        tensor, version, found = _last_read
        if tensor() is position_ids and version == position_ids._version:
            return found
    ids = (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1).cumsum(1)
    found = ids if bool(ids[0, -1] > 0) else None
    if not position_ids.is_inference():
        _last_read = (weakref.ref(position_ids), position_ids._version, found)
    return found


# ---- the call ------------------------------------------------------------------------------------------


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, shared: dict[str, Any]) -> Tensor:
    mask = mask[..., : k.shape[1]]
    if mask.dtype == torch.bool:
        result: Tensor = attention(q, k, v, attn_mask_type="arbitrary", attention_mask=~mask, **shared)
        return result
    shared |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": mask}
    result = attention(q, k, v, **shared)
    return result


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Visible, shared: dict[str, Any]) -> Tensor:
    causal = seen.causal and seen.seqlen_q > 1  # one row at the end sees every key
    window = seen.window
    if window is not None and seen.seqlen_q == 1:
        window = (window[0], -1 if window[0] >= 0 else 0)
    kind = "causal_bottom_right" if causal else "no_mask"
    if seen.seqlen_q == seen.seqlen_kv and causal:
        kind = "causal"  # the same, and more kernels support it
    if seen.cu_seqlens_q is None:
        result: Tensor = attention(q, k, v, attn_mask_type=kind, window_size=window, **shared)
        return result
    result = attention(
        _reordered(q, seen.order_q, seen.back_q),
        _reordered(k, seen.order_kv),
        _reordered(v, seen.order_kv),
        attn_mask_type="padding_causal_bottom_right" if causal else "padding",
        window_size=window,
        cu_seqlens_q=seen.cu_seqlens_q,
        cu_seqlens_kv=seen.cu_seqlens_kv,
        **shared,
    )
    return _reordered(result, seen.back_q, seen.order_q)


def _packed(q: Tensor, k: Tensor, v: Tensor, seen: Visible, shared: dict[str, Any]) -> Tensor:
    b, s = q.shape[:2]
    result: Tensor = attention(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right" if seen.causal else "padding",
        window_size=seen.window,
        cu_seqlens_q=seen.cu_seqlens_q,
        cu_seqlens_kv=seen.cu_seqlens_kv,
        max_seqlen_q=seen.longest,
        max_seqlen_kv=seen.longest,
        **shared,
    )
    return result.unflatten(0, (b, s))


class _Reorder(torch.autograd.Function):
    """Rows of [b, s, h, d] in another order. The gradient is a gather too: a scatter would add atomically."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return t.gather(1, order[..., None, None].expand(-1, -1, *t.shape[2:]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, back = ctx.saved_tensors
        return _Reorder.apply(grad, back, order), None, None


def _reordered(t: Tensor, order: Tensor | None, back: Tensor | None = None) -> Tensor:
    if order is None:
        return t
    result: Tensor = _Reorder.apply(t, order, order.argsort(1) if back is None else back)
    return result
