"""Command lines: words, flags and variables that are right, odd or nonsense, in any order."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from command_lines import NAMES, ODD, OTHER_NAMES, VARIABLES, attempt_case, script_case
from harness import Case, Target
from hypothesis import strategies as st

from attnsel import AttentionParams, Policy
from attnsel.cli.flags import FLAGS, Flag, plain_type

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


COMMANDS = ["explain", "explain", "explain", "matrix", "matrix", "rules", "rule", "run", "odd"]


@st.composite
def command_line(draw: Any) -> Case:
    kind = draw(st.sampled_from(COMMANDS))
    words = draw(st.lists(WORD, max_size=4)) if draw(st.booleans()) else []
    flags = [word for one in draw(st.lists(flag(), max_size=4)) for word in one]
    if kind == "explain":
        words = ["explain", *flags, *words]
    elif kind == "matrix":
        axes = [f"{draw(FIELDS)}={','.join(draw(st.lists(VALUE, max_size=2)))}" for _ in "rc"]
        words = ["matrix", "--gpu", "H100", "--rows", axes[0], "--cols", axes[1], *flags, *words[:1]]
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


TARGET = Target("commands", command_line(), attempt_case, script_case, gate=150)
