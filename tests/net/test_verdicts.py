"""The engine answers as it did when the record was taken. How to read and accept a change: verdicts.py."""

from __future__ import annotations

import pytest

from attnsel.rules import REGISTRY
from verdicts import (
    NOT_REACHED,
    WAYS_OUT,
    answer,
    before_digests,
    changes,
    files,
    other_ways_out,
    reach,
    read,
    told,
    ways_out,
)


def test_every_answer_is_the_recorded_one():
    record = read(files())
    assert len(record) > 3000
    changed = changes(record, answer)
    if changed:
        pytest.fail(told(record, changed), pytrace=False)


def test_ways_out_are_the_recorded_ones():
    record = read([WAYS_OUT])
    assert len(record) == 300
    changed = changes(record, ways_out)
    if changed:
        pytest.fail(told(record, changed), pytrace=False)


def test_every_code_is_reached_from_both_sides_of_its_bound():
    missing = reach(read(files()))
    if missing:
        pytest.fail(
            "\n".join([*missing, "to ask about them: python tests/proof/net/draw.py --add"]), pytrace=False
        )
    assert set(NOT_REACHED) <= set(REGISTRY.pages)


@pytest.mark.slow
def test_every_way_out_of_every_question_is_the_recorded_one():
    changed = other_ways_out()
    if changed:
        pytest.fail(told(before_digests(changed), changed), pytrace=False)
