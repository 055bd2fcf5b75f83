"""Calls of the public functions in which any two features meet, as cases of attention_calls.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attention_calls import CASE, Problem, make
from pairwise import pairwise

Row = dict[str, Any]
BANDS: dict[str, Row] = {
    "full": {},
    "causal": {"mask": "causal"},
    "causal, bottom right": {"mask": "causal_bottom_right"},
    "window": {"window": (2, 1)},
    "window, top left": {"window": (2, 1), "anchor": False},
    "window, no right bound": {"window": (2, -1)},
    "causal window": {"mask": "causal", "window": (3, 0)},
    "mask": {"mask": "arbitrary", "arbitrary": "b h s_q s_kv"},
    "mask of keys": {"mask": "arbitrary", "arbitrary": "b 1 1 s_kv"},
    "mask of whole rows": {"mask": "arbitrary", "arbitrary": "1 h s_q 1"},
    "mask and window": {"mask": "arbitrary", "arbitrary": "s_q s_kv", "window": (3, 3)},
}
SCORES: dict[str, Row] = {
    "": {},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 1.3},
    "bias": {"bias": ("post_scale_bias", "b h s_q s_kv", False, None)},
    "bias of keys": {"bias": ("post_scale_bias", "1 1 1 s_kv", True, None)},
    "bias of two dimensions": {"bias": ("post_scale_bias", "s_q s_kv", True, None), "softcap": 1.3},
    "pre_scale_bias": {"bias": ("pre_scale_bias", "1 h s_q s_kv", True, None), "scale": 0.3},
    "alibi": {"alibi": "computed"},
    "alibi slopes": {"alibi": "b h"},
}
RESULTS: dict[str, Row] = {"": {}, "lse": {"lse": True}, "max_logit": {"max_logit": True}}
PACKED = ("packed", "packed with gaps")
LENGTHS = {
    "as many": ((9, 4, 0), (9, 4, 0)),
    "fewer queries": ((5, 4, 0), (9, 6, 3)),
    "more queries": ((9, 6, 3), (5, 4, 0)),
}
AXES: dict[str, Sequence[Any]] = {
    "band": list(BANDS),
    "batch": ["dense", "cu_seqlens", "masks", *PACKED],
    "rows": list(LENGTHS),
    "scores": list(SCORES),
    "softmax": ["vanilla", "off-by-one", "learnable"],
    "results": list(RESULTS),
    "heads": [(4, 1), (2, 2), (1, 6)],  # kv heads, and query heads of each
    "e": [8, 16, 4],
    "fmt": ["bshd", "sbhd", "bhsd"],
}
# What every kernel has an argument for.
PLAIN_AXES: dict[str, Sequence[Any]] = {
    "band": [name for name in BANDS if "mask" not in name],
    "scores": ["", "scale"],
    "softmax": ["vanilla"],
    "results": ["", "lse"],
}


def rows(**axes: Sequence[Any]) -> list[Row]:
    """Any two values of two axes meet in some row; ``axes`` come in addition, or with other values."""
    return pairwise({**AXES, **axes})


def case_of(row: Row, **more: Any) -> Row:
    """The case of a row: of its first value wherever it has none."""
    row = {name: values[0] for name, values in AXES.items()} | row
    lens_q, lens_kv = LENGTHS[row["rows"]]
    case = {"dtype": "float64", "g": row["heads"][0], "r": row["heads"][1], "d": 8, "e": row["e"]}
    case |= {"fmt": row["fmt"], "s_q": lens_q[0], "s_kv": lens_kv[0], "grads": "qkvs"}
    case |= {**BANDS[row["band"]], **SCORES[row["scores"]], **RESULTS[row["results"]]}
    case["softmax"] = row["softmax"]
    if row["batch"] != "dense" and case.get("mask") != "arbitrary":
        packed = row["batch"] in PACKED
        mask = case.get("mask", "")
        case |= {"mask": f"padding_{mask}" if mask else "padding", "b": 3}
        case |= {"lens_q": list(lens_q), "lens_kv": list(lens_kv)}
        case |= {"fmt": "thd" if packed else row["fmt"], "lengths": "cu_seqlens" if packed else row["batch"]}
        if row["batch"] == "packed with gaps":
            case["gaps"] = [[2, 2, 2], [2, 2, 2]]
    return {**CASE, **case, **more}


def made(row: Row, **more: Any) -> Problem:
    """The call of a row. As programs have it: one tensor for both lengths, where those are the same."""
    problem = make(case_of(row, **more))
    if problem.case["lens_q"] == problem.case["lens_kv"]:
        for name in ("cu_seqlens_kv", "cu_seqlens_kv_padded"):
            if name in problem.tensors:
                problem.tensors[name] = problem.tensors[name.replace("kv", "q")]
    return problem
