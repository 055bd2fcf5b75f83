"""Exact changes of a call: when each applies, what it makes of the question, what it costs; how to find them.

An adaptation has two halves of one name, because planning loads no torch: here a function, which is pure
(parameters and a target in, the changed parameters and the cost out; None where the change would not be
exact, or would change nothing), and in ``attnsel/runtime/adaptations.py`` a class, which does the same to
tensors. Costs count the memory that a change makes while the forward runs (copies, and what a wider output
takes beyond the one that is asked for) and the operations that the kernel then does more.

The engine asks the rules again about the changed question, so an adaptation never vouches for a candidate:
the rules do.

Letters as in ``backends/contract.py``: b, h, g heads, s_q, s_kv, d head_dim_qk, e head_dim_v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from attnsel.params import ITEMSIZE, AttentionParams, DType, TensorSpec
from attnsel.params.layout import LAYOUTS
from attnsel.verdicts.reasons import Adaptation, Reason, Unknown
from attnsel.verdicts.requirements import Multiple

Target = tuple[tuple[str, Any], ...]  # fields and the values they are brought to
Applied = tuple[AttentionParams, Adaptation] | None
Aim = Callable[[AttentionParams, list[Reason]], Target | None]
Apply = Callable[[AttentionParams, Target], Applied]

_MASK = TensorSpec(shape=(1, 1, 1, 1), stride=(1, 1, 1, 1))


# ---- what an objection asks for ---------------------------------------------------------------------


def nothing_to_choose(p: AttentionParams, reasons: list[Reason]) -> Target | None:
    """For changes that can be made in one way only."""
    return ()


def blamed_tensors(p: AttentionParams, reasons: list[Reason]) -> Target | None:
    """Those of q, k and v whose memory is objected to."""
    blamed = {reason.field.partition(".")[2] for reason in reasons if reason.field.startswith("tensors.")}
    return tuple((name, "dense") for name in ("q", "k", "v") if name in blamed) or None


def wider(p: AttentionParams, reasons: list[Reason], field: str) -> Target | None:
    """The smallest value above today's that every objection to ``field`` proposes or allows."""
    value = observed = getattr(p, field)
    for reason in reasons:
        if reason.field == field and not reason.unknown:
            repaired = next(reason.finding.required.repairs(value), None)
            if not isinstance(repaired, int):
                return None
            value = max(value, repaired)
    return ((field, value),) if value > observed else None


def wider_qk(p: AttentionParams, reasons: list[Reason]) -> Target | None:
    return wider(p, reasons, "head_dim_qk")


def wider_v(p: AttentionParams, reasons: list[Reason]) -> Target | None:
    return wider(p, reasons, "head_dim_v")


def longer(p: AttentionParams, reasons: list[Reason]) -> Target | None:
    """The next multiples; queries and keys together where they are as many and a diagonal joins them."""
    found: dict[str, int] = {}
    for reason in reasons:
        required = reason.finding.required
        if reason.field in ("max_seqlen_q", "max_seqlen_kv") and not reason.unknown:
            if not isinstance(required, Multiple):
                return None
            length = found.get(reason.field, getattr(p, reason.field))
            found[reason.field] = -(-length // required.of) * required.of
    if p.max_seqlen_q == p.max_seqlen_kv and p.causal and not p.padding:
        found = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(found.values()))
    return tuple(sorted(item for item in found.items() if item[1] > getattr(p, item[0]))) or None


