"""What comes of small calls is what recorded_calls/*.txt say (tests/support/recorded_calls.py)."""

from __future__ import annotations

import pytest

from recorded_calls import FOLDER, now


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_what_comes_of_small_calls(name: str) -> None:
    assert now(name).splitlines() == (FOLDER / f"{name}.txt").read_text().splitlines()
