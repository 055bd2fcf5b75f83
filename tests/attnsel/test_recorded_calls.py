"""What comes of small calls is what recorded_calls/*.txt say (tests/support/recorded_calls.py)."""

from __future__ import annotations

import pytest

from recorded_calls import FOLDER, now
from records import Record


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_what_comes_of_small_calls(name: str, record: Record) -> None:
    record.holds(FOLDER / f"{name}.txt", now(name))
