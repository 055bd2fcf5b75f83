"""``attnsel doctor`` on FlashAttention: broken installations explained, and who would use what."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from attnsel import Environment, settings
from attnsel.cli import flash as flash_probe
from attnsel.cli import probe
from attnsel.cli.flash import explain, find_flash, uses
from attnsel.cli.probe import FlashFacts, Probe, ProbedMachine
from attnsel.environment.installed import FLASH_ATTN
from fake_packages import (
    NEW_ABI,
    OLD_ABI,
    OTHER_TORCH,
    flash_attn,
    flash_attn_3,
    put,
    undefined,
)
from tables import each

ABSENT = Probe(None, None, {})
LOADS = {"version": None}


def torch(version="2.8.0", cuda="12.8", new_abi=True) -> Probe:
    said = {"version": version, "cuda_build": cuda, "hip_build": None, "cuda_available": cuda is not None}
    return Probe(version, True, {**said, "new_abi": new_abi, "arch_list": []})


def machine(*, here=None, env=None, flash=None, **probes) -> ProbedMachine:
    """A GPU machine; ``probes`` are of components, FlashFacts.packages follows them where it is not given."""
    here = here or torch()
    env = env or Environment.describe("H100", torch=here.installed, cuda=here.said["cuda_build"])
    known = {**dict.fromkeys(probe.DISTRIBUTIONS, ABSENT), "torch": here, **probes}
    packages = {FLASH_ATTN[name]: known[name].installed for name in FLASH_ATTN if known[name].installed}
    flash = flash or FlashFacts()
    flash = flash._replace(packages={**packages, **flash.packages})
    return ProbedMachine(known, (env.replace(detected=True, assumed=()),), ("GPU",), flash=flash)


def broken(trouble, *, component="flash_attn", version="2.8.3", here=None, flash=None) -> ProbedMachine:
    found = Probe(version, False, {}, f"ImportError: {trouble}")
    return machine(here=here, flash=flash, **{component: found})


@pytest.fixture(autouse=True)
def _x86(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


# ---- why it does not load ------------------------------------------------------------------------------

FALSE_WHEEL = FlashFacts(built_for={"cuda": "12", "torch": "2.6", "abi": "FALSE"})
FOR_2_8 = FlashFacts(built_for={"torch": "2.8"})
UNMET = FlashFacts(unmet=("nvidia-cutlass-dsl>=4.6.2 (here 4.4.0)",))
OLD_TORCH = torch("2.6.0", "12.4", new_abi=False)
FA4_BROKEN = {"component": "flash_attn_4", "version": "4.0.0b36"}
CUDART = "libcudart.so.12: cannot open shared object file: No such file or directory"
NO_CUDA = "libc10_cuda.so: cannot open shared object file"
GLIBC = "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.32' not found (required by …)"
NAMESPACE = "cannot import name 'flash_attn_func' from 'flash_attn' (unknown location)"
COMPILED = "flash-attn was compiled"


@each(
    "fake, why",
    [
        (broken(undefined(OLD_ABI)), f"{COMPILED} with the old C++ ABI, and torch 2.8.0 with the new one"),
        (
            broken(undefined(NEW_ABI), here=OLD_TORCH),
            f"{COMPILED} with the new C++ ABI, and torch 2.6.0 with the old one",
        ),
        (
            broken(undefined(NEW_ABI), here=OLD_TORCH, flash=FALSE_WHEEL),
            f"{COMPILED} with the new C++ ABI (as are all wheels of 2.8 for torch 2.6, whatever "
            "their names say: flash-attention#1783), and torch 2.6.0 with the old one",
        ),
        (broken(undefined(NEW_ABI)), f"{COMPILED} for another torch: here is 2.8.0"),
        (
            broken(undefined(OTHER_TORCH), here=torch("2.10.0"), flash=FOR_2_8),
            f"{COMPILED} for another torch, 2.8: here is 2.10.0",
        ),
        (broken(undefined("aoti_torch_new"), component="flash_attn_3"), "flash-attn-3 was compiled for"),
        (
            broken(CUDART, here=torch("2.13.0", "13.0")),
            "it was compiled for CUDA 12, and torch 2.13.0 is a build for CUDA 13.0",
        ),
        (
            broken(CUDART, here=torch("2.13.0+cpu", None)),
            "it was compiled for CUDA 12, and torch 2.13.0+cpu is not a CUDA build",
        ),
        (broken(CUDART), "the libraries of CUDA 12 are not where the linker looks: import torch first"),
        (
            broken(NO_CUDA, here=torch("2.8.0+cpu", None)),
            "it needs a CUDA build of torch, and torch 2.8.0+cpu is none",
        ),
        (broken(GLIBC), "its wheel was made on a newer Linux than this: it needs glibc 2.32"),
        (
            broken("No module named 'flash_attn_2_cuda'"),
            "its compiled part is missing: it was built without CUDA, or only a part of it is left",
        ),
        (broken("No module named 'flash_attn'"), "pip lists it, and its module flash_attn is not there"),
        (
            broken(NAMESPACE),
            "the folder flash_attn is no package: a part of flash-attn, or flash-attn-4 without it, is there",
        ),
        (broken("No module named 'einops'"), "it needs the package einops"),
        (broken("No module named 'cutlass'", **FA4_BROKEN), "it needs the package nvidia-cutlass-dsl"),
        (broken("no such thing", flash=UNMET, **FA4_BROKEN), f"it needs {UNMET.unmet[0]}"),
    ],
)
def test_an_import_error_is_explained(fake, why):
    [found] = [finding for finding in find_flash(fake) if finding.level == "error"]
    component = next(name for name in FLASH_ATTN if fake.probes[name].loads is False)
    assert why in explain(component, fake).why
    assert fake.probes[component].trouble in found.text
    assert explain(component, fake).why[1:] in found.text
    assert found.fix


def test_cute_of_the_other_package():
    stale = machine(
        flash_attn=Probe("2.8.3", True, LOADS),
        flash_attn_4=Probe("4.0.0b36", True, LOADS),
        flash=FlashFacts(cute="flash-attn"),
    )
    [found] = find_flash(stale)
    assert found.level == "error"
    assert found.text == (
        "flash_attn/cute is that of flash-attn 2.8.3, an early one, which was installed over that of "
        "flash-attn-4 4.0.0b36"
    )
    assert found.fix == "pip install --force-reinstall --no-deps --pre flash-attn-4"
    assert not list(find_flash(stale._replace(flash=stale.flash._replace(cute="flash-attn-4"))))


# ---- who uses what --------------------------------------------------------------------------------------

REPOSITORIES = {f"flash_attention_{n}": f"kernels-community/flash-attn{n}" for n in "234"}


def asked(available="", kernels=False, unknown="") -> Probe:
    said = {
        "available": {n: None if n in unknown else n in available for n in "234"},
        "repositories": {name: r for name, r in REPOSITORIES.items() if name[-1] not in unknown},
        "kernels": kernels,
        "kernels_range": ["0.18.2", "0.19.0"],
    }
    return Probe("5.23.0", True, said)


FA2 = Probe("2.8.3", True, LOADS)


def test_transformers_fails_for_a_package_that_does_not_load():
    fake = broken(undefined(OLD_ABI), flash=FlashFacts(transformers=asked("2", kernels=True)))
    [use] = [use for use in uses(fake) if use.name == "flash_attention_2"]
    assert use.breaks
    assert use.gets is None
    assert use.why == "it asks only whether flash-attn 2.8.3 is listed, and that does not load"
    assert {finding.level for finding in find_flash(fake) if "flash_attention_2" in finding.text} == {"error"}


TE_220 = {
    "oldest": "2.1.1",
    "oldest_sm100": "2.7.3",
    "newest": "2.8.4",
    "newest_is_taken": "no",
    "knows": "234",
}
TE_218 = {**TE_220, "newest": "2.8.3", "newest_is_taken": "yes"}
TE_23 = {**TE_218, "newest": "2.7.4.post1", "knows": "23"}


def te(gpu="H100", takes=TE_220, version="2.20.2", **probes) -> dict[str, tuple[str | None, str]]:
    facts = FlashFacts(packages={"transformer-engine": version}, te_takes=takes)
    fake = machine(env=Environment.describe(gpu, torch="2.8.0"), flash=facts, **probes)
    return {use.name: (use.gets, use.why) for use in uses(fake)}


@each(
    "gpu, takes, version, gets",
    [
        ("H100", TE_220, "2.8.3", "on sm90 after cuDNN's fused attention"),
        ("A100", TE_220, "2.8.3", "on sm80 before cuDNN's fused attention"),
        ("T4", TE_220, "2.8.3", "it wants sm80 or newer, and this is sm75"),
        ("H100", TE_220, "2.8.4", "it takes >=2.1.1,<2.8.4, and 2.8.4 is installed"),
        ("H100", TE_218, "2.8.3.post1", "it takes >=2.1.1,<=2.8.3, and 2.8.3.post1 is installed"),
        ("B200", TE_220, "2.6.3", "it takes >=2.7.3,<2.8.4, and 2.6.3 is installed"),
        ("H100", TE_23, "2.8.0.post2", "it takes >=2.1.1,<=2.7.4.post1, and 2.8.0.post2 is installed"),
        # 2.18 compares without the local version, 2.20 below the first that is too new.
        ("H100", TE_218, "2.8.3+cu12torch2.8cxx11abiTRUE", "on sm90 after cuDNN's fused attention"),
        ("H100", TE_220, "2.8.3+cu12torch2.8cxx11abiTRUE", "on sm90 after cuDNN's fused attention"),
        ("H100", TE_220, "2.8.3.post2", "on sm90 after cuDNN's fused attention"),
    ],
)
def test_transformer_engine_takes_releases_within_its_limits(gpu, takes, version, gets):
    taken = f"flash-attn {version}" if gets.startswith("on sm") else None
    assert te(gpu, takes, flash_attn=FA2._replace(installed=version))["FlashAttention-2"] == (taken, gets)


# ---- what is looked at -----------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that both this process and its children import from, and a home without a cache."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "KERNELS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    settings.configure()
    yield folder
    importlib.invalidate_caches()


def test_what_lies_in_the_cache_of_the_hub(site, tmp_path, monkeypatch):
    assert flash_probe.hub_cache() == ()
    hub = tmp_path / ".cache/huggingface/hub"
    (hub / "kernels--kernels-community--flash-attn2").mkdir(parents=True)
    (hub / "models--kernels-community--flash-attn3").mkdir()
    (hub / "models--somebody--flash-attn2").mkdir()
    assert flash_probe.hub_cache() == ("kernels-community/flash-attn2", "kernels-community/flash-attn3")
    elsewhere = tmp_path / "kernels"
    (elsewhere / "kernels--kernels-community--vllm-flash-attn3").mkdir(parents=True)
    monkeypatch.setenv("KERNELS_CACHE", str(elsewhere))
    assert flash_probe.hub_cache() == ("kernels-community/vllm-flash-attn3",)
    monkeypatch.delenv("KERNELS_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nothing"))
    assert flash_probe.hub_cache() == ()


UTILS = "transformer_engine/pytorch/attention/dot_product_attention/utils.py"


UTILS_220 = """
class FlashAttentionUtils:
    version = PkgVersion("0")
    version_required = PkgVersion("2.1.1")
    version_required_blackwell = PkgVersion("2.7.3")
    max_version = PkgVersion("2.8.4")
    v3_is_installed = False
    v4_is_installed = False
    @staticmethod
    def is_version_supported(version, minimum_version): ...
