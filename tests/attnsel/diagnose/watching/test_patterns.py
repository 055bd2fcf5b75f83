"""Attention written by hand, rightly and subtly otherwise (``patterns.txt``): what is told to replace it, run
with the names of the lines, gives what they give; or nothing is told, and why."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402

import attnsel  # noqa: E402
from attnsel.diagnose.watching import by_hand_tried as tried  # noqa: E402

_, *BLOCKS = Path(__file__).with_name("patterns.txt").read_text("utf-8").strip().split("\n\n")
PATTERNS = {title: lines for title, *lines in map(str.splitlines, BLOCKS)}


@pytest.mark.parametrize("title", PATTERNS)
@pytest.mark.filterwarnings("ignore:.*requires_grad=True to a scalar")
def test_a_replacement_gives_the_same_or_is_not_told(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *lines, (expected, *wanted) = [*PATTERNS[title][:-1], PATTERNS[title][-1].removeprefix("| ").split(", ")]
    torch.manual_seed(0)
    shapes: dict[str, Any] = {name: torch.randn(2, 4, 8, 16) * 2 for name in "qkv"}
    names = {"torch": torch, "F": F, "math": math, "INF": -math.inf, "t": torch.randn, **shapes}
    names["hidden"] = lambda *shape: torch.ones(*shape, dtype=torch.bool)
    with attnsel.watch() as seen:
        exec("\n".join(line for line in lines if line[0] != ">"), names)
    exec("\n".join(line[2:] for line in lines if line[0] == ">"), names)
    told = [site for site in seen.sites if site.fix]
    assert ["withheld", "told"][bool(told)] == expected, [(site.unread, site.notes) for site in seen.sites]
    if not told:
        assert all("no library call is known to mean the same" in site.unread for site in seen.sites)
        return
    code = told[0].fix.removeprefix("replace these lines: ").split("  #")[0]
    names |= {"self": SimpleNamespace(training=False), "causal_lower_right": causal_lower_right}
    names |= {"flex_attention": tried._beyond_sdpa, "create_block_mask": tried._block_mask}
    if "attnsel." in code:
        names |= {"attnsel": attnsel, **{name: names[name].transpose(1, 2) for name in "qkv"}}
    got, want = eval(code, names), eval(wanted[0] if wanted else "out", names)
    got = got.transpose(1, 2) if "attnsel." in code else got
    assert float((got - want).detach().abs().max()) <= 1e-2 * float(want.detach().abs().max())
