"""What a caller can do about a tensor that is copied on every call, in the words of the API in use."""

from __future__ import annotations

from math import gcd

from attnsel.errors import Caller
from attnsel.params import AttentionParams
from attnsel.params.layout import FORMATS
from attnsel.verdicts.reasons import Adaptation

# By adaptation, or by a case of one. In braces: what ``advice`` fills in.

_OWN = {
    "contiguous": "call {dense} once before, or make the projection emit {p.qkv_format} in dense memory",
    "pad_head_dim_qk": "make the projections of q and k {to} wide per head, zero weights in the rest, "
    "with softmax_scale={p.head_dim_qk} ** -0.5",
    "pad_head_dim_v": "make the projection of v {to} wide per head, zero weights in the rest, "
    "and cut the output back",
    "pad_sequence": "pad to {to} rows where batches are made, and leave the result so long",
    "expand_gqa": "where k and v are kept, keep k.repeat_interleave({copies}, dim={axis}), and v alike",
    "unpack": "give a padded batch: qkv_format='bshd' with the same cu_seqlens",
}

_WIDER = (
    "make the projections of q, k and v {to} wide per head, zero weights in the rest, "
    "with softmax_scale={p.head_dim_qk} ** -0.5, and cut the output back"
)
_FLASH_ATTN = {
    **_OWN,
    "contiguous": "call {dense} once before, or make the projection emit {shape} in dense memory",
    "contiguous, packed": "give q, k and v of their own, dense in memory: {unpacked}",
    "pad_head_dim_qk": _WIDER,
    "pad_head_dim_v": _WIDER,
    "pad_sequence": "sequences of {to} rows need no copy; flash_attn cannot be told which rows are padding, "
    "so pad only what may be seen",
    "pad_sequence, causal": "pad to {to} rows at the end where batches are made: causal=True hides them",
    "expand_gqa, packed": "where kv is kept, keep kv.repeat_interleave({copies}, dim={axis_of_kv})",
    "unpack": "sequences of one length can go to {padded} as [batch, seqlen, ...]; "
    "others have no padded call there",
}

_TRANSFORMERS = {
    "contiguous": "where the model's attention layer or its cache makes {theirs}, make it dense: "
    ".contiguous() before .transpose(1, 2)",
    "pad_head_dim_qk": "convert the model to q_proj and k_proj {to} wide per head, "
    "zero weights in the rest, with scaling={p.head_dim_qk} ** -0.5",
    "pad_head_dim_v": "convert the model to v_proj and o_proj {to} wide per head, zero weights in the rest",
    "pad_sequence": "keep a cache of fixed length, StaticCache(max_cache_len=...) with a multiple of {step}",
    "pad_sequence, square": "pass pad_to_multiple_of={step} to the tokenizer or the data collator",
    "expand_gqa": "convert the model to num_key_value_heads={groups}, "
    "k_proj and v_proj repeated {copies} times per head; its cache grows alike",
    "unpack": "give a padded batch and its attention_mask instead of packed sequences "
    "(DataCollatorWithPadding, not DataCollatorWithFlattening)",
}
_THEIR_NAMES = {"q": "query", "k": "key", "v": "value"}

COPIES = tuple(_OWN)
"""The adaptations that a caller can spare."""


def advice(a: Adaptation, p: AttentionParams, caller: Caller) -> str:
    """The change of the caller's that spares this copy, one of ``COPIES``."""
    names = [name for name, _ in a.changes]
    sizes = list(dict.fromkeys(to for _, to in a.changes if isinstance(to, int)))
    groups = dict(a.changes).get("num_gqa_groups", p.num_heads)
    axis = FORMATS[p.qkv_format].heads
    unpacked = caller.function.replace("_qkvpacked", "").replace("_kvpacked", "")
    square = p.max_seqlen_q == p.max_seqlen_kv
    texts, case = _OWN, a.name
    if caller.module.startswith("attnsel.flash_attn"):
        texts = _FLASH_ATTN
        if a.name == "pad_sequence":
            case += ", causal" if p.causal and square else ""
        elif unpacked != caller.function:
            case += ", packed"
    elif caller.module == "attnsel.integrations.transformers":
        texts, case = _TRANSFORMERS, f"{a.name}, square" if square else a.name
    return texts.get(case, texts[a.name]).format(
        p=p,
        dense="; ".join(f"{name} = {name}.contiguous()" for name in names),
        theirs=" and ".join(_THEIR_NAMES.get(name, name) for name in names),
        to=", ".join(map(str, sizes)),
        step=gcd(64, *sizes),
        copies=groups // p.num_gqa_groups,
        groups=groups // p.num_gqa_groups * p.num_gqa_groups,
        axis=axis,
        axis_of_kv=axis + 1,
        shape="[total, heads, head_dim]" if p.qkv_format == "thd" else "[batch, seqlen, heads, head_dim]",
        unpacked=unpacked,
        padded=caller.function.replace("_varlen", ""),
    )
