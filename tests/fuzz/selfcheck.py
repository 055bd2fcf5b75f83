"""``ATTNSEL_SELFCHECK=all``: kernels that are right are never found to be wrong."""

from __future__ import annotations

from attention_numbers import Choices, attempt, cases, script, valid_case
from harness import Case, Target


def checked_case(choose: Choices) -> Case:
    backend = choose.of((None, "sdpa.flash", None, "sdpa.math", None))
    return valid_case(choose, selfcheck="all", backend=backend)


TARGET = Target("selfcheck", cases(checked_case), attempt, script, gate=100)
