"""``attnsel doctor``: what is here, what runs, what is wrong, and nothing about who asks."""

from __future__ import annotations

import json
import platform
import sys

import pytest

from attnsel import Environment
from attnsel.cli import doctor as doctor_module
from attnsel.cli import main, probe
from attnsel.cli.probe import Probe, ProbedMachine, redact
from fake_packages import put
from tables import each

ABSENT = Probe(None, None, {})
TORCH = {
    "version": "2.9.1",
    "cuda_build": "12.8",
    "hip_build": None,
    "cuda_available": True,
    "arch_list": ["sm_80", "sm_90", "sm_100"],
}


LOADS = Probe("2.9.1", True, TORCH)


def machine(*, gpus=(), env=None, **probes) -> ProbedMachine:
    known = dict.fromkeys(probe.DISTRIBUTIONS, ABSENT)
    env = env or Environment.describe("cpu", torch="2.9.1", triton=None).replace(detected=True, assumed=())
    return ProbedMachine({**known, **probes}, (env,), tuple(gpus))


def gpu(name="H100", **versions) -> Environment:
    versions = {"torch": "2.9.1", **versions}
    return Environment.describe(name, **versions).replace(detected=True, assumed=())


@pytest.fixture(autouse=True)
def _no_wishes_from_outside(no_switches_from_outside, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def examined(monkeypatch, capsys):
    """``code, told = examined(machine)``, in JSON."""

    def call(fake: ProbedMachine):
        monkeypatch.setattr(doctor_module, "examine", lambda: fake)
        code = main(["doctor", "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def levels(told, part):
    return [finding["level"] for finding in told["findings"] if part in finding["text"]]


@each(
    "cuda, found, level, text",
    [
        ("13.0", "9.10.2", "error", "torch 2.13.0+cu130 pins cuDNN 9.20.0.48, found 9.10.2"),
        ("12.6", "9.20.0", "note", "torch 2.13.0+cu126 pins cuDNN 9.10.2.21, found 9.20.0"),
        ("13.0", "9.20.1", None, "pins cuDNN"),  # torch compares minor releases
        ("13.1", "9.10.2", None, "pins cuDNN"),  # no such wheel
    ],
)
def test_a_cudnn_that_the_wheel_does_not_pin_is_named(examined, cuda, found, level, text):
    said = {**TORCH, "version": "2.13.0", "cuda_build": cuda}
    _, told = examined(machine(env=gpu(cudnn=found, torch="2.13.0"), torch=Probe("2.13.0", True, said)))
    assert levels(told, text) == ([] if level is None else [level])
    fixes = [finding["fix"] for finding in told["findings"] if text in finding["text"]]
    assert level != "error" or "pip install 'nvidia-cudnn-cu13==9.20.0.48'" in fixes[0]


GPU_SEEN = {"gpus": ["NVIDIA L4"]}


@each(
    "fake, text",
    [
        (
            machine(torch=Probe("2.5.1", True, {**TORCH, "cuda_build": None})),
            "torch 2.5.1 is too old: attnsel runs on 2.6 or newer",
        ),
        (
            machine(**GPU_SEEN, torch=Probe("2.9.1+cpu", True, {**TORCH, "cuda_build": None})),
            "there is a GPU (NVIDIA L4) and torch 2.9.1+cpu is a CPU build",
        ),
        (
            machine(**GPU_SEEN, torch=Probe("2.9.1", True, {**TORCH, "cuda_available": False})),
            "there is a GPU (NVIDIA L4) and torch 2.9.1 cannot use it",
        ),
        (
            machine(torch=LOADS, triton=Probe("3.2.0", True, {"version": "3.2.0"})),
            "torch 2.9.1 came with triton 3.5.1, and triton 3.2.0 is installed",
        ),
        (
            machine(torch=Probe("2.9.1", False, {}, "killed by SIGSEGV")),
            "torch 2.9.1 is installed and does not load: killed by SIGSEGV",
        ),
        (
            machine(env=gpu("RTX 5090"), torch=LOADS),
            "device 0 (RTX 5090): torch has no kernels for sm120, only for sm_80, sm_90, sm_100",
        ),
        (
            machine(env=gpu("B200", cuda="12.4", cudnn="9.10.2"), torch=LOADS),
            "device 0 (B200): sm100 needs CUDA 12.8 or newer, not 12.4.0",
        ),
    ],
)
def test_what_is_wrong(examined, fake, text):
    code, told = examined(fake)
    assert code == 4
    [found] = [finding for finding in told["findings"] if finding["text"] == text]
    assert found["level"] == "error"
    assert found["fix"]


def test_a_library_that_lacks_a_package_is_not_reinstalled(examined):
    probe = Probe("3.2.0", False, {}, "ModuleNotFoundError: No module named 'setuptools'")
    _, told = examined(machine(torch=LOADS, triton=probe))
    assert "it needs the package setuptools: pip install setuptools" in [f["fix"] for f in told["findings"]]


def test_a_frontend_without_libcudnn_is_not_reinstalled(examined):
    probe = Probe("1.23.0", False, {}, "RuntimeError: Unable to find symbol cudnnGetVersion")
    for env, level, fix in (
        (None, "note", "nothing to do without a GPU: cuDNN would have no use"),
        (gpu(cuda="12.8"), "error", "pip install nvidia-cudnn-cu12, or put cuDNN's folder on "),
    ):
        _, told = examined(machine(env=env, torch=LOADS, cudnn_frontend=probe))
        [found] = [f for f in told["findings"] if "finds no libcudnn" in f["text"]]
        assert (found["level"], found["fix"][: len(fix)]) == (level, fix)


def test_a_gpu_hidden_on_purpose_and_an_invalid_variable_stop_nothing(examined, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("ATTNSEL_ADAPT", "maybe")
    code, told = examined(machine(**GPU_SEEN, torch=Probe("2.9.1", True, {**TORCH, "cuda_available": False})))
    assert code == 4
    assert told["settings"] is None
    assert levels(told, "ATTNSEL_ADAPT = 'maybe': must be 'auto' or 'never'") == ["error"]
    assert levels(told, "cannot use it") == ["note"]


# ---- in child processes ------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="signals are told otherwise there")
def test_a_library_that_crashes_is_a_finding(tmp_path, monkeypatch, capsys):
    home = tmp_path / "people" / "someone"
    home.mkdir(parents=True)
    crashes = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    put(home, "torch", "2.9.1", {"torch.py": crashes})
    put(home, "triton", "3.5.1", {"triton.py": "raise ImportError(f'cannot load {__file__}')"})
    frontend = "__version__ = '1.28.0'\nbackend_version = lambda: 92000"
    put(home, "nvidia-cudnn-frontend", "1.28.0", {"cudnn.py": frontend})
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(home))
    monkeypatch.syspath_prepend(str(home))
    code = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == 4
    assert told["components"]["torch"] == {
        "installed": "2.9.1", "loads": False, "version": None, "trouble": "killed by SIGSEGV",
    }  # fmt: skip
    assert told["components"]["triton"]["trouble"] == "ImportError: cannot load ~/triton.py"
    assert told["components"]["cudnn_frontend"]["loads"] is True
    assert levels(told, "torch 2.9.1 is installed and does not load") == ["error"]
    assert {call["backend"] for call in told["calls"]} == {None}


def test_a_library_that_hangs_is_a_finding(monkeypatch):
    monkeypatch.setattr(probe, "_TIMEOUT", 0.2)
    assert probe.run_script("import time; time.sleep(60)") == (False, {}, "no answer within 0.2 s")


def test_this_machine(capsys, monkeypatch, tmp_path):
    """The real thing, on whatever runs the tests; as someone whose names must not appear."""
    monkeypatch.setenv("ATTNSEL_DEBUG_FILE", str(tmp_path / "someone-special" / "log"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "someone-special")
    monkeypatch.setattr(platform, "node", lambda: "host-of-secrets")
    code = main(["doctor"])
    out = capsys.readouterr().out
    assert code in (0, 4)
    assert "~/USER/log" in out
    for secret in (str(tmp_path), "someone-special", "host-of-secrets"):
        assert secret not in out
    monkeypatch.setenv("USER", "torch")
    text = f"{tmp_path}/a.so: torch failed on host-of-secrets in /scratch/torch/b.so"
    assert redact(text) == "~/a.so: torch failed on HOST in /scratch/USER/b.so"
