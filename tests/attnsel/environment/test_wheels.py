"""Which wheel of a FlashAttention package fits a machine, and what is said where none does."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.environment.wheels import NoWheel, flash_attn_wheel


def machine(torch="2.8.0", cuda="12.8", python="3.12", **more) -> Environment:
    return Environment.describe("A100", torch=torch, cuda=cuda, python=python, **more)


def test_a_torch_that_is_loaded_is_asked_for_its_abi(monkeypatch):
    env = machine(torch="2.5.1", cuda="12.4").replace(detected=True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    ours = SimpleNamespace(__version__="2.5.1+nv", _C=SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True))
    monkeypatch.setitem(sys.modules, "torch", ours)
    assert flash_attn_wheel(env).new_abi
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert flash_attn_wheel(env) == NoWheel("flash-attn has no wheels for aarch64, only for x86_64", None)


# ---- as a way out --------------------------------------------------------------------------------------


def way_out(**versions):
    found = select(AttentionParams(), machine(**versions), policy=Policy(backend="flash_attn.2")).unlocks
    [unlock] = [unlock for unlock in found if unlock.candidate == "flash_attn.2"]
    return unlock


def test_a_way_out_says_that_it_builds():
    unlock = way_out(torch="2.13.0", cuda="13.0")
    assert unlock.change.endswith(" (no wheel fits: built here)")
    assert unlock.install.built_here
    assert unlock.paste == "pip install 'flash-attn==2.8.3.post2' --no-build-isolation"
    nothing = "no release of flash-attn has a wheel for torch 2.13, CUDA 13, Python 3.12"
    nearest = "the nearest is for torch 2.8, CUDA 12, Python 3.12"
    assert unlock.install.why == (f"{nothing}; {nearest}: it is compiled here, with nvcc and for hours",)


def test_what_is_proposed_has_a_wheel_where_an_older_release_has_one():
    """torch 2.6 for CUDA 12.4 has the old ABI, for which 2.7.4 is the last with a wheel."""
    for versions, version in (({"torch": "2.6.0", "cuda": "12.4"}, "2.7.4"), ({}, "2.8.3")):
        unlock = way_out(**versions)
        assert unlock.change.startswith(f"install flash-attn ≥ {version}")
        assert f"/v{version}.post1/" in unlock.paste
