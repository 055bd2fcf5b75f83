"""The settings of this process: the policy, and how much to print. The only reader of ``ATTNSEL_*``.

The environment is read once, at first use; :func:`configure` reads it again and adds to it;
:func:`override` changes it for one block of code, one thread or task at a time.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from attnsel.base.model import FrozenModel
from attnsel.base.processes import ForkSafeLock
from attnsel.base.suggestions import near, other_names, suggestion
from attnsel.errors import InvalidInput, caller, printable, short
from attnsel.policy import Policy

VARIABLES: dict[str, str] = {
    "ATTNSEL_BACKENDS": "allow",
    "ATTNSEL_DISABLE": "deny",
    "ATTNSEL_ADAPT": "adapt",
    "ATTNSEL_ALLOW_KNOWN_BUGS": "allow_known_bugs",
    "ATTNSEL_DETERMINISTIC": "deterministic",
    "ATTNSEL_MEMORY_LIMIT": "memory_limit",
    "ATTNSEL_FIGURES": "figures",
    "ATTNSEL_PREVIEW": "preview",
    "ATTNSEL_DEBUG": "debug",
    "ATTNSEL_DEBUG_FORMAT": "debug_format",
    "ATTNSEL_DEBUG_FILE": "debug_file",
    "ATTNSEL_DEBUG_RANKS": "debug_ranks",
    "ATTNSEL_CHECK": "check",
    "ATTNSEL_SELFCHECK": "selfcheck",
    "ATTNSEL_STRICT": "strict",
    "ATTNSEL_SILENCE": "silence",
    "ATTNSEL_REPLAY_DIR": "replay_dir",
}
_PREFIX = "ATTNSEL_"
_HINT = re.compile(r"HINT\d{3}|all")


class VariableWarning(UserWarning):
    """A variable that begins with ATTNSEL_ and that nothing reads: probably misspelt. Once for each."""


def _read_selfcheck(value: Any) -> Any:
    """ "0" from 0 and False too, which say it as well in code."""
    return "0" if value is False or (isinstance(value, int) and value == 0) else value


def _read_codes(value: Any) -> Any:
    """``"HINT001, HINT009"`` from a variable, or a sequence of codes; ``all`` stands for every one."""
    if isinstance(value, str):
        value = [part.strip().upper().replace("ALL", "all") for part in value.split(",") if part.strip()]
    if isinstance(value, (list, tuple)):
        for code in value:
            if not (isinstance(code, str) and _HINT.fullmatch(code)):
                raise ValueError(
                    f"{short(code)} is no hint; allowed: all, or codes such as HINT009 "
                    "(attnsel rules --family HINT)"
                )
        return tuple(value)
    return value


class Settings(FrozenModel):
    """The policy, and what is printed about choices."""

    policy: Policy = Policy()
    debug: Literal[0, 1, 2] = Field(
        default=0, description="0: warn on slow paths; 1: a line per new selection; 2: the whole report"
    )
    debug_format: Literal["text", "json"] = Field(
        default="text", description="json: one object per line instead of text"
    )
    debug_file: str | None = Field(
        default=None,
        description="append there, not to standard error; {rank}, {host} and {pid} in it are replaced",
    )
    debug_ranks: Literal["0", "all"] = Field(
        default="0", description="which ranks print: rank 0 alone, or all"
    )
    check: bool = Field(
        default=False, description="read cu_seqlens and masks back from the GPU to check them (synchronises)"
    )
    selfcheck: Annotated[Literal["0", "unproven", "all"], BeforeValidator(_read_selfcheck)] = Field(
        default="unproven", description="whose first call is compared with tiled"
    )
    strict: bool = Field(default=False, description="a call that was probably meant otherwise raises")
    silence: Annotated[tuple[str, ...], BeforeValidator(_read_codes)] = Field(
        default=(), description="HINT codes that are not said, or all"
    )
    replay_dir: str | None = Field(
        default=None, description="a kernel that refuses or is wrong leaves a file there: attnsel replay"
    )


_POLICY_FIELDS = frozenset(Policy.model_fields)
_SETTINGS_FIELDS = frozenset(Settings.model_fields) - {"policy"}

_lock = ForkSafeLock()
_warned: set[str] = set()  # of variables, which are no more than the environment holds
_process: Settings | None = None
_override: ContextVar[Settings | None] = ContextVar("attnsel_settings", default=None)


def current() -> Settings:
    """The settings in force here and now."""
    return _override.get() or _process or _load()


def configure(**changes: Any) -> Settings:
    """Set this process's settings: the environment variables, then ``changes`` on top.

    ``changes`` are fields of :class:`Settings` or :class:`attnsel.Policy`. With none, the environment is
    read afresh and earlier calls are undone. Raises InvalidInput naming the field or the variable.
    """
    global _process
    settings = _changed(_from_environment(os.environ), changes)
    with _lock:
        _process = settings
    _warn_of_unknown(os.environ)
    return settings


@contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Other settings inside a ``with`` block, for this thread or task only."""
    token = _override.set(_changed(current(), changes))
    try:
        yield current()
    finally:
        _override.reset(token)


