"""The frontend inside each release of TransformerEngine."""

from __future__ import annotations

import pytest

from attnsel.environment.te_releases import bundled_frontend
from attnsel.environment.versions import Version


@pytest.mark.parametrize(
    ("release", "frontend"),
    [
        ("1.0", "0.9.2"),
        ("1.7", "1.3.0"),
        ("1.13", "1.8.0"),
        ("2.1", "1.10.0"),
        ("2.2.1", "1.11.0"),
        ("2.4", "1.12.0"),
        ("2.14.1", "1.21.0"),
        ("2.16.1", "1.22.0"),
        ("2.17.1", "1.25.0"),
        ("2.18", None),
        ("3.0", None),
        ("0.9", None),
    ],
)
def test_a_release_has_the_frontend_of_its_tag(release, frontend):
    expected = None if frontend is None else Version.parse(frontend)
    assert bundled_frontend(Version.parse(release)) == expected
