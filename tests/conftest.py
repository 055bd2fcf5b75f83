"""Of a large grid the gate takes one case in n; the others are slow. Whether hypothesis draws the same each
time; what may be skipped. And fixtures that folders share."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings

import known_skips
from added_rule import added_rule as added_rule
from switches import no_switches_from_outside as no_switches_from_outside

# The gate draws the same cases each time; HYPOTHESIS_PROFILE=nightly draws others, and remembers what failed.
settings.register_profile(
    "gate", deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("nightly", deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))


def pytest_configure(config: pytest.Config) -> None:
    known_skips.watch(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """``@pytest.mark.thinned(n)``: by the name of a case, so that it is the same one everywhere, and every
    value of every parameter is in some."""
    for item in items:
        thinned = item.get_closest_marker("thinned")
        if thinned is not None and zlib.crc32(item.nodeid.rpartition("::")[2].encode()) % thinned.args[0]:
            item.add_marker(pytest.mark.slow)
