"""What a way out installs: one set that exists, fits together, and is eligible as a whole."""

from __future__ import annotations

import re

import pytest

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.backends.registry import OLDEST_TORCH
from attnsel.environment.releases import BUILDS, FRONTENDS, ON_ARM, runs_on
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
SOURCES = ("git clone --recursive", "cd flash-attention/hopper")


def resolved(selection, unlock):
    """Carries the commands out on the question's machine by the committed tables, and compares the result."""
    env, install = selection.environment, unlock.install
    _, after, _ = unlock.apply(selection.params, env, selection.policy)
    there = {c: getattr(env, c) for c in ("torch", "cuda", "cudnn", "triton", "cudnn_frontend")}
    build = None
    for line in install.commands:
        torch, package = TORCH.fullmatch(line), PACKAGE.fullmatch(line)
        if torch:
            (build,) = (b for b in BUILDS if (str(b.torch), b.index) == (torch[1], torch[2] or ""))
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


# ---- what real questions get ------------------------------------------------------------------------


def installs(name, gpu, fields=None, **versions):
    selection = select(AttentionParams(**fields or {}), Environment.describe(gpu, **versions))
    return [u for u in selection.unlocks if u.candidate == name and u.install is not None]


def test_a_torch_that_nobody_stated_is_one_whose_pins_fit_together():
    """Trials, wrong answer 7: cuDNN for CUDA 12 stood beside a torch for CUDA 13."""
    for name in ("cudnn", "sdpa.cudnn"):
        (unlock,) = installs(name, "B200", {"head_dim_qk": 192, "head_dim_v": 128}, cudnn="9.10.1")
        assert unlock.install.commands == ("pip install 'torch==2.11.0'",)
        assert dict(unlock.install.pins)["cudnn"] == "9.19.0.56"
        assert "is the first whose wheels bring cuDNN 9.19.0 (CUDA 13.0)" in unlock.install.why[1]


def test_under_a_torch_that_was_stated_its_pin_is_overridden_and_said():
    """cosmos-framework#153: torch 2.13 pins cuDNN 9.20.0.48."""
    mxfp8 = {"fp8": True, "fp8_meta": {"recipe": {"kind": "mxfp8", "fp8_dpa": True}}}
    (unlock,) = installs("cudnn", "B200", mxfp8, torch="2.13.0")
    assert unlock.paste.splitlines() == [
        "pip install 'torch==2.13.0'",
        "pip install --no-deps 'nvidia-cudnn-cu13==9.21.0.82'",
    ]
    assert unlock.install.why == (
        "cuDNN ≥ 9.21.0 is needed by CUDNN316",
        "torch 2.13.0 pins nvidia-cudnn-cu13==9.20.0.48: pip reports a conflict and goes on; "
        "uv needs override-dependencies",
    )


def test_what_torch_would_not_load_or_attnsel_not_run_on_is_never_offered():
    """Trials, wrong answer 7: Triton 3.2 was put beside torch 2.5, which pins 3.1. And torch raises for a
    minor of cuDNN below the one it was compiled with, so that an older torch is what helps."""
    (unlock,) = installs("triton", "A100", torch="2.5.1")
    assert unlock.install.commands == ("pip install 'torch==2.6.0'",)
    fields = {"max_seqlen_q": 1, "max_seqlen_kv": 4096, "attn_mask_type": "no_mask"}
    for unlock in installs("cudnn", "H100", fields, torch="2.15.0", cudnn="9.26.0"):
        assert "nvidia-cudnn" not in unlock.paste
        assert dict(unlock.install.changes)["torch"] < Version(2, 15)


def test_another_recipe_and_16_bits_are_offered_before_another_gpu():
    """Trials, wrong answer 4 and TensorRT-LLM#17849: the only way out was a B200."""
    meta = {"recipe": {"kind": "current", "fp8_dpa": True}}
    p = AttentionParams(fp8=True, fp8_meta=meta, is_training=False, attn_mask_type="no_mask")
    env = Environment.describe("H100", cudnn="9.20.0")
    found = [u for u in select(p, env).unlocks if u.candidate == "cudnn"]
    assert [(u.change, u.effect) for u in found] == [
        ("FP8 recipe current → delayed (other numbers)", "config"),
        ("fp8_dpa=False (attention in 16 bits)", "config"),
    ]
    delayed, plain = (u.apply(p, env, Policy())[0] for u in found)
    assert (delayed.recipe.kind, delayed.fp8_attention) == ("delayed", True)
    assert (plain.recipe.kind, plain.fp8_attention) == ("current", False)
