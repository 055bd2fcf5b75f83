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
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import masking_utils

from attnsel.errors import InvalidInput
from attnsel.functional import attention
from attnsel.runtime.call import constant_when_traced
from attnsel.runtime.mask_functions import Pattern, read_pattern

# --------------------------------------------------------------------------------------------------------
# transformers' visibility as a few lengths instead of a [b, 1, s, s] tensor, where lengths can express it.
#
# transformers describes visibility by a function of (batch, head, q index, kv index), composed of known
# parts, and a padding mask [b, s]. The known parts are recognised. Anything else becomes the boolean mask
# that transformers itself makes for SDPA, which is always right and takes O(s²) memory.
#
# The padding mask is read once per forward pass (one wait for a GPU, as in transformers' SDPA path), and
# never while a graph is traced or captured.


class Visible(NamedTuple):
    """What a layer sees.

    Dense (``packed`` False): without cu_seqlens every row is real; with them they count the real rows of each
    sequence, and ``order_q`` / ``order_kv`` [b, s] reorder those to the front (None: they are there already);
    ``back_q`` is the inverse of order_q. Packed: the rows of the whole batch, one after another, are divided
    at cu_seqlens.
    """

    causal: bool  # from the bottom right corner
    window: tuple[int, int] | None  # (left, right) inclusive, -1 no bound
    seqlen_q: int
    seqlen_kv: int
    packed: bool = False
    cu_seqlens_q: Tensor | None = None  # int32 [n + 1]
    cu_seqlens_kv: Tensor | None = None
    order_q: Tensor | None = None
    order_kv: Tensor | None = None
    back_q: Tensor | None = None
    longest: int | None = None  # packed


