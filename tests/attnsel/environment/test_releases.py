"""What PyTorch's wheels bring, which one was meant, and the frontend inside TransformerEngine's releases."""

from __future__ import annotations

import re
from itertools import pairwise

from packaging.specifiers import SpecifierSet

from attnsel.environment.releases import FRONTENDS, OLDEST, ON_ARM, builds_of, runs_on, torch_builds
from attnsel.environment.versions import Version
from paths import ROOT

V = Version.parse


def test_every_release_has_one_wheel_on_pypi():
    assert list(torch_builds()) == sorted(torch_builds(), key=lambda build: (build.torch, build.cuda))
    assert torch_builds()[0].torch == OLDEST
    for torch in {build.torch for build in torch_builds()}:
        assert [build.index for build in builds_of(torch)].count("") == 1


def test_what_a_release_brings_never_goes_back():
    """Within PyPI's wheels, and for one CUDA, a newer torch has no older cuDNN, NCCL or Triton."""
    for cuda in {None, *(build.cuda for build in torch_builds())}:
        rows = [b for b in torch_builds() if (not b.index if cuda is None else b.cuda == cuda)]
        for older, newer in pairwise(rows):
            assert older.cudnn <= newer.cudnn
            assert older.triton <= newer.triton
            assert older.nccl <= newer.nccl
            assert older.pythons[-1] <= newer.pythons[-1]


def test_a_cuda_compiles_for_what_it_knows():
    """First and last toolkits of architectures, from CUDA's release notes."""
    for build in torch_builds():
        if build.cuda < V("12.8"):
            assert max(build.sass) <= 90
        if build.cuda >= V("13.0"):
            assert min(build.sass) >= 75
        if build.cuda >= V("12.0"):
            assert min(build.sass) >= 50
        assert build.ptx in (None, max(build.sass))
        boards = ON_ARM - set(build.sass)  # which run no code of other GPUs of their generation
        assert not any(runs_on(build, arch) for arch in boards)


def test_the_frontends_are_those_of_the_extra() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r'"nvidia-cudnn-frontend([^;"]+)', project)
    taken = SpecifierSet(extra[1])
    assert all(str(version) in taken for version in FRONTENDS)
    assert str(FRONTENDS[-1]._replace(minor=FRONTENDS[-1].minor + 1)) not in taken
    assert str(FRONTENDS[0]._replace(minor=FRONTENDS[0].minor - 1)) not in taken
