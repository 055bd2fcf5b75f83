"""Pieces of cuDNN and NVRTC on disk: absent, broken, overwritten, from elsewhere. A stand-in tree, no GPU."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from attnsel import Environment
from attnsel.cli import findings as cuda_libraries
from attnsel.cli.findings import PIECES, find_cuda, look
from attnsel.cli.probe import CudaLibraries

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for .so files")
NVRTC = "libnvrtc.so.912"
H100 = Environment.describe("H100", torch="2.9.1")


@pytest.fixture(scope="module")
def library():
    """A shared library that loads anywhere."""
    import _ctypes

    return Path(_ctypes.__file__)


@pytest.fixture
def tree(tmp_path, monkeypatch, library):
    """Wheels as torch for CUDA 12 brings them, each piece a library that loads."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(cuda_libraries, "distribution", lambda name: None)
    # Of releases that no loader knows: a CUDA toolkit may be installed here.
    numbered = {12: ("nvidia/cuda_nvrtc/lib", NVRTC), 13: ("nvidia/cu13/lib", "libnvrtc.so.913")}
    monkeypatch.setattr(cuda_libraries, "_NVRTC", numbered)
    cudnn, nvrtc = tmp_path / "nvidia/cudnn/lib", tmp_path / "nvidia/cuda_nvrtc/lib"
    cudnn.mkdir(parents=True)
    nvrtc.mkdir(parents=True)
    for name in PIECES:
        shutil.copy(library, cudnn / name)
    for name in (NVRTC, "libnvrtc-builtins.so.12.8"):
        shutil.copy(library, nvrtc / name)
    return tmp_path


def seen(tree, build="12.8"):
    return look(build, [str(tree)])


def texts(found):
    return [finding.text for finding in find_cuda(found, H100)]


def test_a_piece_that_is_absent_or_broken_is_named_with_the_line_that_brings_it(tree):
    assert seen(tree) == CudaLibraries()
    assert texts(seen(tree)) == []
    engines = tree / "nvidia/cudnn/lib/libcudnn_engines_precompiled.so.9"
    engines.rename(tree / "kept")
    found = seen(tree)
    assert found.missing == ("libcudnn",)
    (finding,) = find_cuda(found, H100)
    assert finding.level == "error"
    assert finding.text.startswith("libcudnn_engines_precompiled.so.9 is not there")
    assert finding.fix == "pip install --force-reinstall --no-deps 'nvidia-cudnn-cu12==9.10.2.*'"
    (tree / "kept").rename(engines)
    (tree / "nvidia/cudnn/lib/libcudnn_graph.so.9").write_text("no library")
    found = seen(tree)
    assert found.missing == ("libcudnn",)
    (text,) = texts(found)
    assert text.startswith("libcudnn_graph.so.9 does not load: ")
    assert "file too short" in text or "invalid ELF header" in text


def test_nvrtc_that_is_nowhere_or_half_there_is_missing(tree):
    (tree / "nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.8").unlink()
    assert seen(tree).missing == ("libnvrtc",)
    assert texts(seen(tree))[0].startswith("libnvrtc-builtins.so is not there")
    shutil.rmtree(tree / "nvidia/cuda_nvrtc")
    found = seen(tree)
    assert found.missing == ("libnvrtc",)
    (finding,) = find_cuda(found, H100)
    assert finding.text == f"{NVRTC} is not there: cuDNN compiles its attention with it"
    assert finding.fix == "pip install --force-reinstall nvidia-cuda-nvrtc-cu12"


class Package:
    """A distribution that lists one piece."""

    version = "9.10.2.21"

    def __init__(self, name, file, size):
        self.metadata = {"Name": name}
        self.files = [self]
        self.file, self.name, self.size = file, file.name, size

    def locate(self):
        return self.file


def test_a_piece_that_was_overwritten_and_two_packages_in_one_folder_are_told(tree, monkeypatch):
    file = tree / "nvidia/cudnn/lib/libcudnn_graph.so.9"
    packages = {
        f"nvidia-cudnn-cu{n}": Package(f"nvidia-cudnn-cu{n}", file, file.stat().st_size) for n in (12, 13)
    }
    monkeypatch.setattr(cuda_libraries, "distribution", packages.get)
    (finding,) = find_cuda(seen(tree), H100)
    assert finding.text.startswith("nvidia-cudnn-cu12 and nvidia-cudnn-cu13 write into one folder")
    assert finding.fix.startswith("pip uninstall -y nvidia-cudnn-cu12 nvidia-cudnn-cu13; pip install")
    del packages["nvidia-cudnn-cu13"]
    assert seen(tree) == CudaLibraries()
    packages["nvidia-cudnn-cu12"].size += 1
    found = seen(tree)
    assert found.missing == ("libcudnn",)
    (text,) = texts(found)
    assert text.startswith("libcudnn_graph.so.9 of nvidia-cudnn-cu12 9.10.2.21 was overwritten")


def test_another_cudnn_on_the_library_path_goes_first(tree, tmp_path, monkeypatch, library):
    other = tmp_path / "toolkit"
    other.mkdir()
    shutil.copy(library, other / "libcudnn_graph.so.9.8.0")
    (other / "libcudnn_graph.so.9").symlink_to(other / "libcudnn_graph.so.9.8.0")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{other}")
    found = seen(tree)
    assert list(found.ahead) == ["libcudnn_graph.so.9"]
    assert found.missing == ()
    (finding,) = find_cuda(found, H100)
    assert finding.level == "warning"
    assert "libcudnn_graph.so.9.8.0" in finding.text
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tree / "nvidia/cudnn/lib"))
    assert seen(tree) == CudaLibraries()


def test_the_doctor_says_it_and_what_it_costs(tree, monkeypatch, capsys):
    """huggingface/diffusers#9704: the call on this machine no longer goes to cuDNN."""
    from attnsel.cli import main, probe
    from attnsel.cli.probe import Probe, ProbedMachine

    shutil.rmtree(tree / "nvidia/cuda_nvrtc")
    known = dict.fromkeys(probe.DISTRIBUTIONS, Probe(None, None, {}))
    torch = {"version": "2.9.1", "cuda_build": "12.8", "cuda_available": True, "arch_list": ["sm_90"]}
    known["torch"] = Probe("2.9.1", True, torch)
    env = H100.replace(detected=True, assumed=())
    monkeypatch.setattr(probe, "examine", lambda: ProbedMachine(known, (env,), ("H100",)))
    monkeypatch.setattr(cuda_libraries.sys, "path", [str(tree), *sys.path])
    assert main(["doctor", "--json"]) == 4
    told = json.loads(capsys.readouterr().out)
    assert any(f["text"].startswith(f"{NVRTC} is not there") for f in told["findings"])
    assert told["devices"][0]["missing"] == ["libnvrtc"]
    codes = {call["verdicts"]["cudnn"]["code"] for call in told["calls"] if call["dtype"] == "bf16"}
    assert codes == {"INSTALL009"}