class LazyMask(Tensor):
    """What a layer sees, for whoever takes it for the mask that it is: [b, 1, s_q, s_kv].

    Models and ``generate`` slice their masks, make them contiguous, add to them and ask for their shape. The
    first of these that needs values makes the mask, once, and from then on ``seen`` is None: a view of it may
    have been written to. What only hands it on (``contiguous``, ``detach``, another device) keeps them.
    """

    seen: Visible | None
    _make: Callable[[], Tensor]
    _made: Tensor | None

    @staticmethod
    def __new__(
        cls, seen: Visible | None, make: Callable[[], Tensor], shape: tuple[int, ...], dtype: Any, device: Any
    ) -> LazyMask:
        mask: LazyMask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask.seen, mask._make, mask._made = seen, make, None
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            operator in _HANDED_ON
            and args[0].seen is not None
            and kwargs.get("dtype") in (None, args[0].dtype)
        ):
            return args[0]._on(kwargs.get("device") or args[0].device)
        args, kwargs = tree_map_only(cls, cls.dense, (args, kwargs))
        return operator(*args, **kwargs)

    def dense(self) -> Tensor:
        """The mask with its values, which somebody may change."""
        if self._made is None:
            self._made, self.seen = self._make(), None
        return self._made

    def _on(self, device: torch.device) -> LazyMask:
        assert self.seen is not None
        moved: dict[str, Any] = {
            n: t.to(device) for n, t in self.seen._asdict().items() if isinstance(t, Tensor)
        }
        seen = self.seen._replace(**moved)
        return LazyMask(seen, lambda: self._make().to(device), tuple(self.shape), self.dtype, device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def __repr__(self, **more: Any) -> str:  # type: ignore[override]  # looking at it does not make it
        return f"LazyMask({self.seen or self._made})"


_HANDED_ON = frozenset(
    getattr(torch.ops.aten, name).default for name in ("alias", "clone", "detach", "_to_copy")
)


def visible(
    *,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **rest: Any,
) -> Tensor | None:
    """transformers' mask interface: makes the ``attention_mask`` that attention functions get.

    A tensor [b, 1, s_q, s_kv]: bool, True where a row sees a key, or floating for families that have eager
    attention alone; a LazyMask where lengths can express it. None, the layer's own causality, only while a
    graph is traced: a model that gets None from another (PaliGemma's language model) makes a mask of its own.
    """
    seqlen_q = rest["q_length"] if "q_length" in rest else rest["cache_position"].shape[0]
    pattern = read_pattern(mask_function)
    seen: Visible | None = None
    if pattern is not None and _last_row_at_last_key(pattern, seqlen_q, kv_offset + kv_length, rest):
        padding = None if attention_mask is None else _key_padding(attention_mask, kv_length, kv_offset)
        if all(t is None or can_read(t) for t in (padding, pattern.sequences)):
            seen = as_lengths(pattern, padding, seqlen_q, kv_length)
    added = _adds_its_masks(getattr(rest.get("config"), "model_type", None))
    skips = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
    make = masking_utils.eager_mask if added else masking_utils.sdpa_mask

    def dense() -> Tensor:
        mask: Tensor = make(
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **{**rest, **skips},
        )
        return mask

    if torch.compiler.is_compiling():
        plain = seen is not None and seen.causal and seen.window is None and seen.cu_seqlens_q is None
        return None if plain and not added else dense()
    if seen is None:
        return dense()
    device = rest.get("device", "cpu" if attention_mask is None else attention_mask.device)
    dtype = rest.get("dtype", torch.float32) if added else torch.bool
    return LazyMask(seen, dense, (rest["batch_size"], 1, seqlen_q, kv_length), dtype, device)


@constant_when_traced
@lru_cache(maxsize=1024)
def _adds_its_masks(model_type: str | None) -> bool:
    """Whether a family's code may compute with masks as eager attention has them.

    It does not support SDPA, so that nothing in it is written for bool ones: DeepSeek-V4 turns floats of its
    own into the mask's dtype.
    """
    from transformers.models.auto import CONFIG_MAPPING, MODEL_MAPPING

    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_MAPPING:
        return False
    models = MODEL_MAPPING[CONFIG_MAPPING[model_type]]
    models = models if isinstance(models, tuple) else (models,)
    return not all(getattr(model, "_supports_sdpa", False) for model in models)


def _last_row_at_last_key(pattern: Pattern, seqlen_q: int, keys_end: int, rest: dict[str, Any]) -> bool:
    """Whether the last row is at the last key. A static cache has unused keys after it."""
    if pattern.sequences is not None:
        return True  # packed sequences come without a cache
    if "q_offset" in rest:  # transformers 5
        skip = rest.get("allow_is_causal_skip", True) or rest.get("allow_is_bidirectional_skip", False)
        if not skip or isinstance(rest["q_offset"], Tensor):
            return False
        return not pattern.causal or rest["q_offset"] + seqlen_q == keys_end
    return bool(rest.get("allow_is_causal_skip", True))


def can_read(t: Tensor) -> bool:
    """Whether the values of a tensor can be read now."""
    if torch.compiler.is_compiling() or type(t) is not Tensor or t.is_meta or torch._C._get_tracing_state():
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def as_lengths(pattern: Pattern, padding: Tensor | None, seqlen_q: int, seqlen_kv: int) -> Visible | None:
    """Visibility as lengths; None where they cannot express it. ``padding``: bool [b, s_kv], True = real."""
    left = -1 if pattern.left >= seqlen_kv - 1 else pattern.left
    right = -1 if pattern.right >= seqlen_kv - 1 else pattern.right
    window = None if left == right == -1 else (left, right)
    dense = Visible(pattern.causal, window, seqlen_q, seqlen_kv)
    if pattern.chunk:
        return None
    if pattern.sequences is not None:
        return None if padding is not None else _as_sequences(dense, pattern)
    return dense if padding is None else _padded(dense, pattern, padding)


def _as_sequences(dense: Visible, pattern: Pattern) -> Visible:
    assert pattern.sequences is not None
    ids = pattern.sequences
    starts = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[:, 1:], ids[:, :-1], out=starts[:, 1:])
    bounds = starts.flatten().nonzero().flatten()  # waits for the number of sequences
    if bounds.numel() == ids.shape[0]:
        return dense  # one sequence per row
    ends = torch.cat([bounds, bounds.new_tensor([ids.numel()])]).to(torch.int32)
    longest = int(ends.diff().max())
    return dense._replace(
        window=pattern.window,
        packed=True,
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        longest=longest,
    )


def _padded(dense: Visible, pattern: Pattern, padding: Tensor) -> Visible | None:
    first, count = _extent(padding)
    if pattern.causal:
        first_q, count_q = _extent(padding[:, -dense.seqlen_q :])
    else:  # q may belong to another sequence than the keys; all of its rows are real
        first_q, count_q = torch.zeros_like(first), torch.full_like(count, dense.seqlen_q)
    last = padding.flip(1).int().argmax(1)
    whole = (count == 0) | (count + first + last == padding.shape[1])
    flags = torch.stack([padding.all(), whole.all(), (first == 0).all(), (first_q == 0).all()])
    everything, no_holes, keys_in_front, rows_in_front = flags.tolist()
    if everything:
        return dense
    if not no_holes or dense.seqlen_q == 1:
        return None  # holes count as distance in a window; for a single row a mask is as small as lengths
    if (pattern.causal and padding.shape[1] < dense.seqlen_q) or (not pattern.causal and dense.window):
        return None
    return dense._replace(
        cu_seqlens_q=_cumulated(count_q),
        cu_seqlens_kv=_cumulated(count),
        order_q=None if rows_in_front else _rotated(first_q, dense.seqlen_q),
        back_q=None if rows_in_front else _rotated(-first_q, dense.seqlen_q),
        order_kv=None if keys_in_front else _rotated(first, dense.seqlen_kv),
    )