"""
UTILS_23 = """
    version_required = PkgVersion("2.1.1")
    version_required_blackwell = PkgVersion("2.7.3")
    max_version = PkgVersion("2.7.4.post1")
    v3_is_installed = False
"""


@pytest.mark.parametrize(
    ("path", "source", "limits"),
    [  # the lines as they stand in 2.20.2 and in 2.3.0
        (UTILS, UTILS_220, TE_220),
        (UTILS, UTILS_23, TE_23),
        ("transformer_engine/pytorch/attention.py", "nothing of the kind", {}),
    ],
)
def test_what_transformer_engine_takes_is_read_from_its_source(site, path, source, limits):
    files = {"transformer_engine/__init__.py": "raise ImportError", path: source}
    put(site, "transformer-engine", "2.0", files)
    assert flash_probe.te_takes() == limits


def test_nothing_of_it_is_not_even_asked(site, monkeypatch):
    """transformers is installed here. The one line that the doctor prints: tests/net, doctor_healthy_text."""
    monkeypatch.setattr(probe, "run_script", lambda script: pytest.fail("a child for nothing"))
    found = flash_probe.look()
    assert found == FlashFacts(packages=found.packages)
    assert uses(machine(flash=found)) == ()


def test_a_module_without_its_package(site, monkeypatch):
    put(site, "flash-attn-npu", "1.0", flash_attn())
    put(site, "old-thing", "1.0", flash_attn_3())
    found = flash_probe.look()
    assert found.strangers == {"flash_attn": "flash-attn-npu", "flash_attn_interface": "old-thing"}
    texts = [finding.text for finding in find_flash(machine(flash=found._replace(transformers=ABSENT)))]
    stranger = "a module flash_attn without the package flash-attn: it is of flash-attn-npu"
    assert any(stranger in text for text in texts)
    ours = ModuleType("flash_attn")
    ours.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None, origin="attnsel")
    monkeypatch.setitem(sys.modules, "flash_attn", ours)
    findings = find_flash(machine(flash=FlashFacts(strangers=flash_probe._strangers({}))))
    assert ("note", "the module flash_attn is attnsel's own in this process", "") in findings


# ---- in child processes ----------------------------------------------------------------------------------


def test_the_installed_transformers_is_asked(site):
    """Its names are those that the script asks for: a release that renames one is noticed here."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    loads, said, trouble = probe.run_script(flash_probe._TRANSFORMERS)
    assert loads, trouble
    assert set(said["available"]) == {"2", "3", "4"}
    assert said["kernels"] is False or isinstance(said["kernels"], bool)
    assert said["available"]["2"] is False  # of flash-attn there is nothing in the test environment
    for repository in said["repositories"].values():
        assert repository in flash_probe.HUB_KERNELS
