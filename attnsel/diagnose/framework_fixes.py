"""The fix in the words of the program's own library: lines that a user of that library can paste.

What stands in the way comes as attnsel's reasons, as the changes of an unlock or an adaptation, or as the
refusals of another library's dispatcher. Each is brought to a topic (a mask, grouped heads, a dtype), and
each library has its own way out of a topic. What no change of the call helps against (a GPU, a release) has
none here: that is what ``attnsel.selection.unlock`` is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from attnsel.base.rows import read_rows
from attnsel.params import AttentionParams, default_softmax_scale
from attnsel.rules import find_rule
from attnsel.selection.unlock.search import Unlock
from attnsel.verdicts.dispatch import Refusal
from attnsel.verdicts.reasons import Adaptation, Reason
from attnsel.verdicts.requirements import AtMost, EqualTo, Multiple


class Fix(NamedTuple):
    """``text``: what to do and why, a sentence. ``code``: lines to paste; "" where there are none."""

    text: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.text}: {self.code}" if self.code else self.text


TORCH = "F.scaled_dot_product_attention"


@cache
def known_fixes() -> dict[tuple[str, str], Fix]:
    """By topic and library what its user does: the rows of ``data/framework_fixes.csv``. Figures of a call
    stand in braces."""
    rows = read_rows("attnsel.diagnose", "framework_fixes")
    return {(row["topic"], row["api"]): Fix(row["text"], row["code"]) for row in rows}


def unwritten(api: str, p: AttentionParams | None = None) -> Fix | None:
    """What makes a library run a kernel where it wrote attention out; None for the program's own lines."""
    topic = "written out"
    if p is not None and (p.softcap or p.softmax_type != "vanilla"):
        topic = "softcap" if p.softcap else "sinks"  # which not every way of the library has
    return known_fixes().get((topic, api))


# ---- What to put in the place of attention written by hand ---------------------------------------------


def replacement(
    p: AttentionParams,
    *,
    scale: float,
    temperature: str = "",
    folded: bool = False,
    cast: bool = False,
    same: bool = True,
    factors: tuple[float, float] = (1.0, 1.0),
) -> Fix | None:
    """What to put in the place of attention written by hand, with its arguments filled in; None where no call
    says it. What stands before the comment can be computed from the names that it uses.

    ``scale``: what the scores are multiplied by, and by a tensor where ``temperature`` is "*" or "/".
    ``folded``: q, k, v [n, s, d]. ``cast``: they were cast to float32 first. ``same``: whether the mask is
    that of the whole batch. ``factors``: what the lines multiply q and k by before the scores.
    """
    if p.softcap or p.softmax_type != "vanilla":
        plain = not temperature and not folded and factors == (1.0, 1.0)
        return _flexible(p, scale, same) if plain else None
    names = [f"{name}.unsqueeze(1)" for name in "qkv"] if folded else ["q", "k", "v"]
    extra: list[str] = []
    notes: list[str] = []
    if temperature:
        names[0] = f"(q {temperature} temperature).unsqueeze(1)" if folded else f"q {temperature} temperature"
    if temperature or not math.isclose(scale, default_softmax_scale(p.head_dim_qk), rel_tol=1e-4):
        extra.append(f"scale={scale:.6g}")
    extra = [*_mask_arguments(p, notes, folded, same), *extra]
    if p.attention_dropout:
        extra.append(f"dropout_p={p.attention_dropout:g} if self.training else 0.0")
    if p.gqa:
        extra.append("enable_gqa=True")
        notes.append(f"k and v with their {p.num_gqa_groups} heads, not repeated")
    call = f"F.scaled_dot_product_attention({', '.join([*names, *extra])})" + (
        ".squeeze(1)" if folded else ""
    )
    if cast:
        notes.append(f"q, k, v in {p.dtype}: it sums in fp32 itself")
    for name, factor in zip("qk", factors, strict=True):
        if factor != 1:
            notes.insert(0, f"{name} before it is multiplied by {factor:.6g}")
    if not folded:
        notes.insert(0, "q, k, v [b, h, s, d]")
    return Fix("replace these lines", call + (f"  # {'; '.join(notes)}" if notes else ""))


def _mask_arguments(p: AttentionParams, notes: list[str], folded: bool, same: bool) -> list[str]:
    kind = p.attn_mask_type
    if p.has_bias or p.core_attention_bias_type == "alibi":
        notes.append("bias: all that is added to the scaled scores" + _hides(p))
        return ["attn_mask=bias.to(q.dtype)" + _for_each(folded, (p.core_attention_bias_shape or "1hss")[:2])]
    if kind == "no_mask":
        return []
    if p.tensors.mask_hides_nothing:
        notes.append("visible: the mask, which hid nothing in this call")
    elif same and kind == "causal" and not p.windowed:
        return ["is_causal=True"]
    elif same and kind == "causal_bottom_right" and not p.windowed:
        if p.max_seqlen_q == 1:
            return []
        notes.append("from torch.nn.attention.bias import causal_lower_right")
        return [f"attn_mask=causal_lower_right({p.max_seqlen_q}, {p.max_seqlen_kv})"]
    else:
        notes.append("visible: a bool mask that is True where a key is seen")
    return ["attn_mask=visible" + _for_each(folded, "11" if same else "1h")]


