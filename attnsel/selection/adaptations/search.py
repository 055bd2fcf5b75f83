"""Which exact changes of a call let a candidate run it, and what they weigh against the attention itself.

The engine asks the rules again about the changed question, so an adaptation never vouches for a candidate:
the rules do. ``transforms.py`` holds each change with its proof; ``attnsel/runtime/adaptations.py`` carries
them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from attnsel.params import AttentionParams
from attnsel.selection.adaptations import transforms as made
from attnsel.selection.adaptations.transforms import Applied, Target
from attnsel.verdicts.verdict import Adaptation, Reason


class Adapter(NamedTuple):
    """One change. ``fields``: objections to these can be met. ``aim(p, reasons)``: what the objections ask
    for, None where nothing does. ``apply(p, target)``: the question after the change, or None."""

    name: str
    fields: frozenset[str]
    aim: Callable[[AttentionParams, list[Reason]], Target | None]
    apply: Callable[[AttentionParams, Target], Applied]


_LENGTHS = frozenset({"max_seqlen_q", "max_seqlen_kv"})
_MEMORY = frozenset({"tensors.q", "tensors.k", "tensors.v"})
_VISIBILITY = frozenset(
    {"attn_mask_type", "window_size", "core_attention_bias_type", "bottom_right_diagonal"}
)

# In the order in which they are carried out: what is padded or repeated is dense already, and a mask is
# folded over the lengths and heads that the kernel sees.
ADAPTERS: dict[str, Adapter] = {
    adapter.name: adapter
    for adapter in (
        Adapter("drop_mask", frozenset({"attn_mask_type"}), made.nothing_to_choose, made.drop_mask),
        Adapter("unpack", frozenset({"qkv_layout"}), made.nothing_to_choose, made.unpack),
        Adapter("zero_padding", frozenset({"attn_mask_type"}), made.nothing_to_choose, made.zero_padding),
        Adapter("pad_sequence", _LENGTHS, made.longer, made.pad_sequence),
        Adapter("pad_head_dim_qk", frozenset({"head_dim_qk"}), made.wider_qk, made.pad_head_dim_qk),
        Adapter("pad_head_dim_v", frozenset({"head_dim_v"}), made.wider_v, made.pad_head_dim_v),
        Adapter("expand_gqa", frozenset({"num_gqa_groups"}), made.more_groups, made.expand_gqa),
        Adapter("contiguous", _MEMORY, made.blamed_tensors, made.contiguous),
        Adapter("pack", frozenset({"qkv_layout"}), made.nothing_to_choose, made.pack),
        Adapter("fold_mask", _VISIBILITY, made.nothing_to_choose, made.fold_mask),
    )
}

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
    refused = {reason.field for reason in reasons if not reason.unknown}
    if not refused <= within_reach(names):
        return (), reasons  # something stays refused whatever is adapted
    answered: dict[str, Reason] = {}
    for _ in range(_MOST_ROUNDS):
        if not refused:
            break
        for name, fields, aim, _ in _adapters(names):
            if fields.isdisjoint(refused):
                continue
            target = aim(p, reasons)
            if target is None:
                continue
            before = chosen.get(name)
            if before is not None and (target := _joined(before, target)) == before:
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
        refused = {reason.field for reason in reasons if not reason.unknown}
    return _with_reasons(applied, tuple(answered.values())), reasons


def _with_reasons(applied: tuple[Adaptation, ...], answered: tuple[Reason, ...]) -> tuple[Adaptation, ...]:
    """The adaptations, each with the reasons against fields that it can do something about."""
    if not answered:
        return applied
    return tuple(
        made._replace(avoids=tuple([r for r in answered if r.field in ADAPTERS[made.name].fields]))
        for made in applied
    )


_MOST_ROUNDS = 12  # every adapter once, and three tensors or head dimensions that grow in turn


def _joined(before: Target, after: Target) -> Target:
    return tuple(sorted({**dict(before), **dict(after)}.items()))


def _apply(
    names: tuple[str, ...], p: AttentionParams, chosen: dict[str, Target], memo: Memo
) -> tuple[AttentionParams, tuple[Adaptation, ...]] | None:
    """The question after all that is chosen; None where the first change does not apply."""
    applied: list[Adaptation] = []
    for name in names:
        if name not in chosen:
            continue
        key = (name, p, chosen[name])
        if key not in memo:
            memo[key] = ADAPTERS[name].apply(p, chosen[name])
        changed = memo[key]
        if changed is not None:  # a tensor that another change made dense needs no copy
            p = changed[0]
            applied.append(changed[1])
    return (p, tuple(applied)) if applied else None


@lru_cache(maxsize=64)
def _adapters(names: tuple[str, ...]) -> tuple[Adapter, ...]:
    return tuple(ADAPTERS[name] for name in names)


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
