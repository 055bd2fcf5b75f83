"""Of a large grid the gate takes one case in n; the others are slow. And fixtures that folders share."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest

from added_rule import added_rule as added_rule
from switches import no_switches_from_outside as no_switches_from_outside


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """``@pytest.mark.thinned(n)``: by the name of a case, so that it is the same one everywhere, and every
    value of every parameter is in some."""
    for item in items:
        thinned = item.get_closest_marker("thinned")
        if thinned is not None and zlib.crc32(item.nodeid.rpartition("::")[2].encode()) % thinned.args[0]:
            item.add_marker(pytest.mark.slow)
