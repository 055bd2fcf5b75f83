"""Random questions, machines and policies: wide, seeded, and legal."""

from __future__ import annotations

import random
from collections.abc import Iterator

from attnsel import AttentionParams, Environment, Policy
from draw import random_question


def questions(seed: int, count: int) -> Iterator[tuple[AttentionParams, Environment, Policy]]:
    """``count`` legal questions, each on some machine under some policy, drawn as those of the net are."""
    source = random.Random(seed)
    while count:
        drawn = random_question(source)
        if drawn is not None:
            p, env, policy, _ = drawn.parts
            yield p, env, policy
            count -= 1
