"""What to hand to another library so that it takes the best kernel that it has for a call."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from attnsel.decision import Selection, select
from attnsel.diagnose.models.calls import Call
from attnsel.diagnose.models.plan import plan
from attnsel.dispatchers import dispatched_by
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.verdicts.dispatch import Offer

LIBRARIES = {"transformers": "transformers", "sdpa": "torch", "te": "te"}
"""The names that are taken, and whose choosers answer for them."""

_SDP_BACKENDS = {
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "mem_efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
"""torch.nn.attention.SDPBackend, by F.sdpa's own words for its kernels."""

_NVTE = {
    "FusedAttention": "NVTE_FUSED_ATTN",
    "FlashAttention 2": "NVTE_FLASH_ATTN",
    "FlashAttention 3": "NVTE_FLASH_ATTN",
    "FlashAttention 4": "NVTE_FLASH_ATTN",
    "UnfusedDotProductAttention": "NVTE_UNFUSED_ATTN",
}


class Implementation(str):
    """``attn_implementation`` of transformers. ``why``: in a sentence."""

    why: str


class Backends(list[Any]):
    """For ``torch.nn.attention.sdpa_kernel``, best first: its members, or their names where torch is not
    installed. ``why``: in a sentence."""

    why: str


class Variables(dict[str, str]):
    """Environment variables of TransformerEngine; empty where it takes the best by itself. ``why``: in a
    sentence."""

    why: str


def recommend(
    library: str,
    call: Any,
    environment: Environment | None = None,
    *,
    policy: Policy | None = None,
    **stated: Any,
) -> Implementation | Backends | Variables:
    """What ``library`` ("transformers", "sdpa" or "te") is to be told for a call, or for all of a model's.

    ``call``: AttentionParams; q, k and v in F.sdpa's shape [batch, heads, length, head_dim]; or what
    ``attnsel.plan`` takes as a model. ``environment`` None is this machine. ``stated``: fields of
    AttentionParams that tensors do not say, and what else ``attnsel.plan`` takes.

    Raises InvalidInput for a library that is none of these, and for a call that it has no kernel for.
    """
    if library not in LIBRARIES:
        raise InvalidInput("library", library, f"must be one of {', '.join(LIBRARIES)}")
    env = Environment.detect() if environment is None else environment
    how: dict[str, Any] = {
        "policy": policy or Policy(),
        "dispatcher": LIBRARIES[library],
        "switches": {},
    }
    written: list[Call] = []
    if isinstance(call, AttentionParams):
        asked = [select(call, env, **how)]
    elif isinstance(call, Sequence) and not isinstance(call, str):
        asked = [select(_of_tensors(call, stated), env, **how)]
    else:
        cells = plan(call, env, **how, **stated).cells
        asked = [cell.selection for cell in cells]
        written = [cell.call for cell in cells if cell.call.by_hand] if library == "transformers" else []
    offers = _open_to_all(library, asked)
    if written:  # no other is taken by such a model
        reached = {call.reaches for call in written}
        offers = [offer for offer in offers if {offer.name} == reached]
        if not offers:
            eager = Implementation("eager")
            eager.why = "its code writes attention out, and no other kernel runs what it holds"
            return eager
    if not offers:
        refused = asked[0].dispatched.offers[0].refusals if asked[0].dispatched else ()
        why = refused[0].text if refused else "it has no kernel for it"
        raise InvalidInput("library", library, f"cannot run this call: {why}")
    best = offers[0]
    why = _why(best, asked)
    found: Any
    if library == "transformers":
        found = Implementation(best.name)
    elif library == "sdpa":
        found = Backends(_members([_SDP_BACKENDS[offer.name] for offer in offers]))
    else:
        found = Variables(_variables(best, asked))
    found.why = why
    return found  # type: ignore[no-any-return]


def _of_tensors(tensors: Sequence[Any], stated: dict[str, Any]) -> AttentionParams:
    """The question of q, k and v as F.sdpa takes them. Raises InvalidInput."""
    if len(tensors) != 3 or any(getattr(t, "ndim", 0) != 4 for t in tensors):
        raise InvalidInput("call", tensors, "must be q, k and v of four dimensions, as F.sdpa takes them")
    q, k, v = tensors
    given: dict[str, Any] = {
        "dtype": str(q.dtype).removeprefix("torch."),
        "qkv_layout": "bhsd",
        "batch_size": q.shape[0],
        "num_heads": q.shape[1],
        "num_gqa_groups": k.shape[1],
        "max_seqlen_q": q.shape[2],
        "max_seqlen_kv": k.shape[2],
        "head_dim_qk": q.shape[3],
        "head_dim_v": v.shape[3],
        "attn_mask_type": "no_mask",
        "is_training": any(t.requires_grad for t in tensors),
    }
    return AttentionParams(**{**given, **stated})


def _open_to_all(library: str, asked: list[Selection]) -> list[Offer]:
    """The kernels that the library has for every call, best first by attnsel's own order."""
    taken: dict[str, list[int]] = {}
    offers: dict[str, Offer] = {}
    for selection in asked:
        places = {candidate.name: place for place, candidate in enumerate(selection.ranked)}
        for tried, offer in enumerate(_taken(library, selection)):
            taken.setdefault(offer.name, []).append(100 * places.get(offer.candidate, 99) + tried)
            offers[offer.name] = offer
    kept = [name for name, places in taken.items() if len(places) == len(asked)]
    return [offers[name] for name in sorted(kept, key=lambda name: sum(taken[name]))]


def _taken(library: str, selection: Selection) -> list[Offer]:
    """What the library would take for one call; of transformers, where its name is the one asked for."""
    dispatched = selection.dispatched
    assert dispatched is not None
    if library != "transformers":
        return [offer for offer in dispatched.offers if offer.taken]
    question = selection.params, selection.environment
    named = (
        dispatched_by(library, *question, {"attn_implementation": offer.name}).chosen
        for offer in dispatched.offers
    )
    return [
        chosen
        for offer, chosen in zip(dispatched.offers, named, strict=True)
        if chosen is not None and chosen.name == offer.name
    ]


def _why(best: Offer, asked: list[Selection]) -> str:
    selection = asked[0]
    first = selection.ranked[0].name if selection.ranked else "nothing"
    text = f"{best.name} ({best.candidate})" if best.candidate else best.name
    if best.candidate == first:
        return f"{text} is the first by attnsel's order"
    assert selection.dispatched is not None
    missing = next((o for o in selection.dispatched.offers if o.candidate == first and o.refusals), None)
    lacking = f"it does not take {first}: {missing.refusals[0].text}" if missing else f"it has no {first}"
    return f"{text} is the best that it takes; {lacking}"


def _members(names: list[str]) -> list[Any]:
    if importlib.util.find_spec("torch") is None:
        return names
    from torch.nn.attention import SDPBackend

    return [getattr(SDPBackend, name) for name in names]


def _variables(best: Offer, asked: list[Selection]) -> dict[str, str]:
    """What keeps TransformerEngine from those that it would take before the best."""
    answers = [selection.dispatched.chosen for selection in asked if selection.dispatched]
    chosen = {offer.name for offer in answers if offer is not None}
    if chosen == {best.name}:
        return {}
    off = {_NVTE[name] for name in chosen if name != best.name} - {_NVTE[best.name]}
    return dict.fromkeys(sorted(off), "0")
