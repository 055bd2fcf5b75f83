"""The calls whose launches and graphs tests/backends/*/test_recorded.py hold, and how they are told."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_cases import CASES, Case, build, int32
from attnsel.backends.checks import default_slopes
from attnsel.backends.contract import Inputs, Spec

ASKED = json.loads(Path(__file__).with_name("recorded_calls.json").read_text(encoding="utf-8"))


class Differences:
    """Each of several alike things, told by what differs from the first of its kind."""

    def __init__(self) -> None:
        self.first: dict[str, dict[str, Any]] = {}

    def line(self, kind: str, values: dict[str, Any]) -> str:
        first = self.first.setdefault(kind, {})
        gone = [f"without {name}" for name in first if name not in values]
        changed = [f"{name}={value}" for name, value in values.items() if first.get(name, None) != value]
        if not first:
            first.update(values)
        return ", ".join(gone + changed) or "as the first"


def roomy(t: Tensor) -> Tensor:
    """The same values in memory [b, s, h, d] (packed [t, h, d]) with room behind every axis but the first."""
    if t.dim() == 3:
        rows, h, d = t.shape
        room = t.new_zeros(rows, h + 1, d + 16)[:, :h, :d]
    else:
        b, h, s, d = t.shape
        room = t.new_zeros(b, s + 2, h + 1, d + 16)[:, :s, :h, :d].transpose(1, 2)
    return room.copy_(t)


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Spec, Inputs]]:
    """Calls of the contract by name. Every axis has a size of its own, and so has every stride."""
    for row in [*ASKED["contract"], *[dataclasses.asdict(case) for case in CASES]]:
        sizes = {**ASKED["sizes"], **row.get("sizes", {})}
        spec, inputs = build(Case("", row.get("spec", {}), row.get("tensors", {}), sizes), dtype)
        given = row.get("given", {})
        if row.get("slopes"):
            given["alibi_slopes"] = default_slopes(sizes["h"], torch.device("cpu"))
        given |= {name: roomy(t) for name, t in zip("qkv", inputs[:3], strict=True)}
        if row.get("paged"):
            given |= {name: int32(values) for name, values in ASKED["pages"].items()}
            widths = zip("kv", (sizes["d"], sizes["e"]), strict=True)
            given |= {name: roomy(torch.zeros(5, sizes["g"], 16, d, dtype=dtype)) for name, d in widths}
            given["cu_seqlens_kv"] = None
        if inputs.bias is not None:
            inputs.bias.requires_grad_()
        yield row["name"], spec, inputs._replace(**given)
