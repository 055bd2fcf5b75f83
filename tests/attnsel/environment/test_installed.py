"""FlashAttention packages: what counts as installed, told from files and metadata alone."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from attnsel import Environment
from attnsel.environment import machine
from attnsel.environment.installed import (
    built_for,
    cute_owner,
    flash_attn_versions,
    installed_version,
    unmet_requirements,
)
from attnsel.environment.versions import Version
from fake_packages import flash_attn, flash_attn_3, flash_attn_4, put


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    importlib.invalidate_caches()


def versions() -> dict[str, str]:
    importlib.invalidate_caches()
    return {name: str(version) for name, version in flash_attn_versions().items() if version}


def test_all_three(site):
    put(site, "flash-attn", "2.7.4.post1", flash_attn())
    put(site, "flash-attn-3", "3.0.0", flash_attn_3())
    put(site, "flash-attn-4", "4.0.0b36", flash_attn_4())
    assert set(versions()) == {"flash_attn", "flash_attn_3", "flash_attn_4"}
    assert versions()["flash_attn"] == "2.7.4"


def test_a_distribution_without_its_module_or_its_compiled_part_does_not_count(site):
    files = flash_attn()
    del files["flash_attn_2_cuda.py"]
    put(site, "flash-attn", "2.8.3", files)
    put(site, "flash-attn-3", "3.0.0")
    put(site, "flash-attn-4", "4.0.0b36")
    assert versions() == {}


def test_flash_attn_4_alone_is_no_flash_attn_2(site):
    put(site, "flash-attn-4", "4.0.0b36", flash_attn_4())
    put(site, "flash-attn", "2.8.3", {"flash_attn_2_cuda.py": ""})  # what an uninstallation left behind
    assert set(versions()) == {"flash_attn_4"}


@pytest.mark.parametrize("last", ["flash-attn", "flash-attn-4"])
def test_whose_cute_is_there(site, last):
    packages = {"flash-attn": ("2.8.3", flash_attn(cute=True)), "flash-attn-4": ("4.0.0b36", flash_attn_4())}
    for name in sorted(packages, key=lambda name: name == last):
        put(site, name, *packages[name])
    importlib.invalidate_caches()
    assert cute_owner() == last
    assert ("flash_attn_4" in versions()) is (last == "flash-attn-4")
    assert "flash_attn" in versions()


def test_cute_changed_by_hand_is_nobodys(site):
    put(site, "flash-attn", "2.8.3", flash_attn(cute=True))
    put(site, "flash-attn-4", "4.0.0b36", flash_attn_4())
    (site / "flash_attn/cute/interface.py").write_text("# patched\n")
    importlib.invalidate_caches()
    assert cute_owner() is None
    assert "flash_attn_4" in versions()


URL = (
    "https://github.com/Dao-AILab/flash-attention/releases/download/v2.8.3/"
    "flash_attn-2.8.3%2Bcu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl"
)


@pytest.mark.parametrize(
    ("version", "url", "wheel"),
    [
        ("2.8.3+cu12torch2.8cxx11abiTRUE", None, {"cuda": "12", "torch": "2.8", "abi": "TRUE"}),
        ("2.8.3", URL, {"cuda": "12", "torch": "2.8", "abi": "TRUE"}),
        ("2.6.3+cu123torch2.4.0cxx11abifalse", None, {"cuda": "12", "torch": "2.4", "abi": "FALSE"}),
        ("2.8.3", "file:///wheels/flash_attn.whl", {}),
        ("2.8.3", None, {}),
    ],
)
def test_what_a_wheel_was_built_for(site, version, url, wheel):
    put(site, "flash-attn", version, url=url)
    assert built_for("flash-attn") == wheel


def test_what_a_package_needs_and_does_not_find(site):
    put(site, "nvidia-cutlass-dsl", "4.4.0")
    needs = ("nvidia-cutlass-dsl>=4.6.2", "no-such-package-anywhere>=1", "packaging")
    extra = 'nvidia-cutlass-dsl[cu13]>=9; extra == "cu13"'
    put(site, "flash-attn-4", "4.0.0b36", requires=(*needs, extra))
    assert unmet_requirements("flash-attn-4") == [
        "nvidia-cutlass-dsl>=4.6.2 (here 4.4.0)",
        "no-such-package-anywhere>=1 (not installed)",
    ]
    assert unmet_requirements("not-installed-at-all") == []


def test_a_version_that_is_none_is_passed_over(site):
    put(site, "first", "unknown")
    put(site, "second", "1.2")
    assert installed_version("first", "second") == Version(1, 2)
    assert installed_version("first") is None


def test_this_machine_is_described_by_them_and_nothing_is_imported_to_find_out(site):
    put(site, "flash-attn", "2.8.3", flash_attn(error="no"))
    put(site, "flash-attn-3", "3.0.0")
    machine._detect.cache_clear()
    try:
        env = Environment.detect("cpu")
        assert (env.flash_attn, env.flash_attn_3) == (Version(2, 8, 3), None)
    finally:
        machine._detect.cache_clear()
    assert not {"flash_attn", "flash_attn_2_cuda"} & set(sys.modules)


@pytest.mark.parametrize(
    ("generation", "version", "component"),
    [(2, "2.8.3", "flash_attn"), (3, "3.0.0", "flash_attn_3"), (4, "4.0.0b36", "flash_attn_4")],
)
def test_what_is_loaded_already_counts(generation, version, component):
    emulated = pytest.importorskip("emulated_flash_attn")
    with emulated.installed(generation, version):
        assert versions() == {component: version}
    assert versions() == {}


def test_attnsels_own_module_hides_no_package(site, monkeypatch):
    put(site, "flash-attn", "2.8.3", flash_attn())
    ours = ModuleType("flash_attn")
    ours.__spec__ = ModuleSpec("flash_attn", None, origin="attnsel")
    monkeypatch.setitem(sys.modules, "flash_attn", ours)
    assert versions() == {"flash_attn": "2.8.3"}
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # what may not be imported
    assert versions() == {}
