"""Calls in which any two features meet: a greedy covering array, the same everywhere, the best rows first."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from attention_cases import BOTTOM_RIGHT, CAUSAL, DROPOUT, Case

TRIED = 8  # rows drawn for each that is taken


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows with a value of every axis, so that any two values of two axes meet in some row."""
    rng = random.Random(seed)
    sizes = {at: len(values) for at, values in enumerate(axes.values())}
    # Values of two axes that have not met yet: (axis, value, later axis, value).
    left = {
        (a, i, b, j)
        for a, b in itertools.combinations(sizes, 2)
        for i, j in itertools.product(range(sizes[a]), range(sizes[b]))
    }

    def gain(row: Mapping[int, int], at: int, value: int) -> int:
        pairs = ((at, value, b, j) if at < b else (b, j, at, value) for b, j in row.items())
        return sum(pair in left for pair in pairs)

    def drawn(first: tuple[int, ...]) -> tuple[int, dict[int, int]]:
        row, total = {first[0]: first[1], first[2]: first[3]}, 1
        for at in rng.sample(list(sizes), len(sizes)):
            if at not in row:
                gains = {value: gain(row, at, value) for value in rng.sample(range(sizes[at]), sizes[at])}
                value = max(gains, key=gains.__getitem__)
                total += gains[value]
                row[at] = value
        return total, row

    rows = []
    while left:
        first = rng.choices(sorted(left), k=TRIED)
        _, row = max((drawn(pair) for pair in first), key=lambda found: found[0])
        left -= {(a, row[a], b, row[b]) for a, b in itertools.combinations(sizes, 2)}
        rows.append({name: values[row[at]] for at, (name, values) in enumerate(axes.items())})
    return rows


PADDED = {"seqlens_q": "b", "seqlens_kv": "b"}
BANDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "bottom-right": BOTTOM_RIGHT,
    "window": {"window_left": 5, "window_right": 0},
    "two-sided": {"window_left": 3, "window_right": 6},
    "left bound": {"window_left": 4},
    "window bottom-right": {"window_left": 3, "window_right": 2, "bottom_right": True},
}
BATCHES: dict[str, dict[str, str]] = {
    "dense": {},
    "lengths": PADDED,
    "lengths of queries": {"seqlens_q": "b"},
    "lengths of keys": {"seqlens_kv": "b"},
    "packed": {},
    "packed with gaps": {"cu_seqlens_padded": ""},
}
OFFSETS: dict[str, dict[str, int]] = {
    "": {},
    "offsets": {"q_offset": 10, "kv_offset": 5},
    "keys later": {"kv_offset": 7},
}
AXES: dict[str, Sequence[Any]] = {
    "band": list(BANDS),
    "batch": list(BATCHES),
    "bias": ["", "b h s_q s_kv", "1 h s_q s_kv", "b 1 s_q s_kv", "b 1 1 s_kv", "1 h s_q 1"],
    "mask": ["", "b h s_q s_kv", "b 1 1 s_kv", "1 h s_q 1"],
    "softmax": ["vanilla", "off-by-one", "learnable"],
    "alibi": ["", "h", "b h"],
    "softcap": [0.0, 1.2],
    "dropout": [False, True],
    "offset": list(OFFSETS),
    "heads": [(2, 1), (4, 2), (2, 2)],  # of queries and of keys
    "e": [8, 12, 3],
    "rows": [(21, 27), (27, 21), (5, 18)],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
}


class Pair(NamedTuple):
    case: Case
    dtype: torch.dtype


def _case(row: Mapping[str, Any], number: int) -> Pair:
    packed = row["batch"].startswith("packed")
    spec = {**BANDS[row["band"]], **OFFSETS[row["offset"]], "softmax_type": row["softmax"], "packed": packed}
    spec |= {"softcap": row["softcap"]} | (DROPOUT if row["dropout"] else {})
    tensors = {"bias": row["bias"], "attn_mask": row["mask"], "alibi_slopes": row["alibi"]}
    tensors = {name: shape for name, shape in tensors.items() if shape} | BATCHES[row["batch"]]
    if row["softmax"] == "learnable":
        tensors["softmax_offset"] = "h"
    sizes = dict(zip(("h", "g", "s_q", "s_kv"), (*row["heads"], *row["rows"]), strict=True)) | {"e": row["e"]}
    name = ", ".join(
        str(value) if isinstance(value, str) else f"{axis} {value}"
        for axis, value in row.items()
        if value not in ("", AXES[axis][0])
    )
    return Pair(Case(f"{number}: {name}", spec, tensors, sizes | ({"b": 3} if packed else {})), row["dtype"])


def some(pairs: Sequence[Pair], count: int) -> Any:
    """A parametrization by the first of them; the others are slow."""
    marks = [() if number < count else pytest.mark.slow for number in range(len(pairs))]
    params = [
        pytest.param(pair, marks=mark, id=pair.case.name) for pair, mark in zip(pairs, marks, strict=True)
    ]
    return pytest.mark.parametrize("pair", params)


PAIRS = [_case(row, number) for number, row in enumerate(pairwise(AXES))]
