"""The gate's share of every fuzz target: the same cases each time. ``run.py`` draws others for hours."""

from __future__ import annotations

import pytest
from harness import fuzz
from targets import TARGETS

SEED = 20261122


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_wrong(name: str) -> None:
    tally = fuzz(TARGETS[name], TARGETS[name].gate, SEED)
    assert tally.total() >= TARGETS[name].gate // 2
