"""--stride and --misaligned: what they say reaches the question, and the answer names what it avoids.

What each says and refuses: recorded_calls/cli.txt, test_mistakes.py.
"""

from __future__ import annotations

import json

PAGED = "--layout paged_kv_bshd_bshd_bshd --kv-cache paged --page-size 64 --mask padding --inference"


def test_pages_have_the_shape_of_pages(asked):
    tensors = asked(f"explain --gpu H100 {PAGED} --seqlen-q 1 --seqlen-kv 100 --misaligned k").params.tensors
    assert tensors.k.shape == (4, 64, 16, 128)


def test_a_misaligned_tensor_is_copied_for_a_reason(run):
    code, out, _ = run("explain --gpu H100 --torch 2.13 --inference --misaligned q --json")
    assert code == 0
    flash = next(c for c in json.loads(out)["candidates"] if c["name"] == "sdpa.flash")
    [copied] = flash["adaptations"]
    assert (copied["name"], copied["avoids"]) == ("contiguous", ["SDPA021"])
