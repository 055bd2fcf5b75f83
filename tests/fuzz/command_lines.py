"""Command lines, of words, flags and variables that are right, odd or nonsense, and files that they name.

What no command may do: die with a traceback, write what moves a terminal's cursor, or end in an
exit code that nobody documented. All run in this process.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin
from unittest import mock

from harness import Case, Target, Wrong
from hypothesis import strategies as st

from attnsel import AttentionParams, Environment, Policy, settings
from attnsel.cli import main
from attnsel.cli.flags import FLAGS, SHORTHANDS, Flag, plain_type
from attnsel.cli.output import BAD_INPUT, FOUND, NO_BACKEND

WORDS = {FOUND: "answered", NO_BACKEND: "no backend", BAD_INPUT: "bad input"}

NAMES = [name for flag in (*FLAGS, *SHORTHANDS) for name in (*flag.names, flag.negative) if name]
OTHER_NAMES = ["--json", "--csv", "--params", "--env", "--gpus-per-node", "--link-gbs", "--network-gbs",
               "--short", "--markdown", "--sources", "--rows", "--cols", "--candidate", "--family",
               "--evidence", "--ranges", "--help"]  # fmt: skip

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


def attempt(case: Case) -> str:
    """How ``attnsel WORDS`` ended. Raises Wrong for everything that this file's first lines rule out."""
    words, variables = case["words"], case.get("variables", {})
    mine = {name: text for name, text in os.environ.items() if name not in settings.VARIABLES}
    path = list(sys.path)
    with (
        mock.patch.dict(os.environ, {**mine, **variables}, clear=True),
        mock.patch.object(sys, "argv", ["attnsel", *words]),
        mock.patch.object(settings, "_process", None),
        _streams(case.get("stdin", b"")) as (out, err),
    ):
        try:
            code = main(words)
        except BaseException as error:
            told = "".join(traceback.format_exception(error)[-4:])
            raise Wrong(f"{type(error).__name__} came out of the command:\n{told}") from None
        finally:
            sys.path[:] = path
        texts = []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    if code not in WORDS:
        raise Wrong(f"exit code {code}")
    coloured = bool(variables.get("FORCE_COLOR"))  # asked for, and the only escapes there are
    for name, text in zip(("standard output", "standard error"), texts, strict=True):
        odd = next((line for line in text.splitlines() if not line.isprintable()), None)
        if odd is not None and not (coloured and name == "standard output"):
            raise Wrong(f"{name} holds what a terminal would obey: {odd!r}")
    if code == BAD_INPUT and (texts[1].count("\n") != 1 or len(texts[1]) > 2000):
        raise Wrong(f"bad input, and not one short line about it: {texts[1][:3000]!r}")
    return WORDS[code]


def script(case: Case) -> str:
    lines = ["import io, os, sys", "from attnsel.cli import main"]
    if case.get("variables"):
        lines.append(f"os.environ |= {case['variables']!r}")
    if case.get("stdin"):
        lines.append(f"sys.stdin = io.TextIOWrapper(io.BytesIO({case['stdin']!r}), 'utf-8')")
    return "\n".join([*lines, f"print(main({case['words']!r}))"])


# ---- words -------------------------------------------------------------------------------------------

ODD_WORD = st.one_of(st.sampled_from(ODD), st.text(max_size=6), st.integers().map(str))
WORD = st.one_of(ODD_WORD, st.sampled_from(NAMES + OTHER_NAMES))
VALUE = st.one_of(
    ODD_WORD, st.sampled_from(["64", "128", "64:256:+64", "bf16,fp16", "causal", "9.1", "H100"])
)
FIELDS = st.sampled_from([*AttentionParams.model_fields, "gpu", "cudnn", "fp8_recipe", "zz", ""])
NUMBERS = ["0", "1", "2", "8", "64", "128", "256", "4096", "1099511627776"]


def likely(flag: Flag) -> list[str]:
    """Values that the flag takes by itself; how they go together is another matter."""
    if flag.part == "machine":
        return {"gpu": ["H100", "T4", "B200", "sm80", "cpu"], "platform": ["linux", "darwin"]}.get(
            flag.field, ["9.1.0", "9.10.2", "2.13.0", "3.7.1", "none"]
        )
    info = {**AttentionParams.model_fields, **Policy.model_fields}.get(flag.field)
    kind = None if info is None else plain_type(info.annotation)[0]
    if get_origin(kind) is Literal:
        return list(map(str, get_args(kind)))
    if kind in (int, float):
        return NUMBERS
    return {"qkv_layout": ["bshd", "thd", "bs3hd"], "memory_limit": ["2GiB", "0"]}.get(flag.field, ["cudnn"])


