"""What ``explain --measure`` writes, for which calls a row speaks, and that none is lost."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from attnsel import AttentionParams, Environment, InvalidInput, Policy, select
from attnsel.cli import main
from attnsel.verdicts import measured
from attnsel.verdicts.measured import append
from tables import rows_of

DATA = Path(__file__).with_name("measured.csv")
WORDS = [
    "explain",
    "--measure",
    "--seqlen=32",
    "--batch-size=1",
    "--num-heads=2",
    "--head-dim=16",
    "--dtype=fp32",
]


@pytest.mark.parametrize("row", rows_of(__file__, "measured_calls.csv"), ids=lambda row: row["why"])
def test_the_choice_follows_what_was_measured_near_the_call_and_nothing_else(row: dict[str, str]) -> None:
    own = ("why", "gpu", "m", "first")
    p = AttentionParams(
        **{name: json.loads(value) for name, value in row.items() if value and name not in own}
    )
    env = Environment.describe(row["gpu"] or "H100")
    selection = select(p, env, policy=Policy(figures=DATA))
    assert [one.name for one in selection.figures if one.here] == list(filter(None, [row["m"]]))
    if not row["m"]:
        assert list(selection) == list(select(p, env))
        assert f"nothing near this call in {DATA}" in " ".join(selection.report(1000).split())
        return
    assert selection.backend == row["first"]
    followed = [c.name for c in selection.ranked if c.placed_by == "PREF016"]
    assert followed
    assert all(selection.keeps_away(name) == ("PREF016",) for name in followed)
    assert f"Measured here ({row['m']})" in selection.report()


def test_the_same_content_is_the_same_policy_and_another_one_is_another(tmp_path):
    first, copy = Policy(figures=DATA), tmp_path / "copy.csv"
    assert first == Policy(figures=str(DATA)) == Policy.model_validate_json(first.model_dump_json())
    copy.write_bytes(DATA.read_bytes())
    before = Policy(figures=copy)
    assert before.figures.digest == first.figures.digest
    append(copy, [{"direction": "fwd", "kernel": "tiled", "value": "1", "unit": "us"}])
    assert Policy(figures=copy) != before == pickle.loads(pickle.dumps(before))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "lacks the column arch"),
        (b"\xff\xfe\x00", "no UTF-8 text"),
        (DATA.read_bytes()[:-20], "line 19 has 25 cells, not 29"),
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
    assert main([*WORDS, "--out", str(file)]) == 2
    assert f"{file}: is" in capsys.readouterr().err
    assert file.read_bytes() == content


def test_measuring_writes_rows_that_the_choice_follows_and_a_full_disk_loses_none(
    tmp_path, capsys, monkeypatch
):
    pytest.importorskip("torch")
    file = tmp_path / "figures.csv"
    words = [*WORDS, "--budget=2", "--out", str(file)]
    assert main([*words, "--json"]) == 0
    told, written = json.loads(capsys.readouterr().out)["measured"], rows_of(file, file.name)
    assert {one["name"]: one["status"] for one in told["candidates"]}["sdpa.flash"] == "measured"
    assert {(row["pair"], row["direction"]) for row in written} == {
        ("m1", "fwd"),
        ("m1", "bwd"),
        ("m1", "fwd+bwd"),
    }
    first = min((r for r in written if r["direction"] == "fwd+bwd"), key=lambda row: float(row["value"]))
    p = AttentionParams(
        max_seqlen_q=32, batch_size=1, num_heads=2, head_dim_qk=16, dtype="fp32", is_training=True
    )
    assert select(p, policy=Policy(figures=file)).backend == first["kernel"]
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measured.os, "fsync", full)
    assert main(words) == 74
    assert f"{file}: No space left" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert not list(tmp_path.glob("*.new"))


def test_ctrl_c_keeps_what_was_measured(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    from attnsel.runtime import measure

    sample, seen = measure._sample, []

    def interrupted(*given, **more):
        if len(seen) == 4:
            raise KeyboardInterrupt
        seen.append(sample(*given, **more))

    monkeypatch.setattr(measure, "_sample", interrupted)
    assert main([*WORDS, "--json", "--out", str(tmp_path / "figures.csv")]) == 130
    told = json.loads(capsys.readouterr().out)["measured"]
    assert told["interrupted"]
    assert [one["status"] for one in told["candidates"][:2]] == ["measured", "measured"]
    assert rows_of(tmp_path / "x", "figures.csv") == [{**row, "pair": "m1"} for row in told["rows"]]
