"""The committed reports of printed_strings.py: nothing in them is unknown, and what is known still is."""

from __future__ import annotations

from printed_strings import APART, KNOWN, REPORTS, UNKNOWN, decisions, rows_of, still_known
from tables import each

COMPLETE = ("torch", "flex", "flash-attn", "xformers", "transformer-engine", "cudnn", "transformers")
COMPLETE += ("diffusers", "vllm", "sglang", "flashinfer")


@each("library", COMPLETE)
def test_every_text_that_a_library_can_print_is_known_or_decided(library: str) -> None:
    rows = rows_of(REPORTS / f"{library}.csv")
    assert rows
    assert [row["text"] for row in rows if row["about"] == UNKNOWN or not row["by"]] == []
    known = [row for row in rows if row["about"] == KNOWN]
    assert [row["text"] for row in known if not still_known(library, row)] == []
    apart = {(row["function"], row["text"]): row["by"] for row in rows if row["about"] == APART}
    assert apart == decisions(library), (
        "a decision about a text that is known, or that nothing prints any more"
    )
