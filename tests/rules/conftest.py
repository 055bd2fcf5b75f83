"""What the specification-style rule tests share: which codes speak against a candidate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules import REGISTRY, load_all
from attnsel.verdicts.verdict import Unknown, Violation


def _findings(candidate: str, env: Environment, **params: Any) -> dict[str, Violation | Unknown]:
    load_all()
    p = AttentionParams(**params)
    return {
        rule.code: finding
        for rule in REGISTRY.rules.values()
        if candidate in rule.candidates
        and rule.applies(env)
        and rule.concerns(p)
        and (finding := rule.find(p, env)) is not None
    }


@pytest.fixture(scope="session")
def findings() -> Callable[..., dict[str, Violation | Unknown]]:
    """``findings("cudnn", env, **fields)``: every finding by its code."""
    return _findings


@pytest.fixture(scope="session")
def codes() -> Callable[..., set[str]]:
    """``codes("cudnn", env, **fields)``: the codes of the rules that do not say yes."""
    return lambda candidate, env, **params: set(_findings(candidate, env, **params))
