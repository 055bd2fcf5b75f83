"""Whether hypothesis draws the same each time; what may be skipped; when Python looks for garbage.

And fixtures that folders share.
"""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

import known_skips
from added_rule import added_rule as added_rule
from records import record as record
from switches import no_switches_from_outside as no_switches_from_outside

# The gate draws the same cases each time; HYPOTHESIS_PROFILE=nightly draws others, and remembers what failed.
settings.register_profile(
    "gate", deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("nightly", deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))
# Seldom, and never in what was imported: looking for garbage there took a third of the engine's own time.
gc.set_threshold(100_000, 20, 20)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    known_skips.watch(config)
