"""``attnsel compare`` of folders: many ranks' files in one answer."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from attnsel import AttentionParams
from attnsel.cli import main
from attnsel.diagnose.ranks.answer import read
from rank_files import answer, debug_line, environment, site, watch_lines, write_ranks

WORDS = "numbers are off by 0.5"
ESC = "\x1b]0;owned\x07"


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*words: str | Path) -> tuple[int, str, str]:
        code = main(["compare", *map(str, words)])
        return (code, *capsys.readouterr())

    return call


def lacks_each(text: str, *parts: str) -> list[str]:
    flat = " ".join(text.split())
    return [part for part in parts if part not in text and part not in flat]


# ---- who differs -------------------------------------------------------------------------------------


def test_one_dissenter_among_64_ranks_is_named_with_what_differs(tmp_path: Path, told: Any) -> None:
    write_ranks(tmp_path, dissenter=None)
    code, out, _ = told(tmp_path)
    assert (code, out.splitlines()[0]) == (0, "64 ranks: they agree.")
    write_ranks(tmp_path, dissenter=17)
    code, out, err = told(tmp_path)
    assert (code, err) == (4, "")
    assert out.startswith("64 ranks: rank 17 differs from the others in 1 question.")
    assert not lacks_each(
        out,
        "63 ranks (0-16, 18-63): cudnn",
        "> rank 17: sdpa.flash",
        "cudnn: none here, 9.10.2 on the others",
        "fix: install cudnn 9.10.2 here too",
    )
    assert max(map(len, out.splitlines())) <= 80
    write_ranks(tmp_path, dissenter=3, deny=("cudnn",))
    assert not lacks_each(
        told(tmp_path)[1],
        "ATTNSEL_DISABLE: cudnn here, none on the others",
        "fix: set ATTNSEL_DISABLE alike on all ranks",
    )


def test_questions_that_part_ranks_alike_are_told_once(tmp_path: Path) -> None:
    envs = [environment(), environment(), environment(cudnn=None), environment()]
    questions = [AttentionParams(max_seqlen_q=rows) for rows in (256, 512, 1024)]
    lines = [debug_line(answer(p, env), rank) for p in questions for rank, env in enumerate(envs)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines) + "\n")
    (one,) = read([str(tmp_path)]).ran
    assert one.alike == 2


def test_ranks_are_told_apart_where_a_launcher_sets_none(tmp_path: Path) -> None:
    """By the file's name, or by process and host."""
    for names, wanted in (("abcd", "0 (process 102 on node2)"), (("rank0", "rank1", "rank2", "rank3"), "2")):
        folder = tmp_path / names[0]
        folder.mkdir()
        for number, name in enumerate(names):
            chosen = answer(env=environment(cudnn=None)) if number == 2 else answer()
            line = debug_line(chosen, 0, world_size=1, pid=100 + number, host=f"node{number}")
            (folder / f"{name}.jsonl").write_text(line + "\n")
        found = read([str(folder)])
        (one,) = found.disagreements
        assert one.groups[1].ranks == wanted
        assert found.troubles == ()


# ---- what went wrong ---------------------------------------------------------------------------------


def test_the_first_fall_back_and_the_failed_check_say_when_where_and_why(tmp_path: Path, told: Any) -> None:
    fell_back, off = ("cudnn", "RUNTIME001", "no plan"), ("sdpa.cudnn", "RUNTIME002", WORDS)
    for rank, hour in ((0, "09"), (1, "07")):
        lines = [
            debug_line(answer(refusals=made), rank, world_size=2, time=f"2026-11-23T{hour}:00:0{n}+00:00")
            for n, made in enumerate([(), (fell_back,), (fell_back, off)])
        ]
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    code, out, _ = told(tmp_path)
    assert code == 4, "a self-check failed"
    assert not lacks_each(
        out,
        "cudnn, then sdpa.cudnn: first on rank 1 at 2026-11-23T07:00:01+00:00, 2 ranks in all: no plan [",
        f"{WORDS} [RUNTIME002]",
    )
    found = read([str(tmp_path)])
    assert not found.disagreements, "both ended with the same kernel"
    assert [one.rank_count for one in (*found.fell_back, *found.failed_checks)] == [2, 2]


