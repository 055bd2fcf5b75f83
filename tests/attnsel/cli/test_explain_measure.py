"""What ``explain --measure`` writes and what follows it: which calls a row speaks for, and that no row is lost."""

from __future__ import annotations

import csv
import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attnsel import AttentionParams, Environment, InvalidInput, Policy, select
from attnsel.cli import main
from attnsel.verdicts import measured
from attnsel.verdicts.measured import COLUMNS, append, read_figures

DATA = Path(__file__).with_name("measured.csv")
ASKED = Path(__file__).with_name("measured_calls.csv")
SMALL = (
    "explain --measure --seqlen 32 --batch-size 1 --num-heads 2 --head-dim 16 --dtype fp32 --budget 2".split()
)


def rows_of(path: Path) -> list[dict[str, str]]:
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#")
    return list(csv.DictReader(lines))


@pytest.mark.parametrize("row", rows_of(ASKED), ids=lambda row: row["why"])
def test_the_choice_follows_what_was_measured_near_the_call_and_nothing_else(row: dict[str, str]) -> None:
    words = ("why", "gpu", "m", "first")
    fields = {name: json.loads(value) for name, value in row.items() if value and name not in words}
    p, env = AttentionParams(**fields), Environment.describe(row["gpu"] or "H100")
    policy = Policy(figures=DATA)
    selection, published = select(p, env, policy=policy), select(p, env)
    assert [one.name for one in selection.figures if one.here] == ([row["m"]] if row["m"] else [])
    if not row["m"]:
        assert [c.name for c in selection] == [c.name for c in published]
        assert "nothing near this call in" in selection.report()
        return
    assert selection.backend == row["first"]
    assert "PREF016" in [c.placed_by for c in selection.ranked]
    assert f"Measured here ({row['m']})" in selection.report()


def test_the_same_content_is_the_same_answer_and_another_one_is_another_policy(tmp_path: Path) -> None:
    first, copy = Policy(figures=DATA), tmp_path / "copy.csv"
    assert (
        first
        == Policy(figures=str(DATA))
        == pickle.loads(pickle.dumps(first))
        == first.replace(preview=False)
    )
    copy.write_bytes(DATA.read_bytes())
    before = Policy(figures=copy)
    assert before.figures is not None and first.figures is not None
    assert before.figures.digest == first.figures.digest
    append(
        copy,
        [dict.fromkeys(COLUMNS, "") | {"direction": "fwd", "kernel": "tiled", "value": "1", "unit": "us"}],
    )
    assert Policy(figures=copy) != before == pickle.loads(pickle.dumps(before))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "lacks the column arch"),
        (b"\xff\xfe\x00", "no UTF-8 text"),
        (DATA.read_bytes()[:-20], "line 20 has"),
        (DATA.read_bytes().replace(b"figures/1", b"figures/7"), "newer attnsel: it holds attnsel.figures/7"),
        (DATA.read_bytes().replace(b",310,us", b",-310,us"), "has value '-310'"),
    ],
)
def test_a_file_that_is_none_of_ours_is_named_and_left_as_it_is(tmp_path, capsys, content, said) -> None:
    file = tmp_path / "figures.csv"
    file.write_bytes(content)
    with pytest.raises(InvalidInput, match="figures") as found:
        Policy(figures=file)
    assert said in found.value.allowed
    pytest.importorskip("torch")
    assert main([*SMALL, "--out", str(file)]) == 2
    error = capsys.readouterr().err
    assert str(file) in error and said in error and file.read_bytes() == content


def test_measuring_on_this_machine_writes_rows_that_the_choice_follows(tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "figures.csv"
    assert main([*SMALL, "--out", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["measured"]
    assert {one["name"]: one["status"] for one in told["candidates"]}["sdpa.flash"] == "measured"
    assert {row["direction"] for row in told["rows"]} == {"fwd", "bwd", "fwd+bwd"}
    written = rows_of(file)
    assert {row["pair"] for row in written} == {"m1"} and tuple(written[0]) == COLUMNS
    first = min((r for r in written if r["direction"] == "fwd+bwd"), key=lambda row: float(row["value"]))
    p = AttentionParams(
        max_seqlen_q=32, batch_size=1, num_heads=2, head_dim_qk=16, dtype="fp32", is_training=True
    )
    assert select(p, policy=Policy(figures=file)).backend == first["kernel"]
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measured.os, "fsync", full)
    assert main([*SMALL, "--out", str(file)]) == 74
    shown = capsys.readouterr()
    assert "is the fastest" in shown.out and f"{file}: No space left" in shown.err
    assert file.read_bytes() == before and not list(tmp_path.glob(".figures-*"))


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = [*SMALL[:2], "--seqlen", "2048", "--num-heads", "4", "--budget", "60", "--json"]
    code = f"""
import signal, sys
from attnsel.runtime import measure
sample, seen = measure._sample, []
def counted(*given, **more):
    sample(*given, **more)
    seen.append(1)
    if len(seen) == 2:
        signal.raise_signal(signal.SIGINT)
measure._sample = counted
from attnsel.cli import main
sys.exit(main({[*words, "--out", str(tmp_path / "figures.csv")]!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGINT
    told = json.loads(done.stdout)["measured"]
    assert told["interrupted"] and [one["status"] for one in told["candidates"]][0] == "measured"
    assert len(rows_of(tmp_path / "figures.csv")) == len(told["rows"]) > 0
    assert read_figures(tmp_path / "figures.csv").digest
