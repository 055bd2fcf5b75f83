"""What a caller can do about a tensor that is copied on every call, in the words of the API in use."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from attnsel.errors import Caller
from attnsel.params import AttentionParams
from attnsel.params.layout import FORMATS
from attnsel.verdicts.reasons import Adaptation

Advice = Callable[[Adaptation, AttentionParams, str], str]


COPIES = ("contiguous", "pad_head_dim_qk", "pad_head_dim_v", "pad_sequence", "expand_gqa", "unpack")
"""The adaptations that a caller can spare."""


def advice(a: Adaptation, p: AttentionParams, caller: Caller) -> str:
    """The change of the caller's that spares this copy, one of ``COPIES``."""
    return _of_api(caller.module)[a.name](a, p, caller.function)


def _of_api(module: str) -> dict[str, Advice]:
    if module.startswith("attnsel.flash_attn"):
        return _FLASH_ATTN
    return _TRANSFORMERS if module == "attnsel.integrations.transformers" else _OWN


def _lengths(a: Adaptation) -> str:
    return ", ".join(str(n) for n in dict.fromkeys(to for _, to in a.changes))


def _copies(a: Adaptation, p: AttentionParams) -> int:
    return int(dict(a.changes).get("num_gqa_groups", p.num_heads)) // p.num_gqa_groups


# ---- attention() and DotProductAttention ----------------------------------------------------------------


def _dense_copy(a: Adaptation, p: AttentionParams, _: str) -> str:
    names = [name for name, _ in a.changes]
    lines = "; ".join(f"{name} = {name}.contiguous()" for name in names)
    return f"call {lines} once before, or make the projection emit {p.qkv_format} in dense memory"


def _wider_heads(a: Adaptation, p: AttentionParams, _: str) -> str:
    (field, to), *_more = a.changes
    if field == "head_dim_qk":
        scale = f"softmax_scale={p.head_dim_qk} ** -0.5"
        return f"make the projections of q and k {to} wide per head, zero weights in the rest, with {scale}"
    return f"make the projection of v {to} wide per head, zero weights in the rest, and cut the output back"


def _longer_batches(a: Adaptation, p: AttentionParams, _: str) -> str:
    return f"pad to {_lengths(a)} rows where batches are made, and leave the result so long"


def _repeated_heads(a: Adaptation, p: AttentionParams, _: str) -> str:
    axis = FORMATS[p.qkv_format].heads
    return f"where k and v are kept, keep k.repeat_interleave({_copies(a, p)}, dim={axis}), and v alike"


def _padded_batch(a: Adaptation, p: AttentionParams, _: str) -> str:
    return "give a padded batch: qkv_format='bshd' with the same cu_seqlens"


# ---- flash_attn's functions -----------------------------------------------------------------------------


def _flash_dense(a: Adaptation, p: AttentionParams, function: str) -> str:
    plain = function.replace("_qkvpacked", "").replace("_kvpacked", "")
    if plain != function:
        return f"give q, k and v of their own, dense in memory: {plain}"
    lines = "; ".join(f"{name} = {name}.contiguous()" for name, _ in a.changes)
    shape = "[total, heads, head_dim]" if p.qkv_format == "thd" else "[batch, seqlen, heads, head_dim]"
    return f"call {lines} once before, or make the projection emit {shape} in dense memory"


def _flash_wider(a: Adaptation, p: AttentionParams, _: str) -> str:
    to = max(to for _, to in a.changes)
    wide = f"make the projections of q, k and v {to} wide per head, zero weights in the rest"
    return f"{wide}, with softmax_scale={p.head_dim_qk} ** -0.5, and cut the output back"


def _flash_longer(a: Adaptation, p: AttentionParams, _: str) -> str:
    if p.causal and p.max_seqlen_q == p.max_seqlen_kv:
        return f"pad to {_lengths(a)} rows at the end where batches are made: causal=True hides them"
    return (
        f"sequences of {_lengths(a)} rows need no copy; flash_attn cannot be told which rows are padding, "
        "so pad only what may be seen"
    )


def _flash_repeated(a: Adaptation, p: AttentionParams, function: str) -> str:
    axis, copies = FORMATS[p.qkv_format].heads, _copies(a, p)
    if "kvpacked" in function:
        return f"where kv is kept, keep kv.repeat_interleave({copies}, dim={axis + 1})"
    return f"where k and v are kept, keep k.repeat_interleave({copies}, dim={axis}), and v alike"


def _flash_padded(a: Adaptation, p: AttentionParams, function: str) -> str:
    dense = function.replace("_varlen", "")
    return (
        f"sequences of one length can go to {dense} as [batch, seqlen, ...]; others have no padded call there"
    )


# ---- transformers ---------------------------------------------------------------------------------------

_THEIR_NAMES = {"q": "query", "k": "key", "v": "value"}


def _model_dense(a: Adaptation, p: AttentionParams, _: str) -> str:
    names = " and ".join(_THEIR_NAMES.get(name, name) for name, _ in a.changes)
    how = ".contiguous() before .transpose(1, 2)"
    return f"where the model's attention layer or its cache makes {names}, make it dense: {how}"


def _model_wider(a: Adaptation, p: AttentionParams, _: str) -> str:
    (field, to), *_more = a.changes
    if field == "head_dim_qk":
        scale = f"scaling={p.head_dim_qk} ** -0.5"
        wide = f"q_proj and k_proj {to} wide per head, zero weights in the rest"
        return f"convert the model to {wide}, with {scale}"
    return f"convert the model to v_proj and o_proj {to} wide per head, zero weights in the rest"


def _model_longer(a: Adaptation, p: AttentionParams, _: str) -> str:
    step = gcd(64, *(to for _, to in a.changes))
    if p.max_seqlen_q != p.max_seqlen_kv:
        return f"keep a cache of fixed length, StaticCache(max_cache_len=...) with a multiple of {step}"
    return f"pass pad_to_multiple_of={step} to the tokenizer or the data collator"


def _model_repeated(a: Adaptation, p: AttentionParams, _: str) -> str:
    groups = p.num_gqa_groups * _copies(a, p)
    how = f"k_proj and v_proj repeated {_copies(a, p)} times per head"
    return f"convert the model to num_key_value_heads={groups}, {how}; its cache grows alike"


def _model_padded(a: Adaptation, p: AttentionParams, _: str) -> str:
    return (
        "give a padded batch and its attention_mask instead of packed sequences "
        "(DataCollatorWithPadding, not DataCollatorWithFlattening)"
    )


# ---- all of them ----------------------------------------------------------------------------------------


def _table(*advice: Advice) -> dict[str, Advice]:
    return dict(zip(COPIES, advice, strict=True))


_OWN = _table(_dense_copy, _wider_heads, _wider_heads, _longer_batches, _repeated_heads, _padded_batch)
_FLASH_ATTN = _table(_flash_dense, _flash_wider, _flash_wider, _flash_longer, _flash_repeated, _flash_padded)
_TRANSFORMERS = _table(
    _model_dense, _model_wider, _model_wider, _model_longer, _model_repeated, _model_padded
)
