"""A kernel that refuses what the rules allowed: its own words, and the rules that may explain them.

Or one that ran and was wrong: the figures. What was refused is shared by the process, so that later calls go
straight to a candidate that works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import torch

from attnsel import debug
from attnsel.backends.registry import CANDIDATES
from attnsel.base.processes import ForkSafeLock
from attnsel.decision import Selection, select
from attnsel.environment import Environment
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.rules import REGISTRY
from attnsel.runtime.kernels import CannotPrepare, is_kernel_refusal
from attnsel.settings import Settings
from attnsel.verdicts.reasons import NO_EVIDENCE, WRONG_NUMBERS, Evidence, Refusal

_MOST_REFUSALS = 256
_MOST_LIKELY = 3
_NEAR = 4  # minor versions: what refuses a call further off is another story

_evidence: Evidence = NO_EVIDENCE
_lock = ForkSafeLock()


class WrongNumbers(Exception):
    """A kernel's numbers are not tiled's; the message has the figures."""


def evidence() -> Evidence:
    """What kernels refused in this process so far."""
    return _evidence


def forget() -> None:
    """Forget what kernels refused."""
    global _evidence
    with _lock:
        _evidence = NO_EVIDENCE


def record_refusals(refusals: Iterable[Refusal], settings: Settings) -> None:
    """Share refusals with later calls, and say each once. The oldest of too many are forgotten."""
    global _evidence
    for refusal in refusals:
        with _lock:
            if refusal in _evidence.refusals:
                continue
            _evidence = Evidence((*_evidence.refusals[-_MOST_REFUSALS + 1 :], refusal))
        words = f"{refusal.message} ({refusal.hint})" if refusal.hint else refusal.message
        wrong = refusal.code == WRONG_NUMBERS
        debug.warn_fallback(refusal.candidate, words, settings, wrong=wrong)


def is_refusal(error: BaseException, name: str) -> bool:
    """Whether an error met on the way of a call says that this candidate does not take it, and another may.

    Bad input, memory that is not there, a device that is lost and an interrupt say nothing of the kind.
    """
    if isinstance(error, (CannotPrepare, WrongNumbers)):
        return True
    if isinstance(error, InvalidInput) or not is_kernel_refusal(error) or _is_of_a_hook(error):
        return False
    return isinstance(error, (RuntimeError, ValueError, *_of_the_library(name)))


def _is_of_a_hook(error: BaseException) -> bool:
    """Whether it was raised by what the user's program put into PyTorch: hooks on what autograd saves, modes
    that see every operator."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    codes = [getattr(hook, "__code__", None) for hook in top(True) or ()]
    trace = error.__traceback__
    while trace is not None:
        code, module = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__"))
        sees_operators = code.co_name in ("__torch_dispatch__", "__torch_function__")
        if code in codes or (sees_operators and module.partition(".")[0] not in ("torch", "attnsel")):
            return True
        trace = trace.tb_next
    return False


def _of_the_library(name: str) -> tuple[type[BaseException], ...]:
    """The exceptions that a candidate's record names, as far as they can be imported."""
    found = []
    for path in CANDIDATES[name].refusals:
        with contextlib.suppress(ImportError, AttributeError):
            found.append(_named(path))
    return tuple(found)


def _named(path: str) -> Any:
    """The object behind "module:name"."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def refusal_of(selection: Selection, error: BaseException) -> Refusal:
    """The evidence that the chosen candidate's ``error`` is."""
    name = selection.backend
    assert name is not None
    message = str(error) or type(error).__name__
    if isinstance(error, WrongNumbers):
        return Refusal(name, selection.params, message, code=WRONG_NUMBERS)
    return Refusal(
        name, selection.params, message, likely_rules(name, message, selection.params, selection.environment)
    )


def likely_rules(name: str, message: str, p: AttentionParams, env: Environment) -> tuple[str, ...]:
    """Codes of rules for this candidate, the likeliest first; at most three.

    Rules that stand for a sentence of the message; "No execution plans support the graph" says nothing, so
    then the rules that refuse the same call on the nearest older and newer release of its library, if one
    near by does. None for a library whose words nobody has studied.
    """
    record = CANDIDATES[name]
    if not record.explain_refusal:
        return ()
    found = _named(record.explain_refusal)(message)
    found = found or _on_neighbours(name, record.library, p, env)
    return tuple(dict.fromkeys(found))[:_MOST_LIKELY]


def _on_neighbours(name: str, library: str, p: AttentionParams, env: Environment) -> Iterator[str]:
    current: Version | None = getattr(env, library)
    if current is None:
        return
    edges = {
        edge for rule in REGISTRY.rules.values() if name in rule.candidates for edge in rule.edges(library)
    }
    newer = sorted(edge for edge in edges if edge > current)
    older = sorted((edge for edge in edges if edge < current), reverse=True)
    for side in (older, newer):
        for edge in side:
            if edge.major != current.major or abs(edge.minor - current.minor) > _NEAR:
                break
            candidate = select(p, env.replace(**{library: edge}))[name]
            codes = [reason.code for reason in candidate.reasons if not reason.unknown]
            if codes:
                yield from codes
                break
