"""Which releases' choosers were read, and where."""

from __future__ import annotations

from typing import NamedTuple

from attnsel.environment.versions import Version

_READ = tuple(
    Version.parse(text)
    for text in (
        *("2.2.2", "2.3.1", "2.4.0", "2.5.0", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1"),
        *("2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1"),
    )
)
"""2.4.0 as source (MetaX-MACA/mcPytorch, commit 37348663, whose chooser is PyTorch's); the others as the
machine code of libtorch_cuda.so and libtorch_cpu.so of PyPI's wheel for Linux, whose symbols name each check,
whose constants are the limits and whose warnings carry their line in sdp_utils.cpp, with sdp_utils_cpp.h from
the wheel."""


class Read(NamedTuple):
    """``release`` was read for the one asked about; ``inferred``: why that one, "" where it is the same."""

    release: Version
    inferred: str = ""


def read_for(release: Version) -> Read:
    """The release whose source answers for ``release``: of the same minor, or else the newest before it."""
    if release in _READ:
        return Read(release)
    same = [known for known in _READ if known[:2] == release[:2]]
    before = [known for known in same or _READ if known <= release]
    found = before[-1] if before else (same or _READ)[0]
    what = f"the chooser of {release} itself was not read"
    if found[:2] == release[:2]:
        return Read(found, f"{what}; patch releases seldom change it")
    return Read(found, f"{what}; whether it differs is not known")
