"""What a way out installs: one set that exists, fits together, and is eligible as a whole."""

from __future__ import annotations

import re

import pytest

from attnsel import select
from attnsel.backends.registry import OLDEST_TORCH
from attnsel.environment.releases import FRONTENDS, ON_ARM, runs_on, torch_builds
from attnsel.environment.versions import Version
from attnsel.environment.wheels import Wheel, flash_attn_wheel
from attnsel.selection.unlock.software import exact, package_of
from questions import questions

TORCH = re.compile(
    r"pip install 'torch==([0-9.]+)(?:\+cu\d+)?'(?: --index-url https://download.pytorch.org/whl/(cu\d+))?"
)
PACKAGE = re.compile(
    r"pip install (--no-deps )?'([a-z0-9-]+)(?:\[cu13\])?==([0-9.a-z]+)'( --no-build-isolation)?"
)
ON_ROCM = "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE "
SOURCES = ("git clone --recursive", "cd flash-attention/hopper")


def resolved(selection, unlock):
    """Carries the commands out on the question's machine by the committed tables, and compares the result."""
    env, install = selection.environment, unlock.install
    _, after, _ = unlock.apply(selection.params, env, selection.policy)
    there = {c: getattr(env, c) for c in ("torch", "cuda", "cudnn", "triton", "cudnn_frontend")}
    build = None
    for line in install.commands:
        if line.startswith(ON_ROCM):
            assert after.device.type == "rocm", line
            line = line.removeprefix(ON_ROCM)
        torch, package = TORCH.fullmatch(line), PACKAGE.fullmatch(line)
        if torch:
            (build,) = (b for b in torch_builds() if (str(b.torch), b.index) == (torch[1], torch[2] or ""))
            there |= {"torch": build.torch, "cuda": build.cuda, "cudnn": build.cudnn, "triton": build.triton}
        elif package:
            name = _component(package[2], there["cuda"])
            version = Version.parse(package[3])
            assert exact(name, version, there["cuda"]) == package[3], line
            if build is not None and name in ("cudnn", "triton"):
                assert package[1], f"{line} would be undone by torch's own pin"
                assert any("pip reports a conflict" in sentence for sentence in install.why)
            there[name] = version
        elif line.startswith("pip install https://"):
            assert isinstance(flash_attn_wheel(after, lambda version: version == after.flash_attn), Wheel)
        else:
            assert line.startswith(("pip install flash-attn-3 --index-url", *SOURCES)), line
    assert {c: getattr(after, c) for c in there} == there, install
    assert after.torch >= OLDEST_TORCH
    if "nvidia-cudnn-frontend" in unlock.paste:
        assert Version(*after.cudnn_frontend[:2]) in FRONTENDS
    if build is not None and after.arch not in (None, *ON_ARM):
        assert runs_on(build, after.arch)
    assert len(install.why) <= 2


def _component(package, cuda):
    names = ("cudnn", "triton", "cudnn_frontend", "flash_attn", "flash_attn_4")
    return next(name for name in names if package_of(name, cuda) == package)


def refused(seed, count):
    """Selections of random questions that have a way out by software."""
    for p, env, policy in questions(seed, 10**6):
        if count == 0:
            return
        selection = select(p, env, policy=policy)
        if env.platform == "linux" and any(unlock.install for unlock in selection.unlocks):
            count -= 1
            yield selection


@pytest.mark.parametrize(
    ("seed", "count"), [(17, 12), pytest.param(18, 300, marks=pytest.mark.slow)], ids=["12", "300"]
)
def test_every_install_of_random_refused_questions_resolves(seed, count):
    seen = 0
    for selection in refused(seed, count):
        for unlock in selection.unlocks:
            if unlock.install is not None:
                resolved(selection, unlock)
                seen += 1
    assert seen > count