def _extent(real: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of a bool [b, s]: the index of the first True (0 without one), and how many there are."""
    return real.int().argmax(1), real.sum(1)


def _cumulated(count: Tensor) -> Tensor:
    return torch.nn.functional.pad(count.cumsum(0), (1, 0)).to(torch.int32)


def _rotated(by: Tensor, length: int) -> Tensor:
    """int64 [b, length]: row j comes from (j + by) % length."""
    return (torch.arange(length, device=by.device) + by[:, None]) % length


def _key_padding(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """bool [b, kv_length]; keys beyond the mask count as padding, as in transformers."""
    missing = kv_length + kv_offset - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)


# Arguments that models pass to every attention function and that do not change attention.
_IGNORED = frozenset(
    {
        "cache_position",
        "grid_thw",  # sizes of images
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
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [b, s_q, h, e] of q [b, h, s_q, d], k [b, g, s_kv, d], v [.., e].

    attention_mask: what :func:`visible` made; or bool [b, s_kv], True = real;
        or [b, 1, s_q, s_kv], bool (True = sees) or floating (added to the scores), then applied alone.
    sliding_window: keys a row sees, itself included; used where a mask has no window of its own.
    s_aux: sinks, one logit per head. cu_seq_lens_*, max_length_*: packed sequences, as
        DataCollatorWithFlattening makes them; a single row of restarting position_ids is packed too.
    position_bias: broadcasts to [b, h, s_q, s_kv], added to the scores.
    indices: [b, s_q, n], the keys that a row may see of those that a mask [b, 1, s_q, s_kv] lets it.

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
    if isinstance(attention_mask, LazyMask):
        # What is said of pairs of a row and a key does not follow rows that are put in another order.
        pairs = indices is not None or position_bias is not None
        seen = None if pairs else attention_mask.seen
        attention_mask = attention_mask.dense() if seen is None else seen
    if indices is not None:
        attention_mask = _of_indices(indices, attention_mask)
    if position_bias is not None:
        if any(value is not None for value in given):
            raise InvalidInput("position_bias", "a tensor", "must be left out beside packed sequences")
        shared |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": position_bias}
        position_ids = None
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        _refuse_lengths_beside_a_mask(given)
        return _masked(q, k, v, attention_mask, shared).contiguous(), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seen = _visibility(attention_mask, causal, sliding_window, q, k, position_ids, given)
    if seen.packed:
        return _packed(q, k, v, seen, shared).contiguous(), None
    return _dense(q, k, v, seen, shared).contiguous(), None  # as transformers' own: models take views of it


def _of_indices(indices: Tensor, mask: Tensor | Visible | None) -> Tensor:
    """A mask [b, 1, s_q, s_kv] that is left to the keys of ``indices``."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise InvalidInput("indices", "a tensor", "must come with an attention_mask [b, 1, s_q, s_kv]")
    kept = torch.zeros((*indices.shape[:2], mask.shape[-1]), dtype=torch.bool, device=mask.device)
    kept = kept.scatter(-1, indices.long(), True)[:, None]
    return mask & kept if mask.dtype == torch.bool else mask.masked_fill(~kept, -torch.inf)


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
    packed = any(value is not None for value in given)
    # Without causality transformers' flash path applies the window to both sides. Without a mask its eager
    # and SDPA code show every key then, and so mean models that make none: DiffusionGemma's decoder.
    whole = sliding_window is None or (mask is None and not causal and not packed)
    left = -1 if whole else int(sliding_window or 0) - 1
    pattern = Pattern(causal, left, -1 if causal else left)
    if packed:
        # A packed mask was derived from position_ids and means the same lengths.
        if isinstance(mask, Tensor) or (
            isinstance(mask, Visible) and mask.cu_seqlens_q is not None and not mask.packed
        ):
            _refuse_lengths_beside_a_mask(given)
        return _flattened(pattern, q, k, given)
    if isinstance(mask, Visible) and not mask.causal and mask.window is None and mask.cu_seqlens_q is None:
        return mask._replace(seqlen_q=q.shape[1], seqlen_kv=k.shape[1])  # every key, however many there are
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
        pattern.window,
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


_attend: Callable[..., Tensor] = attention  # with no log-sum-exp


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, shared: dict[str, Any]) -> Tensor:
    mask = mask[..., : k.shape[1]]
    if mask.dtype == torch.bool or "core_attention_bias" not in shared:
        return _attend(q, k, v, attn_mask=mask, **shared)
    return _attend(q, k, v, **shared | {"core_attention_bias": shared["core_attention_bias"] + mask})


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Visible, shared: dict[str, Any]) -> Tensor:
    causal = seen.causal and seen.seqlen_q > 1  # one row at the end sees every key
    window = seen.window
    if window is not None and seen.seqlen_q == 1:
        window = (window[0], -1 if window[0] >= 0 else 0)
    kind = "causal_bottom_right" if causal else "no_mask"
    if seen.seqlen_q == seen.seqlen_kv and causal:
        kind = "causal"  # the same, and more kernels support it
    if seen.cu_seqlens_q is None:
        return _attend(q, k, v, attn_mask_type=kind, window_size=window, **shared)
    result = _attend(
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
    result = _attend(
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
