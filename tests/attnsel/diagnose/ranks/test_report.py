"""``attnsel report``: many ranks' files in one answer."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from attnsel import AttentionParams
from attnsel.cli import main
from attnsel.diagnose.ranks import tables
from attnsel.diagnose.ranks.answer import read
from rank_files import QUESTION, answer, debug_line, environment, site, watch_lines, write_ranks

WORDS = "numbers are off by 0.5"
ESC = "\x1b]0;owned\x07"


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*words: str | Path) -> tuple[int, str, str]:
        code = main(["report", *map(str, words)])
        return (code, *capsys.readouterr())

    return call


# ---- who differs -------------------------------------------------------------------------------------


def test_one_dissenter_among_64_ranks_is_named_with_what_differs(tmp_path: Path, told: Any) -> None:
    write_ranks(tmp_path, dissenter=None)
    code, out, _ = told(tmp_path)
    assert (code, out.splitlines()[0]) == (0, "64 ranks: they agree.")
    write_ranks(tmp_path, dissenter=17)
    code, out, err = told(tmp_path)
    assert (code, err) == (1, "")
    assert out.startswith("64 ranks: rank 17 differs from the others in 1 question.")
    assert "63 ranks (0-16, 18-63): cudnn" in out
    assert "> rank 17: sdpa.flash" in out
    assert "cudnn: none here, 9.10.2 on the others" in out
    assert "fix: install cudnn 9.10.2 here too" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_policy_of_one_rank_is_named_by_its_variable(tmp_path: Path, told: Any) -> None:
    write_ranks(tmp_path, dissenter=3, deny=("cudnn",))
    _, out, _ = told(tmp_path)
    assert "ATTNSEL_DISABLE: cudnn here, none on the others" in out
    assert "fix: set ATTNSEL_DISABLE alike on all ranks" in out


def test_strides_of_one_rank_are_what_differs(tmp_path: Path) -> None:
    lines = [json.loads(debug_line(answer(), rank, world_size=3)) for rank in range(3)]
    lines[2]["backend"] = "tiled"
    lines[2]["params"]["tensors"]["q"] = {
        "shape": [2, 2048, 16, 128], "stride": [1, 2, 3, 4], "dtype": "bf16", "alignment": 2,
    }  # fmt: skip
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (one,) = read([str(tmp_path)]).disagreements
    (dissent,) = one.dissents
    assert dissent.group.ranks == "2"
    assert [differs.name for differs in dissent.differs] == ["tensors"]
    assert "same strides" in dissent.fix


def test_questions_that_part_ranks_alike_are_told_once(tmp_path: Path) -> None:
    with (tmp_path / "all.jsonl").open("w") as file:
        for rows in (256, 512, 1024):
            question = AttentionParams(max_seqlen_q=rows)
            for rank in range(4):
                env = environment(cudnn=None) if rank == 2 else None
                file.write(debug_line(answer(question, env), rank, world_size=4) + "\n")
    (one,) = read([str(tmp_path)]).disagreements
    assert one.alike == 2


def test_programs_that_all_call_themselves_rank_0_are_told_apart(tmp_path: Path) -> None:
    for number in range(3):
        chosen = answer(env=environment(cudnn=None)) if number == 1 else answer()
        line = debug_line(chosen, 0, world_size=1, pid=100 + number, host=f"node{number}")
        (tmp_path / f"{'abc'[number]}.jsonl").write_text(line + "\n")
    (one,) = read([str(tmp_path)]).disagreements
    assert one.dissents[0].group.ranks == "0 (process 101 on node1)"


def test_file_names_tell_ranks_where_a_launcher_sets_none(tmp_path: Path) -> None:
    for number in range(4):
        chosen = answer(env=environment(cudnn=None)) if number == 2 else answer()
        line = debug_line(chosen, 0, world_size=1, pid=100 + number)
        (tmp_path / f"rank{number}.jsonl").write_text(line + "\n")
    found = read([str(tmp_path)])
    assert found.disagreements[0].dissents[0].group.ranks == "2"
    assert found.troubles == ()


# ---- what went wrong ---------------------------------------------------------------------------------


def test_the_first_fall_back_and_the_failed_check_say_when_where_and_why(tmp_path: Path, told: Any) -> None:
    for rank, hour in ((0, "09"), (1, "07")):
        steps = [
            debug_line(answer(), rank, world_size=2, time=f"2026-11-23T{hour}:00:00+00:00"),
            *(
                debug_line(
                    answer(refusals=refusals), rank, world_size=2, time=f"2026-11-23T{hour}:00:0{n}+00:00"
                )
                for n, refusals in enumerate(
                    [
                        (("cudnn", "RUNTIME001", "no plan"),),
                        (("cudnn", "RUNTIME001", "no plan"), ("sdpa.cudnn", "RUNTIME002", WORDS)),
                    ],
                    1,
                )
            ),
        ]
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(steps) + "\n")
    code, out, _ = told(tmp_path)
    assert code == 1, "a self-check failed"
    assert "cudnn, then sdpa.cudnn: 2026-11-23T07:00:01+00:00, first on rank 1, in all" in out
    assert "no plan [RUNTIME001]" in out
    assert f"{WORDS} [RUNTIME002]" in out
    found = read([str(tmp_path)])
    assert not found.disagreements, "both ended with the same kernel"
    assert [one.rank_count for one in (*found.fell_back, *found.failed_checks)] == [2, 2]


def test_a_fall_back_of_one_rank_explains_its_dissent(tmp_path: Path) -> None:
    write_ranks(tmp_path, ranks=4, dissenter=None)
    refused = answer(refusals=(("cudnn", "RUNTIME001", "no plan"),))
    with (tmp_path / "rank2.jsonl").open("a") as file:
        file.write(debug_line(refused, 2, world_size=4) + "\n")
    (one,) = read([str(tmp_path)]).disagreements
    (dissent,) = one.dissents
    assert (dissent.group.ranks, dissent.refused) == ("2", ("cudnn",))
    assert "ATTNSEL_DISABLE=cudnn" in dissent.fix


def test_a_slow_path_comes_with_the_way_out(tmp_path: Path, told: Any) -> None:
    slow = answer(AttentionParams(softcap=30.0), environment(triton=None))
    assert slow.backend == "tiled"
    (tmp_path / "rank0.jsonl").write_text(debug_line(slow, 0, world_size=1) + "\n")
    code, out, _ = told(tmp_path)
    assert code == 0
    assert "Slow paths\n  tiled for" in out
    assert "fix: to get " in out


def test_missing_empty_and_cut_off_ranks_are_named(tmp_path: Path, told: Any) -> None:
    write_ranks(tmp_path, ranks=16, dissenter=None)
    for rank in (4, 5, 6, 11):
        (tmp_path / f"rank{rank}.jsonl").unlink()
    whole = (tmp_path / "rank2.jsonl").read_text()
    (tmp_path / "rank2.jsonl").write_text(whole + whole[:500])
    (tmp_path / "rank3.jsonl").write_text("")
    code, out, _ = told(tmp_path)
    assert code == 1
    assert "rank 2: cut off in the middle of a line (rank2.jsonl)" in out
    assert "rank 3: its file holds no line of attnsel's" in out
    assert "rank 4-6, 11: no file or line, and the world size is 16" in out


def test_rank_0_alone_is_told_how_the_others_speak(tmp_path: Path, told: Any) -> None:
    (tmp_path / "choices.jsonl").write_text(debug_line(answer(), 0) + "\n")
    assert "ATTNSEL_DEBUG_RANKS=all" in " ".join(told(tmp_path)[1].split())


# ---- watch and logs ----------------------------------------------------------------------------------


def test_calls_of_watched_programs_are_added_up(tmp_path: Path, told: Any) -> None:
    for rank, kernel in enumerate(("sdpa.flash", "sdpa.flash", "sdpa.math")):
        sites = [site(f"aten::{kernel}", kernel, fix="attn_implementation='sdpa'", why=["SDPA001 no"])]
        (tmp_path / f"watch-{rank}.jsonl").write_text(watch_lines(rank, sites, world_size=3))
    code, out, _ = told(tmp_path)
    assert code == 1
    assert "rank 2 differs" in out
    assert "sdpa.flash: 20 calls, 2 ranks (0-1)" in out
    assert "Slow paths\n  sdpa.math" in out
    assert "fix: attn_implementation='sdpa'" in out


def test_a_watched_program_that_failed_is_named(tmp_path: Path, told: Any) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.jsonl").write_text(watch_lines(rank, [site("a", "sdpa.flash")], ended=rank))
    code, out, _ = told(tmp_path)
    assert code == 1
    assert "rank 1: the program ended with exit code 1" in out


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
    _, out, _ = told(tmp_path)
    assert "cudnn: said 1 time, rank 1" in out
    assert "cudnn: first on rank 1" in out
    assert "tiled for bf16 bshd b4 causal training" in out
    assert "1 line of others (out.1.log): attnsel explain --from-log" in " ".join(out.split())


# ---- files -------------------------------------------------------------------------------------------


def test_gz_files_patterns_and_files_twice(tmp_path: Path) -> None:
    write_ranks(tmp_path, ranks=4, dissenter=None)
    plain = tmp_path / "rank3.jsonl"
    with gzip.open(tmp_path / "rank3.jsonl.gz", "wt") as file:
        file.write(plain.read_text())
    plain.unlink()
    found = read([f"{tmp_path}/rank*", str(tmp_path)])
    assert (found.files, found.ranks, found.troubles) == (4, 4, ())


def test_a_gz_file_that_breaks_off_is_cut_off(tmp_path: Path) -> None:
    write_ranks(tmp_path, ranks=2, dissenter=None)
    data = gzip.compress((tmp_path / "rank1.jsonl").read_bytes() * 50, mtime=0)
    (tmp_path / "rank1.jsonl.gz").write_bytes(data[: len(data) // 2])
    (tmp_path / "rank1.jsonl").unlink()
    found = read([str(tmp_path)])
    assert [trouble.rank for trouble in found.troubles] == ["1"]
    assert [skipped.why for skipped in found.skipped] == ["a gz file that breaks off or is damaged"]


def test_odd_files_are_a_line_each_and_no_traceback(tmp_path: Path, told: Any) -> None:
    write_ranks(tmp_path, ranks=2, dissenter=None)
    (tmp_path / "model.bin").write_bytes(b"\0\1\2" * 100)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "sub").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / f"x{ESC}.log").write_bytes(b"\0")
    code, out, err = told(tmp_path)
    assert (code, err) == (0, "")
    assert out.replace("\n", "").isprintable()
    for line in (
        "gone: a link that leads nowhere",
        "loop: a link to a folder, which is not followed",
        "model.bin: no text",
        "pipe: no plain file",
    ):
        assert line in out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_a_line(tmp_path: Path) -> None:
    write_ranks(tmp_path, ranks=1, dissenter=None)
    (tmp_path / "rank1.jsonl").touch(mode=0)
    (tmp_path / "closed").mkdir(mode=0)
    assert [one.why for one in read([str(tmp_path)]).skipped] == ["Permission denied"] * 2


def test_broken_lines_and_unknown_versions_are_counted_with_their_places(tmp_path: Path, told: Any) -> None:
    good = debug_line(answer(), 0, world_size=1)
    lines = [
        good,
        "{",
        '{"schema": "attnsel.debug/99"}',
        '{"a":' * 100_000,
        '{"schema": "attnsel.debug/5"}',
        good,
    ]
    (tmp_path / "rank0.jsonl").write_text("\n".join(lines) + "\n")
    code, out, _ = told(tmp_path)
    assert code == 0
    flat = " ".join(out.split())
    assert "3 broken lines: rank0.jsonl:2 (no JSON" in flat
    assert "rank0.jsonl:4 (nested too deeply)" in flat
    assert "attnsel.debug/99: 1 line of a version that this attnsel does not read" in flat


def test_a_line_without_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnsel.diagnose.ranks.reading.LONGEST", 1 << 15)
    good = debug_line(answer(), 0, world_size=1)
    (tmp_path / "rank0.jsonl").write_text("{" * 200_000 + "\n" + good + "\n")
    found = read([str(tmp_path)])
    assert (found.known, found.broken) == (1, 1)
    assert "longer than is read" in found.broken_places[0]


HOSTILE: list[Any] = [None, [], {}, "x", -1, 10**30, 1.5, True, ESC, "\ud800", "9" * 5000]


def test_no_value_of_a_line_breaks_the_report_or_reaches_the_terminal(tmp_path: Path, told: Any) -> None:
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
        assert code in (0, 1)
        assert out.replace("\n", "").isprintable()
        assert err == ""


def test_bad_input_is_one_line(told: Any) -> None:
    for words, said in (
        ([], "report needs a folder, files or a pattern"),
        (["/nowhere/x"], "there is no such file or folder"),
        (["/nowhere/*.jsonl"], "no file matches"),
        (["a\0b"], "a\\x00b: there is no such file or folder"),
        ([".", "--json", "--markdown"], "one form at a time"),
    ):
        code, out, err = told(*words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err


def test_nothing_known_says_what_is_looked_for(tmp_path: Path, told: Any) -> None:
    (tmp_path / "train.log").write_text("step 1\n")
    code, _, err = told(tmp_path)
    assert code == 3
    assert "Looked for: lines of ATTNSEL_DEBUG_FILE" in err
    assert "1 line of others (train.log): attnsel explain --from-log FILE reads those" in err
    assert err.count("\n") == 1


# ---- memory ------------------------------------------------------------------------------------------


def large_file(path: Path, size: int) -> int:
    """Lines of many questions on many ranks, up to ``size`` bytes; how many."""
    made = [
        json.loads(debug_line(answer(QUESTION.replace(max_seqlen_q=64 * n), policy), 0))
        for n in range(1, 9)
        for policy in (environment(), environment(cudnn=None))
    ]
    count = written = 0
    with path.open("w") as file:
        while written < size:
            line = made[count % len(made)] | {"rank": count % 64, "label": f"layer {count % 48}"}
            # No two questions alike: more than there is room for.
            line["params"] = {**line["params"], "max_seqlen_kv": count}
            written += file.write(json.dumps(line) + "\n")
            count += 1
    return count


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 MB here; 1 GB in the slow form. Tables are full long before the end."""
    monkeypatch.setattr(tables, "MOST_QUESTIONS", 32)
    peaks = []
    for name, size in (("small", 1 << 19), ("large", 1 << 21)):
        count = large_file(tmp_path / name, size)
        tracemalloc.start()
        found = read([str(tmp_path / name)])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.lines == count
        assert found.dropped["lines of further questions"] == count - 32
    assert peaks[1] < peaks[0] + (100 << 10)


@pytest.mark.slow
def test_a_gigabyte_is_read_in_flat_memory(tmp_path: Path) -> None:
    import resource
    import subprocess
    import sys

    count = large_file(tmp_path / "large.jsonl", 1 << 30)
    code = (
        "import resource, sys; from attnsel.diagnose.ranks.answer import read\n"
        "moves = []\n"
        "found = read([sys.argv[1]], lambda done, total: moves.append(done) if len(moves) < 9 else None)\n"
        "print(found.lines, len(moves), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "large.jsonl")],
        check=True,
        capture_output=True,
        text=True,
    )
    lines, moves, peak = map(int, done.stdout.split())
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    print(f"{lines} lines, peak {peak >> 10} MiB, {seconds:.0f} s of CPU")
    assert (lines, moves) == (count, 9)
    assert peak < 150 << 10
