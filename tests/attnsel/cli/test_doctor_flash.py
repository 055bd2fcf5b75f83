"""``attnsel doctor`` on FlashAttention: broken installations explained, and who else chooses."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from attnsel import Environment, settings
from attnsel.cli import flash as flash_probe
from attnsel.cli import probe
from attnsel.cli.flash import explain, find_flash
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
    fails = {**stale.probes, "flash_attn_4": Probe("4.0.0b36", False, {}, "ImportError")}
    assert list(find_flash(stale._replace(probes=fails))) == [found]
    assert not list(find_flash(stale._replace(flash=stale.flash._replace(cute="flash-attn-4"))))


# ---- what is looked at -----------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that this process imports from."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    settings.configure()
    yield folder
    importlib.invalidate_caches()


def test_who_else_chooses_is_told_where_there_is_flash_attention(site):
    """Of transformers and TransformerEngine alone nothing is said."""
    put(site, "transformer-engine", "2.20.2", {"transformer_engine/__init__.py": ""})
    found = flash_probe.look()
    assert found == FlashFacts(packages=found.packages)
    assert not list(find_flash(machine(flash=found)))
    notes = list(find_flash(machine(flash=found, flash_attn=Probe("2.8.3", True, LOADS))))
    text = "transformer-engine 2.20.2 chooses among what is here of FlashAttention by its own rules"
    assert ("DOCTOR032", text, "attnsel explain --as te") in notes


def test_a_module_without_its_package(site, monkeypatch):
    put(site, "flash-attn-npu", "1.0", flash_attn())
    put(site, "old-thing", "1.0", flash_attn_3())
    found = flash_probe.look()
    assert found.strangers == {"flash_attn": "flash-attn-npu", "flash_attn_interface": "old-thing"}
    texts = [finding.text for finding in find_flash(machine(flash=found))]
    stranger = "a module flash_attn without the package flash-attn: it is of flash-attn-npu"
    assert any(stranger in text for text in texts)
    ours = ModuleType("flash_attn")
    ours.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None, origin="attnsel")
    monkeypatch.setitem(sys.modules, "flash_attn", ours)
    findings = find_flash(machine(flash=FlashFacts(strangers=flash_probe._strangers({}))))
    assert ("DOCTOR030", "the module flash_attn is attnsel's own in this process", "") in findings
