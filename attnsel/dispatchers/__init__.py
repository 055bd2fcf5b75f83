"""What other libraries' choosers would run for the same question, with every reason they do not give.

====================  ==========================================================
module                is
====================  ==========================================================
``torch``             F.scaled_dot_product_attention
``te``                TransformerEngine's get_attention_backend
``transformers``      attn_implementation
``conditions``        how a row of theirs is read: what has to hold, in words
====================  ==========================================================

A module has ``SWITCHES``, the things of its own that a user may set; ``held()``, those that are set in this
process, as texts by name; and ``dispatch(p, env, switches)``, which is pure.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_args

from attnsel.base.suggestions import near, with_meant
from attnsel.dispatchers.known_bugs import known_bugs
from attnsel.environment import COMPONENTS, Environment
from attnsel.environment.read import newest_read, unread_release
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.verdicts.dispatch import Dispatch, DispatcherName, Offer, Refusal, Switch

__all__ = [
    "DISPATCHERS",
    "Dispatch",
    "Offer",
    "Refusal",
    "Switch",
    "dispatched_by",
    "held_by",
    "switches_of",
]

DISPATCHERS: tuple[str, ...] = get_args(DispatcherName)
_RELEASES = {"torch": "torch", "te": "transformer_engine", "transformers": "transformers"}
"""Whose release a dispatcher goes by, as a subject of ``environment/data/read.csv``."""


def switches_of(dispatcher: str) -> dict[str, Switch]:
    """What may be set, by name. Raises InvalidInput for a dispatcher that there is not."""
    return {switch.name: switch for switch in _module(dispatcher).SWITCHES}


def held_by(dispatcher: str, env: Environment) -> dict[str, str]:
    """The switches that are set in this process, by name. Raises InvalidInput."""
    return dict(_module(dispatcher).held(env))


def dispatched_by(
    dispatcher: str, p: AttentionParams, env: Environment, switches: Mapping[str, str] | None = None
) -> Dispatch:
    """What ``dispatcher`` would choose. ``switches`` by name; None takes those of this process.

    Raises InvalidInput for a dispatcher, a switch or a value that there is not.
    """
    held = held_by(dispatcher, env) if switches is None else switches
    return _dispatched(dispatcher, p, env, _checked(dispatcher, held))


@lru_cache(maxsize=4096)
def _dispatched(
    dispatcher: str, p: AttentionParams, env: Environment, switches: tuple[tuple[str, str], ...]
) -> Dispatch:
    # Of other components its own code says what it makes of a number, however new that is.
    subject, there = _RELEASES[dispatcher], env
    if subject in COMPONENTS and unread_release(subject, getattr(env, subject)) is not None:
        there = env.derive(**{subject: newest_read(subject)})
    answer: Dispatch = _module(dispatcher).dispatch(p, there, dict(switches))
    if answer.dispatcher == "te" and answer.chosen is not None:  # which hands the question on as it is
        answer = answer._replace(known_bugs=known_bugs("te", answer.chosen.candidate, p, env))
    release = getattr(env, subject) if subject in COMPONENTS else Version.parse(answer.release)
    newer = unread_release(subject, release)
    if newer is None:
        return answer
    return answer._replace(release=newer.value, read=newer.read_as, inferred=str(newer), unread=newer)


def _module(dispatcher: str) -> Any:
    if dispatcher not in DISPATCHERS:
        allowed = with_meant("dispatcher", dispatcher, f"allowed: {', '.join(DISPATCHERS)}")
        raise InvalidInput("dispatcher", dispatcher, allowed)
    return importlib.import_module(f"attnsel.dispatchers.{dispatcher}")


def _checked(dispatcher: str, held: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    known = switches_of(dispatcher)
    for name, value in held.items():
        if name not in known:
            names = {name.casefold(): name for name in known}
            meant = near(name.casefold(), names)
            hint = f"; has: {', '.join(known)}" if meant is None else f": did you mean {names[meant]}?"
            raise InvalidInput(name, value, f"{dispatcher} has no such switch{hint}")
        if known[name].values and value not in known[name].values:
            raise InvalidInput(name, value, f"allowed: {', '.join(known[name].values)}")
    return tuple(sorted(held.items()))
