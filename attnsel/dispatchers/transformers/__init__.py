"""What transformers would run for a question: ``attn_implementation``, its checks, and what reaches a kernel.

``switches``        what may be set, its value as typed; which releases were read, and the lines of statements
``implementations`` each implementation: its call, what refuses it when a model is made, and what when it runs

The name that was asked for is tried first, then what transformers falls back to; the other implementations
follow, for a reader who thinks of changing it.
"""

from __future__ import annotations

from collections.abc import Mapping

from attnsel.dispatchers.transformers.implementations import NAMES, Attempt, attempt
from attnsel.dispatchers.transformers.switches import (
    SWITCHES,
    Switches,
    held,
    read_for,
    read_switches,
    source,
)
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.verdicts.dispatch import Dispatch, Offer, Refusal

__all__ = ["SWITCHES", "dispatch", "held"]


def dispatch(p: AttentionParams, env: Environment, switches: Mapping[str, str]) -> Dispatch:
    """Raises InvalidInput for a value that cannot be read."""
    asked = read_switches(switches, p)
    order = _resolution(asked, env)
    tried = [attempt(name, p, env, asked) for name in order]
    named = [name for name, since in NAMES.items() if asked.release >= since]
    others = [attempt(name, p, env, asked) for name in named if name not in order]
    chosen, error = _first_that_runs(tried)
    offers = [one.offer() for one in tried] + [_not_asked(one, asked) for one in others]
    known, inferred = read_for(asked.release)
    return Dispatch(
        dispatcher="transformers",
        release=str(asked.release),
        read=known,
        call=(tried[0] if chosen is None else chosen).call,
        offers=tuple(offers),
        chosen=None if chosen is None else offers[tried.index(chosen)],
        order_source=source("resolve", asked.release),
        inferred=inferred,
        error=error,
        switches=tuple(sorted(switches.items())),
        notes=_notes(tried if chosen is None else [chosen], p, env, asked),
        known_bugs=() if chosen is None else chosen.known_bugs,
    )


def _resolution(asked: Switches, env: Environment) -> tuple[str, ...]:
    """The implementations that transformers tries by itself, in its order."""
    if asked.implementation is None:
        return ("sdpa", "eager")
    device = env.device.type
    name = asked.replaced(asked.implementation, device)
    other = device in ("cuda", "rocm") and not (env.flash_attn is env.flash_attn_3 is None)
    hub = asked.hub_fallback(name, device, other)
    return (name, hub) if hub else (name,)


def _first_that_runs(tried: list[Attempt]) -> tuple[Attempt | None, str]:
    """What runs, or None and what transformers says. Only what a model's check refuses leads to the next."""
    for one in tried:
        if not one.refused_when_made:
            if not one.refused_when_run:
                return one, ""
            return None, one.refused_when_run[0].told or one.refused_when_run[0].text
    first = tried[0].refused_when_made[0]
    return None, first.told or first.text


def _not_asked(one: Attempt, asked: Switches) -> Offer:
    meant = "attn_implementation is not set" if asked.implementation is None else "another was asked for"
    refusal = Refusal(
        meant,
        source("resolve", asked.release),
        switch=f"attn_implementation={asked.implementation}" if asked.implementation else "",
    )
    return one.offer(before=(refusal,))


def _notes(tried: list[Attempt], p: AttentionParams, env: Environment, asked: Switches) -> tuple[str, ...]:
    notes = [note for one in tried for note in one.notes]
    device, alibi = env.device.type, p.core_attention_bias_type == "alibi"
    if asked.assumed_release:
        notes.append("the release of transformers is assumed: state it by the switch transformers=VERSION")
    if (
        asked.implementation is not None
        and asked.replaced(asked.implementation, device) != asked.implementation
    ):
        notes.append(
            f"the model names {', '.join(asked.compatible)} in _compatible_flash_implementations, so that "
            f"{asked.implementation} is replaced"
        )
    if not asked.sdpa and not asked.model_flags_set:
        notes.append("classes of such models say _supports_sdpa = False")
    if alibi:
        notes.append("as falcon does it; bloom and mpt have eager alone: the switch _supports_sdpa=false")
    if not asked.model_flags_set:
        notes.append(
            "the model is taken to support every implementation; what its class says otherwise is said by "
            "the switches _supports_sdpa, _supports_flash_attn and _supports_flex_attn"
        )
    return tuple(dict.fromkeys(notes))