@st.composite
def flag(draw: Any) -> list[str]:
    """A flag and its value, right in three cases of four."""
    chosen = draw(st.sampled_from(FLAGS))
    name = draw(st.sampled_from([chosen.name, chosen.negative or chosen.name]))
    if chosen.negative:
        return [name]
    return [name, draw(st.sampled_from(ODD if draw(st.integers(0, 3)) == 0 else likely(chosen)))]


COMMANDS = ["explain", "explain", "explain", "grid", "grid", "rules", "rule", "run", "odd"]


@st.composite
def command_line(draw: Any) -> Case:
    kind = draw(st.sampled_from(COMMANDS))
    words = draw(st.lists(WORD, max_size=4)) if draw(st.booleans()) else []
    flags = [word for one in draw(st.lists(flag(), max_size=4)) for word in one]
    if kind == "explain":
        words = ["explain", *flags, *words]
    elif kind == "grid":
        axes = [f"{draw(FIELDS)}={','.join(draw(st.lists(VALUE, max_size=2)))}" for _ in "rc"]
        words = ["can-i-use", "--gpu", "H100", "--rows", axes[0], "--cols", axes[1], *flags, *words[:1]]
    elif kind in ("rules", "rule"):
        words = [kind, *words]
    elif kind == "run":  # of what is not there
        words = [
            "run",
            *draw(st.lists(st.sampled_from(["-q", "--force", "--zz"]), max_size=1)),
            "zz/zz",
            *words,
        ]
    return {"words": words, "variables": draw(VARIABLES)}


# ---- files: JSON of other shapes, sizes and types, at any depth, and what is no JSON ------------------

LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 64, 128, 4096, 2**31, 2**40, 2**63 - 1, 2**63, 10**400]),
    st.integers(),
    st.floats(),
    st.sampled_from(ODD),
    st.text(max_size=5),
)
JSON = st.recursive(
    LEAF,
    lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(max_size=5), part, max_size=3),
    max_leaves=6,
)
LIKELY = st.sampled_from(
    [0, 1, 2, 64, 128, 0.5, True, False, None, "bf16", "causal", "padding", "thd", "bshd", "9.1.0", "none"]
)
NO_JSON = st.one_of(
    st.binary(max_size=20),
    st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [
            b"",
            b"\xef\xbb\xbf{}",  # a byte order mark
            b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
            b"[" * 200_000,
            b'{"batch_size": ' + b"9" * 5000 + b"}",
            b'{"batch_size": NaN, "softcap": Infinity}',
            b'{"batch_size": 1, "batch_size": 2}',
            b'{"device": ' + b'{"device": ' * 300 + b"1" + b"}" * 301,
        ]
    ),
)


@st.composite
def changed(draw: Any, base: dict[str, Any]) -> bytes:
    """Some of the fields of ``base``, up to three of them, at any depth, with other values; or any JSON."""
    if draw(st.integers(0, 9)) == 0:
        return draw(NO_JSON) if draw(st.booleans()) else json.dumps(draw(JSON)).encode()
    names = draw(st.lists(st.sampled_from(sorted(base)), min_size=1, max_size=8, unique=True))
    kept = {name: base[name] for name in names} | {name: base[name] for name in base if name == "device"}
    made = json.loads(json.dumps(kept))
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        place: Any = made
        key = draw(st.sampled_from(sorted(place)))
        while isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
            place = place[key]
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        place[key] = draw(JSON if draw(st.booleans()) else LIKELY)
    if draw(st.integers(0, 19)) == 0:
        made[draw(st.text(max_size=5))] = draw(JSON)
    if draw(st.integers(0, 9)) == 0:  # an earlier answer, which holds both
        made = {draw(st.sampled_from(["params", "environment", "zz"])): made, "backend": "cudnn"}
    return json.dumps(made, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


@st.composite
def question(draw: Any) -> Case:
    about = draw(st.sampled_from(["params", "params", "env"]))
    words = ["explain", *(["--gpu", "H100"] if about == "params" else []), f"--{about}", "-"]
    words += draw(st.sampled_from([[], ["--json"]]))
    if draw(st.integers(0, 3)) == 0:
        words += [draw(st.sampled_from(NAMES)), draw(st.sampled_from(ODD))]
    return {"words": words, "stdin": draw(changed(PARAMS if about == "params" else ENVIRONMENT))}


TARGETS = [
    Target("commands", command_line(), attempt, script, gate=150),
    Target("json_files", question(), attempt, script, gate=130),
]
