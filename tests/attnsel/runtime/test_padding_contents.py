"""What lies in padded rows never reaches a real row or a gradient, whichever candidate runs. But for Triton,
any call: the fuzz target ``padding``."""

from __future__ import annotations

import importlib.util

from attention_calls import outcome
from call_cases import Row, case_of
from tables import each

ROWS: list[tuple[str, Row]] = [
    ("sdpa.flash", {"batch": "masks", "band": "causal"}),
    ("sdpa.math", {"batch": "cu_seqlens"}),
    ("tiled", {"batch": "packed with gaps", "band": "causal, bottom right"}),
    ("triton", {"batch": "cu_seqlens", "band": "causal"}),
    ("triton", {"batch": "packed with gaps", "band": "causal"}),
]


@each("backend, row", [row for row in ROWS if row[0] != "triton" or importlib.util.find_spec("triton")])
def test_padded_rows_reach_nothing(backend: str, row: Row) -> None:
    for garbage in ("nan",) if backend == "triton" else ("nan", "inf", "-inf", "1e38"):
        case = case_of(row, backend=backend, dtype="float32", garbage=garbage)
        assert outcome(case) == ("right", ""), garbage
