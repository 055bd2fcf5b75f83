"""The GPUs that the driver of this machine names. What ``attnsel gpus`` lists: tests/net/words."""

from __future__ import annotations

import sys

from attnsel.cli import probe
from tables import each

NVML = """
class NVMLError(Exception): pass
def nvmlInit(): {init}
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetName(handle): return ["NVIDIA H200", b"NVIDIA L4"][handle]
"""


@each(
    "init, named",
    [
        ("pass", ("NVIDIA H200", "NVIDIA L4")),
        ("raise NVMLError('Driver Not Loaded')", ()),
        ("import os; os.abort()", ()),
    ],
)
def test_the_driver_names_its_gpus_and_one_that_does_not_answer_is_no_error(
    tmp_path, monkeypatch, init, named
) -> None:
    (tmp_path / "pynvml.py").write_text(NVML.replace("{init}", init))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # each row is a file of the same second
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(probe, "_DRIVER_FOLDER", tmp_path / "nothing")
    assert probe._gpus_in_sight() == named
    assert not named or not probe._driver_unasked(named)


def test_without_nvidia_ml_py_gpus_have_no_names_and_it_is_said(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    monkeypatch.setattr(probe, "_DRIVER_FOLDER", tmp_path)
    assert probe._gpus_in_sight() == ("NVIDIA GPU", "NVIDIA GPU")
    assert probe._driver_unasked(("NVIDIA GPU",))
    monkeypatch.setattr(probe.shutil, "which", lambda name: None)
    assert not probe._driver_unasked(()), "without a driver nothing is missing"
    monkeypatch.setattr(probe.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert probe._driver_unasked(())
