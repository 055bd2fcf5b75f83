"""The fix in the words of the program's own library: lines that a user of that library can paste.

What stands in the way comes as attnsel's reasons, as the changes of an unlock or an adaptation, or as the
refusals of another library's dispatcher. Each is brought to a topic (a mask, grouped heads, a dtype), and
each library has its own way out of a topic. What no change of the call helps against (a GPU, a release) has
none here: that is what ``attnsel.selection.unlock`` is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from attnsel.diagnose.framework_fixes.by_hand import replacement
from attnsel.diagnose.framework_fixes.ways import TORCH, WAYS, Fix
from attnsel.params import AttentionParams
from attnsel.rules import find_rule
from attnsel.selection.unlock.search import Unlock
from attnsel.verdicts.dispatch import Refusal
from attnsel.verdicts.requirements import AtMost, EqualTo, Multiple
from attnsel.verdicts.verdict import Adaptation, Reason

__all__ = ["TOPICS", "Fix", "Hindrance", "fixes", "replacement", "topics", "ways_out"]

Hindrance = Reason | Unlock | Refusal | Adaptation


def ways_out(api: str, p: AttentionParams, topics: Iterable[str]) -> tuple[Fix, ...]:
    """What a user of ``api`` does about each of ``topics`` (among ``TOPICS``), where there is a way."""
    found = (_fix(api, topic, p) for topic in topics)
    return tuple(dict.fromkeys(fix for fix in found if fix is not None))


def fixes(api: str, p: AttentionParams, hindrances: Iterable[Hindrance]) -> tuple[Fix, ...]:
    """The ways out of ``hindrances`` for a user of ``api`` (``record.Api``), each once, in their order."""
    found: dict[Fix, None] = {}
    for hindrance in hindrances:
        for topic in topics(p, hindrance):
            fix = _fix(api, topic, p)
            if fix is not None:
                found[fix] = None
    return tuple(found)


# ---- topics -----------------------------------------------------------------------------------------

_OF_FIELD = {
    "attn_mask_type": "mask",
    "tensors.mask": "mask",
    "core_attention_bias_type": "bias",
    "core_attention_bias_shape": "bias",
    "core_attention_bias_requires_grad": "bias gradient",
    "window_size": "window",
    "num_gqa_groups": "grouped heads",
    "attention_dropout": "dropout",
    "dtype": "dtype",
    "fp8": "dtype",
    "tensors.rank": "rank",
    "bottom_right_diagonal": "corner",
    "softcap": "softcap",
    "softmax_type": "sinks",
    "return_lse": "weights",
    "deterministic": "deterministic",
    "qkv_layout": "layout",
    "torch_flash": "switch",
}
TOPICS = frozenset(WAYS)


def topics(p: AttentionParams, hindrance: Hindrance) -> list[str]:
    """What ``hindrance`` is about; empty where no change of the call would help."""
    if isinstance(hindrance, Adaptation):  # what attnsel would change by itself
        return [topic for reason in hindrance.avoids for topic in topics(p, reason)]
    if isinstance(hindrance, Unlock):
        return [topic for field, _ in hindrance.changes for topic in _topic(p, field, None)]
    if isinstance(hindrance, Refusal):
        if hindrance.switch:
            return ["switch"]
        return _of_code(p, hindrance.code) if hindrance.code else []
    return _topic(p, hindrance.field, hindrance.finding.required)


def _topic(p: AttentionParams, field: str, required: Any) -> list[str]:
    if field in ("tensors.q", "tensors.k", "tensors.v"):
        return ["memory"]
    if field in ("head_dim_qk", "head_dim_v"):
        if isinstance(required, EqualTo):
            return ["unequal widths"]
        if required is None:  # a rule that says so in words
            wide = max(p.head_dim_qk, p.head_dim_v)
            return ["unequal widths"] if p.head_dim_qk != p.head_dim_v else ["width"] if wide % 8 else []
        return ["width"] if isinstance(required, Multiple) else []
    if field in ("max_seqlen_q", "max_seqlen_kv"):
        return ["corner"] if p.causal and isinstance(required, (EqualTo, AtMost)) else []
    topic = _OF_FIELD.get(field)
    if topic == "mask":
        if p.tensors.mask_hides_nothing:
            return ["mask that hides nothing"]
        if p.padding:
            return ["padding"]
        return ["mask"] if p.attn_mask_type == "arbitrary" else ["corner"] if p.causal else []
    return [] if topic is None else [topic]


def _of_code(p: AttentionParams, code: str) -> list[str]:
    """The topics of a rule's requirements; of a rule without any, those of what its page fires on."""
    rule = find_rule(code)
    required = dict(getattr(rule, "requires", {}) or {})
    fields = {
        name: need
        for names, need in required.items()
        for name in ((names,) if isinstance(names, str) else names)
    }
    fires_on = getattr(rule, "fires_on", {}) or {}
    fields = fields or dict.fromkeys(fires_on)
    if "core_attention_bias_requires_grad" in fields:
        fields.pop("core_attention_bias_type", None)  # there for the gradient's sake
    tensors = fires_on.get("tensors")
    if tensors is not None and any(getattr(tensors, name) is not None for name in ("q", "k", "v")):
        fields["tensors.q"] = None
    return list(dict.fromkeys(topic for field, need in fields.items() for topic in _topic(p, field, need)))


