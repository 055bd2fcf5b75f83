"""``attnsel gpus``, and the GPUs that the driver of this machine names."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from attnsel.cli import main, probe
from attnsel.environment.gpus import CATALOGUE


def told(capsys, *words: str) -> tuple[int, str]:
    code = main(["gpus", *words])
    return code, capsys.readouterr().out


def names(out: str) -> list[str]:
    return [line.split("  ")[0] for line in out.split("\n\n")[0].splitlines()[1:]]


def test_all_cards_stand_in_a_table_of_80_columns(capsys) -> None:
    code, out = told(capsys)
    assert code == 0
    assert names(out) == [gpu.name for gpu in CATALOGUE.values()]
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[0].split() == ["name", "architecture", "memory", "SMs", "kind"]
    assert out.splitlines()[-1].startswith(f"{len(CATALOGUE)} GPUs.")


@pytest.mark.parametrize(
    ("words", "shown"),
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


def test_a_name_that_no_card_has_is_one_line(capsys) -> None:
    assert main(["gpus", "H150"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("attnsel: H150: unknown GPU (did you mean H200 or H100?)")
    assert err.count("\n") == 1


def test_json_holds_the_figures_and_null_for_what_is_not_known(capsys) -> None:
    rows = json.loads(told(capsys, "sm110", "--json")[1])
    assert rows[0] == {
        "schema": "attnsel.gpus/1",
        "name": "Thor",
        "arch": 110,
        "memory_gib": None,
        "sm_count": None,
        "kind": "Jetson",
    }
    assert [row["memory_gib"] for row in rows] == [None, 128, 64]


def test_markdown_has_a_row_for_each(capsys) -> None:
    lines = told(capsys, "sm103", "--markdown")[1].strip().splitlines()
    assert len(lines) == 4
    assert lines[2] == "| B300 | sm103 | 288 GB | 148 | data center |"


def test_the_help_of_gpu_names_a_few_and_the_list(capsys) -> None:
    main(["explain", "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "H100, H200, B200, B300, RTX 5090, GB10 and more (attnsel gpus lists them)" in said


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


@pytest.mark.parametrize("init", ["raise NVMLError('Driver Not Loaded')", "import os; os.abort()"])
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
