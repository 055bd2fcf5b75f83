"""What is told about choices: as much as was asked for, once each, by rank 0, where it was asked to go."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnsel import (
    AttentionParams,
    DotProductAttention,
    Environment,
    Policy,
    clear_cache,
    configure,
    debug,
    override,
)
from attnsel.debug import SlowPathWarning
from attnsel.decision import Selection, select

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing told yet, and a logger of a bare program: the root's handlers here are pytest's."""
    monkeypatch.setattr(debug, "logger", logging.Logger("attnsel"))
    monkeypatch.setattr(debug, "_announced", set())
    clear_cache()
    yield
    monkeypatch.undo()
    configure()
    clear_cache()


def qkv(s: int = 6) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, s, 4, 8) for _ in "qkv")


def build(**arguments: Any) -> DotProductAttention:
    return DotProductAttention(4, 8, qkv_format="bshd", **arguments)


def test_nothing_is_said_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build()(*qkv())
        build(softcap=1.0)(*qkv())
    assert capfd.readouterr() == ("", "")


def test_level_one_is_a_line_per_selection_and_a_higher_one_says_it_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    module = build(layer_number=3)
    with override(debug=1):
        for s in (6, 6, 7, 6):
            module(*qkv(s))
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert (out, len(lines)) == ("", 2)
    assert all(line.startswith("attnsel: layer 3: ") and "sdpa.flash" in line for line in lines)
    with override(debug=2):
        module(*qkv())
    assert capfd.readouterr().err.count("attnsel: ") == 1


def test_json_is_one_object_per_line_in_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "selections.jsonl"
    with override(debug=1, debug_format="json", debug_file=str(file)):
        for s in (6, 7):
            build()(*qkv(s))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["event"] for record in records] == ["selection"] * 2
    assert [record["params"]["max_seqlen_q"] for record in records] == [6, 7]
    assert all(record["backend"] == "sdpa.flash" and record["rank"] == 0 for record in records)
    assert capfd.readouterr() == ("", "")


def test_a_logger_with_handlers_gets_the_messages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("attnsel")
    monkeypatch.setattr(debug, "logger", logger)
    logger.addHandler(caplog.handler)
    try:
        with override(debug=1):
            build()(*qkv())
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(logging.NOTSET)
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert capfd.readouterr().err == ""


# Slow paths


GPU = Environment.describe(gpu="A100", torch="2.6.0")
SLOW = AttentionParams(dtype="bf16", softcap=30.0, head_dim_qk=512)


def choice(p: AttentionParams, env: Environment = GPU, **policy: Any) -> Selection:
    return select(p, env, policy=Policy(deny=("triton", "cudnn"), **policy))


def test_a_slow_path_warns_once_and_of_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        debug.announce(choice(AttentionParams()), configure())
        debug.announce(choice(SLOW, Environment.describe("cpu")), configure())
        monkeypatch.setenv("RANK", "1")
        debug.announce(choice(SLOW), configure())
        assert caught == []
        monkeypatch.setenv("RANK", "0")
        for _ in range(3):
            debug.announce(choice(SLOW), configure())
    assert [w.category for w in caught] == [SlowPathWarning]
    assert "tiled" in str(caught[0].message)


def padded(s: int) -> Selection:
    """A choice that pads lengths to multiples of 64."""
    asked = AttentionParams(max_seqlen_q=s, is_training=False)
    return select(asked, Environment.describe("A100", cudnn="8.9.7"), policy=Policy(backend="cudnn"))


def test_a_copy_is_told_once_for_a_module_whatever_the_lengths() -> None:
    with pytest.warns(debug.CopyWarning, match="layer.1: cudnn pads .* 1000 → 1024"):
        debug.announce(padded(1000), configure(), "layer.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        debug.announce(padded(1030), configure(), "layer.1")
    with pytest.warns(debug.CopyWarning, match="layer.2: cudnn pads .* 1030 → 1088"):
        debug.announce(padded(1030), configure(), "layer.2")


def test_memory_of_what_was_told_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "_MOST_REMEMBERED", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for s in range(1, 9):
            debug.announce(choice(SLOW.replace(max_seqlen_q=s)), configure())
            debug.announce(padded(1000), configure(), f"layer.{s}")
            assert len(debug._announced) <= 3


@pytest.mark.parametrize("file", ["/dev/full", "/", "/no/such/folder/x", "a\0b"])
def test_a_file_that_cannot_be_written_kills_no_call_and_loses_no_line(
    capfd: pytest.CaptureFixture[str], file: str
) -> None:
    with override(debug=1, debug_file=file), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for s in (6, 7):
            build(name="encoder")(*qkv(s))
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(" runs")[0] for line in lines] == ["attnsel: encoder: sdpa.flash"] * 2
    (warning,) = told
    assert warning.category is debug.DebugFileWarning
    assert str(warning.message).startswith(f"ATTNSEL_DEBUG_FILE {file!r} cannot be written (")


def test_a_name_forges_no_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a call without standard error is none that fails."""
    with override(debug=1):
        build(name="a\nattnsel: b\x1b[2J\u202e")(*qkv())
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("attnsel: a\\nattnsel: b\\x1b[2J\\u202e: sdpa.flash")
    with override(debug=1):
        monkeypatch.setattr("sys.stderr", None)
        build()(*qkv())
