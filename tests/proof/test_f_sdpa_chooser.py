"""The second writing of PyTorch's chooser, against rows by hand; and what is recorded of it."""

from __future__ import annotations

import json

import pytest

from f_sdpa_answers import RECORD, ask_drawn, rows
from f_sdpa_chooser import RELEASES, choose
from f_sdpa_rows import ROWS, Row
from tables import each


@each("row", ROWS)
def test_rows_by_hand(row: Row) -> None:
    assert row.releases()
    for release in row.releases():
        assert choose(release, row.case).taken == row.taken, release


def test_the_record_is_what_it_says() -> None:
    assert json.loads(RECORD.read_text(encoding="utf-8")) == json.loads(json.dumps(list(rows())))


_UNMET = {"2.6.0": 0, "2.7.1": 0}
"""Clauses that no question reaches: GPUs before sm50 and beyond sm121 from 2.8 on, which is one."""


@pytest.mark.slow
def test_a_thousand_drawn_questions_for_each_release_meet_every_clause_and_none_is_answered_otherwise() -> (
    None
):
    recent = tuple(release for release in RELEASES if release >= (2, 6, 0))
    answer = ask_drawn(1000, 0, recent)
    assert not answer.differences
    unmet = {".".join(map(str, release)): len(left) for release, left in answer.unmet.items()}
    assert unmet == {name: _UNMET.get(name, 1) for name in unmet}
