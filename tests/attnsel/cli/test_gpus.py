"""``attnsel gpus``, and the GPUs that the driver of this machine names."""

from __future__ import annotations

import sys
import textwrap

import pytest

from attnsel.cli import main, probe
from tables import each


def told(capsys, *words: str) -> tuple[int, str]:
    code = main(["gpus", *words])
    return code, capsys.readouterr().out


def names(out: str) -> list[str]:
    return [line.split("  ")[0] for line in out.split("\n\n")[0].splitlines()[1:]]


@each(
    "words, shown",
    [
        (["h100"], ["H100", "H100 PCIe", "H100 NVL", "H100 96GB", "H100 64GB"]),
        (["sm103"], ["B300", "GB300"]),
        (["10.3"], ["B300", "GB300"]),
        (["jetson", "thor"], ["Thor"]),
        (["rtx4070", "super"], ["RTX 4070 SUPER", "RTX 4070 Ti SUPER"]),
        (["sm120", "laptop", "geforce", "5090"], ["RTX 5090 Laptop"]),
        (["dgx", "spark"], ["GB10"]),
        (["NVIDIA A100-SXM4-40GB MIG 1g.5gb"], ["A100 40GB MIG 1g.5gb"]),
    ],
)
def test_words_narrow_it(capsys, words, shown) -> None:
    code, out = told(capsys, *words)
    assert (code, names(out)) == (0, shown)


# ---- the driver -------------------------------------------------------------------------------------

NVML = """
class NVMLError(Exception): pass
def nvmlInit(): {init}
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetName(handle): return ["NVIDIA H200", b"NVIDIA L4"][handle]
"""


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    """A pynvml that names two GPUs, old and new style; ``nvml(init)`` with another nvmlInit."""

    def install(init: str = "pass") -> None:
        (tmp_path / "pynvml.py").write_text(textwrap.dedent(NVML).replace("{init}", init))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def test_the_driver_names_its_gpus(nvml) -> None:
    nvml()
    assert probe._gpus_in_sight() == ("NVIDIA H200", "NVIDIA L4")
    assert not probe._driver_unasked(("NVIDIA H200",))


@each("init", ["raise NVMLError('Driver Not Loaded')", "import os; os.abort()"])
def test_a_driver_that_does_not_answer_is_no_error(nvml, monkeypatch, tmp_path, init) -> None:
    nvml(init)
    monkeypatch.setattr(probe, "_DRIVER_FOLDER", tmp_path / "nothing")
    assert probe._gpus_in_sight() == ()


def test_without_nvidia_ml_py_gpus_have_no_names_and_it_is_said(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    monkeypatch.setattr(probe, "_DRIVER_FOLDER", tmp_path)
    assert probe._gpus_in_sight() == ("NVIDIA GPU", "NVIDIA GPU")
    assert probe._driver_unasked(("NVIDIA GPU",))


def test_without_a_driver_nothing_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(probe.shutil, "which", lambda name: None)
    assert not probe._driver_unasked(())
    monkeypatch.setattr(probe.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert probe._driver_unasked(())
