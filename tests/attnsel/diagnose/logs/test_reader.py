"""Logs of any encoding and launcher, one line at a time."""

from __future__ import annotations

import gzip
import io
import os
from itertools import product
from pathlib import Path

import pytest

from attnsel.diagnose.logs.calls import LoggedCall, gather
from attnsel.diagnose.logs.reader import Entry, entries
from attnsel.diagnose.text_files import lines_of, opened
from attnsel.errors import InvalidInput
from tables import each, rows_of

ERROR = "ValueError: No dot product attention backend is available for the provided inputs. Please run"


def calls(data: bytes) -> tuple[LoggedCall, ...]:
    return gather(lines_of(io.BytesIO(data), lambda done: None)).calls


def read(*lines: str) -> list[Entry]:
    return list(entries(lines, ("attention", "config"), lambda line: "brackets" if "config=" in line else ""))


ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "gbk")


def test_encodings_line_ends_and_gzip_are_found() -> None:
    logs = [f"{ERROR} 日志\n".encode(encoding, errors="replace") for encoding in ENCODINGS]
    logs += [f"step 1{end}{ERROR}{end}step 2{end}".encode() for end in ("\n", "\r\n", "\r", "\n\r\n")]
    logs += [
        gzip.compress(f"{ERROR}\n".encode()),
        b"x" * 150_000 + ERROR.encode(),
    ]  # without an end: in pieces
    for log in logs:
        (call,) = calls(log)
        assert call.times == 1
        assert call.findings[0].text == ERROR[12:-12], log[:80]
    with pytest.raises(InvalidInput, match="is no text"):
        calls(bytes(range(32)) * 200)


@each("before", rows_of(__file__, "prefixes.csv"))
def test_prefixes_of_launchers_name_the_stream_and_go(before: dict[str, str]) -> None:
    assert read(f"{before['prefix'].replace('ESC', chr(27))}attention") == [
        Entry(1, before["stream"], "attention")
    ]


def test_lines_that_belong_together_are_one_entry_in_each_stream() -> None:
    found = read(
        "[rank0]: config={'a': (1,", "[rank1]: config={'a': (3,", "[rank0]: 2)}", "[rank1]: 4)}", "attention"
    )
    assert [(entry.number, entry.stream, entry.text) for entry in found] == [
        (1, "rank 0", "config={'a': (1,\n2)}"),
        (2, "rank 1", "config={'a': (3,\n4)}"),
        (5, "", "attention"),
    ]


def test_what_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    cut_off = tmp_path / "x.log.gz"
    cut_off.write_bytes(gzip.compress(os.urandom(5000))[:-200])
    for path in ("nowhere.log", ".", "a\0b", cut_off):
        with pytest.raises(InvalidInput, match="--from-log"), opened(Path(path), "--from-log") as (file, _):
            gather(lines_of(file, lambda done: None))


def test_of_an_endless_line_its_beginning_is_read_and_the_next_line() -> None:
    lines = list(lines_of(io.BytesIO(b"x" * (2 << 20) + b"\nnext\n"), lambda done: None))
    assert (sum(map(len, lines[:-1])), len(lines[0]), lines[-1]) == (192 << 10, 64 << 10, "next\n")
    whole = lines_of(io.BytesIO(b"x" * 99 + b"\nnext\n"), lambda done: None, longest=4, whole=True)
    assert "".join(whole) == "x" * 99 + "\nnext\n", (
        "ranks' lines are whole: else the next would go on with one"
    )


def test_ranks_without_prefixes_that_say_the_same_are_counted() -> None:
    question = "DEBUG:x:Running with config={'compute_capability': 'sm90', 'head_dim_qk': 64}\n"
    chosen = "DEBUG:x:Selected backend = FusedAttention (sub-backend 1)\n"
    (call,) = calls((3 * question + 3 * chosen).encode())
    assert call.times == 3


def test_more_different_calls_than_are_told_apart_are_counted() -> None:
    lines = "".join(
        f"Running with config={{'compute_capability': 'sm90', 'head_dim_qk': {n}}}\n"
        f"Supported flash-attn versions are >= 2.1.1, <= 2.7.4. Found flash-attn 2.9.{m}.\n"
        "Selected backend = NoBackend\n"
        for n, m in product(range(1, 68), range(30))  # 2010 calls of fewer texts than are read
    )
    found = gather(lines.splitlines(keepends=True))
    assert (len(found.calls), found.left_out) == (2000, 10)


def test_of_endless_different_texts_both_ends_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnsel.diagnose.logs.calls.FIRST_TEXTS", 3)
    monkeypatch.setattr("attnsel.diagnose.logs.calls.LAST_TEXTS", 2)
    lost = "RuntimeError: FlashAttention only supports Ampere GPUs or newer."
    noise = [f"attention step {n}" for n in range(9)]
    assert gather([lost, *noise, *noise[:2]]).calls
    found = gather([*noise, lost])
    assert found.calls
    assert found.unread == 5
    assert not gather([*noise, lost, "attention 10", "attention 11"]).calls


def test_steps_that_differ_by_their_numbers_take_no_place() -> None:
    steps = [f"train: step {n} loss {n / 7:.4f} grad_norm {n / 3:.3f} tokens/s {n}" for n in range(900)]
    found = gather([*steps, "RuntimeError: FlashAttention only supports Ampere GPUs or newer.", *steps])
    assert found.calls
    assert not found.unread


def test_a_message_within_a_sentence_of_another_script_is_read() -> None:
    said = "FlashAttention only supports Ampere GPUs or newer."
    (alone,), (within,) = (gather([line]).calls for line in (said, f"运行时报错{said}，请问怎么解决"))
    assert alone.findings[-1].known == within.findings[-1].known
