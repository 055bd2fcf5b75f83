"""Which wheel of a FlashAttention package fits a machine, and what is said where none does."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.environment import describe_device
from attnsel.environment.flash_attn_wheels import BUILT
from attnsel.environment.versions import Version
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
    "versions, file",
    [
        ({}, "v2.8.3.post1/flash_attn-2.8.3.post1%2Bcu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl"),
        (
            {"torch": "2.6.0", "cuda": "12.6"},
            "v2.8.3.post1/flash_attn-2.8.3.post1%2Bcu12torch2.6cxx11abiTRUE-cp312-cp312-linux_x86_64.whl",
        ),
        # flash-attention#1783: the FALSE wheel of 2.8.2 does not load there, that of 2.7.4.post1 does.
        (
            {"torch": "2.6.0", "cuda": "12.4", "python": "3.11"},
            "v2.7.4.post1/flash_attn-2.7.4.post1%2Bcu12torch2.6cxx11abiFALSE-cp311-cp311-linux_x86_64.whl",
        ),
        (
            {"torch": "2.5.1", "cuda": "11.8"},
            "v2.7.3/flash_attn-2.7.3%2Bcu11torch2.5cxx11abiFALSE-cp312-cp312-linux_x86_64.whl",
        ),
        (
            {"torch": "2.2.2", "cuda": "11.8", "python": "3.8"},
            "v2.7.0.post2/flash_attn-2.7.0.post2%2Bcu11torch2.2cxx11abiFALSE-cp38-cp38-linux_x86_64.whl",
        ),
    ],
)
def test_the_newest_wheel_that_fits(versions, file):
    found = fitting(**versions)
    assert isinstance(found, Wheel), found
    assert found.url == DOWNLOADS + file


# Files that people name in reports of what they installed: flash-attention#853, #975, #1234, #1783, #1717.
@each(
    "release, cuda, torch, python, abi",
    [
        ("2.5.5", "cu118", "2.2", 8, False),
        ("2.6.0.post1", "cu122", "2.3", 10, False),
        ("2.6.3", "cu123", "2.4", 11, True),
        ("2.7.4.post1", "cu12", "2.6", 11, False),
        ("2.8.0.post2", "cu12", "2.6", 10, True),
    ],
)
def test_wheels_that_people_have_are_in_the_table(release, cuda, torch, python, abi):
    found = fitting(
        lambda version: version == Version.parse(release),
        abi,
        torch=torch,
        cuda={"cu1": f"{cuda[2:4]}.8"}[cuda[:3]],
        python=f"3.{python}",
    )
    assert found == Wheel(release, cuda, tuple(map(int, torch.split("."))), (3, python), abi)


@each(
    "versions, why, nearest",
    [
        (
            {"torch": "2.13.0", "cuda": "13.0"},
            "no release of flash-attn has a wheel for torch 2.13, CUDA 13, Python 3.12",
            "torch 2.8, CUDA 12, Python 3.12",
        ),
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


def test_the_table_can_be_read_in_full():
    """Every release from 2.3.6 on, once for each CUDA it was built for."""
    rows = [line.split()[:2] for line in BUILT]
    assert len({tuple(row) for row in rows}) == len(rows)
    releases = [Version.parse(release) for release, _ in rows]
    assert releases == sorted(releases, reverse=True)
    assert releases[-1] == Version(2, 3, 6)
    assert Version(2, 8, 3) in releases


@each(
    "versions, line",
    [
        (
            {"torch": "2.13.0", "cuda": "13.0"},
            "--index-url https://download.pytorch.org/whl/cu130",
        ),
        ({"torch": "2.9.1"}, "--index-url https://download.pytorch.org/whl/cu128"),
        ({"torch": "2.9.1", "cuda": "12.6"}, "https://download.pytorch.org/whl/cu126"),
        ({"torch": "2.8.0"}, "cd flash-attention/hopper && python setup.py install"),
        ({"torch": "2.9.1", "cuda": None}, "cd flash-attention/hopper && python setup.py install"),
    ],
)
def test_how_flash_attn_3_is_installed(versions, line):
    assert install_flash_attn_3(machine(**versions)).endswith(line)


def test_how_flash_attn_4_is_installed():
    assert install_flash_attn_4(machine()) == "pip install --pre flash-attn-4"
    assert install_flash_attn_4(machine(cuda="13.0"), ">=4") == "pip install --pre 'flash-attn-4[cu13]>=4'"


# ---- as a way out --------------------------------------------------------------------------------------


def ways(name, gpu="A100", **versions):
    env = machine(**versions).replace(device=describe_device(gpu))
    return [
        u for u in select(AttentionParams(), env, policy=Policy(backend=name)).unlocks if u.candidate == name
    ]


def test_a_way_out_says_that_it_builds():
    (unlock,) = ways("flash_attn.2", torch="2.13.0", cuda="13.0")
    assert unlock.change.endswith(" (no wheel fits: built here)")
    assert unlock.install.built_here
    assert unlock.paste == "pip install 'flash-attn==2.8.3.post2' --no-build-isolation"
    assert unlock.install.why == (
        "no release of flash-attn has a wheel for torch 2.13, CUDA 13, Python 3.12; the nearest is for "
        "torch 2.8, CUDA 12, Python 3.12: it is compiled here, with nvcc and for hours",
    )


def test_what_is_proposed_has_a_wheel_where_an_older_release_has_one():
    """torch 2.6 for CUDA 12.4 has the old ABI, for which 2.7.4 is the last with a wheel."""
    for versions, version in (({"torch": "2.6.0", "cuda": "12.4"}, "2.7.4"), ({}, "2.8.3")):
        found = select(AttentionParams(), machine(**versions), policy=Policy(backend="flash_attn.2")).unlocks
        [unlock] = [unlock for unlock in found if unlock.candidate == "flash_attn.2"]
        assert unlock.change.startswith(f"install flash-attn ≥ {version}")
        assert f"/v{version}.post1/" in unlock.paste