def more_groups(p: AttentionParams, reasons: list[Reason]) -> Target | None:
    """The fewest key/value heads, each alike, that every objection to their number allows."""
    required = [r.finding.required for r in reasons if r.field == "num_gqa_groups" and not r.unknown]
    for copies in range(2, p.num_heads // p.num_gqa_groups + 1):
        groups = copies * p.num_gqa_groups
        if p.num_heads % groups == 0 and all(wanted.holds(groups, p) for wanted in required):
            return (("num_gqa_groups", groups),)
    return None


# ---- the changes ------------------------------------------------------------------------------------


class Adapter(NamedTuple):
    """One change. ``fields``: objections to these can be met. ``aim(p, reasons)``: what the objections ask
    for, None where nothing does. ``apply(p, target)``: the question after the change, or None. ``makes``:
    what the memory that it takes holds."""

    name: str
    fields: frozenset[str]
    aim: Aim
    apply: Apply
    makes: str


ADAPTERS: dict[str, Adapter] = {}
"""In the order in which they are carried out: what is padded or repeated is dense already, and a mask is
folded over the lengths and heads that the kernel sees."""


def adapter(*fields: str, aim: Aim = nothing_to_choose, makes: str = "") -> Callable[[Apply], Apply]:
    """Add a function of this file under its own name, behind those above it."""

    def register(apply: Apply) -> Apply:
        name = apply.__name__
        ADAPTERS[name] = Adapter(name, frozenset(fields), aim, apply, makes or name)
        return apply

    return register


def type_without_mask(p: AttentionParams) -> str | None:
    """The mask type once a mask that is known to hide nothing is left out; None where there is none."""
    if not p.tensors.mask_hides_nothing or p.qkv_format == "thd":
        return None
    kind = {"arbitrary": "no_mask", "padding": "no_mask"}.get(
        p.attn_mask_type, p.attn_mask_type.removeprefix("padding_")
    )
    return None if kind == p.attn_mask_type else kind


@adapter("attn_mask_type")
def drop_mask(p: AttentionParams, target: Target) -> Applied:
    """Leave out a mask that hides nothing.

    Exact: every score keeps its value where no pair is hidden; full lengths leave a bottom-right diagonal
    where it is. No gradient flows through a mask. It must be known without reading a GPU
    (``runtime/call.py`` says how): nothing here looks.
    """
    kind: Any = type_without_mask(p)
    if kind is None:
        return None
    tensors = p.tensors.derive(mask=None, mask_hides_nothing=False)
    return p.derive(attn_mask_type=kind, tensors=tensors), Adaptation(
        "drop_mask", "drops the mask, which hides nothing", 0
    )


@adapter("qkv_layout")
def unpack(p: AttentionParams, target: Target) -> Applied:
    """Packed sequences (thd) as rows of a padded batch, and the result packed again.

    Exact: row i of sequence m becomes row i of batch entry m, so positions, diagonals and distances stay;
    the padding mask hides what lies beyond a length, and those rows are zeros. Each packed row is read once
    on the way in and written once on the way out, so gradients go back through the same indices. The indices
    are computed from cu_seqlens where they lie: nothing is read back. Refused where the longest sequences
    are not known, or are so much longer than the others that the padded batch more than doubles the rows.
    """
    if p.layout.q_format != "thd" or p.layout.kv_format != "thd" or p.tensors.ragged:
        return None
    if p.kv_cache != "none" or p.context_parallel:
        return None
    changed = p.rewritten(
        qkv_layout="bshd_bshd_bshd",
        pad_between_seqs=False,
        tensors=p.tensors.derive(q=None, k=None, v=None),
    )
    text = f"unpacks {p.batch_size} sequences into a padded batch"
    return changed, Adaptation("unpack", text, _bytes(p, "q", "k", "v", "out"))


@adapter("attn_mask_type")
def zero_padding(p: AttentionParams, target: Target) -> Applied:
    """Zeros in padded rows, and no lengths, where no row sees a key after its own.

    Exact: with equal lengths of queries and keys (one tensor), and padding behind them, a real query sees
    keys up to its own place, and those are real. What a kernel multiplies by a probability of 0 is 0 and not
    NaN, as the padded rows of q, k and v are zeros, whatever they held. Their output is overwritten with 0,
    which also zeroes their gradient of the output, so that they add nothing to any other gradient.
    """
    if not p.padding or p.qkv_format == "thd" or p.kv_cache != "none" or p.context_parallel:
        return None
    if not p.same_lengths or p.window_size[1] != 0 or p.return_max_logit:
        return None
    kind: Any = p.attn_mask_type.removeprefix("padding_").replace("padding", "no_mask")
    changed = p.derive(attn_mask_type=kind, **_dense(p, "q", "k", "v"))
    text = f"zeroes padded rows: {p.attn_mask_type} is {kind}"
    return changed, Adaptation("zero_padding", text, _bytes(p, "q", "k", "v", "out"))


@adapter("max_seqlen_q", "max_seqlen_kv", aim=longer)
def pad_sequence(p: AttentionParams, target: Target) -> Applied:
    """Zeros after the last query, the last key, or both; the output without the rows that were added.

    Exact where no real query sees an added key and no diagonal moves. Under lengths (padding) both hold, as
    lengths count real rows. Under a mask tensor the added columns are masked. A causal mask hides added keys
    from the top left when s_q <= s_kv, and from either corner when queries and keys grow by the same number
    of rows. Elsewhere the real lengths are given along, as a padding mask. Added queries see what they may:
    their output is cut off, so their gradient is zero and adds nothing to dK, dV or a bias' gradient. (A
    largest score would count them, so with return_max_logit lengths are given.)
    """
    if "thd" in (p.layout.q_format, p.layout.kv_format) or p.kv_cache != "none" or p.context_parallel:
        return None
    to = dict(target)
    s_q, s_kv = to.get("max_seqlen_q", p.max_seqlen_q), to.get("max_seqlen_kv", p.max_seqlen_kv)
    more_q, more_kv = s_q - p.max_seqlen_q, s_kv - p.max_seqlen_kv
    changes: dict[str, Any] = {"max_seqlen_q": s_q, "max_seqlen_kv": s_kv}
    if not _padding_shows_nowhere(p, more_q, more_kv):
        if p.attn_mask_type == "arbitrary":
            return None
        plain = p.attn_mask_type == "no_mask"
        changes["attn_mask_type"] = "padding" if plain else f"padding_{p.attn_mask_type}"
    moved = (("q",) if more_q else ()) + (("k", "v") if more_kv else ())
    tensors = _dense(p, *moved)
    if s_q == s_kv and more_q != more_kv:  # as many rows now, and not as many real ones
        tensors["tensors"] = tensors["tensors"].derive(lengths_apart=True)
    mask = p.tensors.mask
    if mask is not None:
        # Its keys must all be there, as a broadcast column cannot mask some, and its rows.
        rows = mask.shape[-2] if mask.shape[-2] == 1 else s_q
        columns = mask.shape[-1] if s_kv == p.max_seqlen_kv else s_kv
        shape = (*mask.shape[:-2], rows, columns)
        tensors["tensors"] = tensors["tensors"].derive(
            mask=mask.derive(shape=shape, stride=_strides(shape)), mask_hides_nothing=False
        )
    changed = p.derive(**changes, **tensors)
    size = _bytes(changed, *moved) + _score_input_bytes(p, changed)
    size += p.batch_size * more_q * p.num_heads * p.head_dim_v * ITEMSIZE[p.dtype]  # of the output
    text = f"pads the sequence {p.max_seqlen_q} → {s_q}"
    if more_q != more_kv or p.max_seqlen_q != p.max_seqlen_kv:
        text = "pads " + ", ".join(f"{name} {getattr(p, name)} → {to}" for name, to in target)
    flops = changed.flops - p.flops
    return changed, Adaptation("pad_sequence", text, size, flops=flops, changes=target)


def _padding_shows_nowhere(p: AttentionParams, more_q: int, more_kv: int) -> bool:
    """Whether the question as it stands hides the rows that are added; see ``pad_sequence``."""
    if p.padding:
        return True
    if p.return_max_logit:
        return False
    anchored = p.causal or p.windowed or p.core_attention_bias_type == "alibi"
    if p.bottom_right_diagonal and anchored and more_q != more_kv:
        return False  # the diagonal would move
    if p.attn_mask_type == "arbitrary" or not more_kv:
        return True
    return p.causal and (more_q == more_kv or p.max_seqlen_q <= p.max_seqlen_kv)


def _score_input_bytes(before: AttentionParams, after: AttentionParams) -> int:
    """The mask and bias that grow along. A bias is taken to have the dtype of q."""
    old, new, size = before.tensors.mask, after.tensors.mask, 0
    if old is not None and new is not None and old.shape != new.shape:
        size = prod(new.shape)
    if after.has_bias and bias_shape(before) != bias_shape(after):
        size += prod(bias_shape(after)) * ITEMSIZE[after.dtype]
    return size


def bias_shape(p: AttentionParams) -> tuple[int, ...]:
    """[b|1, h|1, s_q|1, s_kv] of a call's bias."""
    letters = p.core_attention_bias_shape or "1hss"
    full = (p.batch_size, p.num_heads, p.max_seqlen_q, p.max_seqlen_kv)
    return tuple(1 if letter == "1" else n for letter, n in zip(letters, full, strict=True))


@adapter("head_dim_qk", aim=wider_qk)
def pad_head_dim_qk(p: AttentionParams, target: Target) -> Applied:
    """Zeros behind the head dimension of q and k.

    Exact: the added products are 0 * 0, so every score is the same sum; softmax_scale stays that of the real
    head_dim_qk. The gradient of an added column is cut off with it.
    """
    if p.layout.paged:
        return None
    to = dict(target)["head_dim_qk"]
    changed = p.resized(head_dim_qk=to, **_dense(p, "q", "k"))
    text = f"pads head_dim_qk {p.head_dim_qk} → {to}"
    size = _bytes(changed, "q", "k")
    return changed, Adaptation("pad_head_dim_qk", text, size, flops=changed.flops - p.flops, changes=target)


@adapter("head_dim_v", aim=wider_v)
def pad_head_dim_v(p: AttentionParams, target: Target) -> Applied:
    """Zeros behind the head dimension of v; the output without the columns that were added.

    Exact: each column of the output is the weighted sum of one column of v, and no other column enters; the
    gradient of the columns that are cut is zero, so it adds nothing to dP = dO V^T.
    """
    if p.layout.paged:
        return None
    to = dict(target)["head_dim_v"]
    changed = p.resized(head_dim_v=to, **_dense(p, "v"))
    rows = p.batch_size * p.max_seqlen_q * p.num_heads
    size = _bytes(changed, "v") + rows * (to - p.head_dim_v) * ITEMSIZE[p.dtype]
    text = f"pads head_dim_v {p.head_dim_v} → {to}"
    return changed, Adaptation("pad_head_dim_v", text, size, flops=changed.flops - p.flops, changes=target)


@adapter("num_gqa_groups", aim=more_groups, makes="repeated heads")
def expand_gqa(p: AttentionParams, target: Target) -> Applied:
    """Repeat each key/value head for the query heads of its group, or for parts of the group.

    Exact: query head n reads a copy of kv head n // (h // g) either way; the gradient of a kv head is the sum
    over its copies.
    """
    if not p.gqa or p.layout.paged:
        return None
    groups = dict(target).get("num_gqa_groups", p.num_heads)
    changed = p.resized(num_gqa_groups=groups, **_dense(p, "k", "v"))
    text = f"repeats {p.num_gqa_groups} kv head{'s' * (p.num_gqa_groups > 1)} to {groups}"
    return changed, Adaptation("expand_gqa", text, _bytes(changed, "k", "v"), changes=target)


@adapter("tensors.q", "tensors.k", "tensors.v", aim=blamed_tensors, makes="copies")
def contiguous(p: AttentionParams, target: Target) -> Applied:
    """Copy those of q, k and v that a kernel cannot read into dense memory.

    Exact: a copy holds the same numbers; gradients are copied back through the same indices.
    """
    names = [name for name, _ in target if getattr(p.tensors, name) is not None]
    if not names:
        return None
    changed = p.resized(**_dense(p, *names))
    text = f"copies {', '.join(names)} into dense memory"
    return changed, Adaptation("contiguous", text, _bytes(p, *names), changes=target)


@adapter("qkv_layout")
def pack(p: AttentionParams, target: Target) -> Applied:
    """A padded batch as packed sequences (thd), and the result padded again with zeros.

    Exact: the inverse of ``unpack``. The packed tensors keep room for b * s rows, so that their size follows
    from shapes and no length is read back; the rows after the last sequence belong to none.
    """
    if not p.padding or p.qkv_format == "thd" or p.kv_cache != "none" or p.context_parallel:
        return None
    changed = p.derive(
        qkv_layout="thd_thd_thd",
        pad_between_seqs=True,  # rows that belong to no sequence, if only at the end
        tensors=p.tensors.derive(q=None, k=None, v=None),
    )
    text = f"packs {p.batch_size} padded sequences"
    return changed, Adaptation("pack", text, _bytes(p, "q", "k", "v", "out"))


@adapter("attn_mask_type", "window_size", "core_attention_bias_type", "bottom_right_diagonal", makes="mask")
def fold_mask(p: AttentionParams, target: Target) -> Applied:
    """Write windows, diagonals, padding, ALiBi and bias into one additive mask.

    Exact: softmax(x + m) with m = -inf where a pair is hidden and the bias elsewhere is the same sum; rows
    that see no key give 0 in both, and padded rows are zeroed, whatever they hold. The gradient of a bias is
    the gradient of m summed over broadcast dimensions.
    """
    if p.qkv_format == "thd":
        return None  # packed sequences have no [b, h, s_q, s_kv] to mask
    shape = folded_mask_shape(p)
    dtype: DType = p.dtype
    spec = _MASK.derive(
        shape=shape, stride=_strides(shape), dtype=dtype, requires_grad=p.core_attention_bias_requires_grad
    )
    batch, heads, rows, columns = shape
    changed = p.rewritten(
        attn_mask_type="arbitrary",
        window_size=(-1, -1),
        bottom_right_diagonal=True,
        core_attention_bias_type="no_bias",
        core_attention_bias_shape=None,
        core_attention_bias_requires_grad=False,
        alibi_slopes_shape=None,
        tensors=p.tensors.derive(mask=spec),
    )
    folded = ", ".join(_what_is_folded(p))
    text, size = f"folds {folded} into a mask", batch * heads * rows * columns * ITEMSIZE[p.dtype]
    if p.padding:  # -inf beside a NaN hides nothing
        text, size = f"{text} and zeroes padded rows", size + _bytes(p, "q", "k", "v")
    # A kernel that is given a mask computes what the mask hides as well.
    return changed, Adaptation("fold_mask", text, size, flops=changed.flops - p.flops)


def folded_mask_shape(p: AttentionParams) -> tuple[int, int, int, int]:
    """The smallest [b|1, h|1, 1|s_q, s_kv] that holds everything about visibility and bias.

    Padding differs per sequence; ALiBi differs per head (and per sequence with slopes of [b, h]); lengths
    alone are the same for every query.
    """
    batch = heads = rows = 1
    if p.padding:
        batch = p.batch_size
    if p.has_bias:
        shape = p.core_attention_bias_shape or "1hss"
        batch = p.batch_size if shape[0] == "b" else batch
        heads = p.num_heads if shape[1] == "h" else heads
    if p.core_attention_bias_type == "alibi":
        heads = p.num_heads
        batch = p.batch_size if len(p.alibi_slopes_shape or ()) == 2 else batch
    mask = p.tensors.mask
    if mask is not None and len(mask.shape) == 4:
        batch, heads = max(batch, mask.shape[0]), max(heads, mask.shape[1])
    plain = p.core_attention_bias_type == "no_bias" and not p.windowed
    if p.attn_mask_type not in ("no_mask", "padding") or not plain:
        rows = p.max_seqlen_q
    return batch, heads, rows, p.max_seqlen_kv


def _what_is_folded(p: AttentionParams) -> list[str]:
    words: list[str] = []
    if p.attn_mask_type not in ("no_mask", "arbitrary"):
        words.append(p.attn_mask_type)
    if p.windowed:
        words.append(f"window {p.window_size}")
    if p.core_attention_bias_type != "no_bias":
        words.append(p.core_attention_bias_type)
    return words or ["the mask"]


# ---- memory -----------------------------------------------------------------------------------------


def _bytes(p: AttentionParams, *names: str) -> int:
    """Dense copies of some of q, k, v and out; packed ones as if every sequence were the longest."""
    rows_q = p.batch_size * p.max_seqlen_q * p.num_heads
    rows_kv = p.batch_size * p.max_seqlen_kv * p.num_gqa_groups
    size = {
        "q": rows_q * p.head_dim_qk,
        "k": rows_kv * p.head_dim_qk,
        "v": rows_kv * p.head_dim_v,
        "out": rows_q * p.head_dim_v,
    }
    return sum(size[name] for name in names) * ITEMSIZE[p.dtype]


def _dense(p: AttentionParams, *names: str) -> dict[str, Any]:
    """Changed fields where these tensors become dense and separate ones."""
    fields: dict[str, Any] = {"tensors": p.tensors}
    if any(getattr(p.tensors, name) is not None for name in names):
        fields["tensors"] = p.tensors.derive(**dict.fromkeys(names))
    if names and p.layout.group not in ("hd_hd_hd", "sd_sd_sd"):
        separate = f"{p.layout.q_format}_{p.layout.kv_format}_{p.layout.kv_format}"
        if separate in LAYOUTS:
            fields["qkv_layout"] = separate
    return fields


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for n in reversed(shape):
        stride.insert(0, step)
        step *= n
    return tuple(stride)


# ---- which of them let a candidate run a call --------------------------------------------------------


Memo = dict[tuple[str, AttentionParams, Target], Applied]
Ask = Callable[[AttentionParams], list[Reason]]


def adapt_to(
    names: tuple[str, ...], p: AttentionParams, reasons: list[Reason], ask: Ask, memo: Memo
) -> tuple[tuple[Adaptation, ...], list[Reason]]:
    """Apply what is listed until nothing is refused or nothing helps.

    ``ask`` returns the reasons against a changed question; ``memo`` shares changed questions between the
    candidates of one selection. Returns what was applied and the reasons that remain; when some remain,
    nothing is to be applied.
    """
    if p.tensors.mask_hides_nothing and "drop_mask" in names:
        # Free, and less work for every kernel: done whether or not the mask is in the way.
        without = _apply(names, p, {"drop_mask": ()}, memo)
        if without is not None:
            applied, left = _search(names, p, ask(without[0]), ask, memo, {"drop_mask": ()})
            if all(reason.unknown for reason in left):
                return applied, left
    if not reasons:
        return (), reasons
    return _search(names, p, reasons, ask, memo, {})


def _search(
    names: tuple[str, ...],
    asked: AttentionParams,
    reasons: list[Reason],
    ask: Ask,
    memo: Memo,
    chosen: dict[str, Target],
) -> tuple[tuple[Adaptation, ...], list[Reason]]:
    """Meet one objection after the other. ``chosen`` is always applied to the question as it was asked, in
    the order of ``ADAPTERS``; a target may grow while others come in."""
    p, applied = (chosen and _apply(names, asked, chosen, memo)) or (asked, ())
    refused = refused_fields(reasons)
    if not refused <= within_reach(names):
        return (), reasons  # something stays refused whatever is adapted
    answered: dict[str, Reason] = {}
    for _ in range(_MOST_ROUNDS):
        if not refused:
            break
        for change in _adapters(names, frozenset(refused)):
            name, target = change.name, change.aim(p, reasons)
            if target is None:
                continue
            before = chosen.get(name)
            if (
                before is not None
                and (target := tuple(sorted({**dict(before), **dict(target)}.items()))) == before
            ):
                continue
            trial = {**chosen, name: target}
            changed = _apply(names, asked, trial, memo)
            if changed is not None and changed[0] != p:
                break
        else:
            break
        chosen, (p, applied) = trial, changed
        answered |= {reason.code: reason for reason in reasons if not reason.unknown}
        reasons = ask(p)
        refused = refused_fields(reasons)
    return _with_reasons(applied, tuple(answered.values())), reasons


def refused_fields(reasons: list[Reason]) -> set[str]:
    """The fields that are objected to."""
    return {reason.finding.field for reason in reasons if not isinstance(reason.finding, Unknown)}


def _with_reasons(applied: tuple[Adaptation, ...], answered: tuple[Reason, ...]) -> tuple[Adaptation, ...]:
    """The adaptations, each with the reasons against fields that it can do something about."""
    if not answered:
        return applied
    return tuple(  # avoids is last
        Adaptation(*made[:-1], tuple([r for r in answered if r.field in ADAPTERS[made.name].fields]))
        for made in applied
    )


_MOST_ROUNDS = 12  # every adapter once, and three tensors or head dimensions that grow in turn


def _apply(
    names: tuple[str, ...], p: AttentionParams, chosen: dict[str, Target], memo: Memo
) -> tuple[AttentionParams, tuple[Adaptation, ...]] | None:
    """The question after all that is chosen; None where the first change does not apply."""
    applied: list[Adaptation] = []
    for name in chosen if len(chosen) == 1 else [name for name in names if name in chosen]:
        key = (name, p, chosen[name])
        if key not in memo:
            memo[key] = ADAPTERS[name].apply(p, chosen[name])
        changed = memo[key]
        if changed is not None:  # a tensor that another change made dense needs no copy
            p = changed[0]
            applied.append(changed[1])
    return (p, tuple(applied)) if applied else None


@lru_cache(maxsize=1024)
def _adapters(names: tuple[str, ...], refused: frozenset[str]) -> tuple[Adapter, ...]:
    """Those that can do something about one of these fields."""
    return tuple([ADAPTERS[name] for name in names if not ADAPTERS[name].fields.isdisjoint(refused)])


@lru_cache(maxsize=64)
def within_reach(names: tuple[str, ...]) -> frozenset[str]:
    """The fields that these adaptations can do something about."""
    return frozenset().union(*(ADAPTERS[name].fields for name in names))


def stages(
    p: AttentionParams, adaptations: tuple[Adaptation, ...]
) -> Iterator[tuple[Adaptation, AttentionParams, AttentionParams]]:
    """Each adaptation of a selected candidate with the question before it and after it."""
    for adaptation in adaptations:
        changed = ADAPTERS[adaptation.name].apply(p, adaptation.changes)
        if changed is None:
            raise ValueError(f"{adaptation.name} does not apply to {p!r}")
        yield adaptation, p, changed[0]
        p = changed[0]


# ---- what it weighs ---------------------------------------------------------------------------------

# Operations that a GPU's tensor cores do while its memory moves a byte: dense 16-bit peak over bandwidth is
# 156 on an A100, 203 on a T4, 295 on an H100 and 281 on a B200 (NVIDIA's data sheets).
FLOPS_PER_BYTE = 200
_MOST = 16 * 64


def overhead(adaptations: tuple[Adaptation, ...], p: AttentionParams) -> int:
    """What adaptations add to every call, in sixteenths of the attention's own work; 0 for what is free.

    What a change makes is written once and read once, and once more each in a backward. In sixteenths,
    rounded up, because preferences compare it: a finer figure would claim to know too much.
    """
    moved = sum(a.bytes for a in adaptations) * (4 if p.is_training else 2)
    more = sum(a.flops for a in adaptations) + moved * FLOPS_PER_BYTE
    if not more:
        return 0
    return min(_MOST, -(-16 * more // max(1, p.flops)))
