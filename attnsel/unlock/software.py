"""Software as one consistent set: a build of torch, and what is installed beside it.

A wheel of torch pins cuDNN and Triton to one release each, so a change of one is a change of all. What is tried,
in this order: what torch pins anyway; another torch whose pins do; another release of one package in place of
what torch pins (an override). A torch that was stated comes before another one, and one that nobody stated
after it. Which set works is asked of the engine, by whoever walks through these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from attnsel._published import PUBLISHED
from attnsel.candidates import OLDEST_TORCH
from attnsel.environment import Environment
from attnsel.releases import BUILDS, Build, builds_of, runs_on
from attnsel.versions import Version
from attnsel.wheels import Wheel, flash_attn_wheel

Wanted = Mapping[str, Version]
"""By component, the nearest version that is known to help."""

FRONTENDS = Version(1, 20), Version(1, 29)
"""What our extra `cudnn` takes: from the first, below the second (pyproject.toml)."""

_MOST_RELEASES = 4  # tried of one package: rules seldom go back and forth more often


class Software(NamedTuple):
    """``env`` with these versions; ``build`` is its torch, where that is known. ``overrides`` names what is
    installed in place of the build's own pin."""

    env: Environment
    build: Build | None
    moved: bool  # torch, or the CUDA it is built for, is not the one of the question
    overrides: tuple[str, ...]


def build_here(env: Environment) -> Build | None:
    """The build that a machine has, or is assumed to have."""
    if env.torch is None or env.cuda is None:
        return None
    same = (build for build in builds_of(env.torch) if build.cuda[:2] == env.cuda[:2])
    return next(same, None)


def software_sets(env: Environment, wanted: Wanted) -> Iterator[Software]:
    """Sets with all that is wanted, in the order in which they should be tried.

    With nothing wanted: another torch that has code for this GPU.
    """
    here = build_here(env)
    stays = not wanted.keys() & {"torch", "cuda"} and bool(wanted) and _may_stay(env, here)
    stated = "torch" not in env.assumed
    free = [_with_build(env, wanted, build, here) for build in _others(env, wanted, here)]
    if stays:
        yield from _beside(env, wanted, here, override=False)
        if stated:
            yield from _beside(env, wanted, here, override=True)
    if "flash_attn" in wanted and not stated:
        # A torch that flash-attn has a wheel for, before one for which it would be compiled.
        yield from (each for sets in free for each in sets if has_wheel(each.env))
    newer = [s for s in free if s and (here is None or s[0].build.torch >= here.torch)]
    yield from (each for sets in newer for each in sets if not each.overrides)
    if stays and not stated:
        yield from _beside(env, wanted, here, override=True)
    yield from (each for sets in free for each in sets)