def test_a_fall_back_of_one_rank_explains_its_dissent(tmp_path: Path) -> None:
    write_ranks(tmp_path, ranks=4, dissenter=None)
    refused = answer(refusals=(("cudnn", "RUNTIME001", "no plan"),))
    with (tmp_path / "rank2.jsonl").open("a") as file:
        file.write(debug_line(refused, 2, world_size=4) + "\n")
    (one,) = read([str(tmp_path)]).disagreements
    group = one.groups[1]
    assert (group.ranks, group.refused) == ("2", ("cudnn",))
    assert "ATTNSEL_DISABLE=cudnn" in group.fix


def test_missing_empty_and_cut_off_ranks_are_named(tmp_path: Path, told: Any) -> None:
    write_ranks(tmp_path, ranks=16, dissenter=None)
    for rank in (4, 5, 6, 11):
        (tmp_path / f"rank{rank}.jsonl").unlink()
    whole = (tmp_path / "rank2.jsonl").read_text()
    (tmp_path / "rank2.jsonl").write_text(whole + whole[:500])
    (tmp_path / "rank3.jsonl").write_text("")
    code, out, _ = told(tmp_path)
    assert code == 4
    assert not lacks_each(
        out,
        "rank 2: cut off or damaged (rank2.jsonl)",
        "rank 3: its file holds no line of attnsel's",
        "rank 4-6, 11: no file or line, and the world size is 16",
    )


# ---- watch and logs ----------------------------------------------------------------------------------


