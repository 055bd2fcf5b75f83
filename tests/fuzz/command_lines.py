"""One command in this process, and what none may do: die with a traceback, run without end, write what
moves a terminal's cursor, or end in an exit code that nobody documented."""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from harness import Case, Wrong
from hypothesis import strategies as st

from attnsel import AttentionParams, Environment, settings
from attnsel.cli import main
from attnsel.cli.flags import FLAGS, SHORTHANDS
from attnsel.cli.output import BAD_INPUT, FOUND, NO_BACKEND

SLOW = 5  # seconds
WORDS = {FOUND: "answered", NO_BACKEND: "no backend", BAD_INPUT: "bad input"}

NAMES = [name for flag in (*FLAGS, *SHORTHANDS) for name in (*flag.names, flag.negative) if name]
OTHER_NAMES = ["--json", "--csv", "--params", "--env", "--gpus-per-node", "--link-gbs", "--network-gbs"]
OTHER_NAMES += [
    "--short",
    "--markdown",
    "--sources",
    "--rows",
    "--cols",
    "--candidate",
    "--family",
    "--evidence",
    "--ranges",
    "--help",
]

# What is legal somewhere, and what is legal nowhere.
ODD = ["", " ", "-", "--", "-1", "0", "1", "2", "7", "64", "128", "1e400", "nan", "-inf", "None", "="]
ODD += ["\x1b[2J", "\ud800", "a\0b", "\u202e", "٣", "½", "9" * 30, "9" * 400, "9" * 5000, "0x10"]
ODD += ["H100", "T4", "sm90", "cpu", "bf16", "fp8_e4m3", "causal", "padding", "thd", "alibi", "a2a+p2p"]
ODD += ["9.1", "auto", "9.1.0.0.0", "1e3", "none", "paged", "cudnn", "triton,tiled", "2GiB", "CUDNN204"]
ODD += ["head_dim_qk=64:128:+64", "head_dim_qk=1:1099511627776:+1", "max_seqlen_q=1:9:*1", "gpu=H100,T4"]

VARIABLES = st.dictionaries(
    st.sampled_from([*settings.VARIABLES, "COLUMNS", "FORCE_COLOR", "RANK"]),
    st.one_of(
        st.sampled_from([text for text in ODD if "\0" not in text and "\ud800" not in text]),
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5),
    ),
    max_size=1,
)

_SPEC = {"shape": [2, 4096, 16, 128], "stride": [8388608, 2048, 128, 1]}
PARAMS = AttentionParams().model_dump(mode="json") | {"tensors": {"q": _SPEC, "k": _SPEC}}
ENVIRONMENT = Environment.describe("H100").model_dump(mode="json")


@contextmanager
def _streams(stdin: bytes) -> Iterator[tuple[io.TextIOWrapper, io.TextIOWrapper]]:
    given = io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with mock.patch.multiple(sys, stdin=given, stdout=out, stderr=err):
        yield out, err


def attempt(words: list[str], stdin: bytes = b"", variables: dict[str, str] | None = None) -> str:
    """How ``attnsel WORDS`` ended. Raises Wrong for everything that this file's first lines rule out."""
    mine = {name: text for name, text in os.environ.items() if name not in settings.VARIABLES}
    path = list(sys.path)
    with (
        mock.patch.dict(os.environ, {**mine, **(variables or {})}, clear=True),
        mock.patch.object(sys, "argv", ["attnsel", *words]),
        mock.patch.object(settings, "_process", None),
        _streams(stdin) as (out, err),
    ):
        began = time.monotonic()
        try:
            code = main(words)
        except BaseException as error:
            told = "".join(traceback.format_exception(error)[-4:])
            raise Wrong(f"{type(error).__name__} came out of the command:\n{told}") from None
        finally:
            sys.path[:] = path
        took = time.monotonic() - began
        texts = []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    if code not in WORDS:
        raise Wrong(f"exit code {code}")
    if took > SLOW:
        raise Wrong(f"it took {took:.1f} s")
    coloured = bool((variables or {}).get("FORCE_COLOR"))  # asked for, and the only escapes there are
    for name, text in zip(("standard output", "standard error"), texts, strict=True):
        odd = next((line for line in text.splitlines() if not line.isprintable()), None)
        if odd is not None and not (coloured and name == "standard output"):
            raise Wrong(f"{name} holds what a terminal would obey: {odd!r}")
    if code == BAD_INPUT and (texts[1].count("\n") != 1 or len(texts[1]) > 2000):
        raise Wrong(f"bad input, and not one short line about it: {texts[1][:3000]!r}")
    return WORDS[code]


def script(words: list[str], stdin: bytes = b"", variables: dict[str, str] | None = None) -> str:
    lines = ["import io, os, sys", "from attnsel.cli import main"]
    if variables:
        lines.append(f"os.environ |= {variables!r}")
    if stdin:
        lines.append(f"sys.stdin = io.TextIOWrapper(io.BytesIO({stdin!r}), 'utf-8')")
    return "\n".join([*lines, f"print(main({words!r}))"])


def attempt_case(case: Case) -> str:
    return attempt(case["words"], case.get("stdin", b""), case.get("variables"))


def script_case(case: Case) -> str:
    return script(case["words"], case.get("stdin", b""), case.get("variables"))