# ---- in a library's words ---------------------------------------------------------------------------

_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_LIKE_TORCH = (TORCH, "aten", "by hand")


def _fix(api: str, topic: str, p: AttentionParams) -> Fix | None:
    table = WAYS.get(topic, {})
    way = table.get(api) or (table.get(TORCH) if api in _LIKE_TORCH else None)
    if way is None:
        return None
    return Fix(way.text.format_map(_Words(p)), way.code.format_map(_Words(p)))


class _Words(dict[str, Any]):
    """The figures of a call that the lines below name."""

    def __init__(self, p: AttentionParams) -> None:
        wide = max(p.head_dim_qk, p.head_dim_v)
        to = -(-wide // 8) * 8
        rank, of_mask = p.tensors.rank, len(p.tensors.mask.shape) if p.tensors.mask is not None else 0
        super().__init__(
            s_q=p.max_seqlen_q,
            s_kv=p.max_seqlen_kv,
            heads=p.num_heads,
            groups=p.num_gqa_groups,
            repeats=p.num_heads // p.num_gqa_groups,
            d=p.head_dim_qk,
            dv=p.head_dim_v,
            to=to,
            more=to - p.head_dim_qk,
            more_v=wide - p.head_dim_v,
            more_qk=wide - p.head_dim_qk,
            narrow="v" if p.head_dim_v < p.head_dim_qk else "q, k",
            missing=wide - min(p.head_dim_qk, p.head_dim_v),
            scale=f"{1 / math.sqrt(p.head_dim_qk):.6g}",
            left=p.window_size[0],
            dtype=_NAMES.get(p.dtype, p.dtype),
            p=p.attention_dropout,
            b=p.batch_size,
            bias_at=_bias_at(p),
            rank=rank,
            to_four="x[None, None]" if rank == 2 else "x[None]" if rank < 4 else "x.flatten(0, -4)",
            from_four="[0, 0]" if rank == 2 else "[0]" if rank < 4 else ".unflatten(0, q.shape[:-3])",
            mask_rank=of_mask,
            mask_to_four="[None]" if of_mask == 3 else "[None, None, None]",
        )


def _bias_at(p: AttentionParams) -> str:
    """Where in a bias, or a mask of numbers, the score of (b, h, i, j) finds its own."""
    mask, shape = p.tensors.mask, p.core_attention_bias_shape or "1hss"
    sizes: tuple[int | str, ...]
    if mask is not None and mask.dtype != "bool":
        sizes = mask.shape
    elif shape in ("11ss", "111s"):
        sizes = (1 if shape == "111s" else "s", "s")
    else:
        sizes = tuple(1 if letter == "1" else letter for letter in shape)[0 if shape[0] == "b" else 1 :]
    names = "bhij"[len("bhij") - len(sizes) :]
    return ", ".join("0" if size == 1 else name for size, name in zip(sizes, names, strict=True))
