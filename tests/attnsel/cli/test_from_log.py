"""``attnsel explain --from-log``: its forms, exit codes, flags beside it, and bad input."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tables import each

CASES = Path(__file__).parents[1] / "diagnose" / "logs" / "cases"
LOG = CASES / "NVIDIA-TransformerEngine-2285.txt"


@pytest.fixture
def explain(run):
    def call(*words: str, log: Path = LOG) -> tuple[int, str, str]:
        return run(["explain", "--from-log", str(log), *words])

    return call


def test_a_report_of_many_calls_has_the_most_frequent_first_and_counts_the_rest(explain, tmp_path) -> None:
    file = tmp_path / "x.log"
    call = "Running with config={{'compute_capability': 'sm90', 'head_dim_qk': {}}}\nSelected backend = {}\n"
    dims = [64, *(7 * [512]), *(3 * [72]), 96, 104, 112, 120]
    file.write_text("".join(call.format(dim, "UnfusedDotProductAttention") for dim in dims))
    code, out, _ = explain(log=file)
    assert code == 0
    assert out.startswith("15 attention calls in this log, 7 different.")
    assert out.index("d512/512") < out.index("d72/72") < out.index("d64/64")
    assert "2 more different calls: --json has them all." in out
    assert len(json.loads(explain("--json", log=file)[1])["calls"]) == 7


def test_markdown_makes_no_markup_of_what_a_log_says(explain, tmp_path) -> None:
    file = tmp_path / "x.log"
    file.write_text(
        "Disabling FusedAttention as <img src=x> @someone [x](http://y) `z` \x1b]0;title\x07 | so\n"
    )
    code, out, _ = explain("--markdown", log=file)
    assert code == 0
    assert "<img" not in out.replace("\\<", "")
    assert "\x1b" not in out
    assert "](http" not in out


def test_flags_state_what_the_log_does_not_and_win_over_it(explain, run) -> None:
    assert "CUDNN001" not in explain("--cudnn", "9.11.0")[1]
    assert "d64/64" in explain("--head-dim", "64", "--head-dim-v", "64")[1]
    bare = CASES / "EvolvingLMMs-Lab-LLaVA-OneVision-2-85.txt"
    assert "the call itself is not in the log" in explain(log=bare)[1]
    asked = explain("--gpu", "A100", "--head-dim", "512", "--qkv-layout", "bshd", log=bare)[1]
    assert "A100 (sm80)" in asked
    assert "512" in asked
    assert "[CUDNN" in asked


def test_a_torch_that_is_too_old_to_be_known_is_said_and_the_rest_answered(explain, tmp_path) -> None:
    file = tmp_path / "x.log"
    file.write_text("PyTorch version: 2.1.2\nRuntimeError: No available kernel. Aborting execution.\n")
    code, out, _ = explain(log=file)
    assert code == 0
    assert "not used: torch = 2.1.2: must be 2.2 or newer" in " ".join(out.split())
    assert "✖ No available kernel" in out


@each(
    "words, said",
    [
        (["--ask-library"], "--ask-library"),
        (["--short"], "--short"),
        (["--sources"], "--sources"),
        (["--as", "torch"], "--as"),
        (["--json", "--markdown"], "one form at a time"),
        (["--gpu", "H1000"], "gpu"),
        (["--head-dim", "-5"], "head"),
        (["--params", "-"], "--params"),
        (["--dtype", "int3"], "dtype"),
    ],
)
def test_what_does_not_go_with_it_is_one_line(explain, words: list[str], said: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"head_dim_qk": 64}')))
    code, out, err = explain(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@each("name", ["nowhere.log", "a\0b", ""])
def test_a_file_that_is_not_there_is_one_line(run, name: str) -> None:
    code, out, err = run(["explain", "--from-log", name])
    assert (code, out) == (2, "")
    assert "--from-log" in err
    assert err.count("\n") == 1
