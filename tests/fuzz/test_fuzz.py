"""The gate's share of every fuzz target: the same cases each time. ``run.py`` draws others for hours."""

from __future__ import annotations

import pytest
from harness import fuzz
from targets import TARGETS

SEED = 20261122
# How a case ends that shows something, and in which share of them: a refusal is an answer, and no number.
SHOWN = {
    "numbers": ("right", 0.6),
    "repeats": ("right", 0.6),
    "padding": ("right", 0.6),
    "selfcheck": ("right", 0.6),
    "flash": ("right", 0.9),
    "f_sdpa": ("right", 1.0),
    "wrong_types": ("InvalidInput", 0.5),
    "commands": ("answered", 0.1),
    "json_files": ("answered", 0.05),
    "executed": ("alike", 1.0),
    "rank_faults": ("", 1.0),  # each of its words says what a rank was told
}


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_wrong(name: str) -> None:
    target = TARGETS[name]
    tally = fuzz(target, target.gate, SEED)
    word, share = SHOWN[name]
    shown = sum(count for ended, count in tally.items() if ended.startswith(word))
    assert shown >= share * target.gate // 1, tally
