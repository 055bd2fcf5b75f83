"""Versions and sets of versions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsel.versions import Version, Versions, cudnn, torch

versions = st.builds(Version, st.integers(0, 20), st.integers(0, 30), st.integers(0, 30))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("9.1.0", (9, 1, 0)),
        ("9.1", (9, 1, 0)),
        ("9.10.2.21", (9, 10, 2)),
        ("2.13.0+cu128", (2, 13, 0)),
        ("2.14.0a0+git1234", (2, 14, 0)),
        (8907, (8, 9, 7)),
        ("90100", (9, 1, 0)),
        (91002, (9, 10, 2)),
        ((9, 1), (9, 1, 0)),
    ],
)
def test_every_way_of_writing_a_version_is_read(written, read):
    assert Version.parse(written) == read


@pytest.mark.parametrize("written", ["", "nine", "9.x", None, (), (-1,), 12, 9.1, "-1", (1, 2, 3, 4, 5)])
def test_what_is_no_version_is_refused_with_the_value(written):
    with pytest.raises(ValueError, match="not a version") as caught:
        Version.parse(written)
    assert repr(written) in str(caught.value)


@pytest.mark.parametrize(
    ("specs", "inside", "outside"),
    [
        (("<9.5.0",), ["9.4.9", "8.9.7"], ["9.5.0", "9.10.0"]),
        (("<=9.9.0",), ["9.9.0"], ["9.9.1"]),
        ((">9.9.0",), ["9.9.1"], ["9.9.0"]),
        ((">=9.2.0,<9.6.0",), ["9.2.0", "9.5.1"], ["9.1.1", "9.6.0"]),
        (("==9.10.0", "==9.10.1"), ["9.10.0", "9.10.1"], ["9.9.0", "9.10.2"]),
        ((), ["0.0.1", "99.0.0"], []),
    ],
)
def test_membership(specs, inside, outside):
    span = cudnn(*specs)
    assert all(Version.parse(text) in span for text in inside)
    assert not any(Version.parse(text) in span for text in outside)
    assert None not in span


@pytest.mark.parametrize("spec", ["9.5", "~=9.5", "!=9.5.0", ">=9.6,<9.5", "<", ">=9.x"])
def test_a_specifier_that_is_no_interval_is_refused(spec):
    with pytest.raises(ValueError, match="specifier"):
        cudnn(spec)


@given(versions, versions)
def test_edges_are_where_membership_changes(low, high):
    low, high = sorted((low, high))
    span = Versions("cudnn", ((low, high.next_patch()),))
    assert list(span.edges()) == [low, high.next_patch()]
    assert low in span
    assert high.next_patch() not in span


@given(versions)
def test_text_and_tuple_are_the_same_version(version):
    assert Version.parse(str(version)) == version


@given(versions.filter(lambda v: v > Version(1)))
def test_a_sample_is_a_member(version):
    assert torch(f"<{version}").sample() in torch(f"<{version}")
    assert torch(f">={version}").sample() in torch(f">={version}")