def _hides(p: AttentionParams) -> str:
    return "" if p.attn_mask_type == "no_mask" else ", and -inf where a key is not seen"


def _for_each(folded: bool, lead: str) -> str:
    """A mask for each of a batch whose heads are folded into it."""
    return ".unsqueeze(1)" if folded and lead != "11" else ""


def _flexible(p: AttentionParams, scale: float, same: bool) -> Fix | None:
    """What F.sdpa cannot say."""
    kind = p.attn_mask_type
    masked = p.windowed or p.has_bias or p.core_attention_bias_type == "alibi" or not same
    if masked or p.attention_dropout or kind not in ("no_mask", "causal", "causal_bottom_right"):
        return None
    scaled = f"scale={scale:.6g}"
    if p.softmax_type != "vanilla":
        said = f"attnsel.attention(q, k, v, softmax_type={p.softmax_type!r}, softmax_offset=sinks"
        mask = f", attn_mask_type={kind!r}" if kind != "no_mask" else ""
        return Fix(
            "replace these lines",
            f"{said}, softmax_{scaled}{mask})  # q, k, v [b, s, h, d]; F.sdpa has no sinks",
        )
    mod = f"lambda s, b, h, i, j: {p.softcap:g} * torch.tanh(s / {p.softcap:g})"
    block = ""
    if kind != "no_mask":
        corner = p.max_seqlen_kv - p.max_seqlen_q if kind == "causal_bottom_right" else 0
        seen = "j <= i" + (f" + {corner}" if corner else "")
        sizes = f"{p.max_seqlen_q}, {p.max_seqlen_kv}, device=q.device"
        block = f", block_mask=create_block_mask(lambda b, h, i, j: {seen}, None, None, {sizes})"
    grouped = ", enable_gqa=True" if p.gqa else ""
    return Fix(
        "replace these lines",
        f"flex_attention(q, k, v, score_mod={mod}{block}, {scaled}{grouped})  # F.sdpa has no soft cap",
    )


__all__ = ["Fix", "Hindrance", "fixes", "known_fixes", "replacement", "topics", "unwritten", "ways_out"]

Hindrance = Reason | Unlock | Refusal | Adaptation


def ways_out(api: str, p: AttentionParams, topics: Iterable[str]) -> tuple[Fix, ...]:
    """What a user of ``api`` does about each of ``topics``, where there is a way."""
    found = (_fix(api, topic, p) for topic in topics)
    return tuple(dict.fromkeys(fix for fix in found if fix is not None))


def fixes(
    api: str, p: AttentionParams, hindrances: Iterable[Hindrance], dropout_name: str = ""
) -> tuple[Fix, ...]:
    """The ways out of ``hindrances`` for a user of ``api`` (``record.Api``), each once, in their order.
    ``dropout_name``: what the model's own configuration calls its dropout."""
    found: dict[Fix, None] = {}
    for hindrance in hindrances:
        for topic in topics(p, hindrance):
            fix = _fix(api, topic, p, dropout_name)
            if fix is not None:
                found[fix] = None
    return tuple(found)


# ---- topics -----------------------------------------------------------------------------------------


@cache
def _topics() -> dict[str, str]:
    """The rows of ``data/topics.csv``."""
    return {row["field"]: row["topic"] for row in read_rows("attnsel.diagnose", "topics")}


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
    topic = _topics().get(field)
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


def _fix(api: str, topic: str, p: AttentionParams, dropout_name: str = "") -> Fix | None:
    way = known_fixes().get((topic, api))
    if way is None and api in _LIKE_TORCH:
        way = known_fixes().get((topic, TORCH))
    if way is None:
        return None
    words = _Words(p)
    words["dropout_name"] = dropout_name
    code = way.code if dropout_name or "{dropout_name}" not in way.code else ""
    return Fix(way.text.format_map(words), code.format_map(words))


class _Words(dict[str, Any]):
    """The figures of a call that the lines below name."""

    def __init__(self, p: AttentionParams) -> None:
        wide = max(p.head_dim_qk, p.head_dim_v)
        to = -(-wide // 8) * 8
        missing = wide - min(p.head_dim_qk, p.head_dim_v)
        narrow = "v" if p.head_dim_v < p.head_dim_qk else "q, k"
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
            narrow=narrow,
            padded=", ".join(f"F.pad({name}, (0, {missing}))" if name in narrow else name for name in "qkv"),
            scale=f"{default_softmax_scale(p.head_dim_qk):.6g}",
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