def _load() -> Settings:
    global _process
    with _lock:
        if _process is None:
            _process = _from_environment(os.environ)
        settings = _process
    _warn_of_unknown(os.environ)
    return settings


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that look like ours and that nothing reads, each with the one that was meant, or ""."""
    meant = {field: variable for variable, field in VARIABLES.items()}
    meant |= {variable.removeprefix(_PREFIX).lower(): variable for variable in VARIABLES}
    found = {}
    for name in sorted(environ):
        if name.upper().startswith(_PREFIX) and name not in VARIABLES:
            word = name[len(_PREFIX) :].lower()
            key = word if word in meant else near(word, meant, other_names("field"))
            found[name] = "" if key is None else meant[key]
    return found


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    for name, meant in unknown_variables(environ).items():
        with _lock:
            if name in _warned:
                continue
            _warned.add(name)
        what = f"did you mean {meant}?" if meant else f"allowed: {', '.join(VARIABLES)}"
        text = f"{printable(name)} is set and nothing reads it: {what}"
        warnings.warn(text, VariableWarning, stacklevel=caller().stacklevel)


def _changed(settings: Settings, changes: dict[str, Any]) -> Settings:
    unknown = sorted(set(changes) - _POLICY_FIELDS - _SETTINGS_FIELDS - {"policy"})
    if unknown:
        allowed = ", ".join(sorted(_POLICY_FIELDS | _SETTINGS_FIELDS | {"policy"}))
        meant = suggestion(unknown[0], (*_POLICY_FIELDS, *_SETTINGS_FIELDS))
        said = f"there is no such setting: {meant} Allowed" if meant else "there is no such setting; allowed"
        raise InvalidInput(unknown[0], changes[unknown[0]], f"{said}: {allowed}")
    policy = Settings(policy=changes["policy"]).policy if "policy" in changes else settings.policy
    policy_changes = {name: value for name, value in changes.items() if name in _POLICY_FIELDS}
    if policy_changes:
        policy = policy.replace(**policy_changes)
    rest = {name: value for name, value in changes.items() if name in _SETTINGS_FIELDS}
    return settings.replace(policy=policy, **rest)


def _from_environment(environ: Any) -> Settings:
    policy: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for variable, field in VARIABLES.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        value: Any = text
        if field == "debug":
            value = {"0": 0, "1": 1, "2": 2}.get(text, text)
        if field == "allow_known_bugs":
            value = tuple(part.strip().upper().replace("ALL", "all") for part in text.split(","))
        try:
            # One at a time, so that an error names the variable that holds it.
            (Policy if field in _POLICY_FIELDS else Settings)(**{field: value})
        except InvalidInput as error:
            raise InvalidInput(variable, text, error.allowed) from None
        (policy if field in _POLICY_FIELDS else rest)[field] = value
    return Settings(policy=Policy(**policy), **rest)
