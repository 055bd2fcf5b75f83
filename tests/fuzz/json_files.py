"""Files that commands are given: JSON of other shapes, sizes and types, at any depth, and what is no JSON."""

from __future__ import annotations

import json
from typing import Any

from command_lines import ENVIRONMENT, NAMES, ODD, PARAMS, attempt_case, script_case
from harness import Case, Target
from hypothesis import strategies as st

LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 64, 128, 4096, 2**31, 2**40, 2**63 - 1, 2**63, 10**400]),
    st.integers(),
    st.floats(),
    st.sampled_from(ODD),
    st.text(max_size=5),
)
VALUE = st.recursive(
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
        return draw(NO_JSON) if draw(st.booleans()) else json.dumps(draw(VALUE)).encode()
    names = draw(st.lists(st.sampled_from(sorted(base)), min_size=1, max_size=8, unique=True))
    kept = {name: base[name] for name in names} | {name: base[name] for name in base if name == "device"}
    made = json.loads(json.dumps(kept))
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        place: Any = made
        key = draw(st.sampled_from(sorted(place)))
        while isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
            place = place[key]
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        place[key] = draw(VALUE if draw(st.booleans()) else LIKELY)
    if draw(st.integers(0, 19)) == 0:
        made[draw(st.text(max_size=5))] = draw(VALUE)
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


TARGET = Target("json_files", question(), attempt_case, script_case, gate=130)