def test_watched_programs_are_compared(tmp_path: Path, told: Any) -> None:
    for rank, kernel in enumerate(("sdpa.flash", "sdpa.flash", "sdpa.math")):
        lines = watch_lines(rank, [site(f"aten::{kernel}", kernel)], world_size=3, ended=rank // 2)
        (tmp_path / f"watch-{rank}.jsonl").write_text(lines)
    code, out, _ = told(tmp_path)
    assert code == 4
    assert not lacks_each(
        out,
        "2 ranks (0-1): sdpa.flash",
        "> rank 2: sdpa.math",
        "fix: look for a switch that is set on some ranks alone",
        "rank 2: the program ended with exit code 1",
    )


def test_attnsels_lines_in_plain_logs_are_read_and_the_others_left_to_explain(
    tmp_path: Path, told: Any
) -> None:
    log = [
        "step 1 loss 2.0",
        "attnsel: [rank 1 of 2] layer 3: cudnn runs; next sdpa.flash [bf16 bshd b2 causal training]",
        "[rank1]: x.py:3: FallbackWarning: cudnn refused when it ran: no plan; the next candidate runs",
        "x.py:3: SlowPathWarning: tiled runs; to get cudnn: install cudnn [bf16 bshd b4 causal training]",
    ]
    (tmp_path / "out.1.log").write_text("\n".join(log) + "\n")
    assert not lacks_each(
        told(tmp_path)[1],
        "rank 1: cudnn",
        "cudnn: first on rank 1: no plan [RUNTIME001]",
        "bf16 bshd b4 causal training rank 1: tiled",
        "a line for attnsel explain --from-log: out.1.log:1",
    )
    (tmp_path / "out.1.log").write_text("step 1\n")
    code, _, err = told(tmp_path)
    assert (code, err.count("\n")) == (3, 1)
    assert "Looked for: lines of ATTNSEL_DEBUG_FILE" in err
    assert "a line for attnsel explain --from-log: out.1.log:1" in err


# ---- files -------------------------------------------------------------------------------------------


def test_gz_files_patterns_and_files_twice(tmp_path: Path) -> None:
    write_ranks(tmp_path, ranks=4, dissenter=None)
    plain, packed = tmp_path / "rank3.jsonl", tmp_path / "rank3.jsonl.gz"
    line = plain.read_bytes()
    plain.unlink()
    packed.write_bytes(gzip.compress(line))
    found = read([f"{tmp_path}/rank*", str(tmp_path)])
    assert (found.files, found.ranks, found.troubles) == (4, 4, ())
    data = gzip.compress(line * 50, mtime=0)
    packed.write_bytes(data[: len(data) // 2])
    found = read([str(tmp_path)])
    assert [trouble.rank for trouble in found.troubles] == ["3"]
    assert [one.first for one in found.unread] == ["rank3.jsonl.gz"]
    packed.write_bytes(data[:40] + bytes(40) + data[80:])
    assert [one.first for one in read([str(tmp_path)]).unread] == ["rank3.jsonl.gz"]


def test_broken_lines_and_unknown_versions_are_counted_with_their_places(
    tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = debug_line(answer(), 0, world_size=1)
    broken = '{"schema": "attnsel.debug/'
    newer, deep = broken + '99"}', broken + '5":' + "[" * 100_000
    file = tmp_path / "rank0.jsonl"
    file.write_text("\n".join([good, broken, newer, deep, good]) + "\n")
    code, out, _ = told(tmp_path)
    assert code == 0
    assert not lacks_each(
        out,
        "a broken line of JSON: rank0.jsonl:2 and 1 more",
        "a line of attnsel.debug/99, which this version of attnsel does not read: rank0.jsonl:3",
    )
    monkeypatch.setattr("attnsel.diagnose.ranks.lines.LONGEST", 1 << 15)  # a line without end is not held
    file.write_text(broken + "{" * 200_000 + "\n" + good + "\n")
    found = read([str(tmp_path)])
    assert (found.lines, found.known, found.troubles) == (2, 1, ())


HOSTILE: list[Any] = [None, [], {}, "x", -1, 10**30, 1.5, True, ESC, "\ud800", "9" * 5000]


def test_no_value_of_a_line_breaks_the_report_or_reaches_the_terminal(tmp_path: Path, told: Any) -> None:
    (tmp_path / "model.bin").write_bytes(b"\0\1\2" * 100)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / f"x{ESC}.log").write_bytes(b"\0")
    whole = json.loads(debug_line(answer(), 0, world_size=1))
    one = json.loads(watch_lines(0, [site("a")]).splitlines()[1])
    lines = []
    for value in HOSTILE:
        lines += [json.dumps({**whole, key: value}) for key in whole if key != "schema"]
        lines += [json.dumps({**whole, "params": {**whole["params"], key: value}}) for key in whole["params"]]
        lines += [json.dumps({**one, key: value}) for key in one if key != "schema"]
    (tmp_path / "rank0.jsonl").write_text("\n".join(lines) + "\n")
    for form in ((), ("--markdown",), ("--json",)):
        code, out, err = told(tmp_path, *form)
        assert code in (0, 4)
        assert out.replace("\n", "").isprintable()
        assert err == ""
    assert {one.what: one.first for one in read([str(tmp_path)]).unread if ":" not in one.first} == {
        "No such file or directory": "gone",
        "a link to a folder, which is not followed": "loop",
        "no text": "model.bin",
        "no plain file": "pipe",
    }


def test_no_more_is_kept_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnsel.diagnose.ranks.answer.MOST_ENTRIES", 20)
    made = [debug_line(answer(AttentionParams(max_seqlen_kv=n)), n, world_size=12) for n in range(1, 12)]
    (tmp_path / "many.jsonl").write_text("\n".join(made) + "\n")
    found = read([str(tmp_path)])
    assert (found.lines, len(found.ran), found.ranks) == (11, 5, 5)
    assert found.unread[0].what.startswith("no room for more than")
