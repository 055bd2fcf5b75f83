"""Published figures, and the rules that rest on them: none without a row, none against one that it does not
name."""

from __future__ import annotations

import re

from attnsel.backends.registry import CANDIDATES
from attnsel.base.rows import read_rows
from attnsel.environment.gpus import ARCHITECTURES, catalogue
from attnsel.pages.figures import claims, resting
from attnsel.rules import REGISTRY, Placing, load_all
from attnsel.rules.figures import measured, sources

load_all()
NOISE = 1.05
ALLOWED = {
    "direction": r"fwd|bwd|fwd\+bwd",
    "dtype": r"|bf16|fp16|fp8_e4m3|mxfp8",
    "mask": r"|no_mask|causal|arbitrary",
    "window": r"|\?|\d+",
    "deterministic": r"|1",
    "unit": r"ms|us|TFLOP/s",
    "value": r"\d+(\.\d+)?",
    "kernel": "|".join(map(re.escape, CANDIDATES)) + r"|(other:|flashinfer\.|sage\.|xformers\.)[\w.-]+|flex",
}


def test_every_row_has_a_source_and_nothing_that_is_not_allowed():
    assert all(re.fullmatch(r"\d{4}-\d\d|", s["date"]) and "://" in s["source"] for s in sources().values())
    for row in (row for arch in (0, *ARCHITECTURES) for one in measured(arch) for row in one.rows):
        wrong = {n: row[n] for n, allowed in ALLOWED.items() if not re.fullmatch(allowed, row[n])}
        assert not wrong and row["source"] in sources() and row["gpu"] in ("", *catalogue()), (wrong, row)


def test_no_order_is_without_a_row_and_none_stands_against_one_that_it_does_not_name():
    named = {(row["code"], row["pair"]) for row in read_rows("attnsel.rules", "against")}
    for code, page in REGISTRY.pages.items():
        known, found = resting().get(code, {}), claims().get(code, ())
        if isinstance(page, Placing):
            assert found or known.get("untimed"), f"{code} rests on nothing"
            against = {(code, claim.measurement.name) for claim in found if claim.ratio < 1 / NOISE}
            assert known.get("contested") or against <= named, against - named
