"""``attnsel gpus``, and the GPUs that the driver of this machine names."""

from __future__ import annotations

import sys

from attnsel.cli import probe
from tables import each


@each(
    "words, shown",
    [
        (["h100"], ["H100", "H100 PCIe", "H100 NVL", "H100 96GB", "H100 64GB"]),
        (["10.3"], ["B300", "GB300"]),
        (["rtx4070", "super"], ["RTX 4070 SUPER", "RTX 4070 Ti SUPER"]),
        (["sm120", "laptop", "geforce", "5090"], ["RTX 5090 Laptop"]),
        (["dgx", "spark"], ["GB10"]),
        (["NVIDIA A100-SXM4-40GB MIG 1g.5gb"], ["A100 40GB MIG 1g.5gb"]),
    ],
)
def test_words_narrow_it(run, words, shown) -> None:
    code, out, _ = run(["gpus", *words])
    names = [line.split("  ")[0] for line in out.split("\n\n")[0].splitlines()[2:]]
    assert (code, names) == (0, shown)


# ---- the driver -------------------------------------------------------------------------------------

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
