"""Which wheel of a FlashAttention package fits a machine, and what is said where none does."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.environment.wheels import (
    NoWheel,
    Wheel,
    flash_attn_wheel,
    install_flash_attn_3,
    install_flash_attn_4,
)
from tables import each


def machine(torch="2.8.0", cuda="12.8", python="3.12", **more) -> Environment:
    return Environment.describe("A100", torch=torch, cuda=cuda, python=python, **more)


def fitting(wanted=None, new_abi=None, **versions) -> Wheel | NoWheel:
    return flash_attn_wheel(machine(**versions), wanted, new_abi)


DOWNLOADS = "https://github.com/Dao-AILab/flash-attention/releases/download/"


@each(
    "torch, cuda, python, release, built",
    [
        ("2.8.0", "12.8", "3.12", "2.8.3.post1", "cu12torch2.8cxx11abiTRUE"),
        ("2.6.0", "12.6", "3.12", "2.8.3.post1", "cu12torch2.6cxx11abiTRUE"),
        # flash-attention#1783: the FALSE wheel of 2.8.2 does not load there, that of 2.7.4.post1 does.
        ("2.6.0", "12.4", "3.11", "2.7.4.post1", "cu12torch2.6cxx11abiFALSE"),
        ("2.5.1", "11.8", "3.12", "2.7.3", "cu11torch2.5cxx11abiFALSE"),
        ("2.2.2", "11.8", "3.8", "2.7.0.post2", "cu11torch2.2cxx11abiFALSE"),
    ],
)
def test_the_newest_wheel_that_fits(torch, cuda, python, release, built):
    found = fitting(torch=torch, cuda=cuda, python=python)
    assert isinstance(found, Wheel), found
    tag = f"cp{python.replace('.', '')}"
    assert found.url == f"{DOWNLOADS}v{release}/flash_attn-{release}%2B{built}-{tag}-{tag}-linux_x86_64.whl"


TORCH_213 = {"torch": "2.13.0", "cuda": "13.0"}
NOTHING_FITS = "no release of flash-attn has a wheel for torch 2.13, CUDA 13, Python 3.12"


@each(
    "versions, why, nearest",
    [
        (TORCH_213, NOTHING_FITS, "torch 2.8, CUDA 12, Python 3.12"),
        ({"python": "3.14"}, "Python 3.14", "torch 2.8, CUDA 12, Python 3.13"),
        ({"torch": "2.9.1"}, "torch 2.9, CUDA 12", "torch 2.8, CUDA 12, Python 3.12"),
        ({"torch": "2.2.0", "cuda": "11.8", "python": "3.13"}, "Python 3.13", "Python 3.12"),
    ],
)
def test_no_wheel_names_the_nearest(versions, why, nearest):
    found = fitting(**versions)
    assert isinstance(found, NoWheel)
    assert why in found.why
    assert found.nearest is not None
    assert found.nearest.where.endswith(nearest)
    assert fitting(**versions, wanted=lambda version: version > (3,)) == NoWheel(found.why, None)


def test_the_other_abi_is_another_wheel():
    assert fitting(new_abi=True).new_abi
    old = fitting(new_abi=False)
    assert isinstance(old, NoWheel)
    assert "old C++ ABI" in old.why
    assert fitting(torch="2.5.1", cuda="12.4", new_abi=True).new_abi


def test_a_torch_that_is_loaded_is_asked_for_its_abi(monkeypatch):
    env = machine(torch="2.5.1", cuda="12.4").replace(detected=True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    ours = SimpleNamespace(__version__="2.5.1+nv", _C=SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True))
    monkeypatch.setitem(sys.modules, "torch", ours)
    assert flash_attn_wheel(env).new_abi
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert flash_attn_wheel(env) == NoWheel("flash-attn has no wheels for aarch64, only for x86_64", None)


@each(
    "env, why",
    [
        (machine().replace(platform="windows"), "windows"),
        (machine(torch=None), "torch, which is not installed"),
        (machine(cuda=None), "CUDA builds"),
    ],
)
def test_machines_without_any_wheel(env, why):
    found = flash_attn_wheel(env)
    assert isinstance(found, NoWheel)
    assert why in found.why
    assert found.nearest is None


def test_how_flash_attn_3_and_4_are_installed():
    index, source = (
        "--index-url https://download.pytorch.org/whl/",
        "cd flash-attention/hopper && python setup.py",
    )
    for versions, line in (
        (TORCH_213, f"{index}cu130"),
        ({"torch": "2.9.1"}, f"{index}cu128"),
        ({"torch": "2.9.1", "cuda": "12.6"}, f"{index}cu126"),
        ({"torch": "2.8.0"}, f"{source} install"),
        ({"torch": "2.9.1", "cuda": None}, f"{source} install"),
    ):
        assert install_flash_attn_3(machine(**versions)).endswith(line)
    assert install_flash_attn_4(machine()) == "pip install --pre flash-attn-4"
    assert install_flash_attn_4(machine(cuda="13.0"), ">=4") == "pip install --pre 'flash-attn-4[cu13]>=4'"


# ---- as a way out --------------------------------------------------------------------------------------


def way_out(**versions):
    found = select(AttentionParams(), machine(**versions), policy=Policy(backend="flash_attn.2")).unlocks
    [unlock] = [unlock for unlock in found if unlock.candidate == "flash_attn.2"]
    return unlock


def test_a_way_out_says_that_it_builds():
    unlock = way_out(**TORCH_213)
    assert unlock.change.endswith(" (no wheel fits: built here)")
    assert unlock.install.built_here
    assert unlock.paste == "pip install 'flash-attn==2.8.3.post2' --no-build-isolation"
    nearest = "the nearest is for torch 2.8, CUDA 12, Python 3.12"
    assert unlock.install.why == (f"{NOTHING_FITS}; {nearest}: it is compiled here, with nvcc and for hours",)


def test_what_is_proposed_has_a_wheel_where_an_older_release_has_one():
    """torch 2.6 for CUDA 12.4 has the old ABI, for which 2.7.4 is the last with a wheel."""
    for versions, version in (({"torch": "2.6.0", "cuda": "12.4"}, "2.7.4"), ({}, "2.8.3")):
        unlock = way_out(**versions)
        assert unlock.change.startswith(f"install flash-attn ≥ {version}")
        assert f"/v{version}.post1/" in unlock.paste
