"""Versions and sets of versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsel.environment.versions import Version, Versions, cudnn, flash_attn_4, torch
from tables import each

betas = st.just(Version(0).beta) | st.integers(0, 99)
MEMBERS = Path(__file__).with_name("members.txt")
versions = st.builds(Version, st.integers(0, 20), st.integers(0, 30), st.integers(0, 30), betas)


@each("written", [None, (), (-1,), 9.1, (1, 2, 3, 4, 5)])
def test_what_is_no_version_is_refused_with_the_value(written):
    with pytest.raises(ValueError, match="not a version") as caught:
        Version.parse(written)
    assert repr(written) in str(caught.value)


@each("specs, inside, outside", [row.split(";") for row in MEMBERS.read_text().splitlines()])
def test_membership(specs, inside, outside):
    span = cudnn(*specs.split())
    assert [text for text in (inside + outside).split() if Version.parse(text) in span] == inside.split()
    assert None not in span


@given(versions, versions)
def test_edges_are_where_membership_changes(low, high):
    low, high = sorted((low, high))
    span = Versions("cudnn", ((low, high.after),))
    assert list(span.edges()) == [low, high.after]
    assert low in span
    assert high.after not in span


@given(versions)
def test_text_and_tuple_are_the_same_version(version):
    assert Version.parse(str(version)) == version


@given(versions.filter(lambda v: v > Version(1)))
def test_a_sample_is_a_member(version):
    assert torch(f"<{version}").sample() in torch(f"<{version}")
    assert torch(f">={version}").sample() in torch(f">={version}")


def test_betas_come_before_their_release():
    named = [Version.parse(text) for text in ("3.0.0", "4.0.0b9", "4.0.0b20", "4.0.0", "4.0.1")]
    assert named == sorted(named)
    assert [str(version) for version in named] == ["3.0.0", "4.0.0b9", "4.0.0b20", "4.0.0", "4.0.1"]
    span = flash_attn_4(">=4.0.0b20,<4.0.0b36", "==4.0.0")
    assert [n for n in (19, 20, 35, 36) if Version.parse(f"4.0.0b{n}") in span] == [20, 35]
    assert named[3] in span
    assert named[4] not in span
    assert str(flash_attn_4("==4.0.0b36")) == "4.0.0b36"
    assert flash_attn_4("<4.0.0b20").sample() == Version.parse("4.0.0b19")
