"""Whole answers to a few logs against ``answers.txt``: as text or Markdown, and as JSON without question and machine.

What changed is accepted as tests/support/records.py says."""

# ruff: noqa: E501  what libraries print is not broken into lines

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from attnsel.diagnose.logs.answer import explained
from attnsel.diagnose.logs.calls import gather
from attnsel.diagnose.logs.question import Stated
from attnsel.diagnose.logs.report import render_markdown, render_text
from records import Record

RECORD = Path(__file__).with_name("answers.txt")
CASES = {
    name: (RECORD.with_name("cases") / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    for name in (
        "NVIDIA-TransformerEngine-2285",
        "Dao-AILab-flash-attention-1321",
        "facebookresearch-xformers-1263",
    )
}
CHOSEN = "Running with config={'compute_capability': 'sm80', 'head_dim_qk': 512, 'head_dim_v': 512}\nSelected backend = FlashAttention (2.7.4)"
LOGS = {
    **CASES,
    "chosen against the rules": CHOSEN.splitlines(),
    "twenty reasons": [*(f"Disabling FlashAttention 2 for reason {n}" for n in range(20)), "Selected backend = NoBackend"],
    "seven calls": [f"[rank{n}]: RuntimeError: FlashAttention forward only supports head dimension at most {n}" for n in (7, 1, 2, 3, 4, 5, 6, 7)],
    "cuDNN inside PyTorch": ["cuDNN attention kernel not used because:", "[cudnn_frontend] Error: No execution plans support the graph"],
    "a question alone": CHOSEN.splitlines()[:1],
}  # fmt: skip


def reports() -> Iterator[str]:
    for place, (name, lines) in enumerate(LOGS.items()):
        found = explained(gather(lines), Stated())
        yield f"==== {name}\n\n{render_markdown(found) if place % 2 else render_text(found, 77)}\n"
        for call in found.as_dict()["calls"]:
            facts = {key: value for key, value in call.items() if key not in ("params", "environment")}
            yield json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def test_whole_answers_are_as_they_are_written_down(record: Record) -> None:
    record.holds(RECORD, "\n".join(reports()).splitlines())
