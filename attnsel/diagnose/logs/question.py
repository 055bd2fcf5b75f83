"""The question and the machine of a logged call, as far as the text goes, and what was taken for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from attnsel.decision import DEFAULT_POLICY
from attnsel.diagnose.logs.found import NOTHING, Finding, LoggedCall
from attnsel.diagnose.logs.message import Library
from attnsel.diagnose.logs.parsers import libraries
from attnsel.diagnose.logs.scrub import scrub
from attnsel.environment import COMPONENTS, Environment
from attnsel.errors import InvalidInput, short
from attnsel.params import AttentionParams
from attnsel.policy import Policy

_T = TypeVar("_T")

GPU = "H100"  # where nothing says which: what most logs of our list came from

_MATTER = (
    "dtype",
    "qkv_layout",
    "batch_size",
    "num_heads",
    "max_seqlen_q",
    "head_dim_qk",
    "attn_mask_type",
    "is_training",
)
"""What a rule nearly always reads: named where it was taken for granted."""


class Stated(NamedTuple):
    """What a user says beside the log, which wins over it: fields, ``gpu`` and versions, a whole environment,
    the policy, and what becomes of the finished question (where tensors lie)."""

    params: Mapping[str, Any] = NOTHING
    machine: Mapping[str, Any] = NOTHING
    environment: Environment | None = None
    policy: Policy = DEFAULT_POLICY
    finish: Callable[[AttentionParams], AttentionParams] = lambda p: p


class Rebuilt(NamedTuple):
    """``described``: whether log or user say anything by which rules could answer. ``stated``: fields,
    ``gpu`` and components that they say. ``assumed``: in words, what was
    taken for what nobody says. ``unread``: what the log says and could not be used."""

    params: AttentionParams
    environment: Environment
    described: bool
    stated: tuple[str, ...]
    assumed: tuple[str, ...]
    unread: tuple[str, ...]


def rebuild(call: LoggedCall, machine: Iterable[Finding], stated: Stated) -> Rebuilt:
    """The question behind a call. Raises InvalidInput where what the user states is wrong."""
    unread: list[str] = [one for finding in call.findings for one in finding.unread]
    there: dict[str, Any] = {}
    for finding in machine:
        for name, value in finding.environment.items():
            if there.setdefault(name, value) != value:
                unread.append(f"{name} = {short(value, str)}: the log says {short(there[name], str)} before")
    supposed = call.supposed
    logged = {**_of(supposed, COMPONENTS, "gpu", "platform"), **there, **call.environment}
    usual = library_of(call).usual
    fields = {**usual, **_of(supposed, AttentionParams.model_fields), **call.params}
    env = _environment(logged, stated, unread)
    p = stated.finish(_params(fields, stated.params, unread))
    said = {*call.params, *stated.params} & p.model_fields_set
    described = bool(said) or "gpu" in call.environment
    where = {*there, *call.environment, *stated.machine}
    return Rebuilt(
        p,
        env,
        described,
        tuple(sorted(said | where)),
        tuple(_assumed(p, env, said, where, supposed, stated)),
        tuple(dict.fromkeys(map(scrub, unread))),
    )


def library_of(call: LoggedCall) -> Library:
    """The declarations of the library whose call it is."""
    return next(library for library in libraries() if library.name == call.library)


def _of(facts: Mapping[str, Any], names: Iterable[str], *more: str) -> dict[str, Any]:
    allowed = {*names, *more}
    return {name: value for name, value in facts.items() if name in allowed}


def _params(logged: Mapping[str, Any], stated: Mapping[str, Any], unread: list[str]) -> AttentionParams:
    """The call; what the log says and cannot be is left out, and said."""
    fields = {**logged, **stated}
    while isinstance(made := _made(AttentionParams, fields), InvalidInput):
        name = made.field.split(".")[0]
        if name not in fields:  # a contradiction of several: the log's go, what it said last first
            name = next((one for one in reversed(fields) if one not in stated), "")
        if name in stated or not name:
            raise made
        unread.append(f"{name} = {short(fields.pop(name), str, 60)}: {made.allowed}")
    return made


def _environment(logged: Mapping[str, Any], stated: Stated, unread: list[str]) -> Environment:
    if stated.environment is not None:
        return stated.environment
    facts = {"gpu": GPU, **logged, **stated.machine}
    more = {name: facts.pop(name) for name in tuple(facts) if name not in COMPONENTS and name != "gpu"}
    while isinstance(made := _made(Environment.describe, facts), InvalidInput):
        name = made.field
        if name in stated.machine or name not in facts:
            raise made
        why = "not understood" if name == "gpu" else made.allowed
        unread.append(f"{name} = {short(facts.pop(name), str, 60)}: {why}")
    return made.replace(**more) if more else made


def _made(make: Callable[..., _T], facts: Mapping[str, Any]) -> _T | InvalidInput:
    try:
        return make(**facts)
    except InvalidInput as error:
        return error


def _assumed(
    p: AttentionParams,
    env: Environment,
    said: set[str],
    where: set[str],
    supposed: Mapping[str, Any],
    stated: Stated,
) -> Iterable[str]:
    if "gpu" not in where and stated.environment is None:
        why = ", as its message needs" if "gpu" in supposed else ""
        yield f"GPU {env.device.name or env.device.type}{why}"
    for name, value in supposed.items():
        if name in AttentionParams.model_fields and name not in said:
            yield f"{name} {short(getattr(p, name), str)}, as its message needs"
        elif name in COMPONENTS and name not in where:
            yield f"{name} {short(value, str)}, as its message needs"
    for name in _MATTER:
        if name not in said and name not in supposed:
            yield f"{name} {short(getattr(p, name), str)}"
