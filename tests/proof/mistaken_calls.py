"""Calls as people make them by mistake, at each door in each layout: what docs/reference/mistakes.md says.

    python tests/proof/mistaken_calls.py    # the grid of the page at several sizes

``promised()`` reads the page's table; ``cases()`` makes the calls.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.errors import InvalidInput
from legitimate_calls import Door, Family, Made, _cu, _made, words
from paths import ROOT

PAGE = ROOT / "docs" / "reference" / "mistakes.md"
DOORS = {
    "attention": ("bshd", "sbhd", "bhsd"),
    "module": ("bshd", "sbhd"),
    "flash": ("bshd",),
    "sdpa": ("bhsd",),
}
SIZES = (128, 64, 8), (512, 64, 8), (1024, 128, 16)  # s, d, h


class Case(NamedTuple):
    """A mistake as the page names it, where it is made, and the call."""

    mistake: str
    door: str
    layout: str
    made: Made


class Promise(NamedTuple):
    """A row of the page's table."""

    mistake: str
    code: str
    attention: str
    module: str
    flash: str
    sdpa: str
    seen_by: str


def promised() -> dict[str, Promise]:
    rows = (line.strip("| \n").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines())
    found = [Promise(*row) for row in rows if len(row) == 7 and re.fullmatch(r"HINT\d{3}", row[1])]
    return {row.mistake: row for row in found}


def cases(s: int = 128, d: int = 64, h: int = 8) -> Iterator[Case]:
    """Each mistake at each door that the table has a word for. Raises ValueError for a row without a call."""
    for mistake, promise in promised().items():
        for door, layouts in DOORS.items():
            if getattr(promise, door) != "—":
                for layout in layouts:
                    for made in _calls(mistake, Door(door, layout, torch.float16), s, d, h):
                        yield Case(mistake, door, layout, made)


def _laid(t: Tensor, layout: str) -> Tensor:
    """[b, s, h, d] in ``layout``."""
    return {"bshd": t, "sbhd": t.transpose(0, 1), "bhsd": t.transpose(1, 2)}[layout].contiguous()


def _call(door: Door, layout: str, h: int, d: int, *sizes: int, batch: int = 2, **named: Any) -> Made:
    """Tensors of ``layout`` at a door that reads its own; ``sizes``: rows and keys."""
    family = Family("a mistake", h, h, d, d, 0)
    q, k = (torch.randn(batch, n, h, d).to(door.dtype) for n in (sizes[0], sizes[-1]))
    qkv = tuple(_laid(t, layout) for t in (q, k, k))
    return _made("mistake", _Fixed(), door, family, qkv, **named)


class _Fixed(random.Random):
    """Draws nothing: where a call could be made in two ways, the default one."""

    def random(self) -> float:
        return 0.0


def _calls(mistake: str, door: Door, s: int, d: int, h: int) -> Iterator[Made]:
    full, own = torch.ones(s, s, dtype=torch.bool), door.fmt
    over = torch.ones(s // 2, s, dtype=torch.bool)
    documents = torch.arange(s) // (s // 4)
    window = full.tril() & ~full.tril(-9)
    sinks = window | (full.tril() & (torch.arange(s) < 4))
    real = torch.tensor([s, s - 5])[:, None] > torch.arange(s)
    hole = full.triu(1)
    hole[s // 2] = True
    masks = {
        "a causal triangle of": [full.tril(), full.tril().expand(2, 1, s, s)],
        "the same over a cache": [over.tril(s - s // 2), over.tril()],
        "a window of": [
            window,
            full.tril(4) & ~full.tril(-5),
            sinks,
            full.tril(4) & full.triu(-4) | _globals(s),
        ],
        "packed documents": [
            documents[:, None] == documents,
            (documents[:, None] == documents) & full.tril(),
        ],
        "a causal triangle and padding": [
            full.tril() & real[:, None, None],
            full.tril() & real[:, None, None].flip(-1),
        ],
        "a padding mask of ones": [real[:, None, None], torch.ones(2, 1, 1, s, dtype=torch.bool)],
        "a mask that hides every key from a row": [~hole] if door.name == "sdpa" else [hole],
    }
    for name, given in masks.items():
        if mistake.startswith(name + " "):
            for mask in given:
                said = {"attn_mask": mask} if door.name == "sdpa" else {"attention_mask": mask}
                sizes = (mask.shape[-2] if mask.shape[-2] > 1 else s, s)
                yield _call(door, own, h, d, *sizes, attn_mask_type="arbitrary", **said)
            return
    if mistake.startswith("["):
        wrong, read = re.findall(r"\[(.*?)\]", mistake)
        letters = {f"{', '.join(layout)}": layout for layout in ("bshd", "sbhd", "bhsd")}
        if letters[read] == own:
            yield _call(
                door, letters[wrong], h, d, s, attn_mask_type="causal" if own == "sbhd" else "no_mask"
            )
        return
    if mistake.startswith(("one query", "a chunk")):
        yield _call(door, own, h, d, 1 if mistake.startswith("one") else 7, s, attn_mask_type="causal")
    elif "packed" in mistake:
        yield from _packed(door, s, d, h)
    elif "padded with lengths" in mistake:
        if own != "bhsd":
            lengths = {"cu_seqlens_q": _cu([3, 4]), "cu_seqlens_kv": _cu([s - 3, s])}
            yield _call(door, own, h, d, 4, s, attn_mask_type="padding_causal", **lengths)
    elif "slopes" in mistake:
        named = {"core_attention_bias_type": "alibi", "alibi_slopes": -torch.rand(h)}
        yield _call(door, own, h, d, s, attn_mask_type="causal", **named)
    else:
        raise ValueError(f"no call for {mistake!r}")


def _globals(s: int) -> Tensor:
    """Token 0 sees all and is seen by all."""
    return (torch.arange(s) < 1) | (torch.arange(s) < 1)[:, None]


def _packed(door: Door, s: int, d: int, h: int) -> Iterator[Made]:
    q, k = torch.randn(7, h, d).to(door.dtype), torch.randn(2 * s, h, d).to(door.dtype)
    lengths = (_cu([3, 4]), _cu([s - 10, s + 10]))
    if door.name == "flash":
        from attnsel.flash_attn import flash_attn_varlen_func

        yield Made("packed", flash_attn_varlen_func, (q, k, k, *lengths, 4, s + 10), {"causal": True})
    elif door.fmt == "bshd":
        named = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
        given = {"cu_seqlens_q": lengths[0], "cu_seqlens_kv": lengths[1], **named}
        made = _call(door, "bshd", h, d, s)
        yield Made("packed", made.function, (q, k, k), given)


def outcome(made: Made) -> str:
    """The codes that were said, ``refused`` or ``meant``."""
    try:
        said = words(made)
    except InvalidInput:
        return "refused"
    return " ".join(sorted({re.findall(r"\[(HINT\d+)\]", word)[-1] for word in said})) or "meant"


def expected(case: Case) -> str:
    promise = promised()[case.mistake]
    word: str = getattr(promise, case.door)
    return promise.code if word == "told" else word


def main() -> int:
    wrong = count = 0
    for size in SIZES:
        for case in cases(*size):
            seen = outcome(case.made)
            count += 1
            wrong += seen != expected(case)
            mark = "" if seen == expected(case) else f"   promised: {expected(case)}"
            print(f"{size[0]:5} {case.door:9} {case.layout}  {seen:8} {case.mistake}{mark}")
    print(f"{count} calls, {wrong} other than promised")
    return 4 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
