"""The second writing of PyTorch's chooser, against rows by hand; and what is recorded of it."""

from __future__ import annotations

import json

from f_sdpa_answers import RECORD, rows
from f_sdpa_chooser import choose
from f_sdpa_rows import ROWS, Row
from tables import each


@each("row", ROWS)
def test_rows_by_hand(row: Row) -> None:
    assert row.releases()
    for release in row.releases():
        assert choose(release, row.case).taken == row.taken, release


def test_the_record_is_what_it_says() -> None:
    assert json.loads(RECORD.read_text(encoding="utf-8")) == json.loads(json.dumps(list(rows())))
