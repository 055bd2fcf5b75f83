"""``ATTNSEL_SELFCHECK=all``: kernels that are right are never found to be wrong."""

from __future__ import annotations

from attention_numbers import DEFINITION, Choices, cases, valid_case
from harness import Case, target_of


def checked_case(choose: Choices) -> Case:
    backend = choose.of((None, "sdpa.flash", None, "sdpa.math", None))
    return valid_case(choose, selfcheck="all", backend=backend)


TARGET = target_of("selfcheck", cases(checked_case), DEFINITION, gate=100)
