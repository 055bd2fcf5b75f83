"""Calls as programs make them, drawn at random: none of them may be taken for a mistake.

    python tests/proof/legitimate_calls.py                        # 5,000 calls, a seed that nobody has used
    python tests/proof/legitimate_calls.py --count 20000 --seed 7

Each is made at one of the four doors (``attention``, ``DotProductAttention``, flash_attn's functions,
``scaled_dot_product_attention``), with the heads of a model that exists (``model_families.csv``), at full
size: everything is done as in a program up to the choice, and then no kernel runs. Exit code 4 where a word
was said, with the calls.
"""

from __future__ import annotations

import argparse
import csv
import random
import secrets
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel import DotProductAttention, attention, debug
from attnsel.f_sdpa.function import scaled_dot_product_attention
from attnsel.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from attnsel.runtime import compiled, dispatch
from attnsel.runtime.bind import Bound
from attnsel.runtime.call import Call

SAID = 4
_TOKENS = 1 << 14  # rows of a whole batch, at most
_MASKED = 512  # rows under a mask that has a value for each pair


class Family(NamedTuple):
    """One model's attention."""

    model: str
    heads: int
    groups: int
    head_dim_qk: int
    head_dim_v: int
    window: int


class Made(NamedTuple):
    """One call, and what it is, in words."""

    what: str
    function: Callable[..., Any]
    tensors: tuple[Any, ...]
    named: dict[str, Any]

    def __str__(self) -> str:
        shapes = [tuple(t.shape) for t in self.tensors if isinstance(t, Tensor)]
        named = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in self.named.items()}
        return f"{self.what}: {getattr(self.function, '__name__', self.function)} {shapes} {named}"


def families() -> list[Family]:
    with open(Path(__file__).with_name("model_families.csv"), encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [Family(r["model"], *(int(r[name] or 0) for name in Family._fields[1:])) for r in rows]


# ---- how a call is made at a door ----------------------------------------------------------------------


_ORDER = {"bshd": (0, 1, 2), "sbhd": (1, 0, 2), "bhsd": (0, 2, 1)}  # of [b, s, h] in memory


def _tensor(rng: random.Random, fmt: str, b: int, s: int, h: int, d: int, dtype: torch.dtype) -> Tensor:
    """[b, s, h, d] in ``fmt``: contiguous, or a transposed view of what lies otherwise."""
    inner = [(b, s, h)[n] for n in _ORDER[fmt]]
    if fmt != "sbhd" and rng.random() < 0.4:
        return torch.empty(inner[0], inner[2], inner[1], d, dtype=dtype).transpose(1, 2)
    return torch.empty(*inner, d, dtype=dtype)


class Door(NamedTuple):
    """Where a call enters, and in which format."""

    name: str
    fmt: str
    dtype: torch.dtype


def _door(rng: random.Random, family: Family, *, masks: bool = False, alibi: bool = False) -> Door:
    """One of those that can express the call."""
    names = ["attention", "attention", "module", "module"]
    names += [] if masks or family.head_dim_qk != family.head_dim_v or family.head_dim_qk > 256 else ["flash"]
    names += [] if alibi else ["sdpa"]
    name = rng.choice(names)
    fmt = {"flash": "bshd", "sdpa": "bhsd", "module": rng.choice(("sbhd", "bshd"))}.get(name)
    dtype = rng.choice((torch.bfloat16, torch.float16) + (() if name == "flash" else (torch.float32,)))
    return Door(name, fmt or rng.choice(("bshd", "bshd", "sbhd", "bhsd")), dtype)


def _qkv(
    rng: random.Random, door: Door, family: Family, b: int, s_q: int, s_kv: int
) -> tuple[Tensor, Tensor, Tensor]:
    def make(s: int, h: int, d: int) -> Tensor:
        return _tensor(rng, door.fmt, b, s, h, d, door.dtype)

    q = make(s_q, family.heads, family.head_dim_qk)
    return q, make(s_kv, family.groups, family.head_dim_qk), make(s_kv, family.groups, family.head_dim_v)


def _made(what: str, rng: random.Random, door: Door, family: Family, qkv: Any, **named: Any) -> Made:
    """``named``: as ``attention`` takes them; F.sdpa's and flash_attn's say the same in their own words."""
    what = f"{what}, {family.model}"
    if door.name == "attention":
        return Made(what, attention, qkv, {"qkv_format": door.fmt, **named})
    if door.name == "module":
        channels = (family.head_dim_qk, family.head_dim_v)
        built: dict[str, Any] = {"num_gqa_groups": family.groups}
        if door.fmt != "sbhd" or rng.random() < 0.5:
            built["qkv_format"] = door.fmt
        named.setdefault("attn_mask_type", "no_mask")
        core = DotProductAttention(family.heads, channels, **built)
        return Made(what, core.train(rng.random() < 0.5), qkv, named)
    kind, window = named.pop("attn_mask_type", "no_mask"), named.pop("window_size", (-1, -1))
    if door.name == "flash":
        slopes = named.pop("alibi_slopes", None)
        said = {"causal": "causal" in kind, "window_size": window, "alibi_slopes": slopes}
        return Made(what, flash_attn_func, qkv, said)
    named = {"attn_mask": named["attn_mask"]} if "attn_mask" in named else {"is_causal": kind == "causal"}
    return Made(what, scaled_dot_product_attention, qkv, {**named, "enable_gqa": True})


# ---- the calls -----------------------------------------------------------------------------------------


def _batch(rng: random.Random, rows: int) -> int:
    return rng.choice([n for n in (1, 1, 2, 2, 3, 4, 6, 8, 16, 32, 64) if n == 1 or n * rows <= _TOKENS])


def _rows(rng: random.Random, most: int = 4096) -> int:
    named = (1, 2, 3, 5, 7, 8, 12, 16, 20, 24, 31, 32, 48, 49, 64, 77, 100, 128, 197, 200, 256, 257, 384)
    lengths = (*named, 512, 577, 729, 1000, 1024, 1500, 2048, 4096)
    return rng.choice([n for n in lengths if n <= most]) if rng.random() < 0.7 else rng.randint(9, most)


def prefill(rng: random.Random, family: Family) -> Made:
    """A prompt or a training step: causal, self attention."""
    door = _door(rng, family)
    s = _rows(rng)
    qkv = _qkv(rng, door, family, _batch(rng, s) if s > 4 else rng.randint(1, 8), s, s)
    named: dict[str, Any] = {"attn_mask_type": rng.choice(("causal", "causal", "causal_bottom_right"))}
    if door.name == "sdpa":
        named["attn_mask_type"] = "causal"
    elif family.window:
        named["window_size"] = (family.window, 0)
    if rng.random() < 0.4:
        qkv[0].requires_grad_()
    return _made("prefill", rng, door, family, qkv, **named)


def encoder(rng: random.Random, family: Family) -> Made:
    """Bidirectional, without padding."""
    door = _door(rng, family)
    s = max(5, _rows(rng))
    named = {"window_size": (64, 64)} if door.name != "sdpa" and rng.random() < 0.2 else {}
    qkv = _qkv(rng, door, family, _batch(rng, s), s, s)
    return _made("encoder", rng, door, family, qkv, **named)


def first_token(rng: random.Random, family: Family) -> Made:
    """The first step of a decoder that begins with one token: one row, one key, a whole batch."""
    door = _door(rng, family)
    kind = rng.choice(("causal", "no_mask"))
    qkv = _qkv(rng, door, family, rng.choice((1, 4, 8, 32, 64)), 1, 1)
    if door.name == "module":
        made = _made("first token", rng, door, family, qkv, attn_mask_type=kind)
        made.function.eval()  # type: ignore[attr-defined]
        return made
    return _made("first token", rng, door, family, qkv, attn_mask_type=kind)


def decode(rng: random.Random, family: Family) -> Made:
    """New tokens over a cache: one, a chunk of a prompt, or guesses to be checked."""
    door = _door(rng, family)
    s_q = rng.choice((1, 1, 1, 2, 3, 4, 5, 8, 16, 64, 256, 512))
    s_kv = s_q + _rows(rng)
    b = _batch(rng, s_kv)
    qkv = _qkv(rng, door, family, b, s_q, s_kv)
    what = "decode" if s_q == 1 else "chunk"
    if door.name == "sdpa":
        if s_q == 1 and rng.random() < 0.5:
            return _made(what, rng, door, family, qkv)
        mask = torch.ones(s_q, s_kv, dtype=torch.bool).tril(s_kv - s_q)
        return _made(what, rng, door, family, qkv, attn_mask=mask)
    if s_q == 1 and rng.random() < 0.5:
        return _made(what, rng, door, family, qkv, attn_mask_type="no_mask")
    named: dict[str, Any] = {"attn_mask_type": "causal_bottom_right"}
    if family.window:
        named["window_size"] = (family.window, 0)
    return _made(what, rng, door, family, qkv, **named)


def said_top_left(rng: random.Random, family: Family) -> Made:
    """A prompt into a cache that was allocated whole: the corner is said."""
    s_q = rng.choice((1, 5, 16, 100))
    qkv = _qkv(rng, door := Door("attention", "bshd", torch.float32), family, 2, s_q, s_q + 200)
    return _made("static cache", rng, door, family, qkv, attn_mask_type="causal", bottom_right_diagonal=False)


def _cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def lengths_beside(rng: random.Random, family: Family) -> Made:
    """Padded tensors with lengths beside them, in a cache that may be longer than the queries."""
    door = _door(rng, family, masks=True)
    door = door._replace(name=rng.choice(("attention", "module")), fmt=rng.choice(("bshd", "sbhd")))
    s, b = _rows(rng, 1024), rng.randint(1, 8)
    lengths = [rng.randint(1, s) for _ in range(b)]
    longer = rng.choice((0, 0, 64))
    qkv = _qkv(rng, door, family, b, s, s + longer)
    kind = rng.choice(("padding", "padding_causal"))
    cu = _cu(lengths)
    named = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu if not longer else _cu(lengths)}
    return _made("lengths", rng, door, family, qkv, attn_mask_type=kind, **named)


def packed(rng: random.Random, family: Family) -> Made:
    """Sequences side by side; over a cache, and across two of them."""
    b = rng.randint(1, 8)
    lengths_q = [rng.choice((1, 1, 2, 7, 60, 128, 400, 1000)) for _ in range(b)]
    how = rng.choice(("self", "self", "cache", "cross"))
    lengths_kv = lengths_q if how == "self" else [n + rng.randint(0, 500) for n in lengths_q]
    if how == "cross":
        lengths_kv = [rng.randint(1, 600) for _ in range(b)]
    flash = family.head_dim_qk == family.head_dim_v <= 256 and rng.random() < 0.5
    dtype = torch.bfloat16
    q = torch.empty(sum(lengths_q), family.heads, family.head_dim_qk, dtype=dtype)
    k = torch.empty(sum(lengths_kv), family.groups, family.head_dim_qk, dtype=dtype)
    v = torch.empty(sum(lengths_kv), family.groups, family.head_dim_v, dtype=dtype)
    cu_q, cu_kv = _cu(lengths_q), _cu(lengths_kv)
    what = f"packed {how}, {family.model}"
    if flash:
        given = (q, k, v, cu_q, cu_kv, max(lengths_q), max(lengths_kv))
        return Made(what, flash_attn_varlen_func, given, {"causal": how != "cross"})
    kind = {"self": "padding_causal", "cross": "padding", "cache": "padding_causal_bottom_right"}[how]
    named = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv, "attn_mask_type": kind}
    if rng.random() < 0.5:
        named |= {"max_seqlen_q": max(lengths_q), "max_seqlen_kv": max(lengths_kv)}
    return Made(what, attention, (q, k, v), {"qkv_format": "thd", **named})


def pages(rng: random.Random, family: Family) -> Made:
    """A cache in pages: decoding, and a prompt that was just written into it."""
    b, page, each = rng.randint(1, 8), 16, 20
    lengths = [rng.randint(1, page * each) for _ in range(b)]
    s_q = rng.choice((1, 1, 4))
    kind = "padding" if s_q == 1 else "padding_causal_bottom_right"
    q = torch.empty(b, s_q, family.heads, family.head_dim_qk)
    k = torch.empty(b * each, page, family.groups, family.head_dim_qk)
    v = torch.empty(b * each, page, family.groups, family.head_dim_v)
    table = torch.arange(b * each, dtype=torch.int32).view(b, each)
    named = {"block_table": table, "cu_seqlens_q": _cu([s_q] * b), "cu_seqlens_kv": _cu(lengths)}
    if rng.random() < 0.3:  # the prompt is all that the cache holds
        s = rng.randint(2, page * each)
        q = torch.empty(b, s, family.heads, family.head_dim_qk)
        named |= {"cu_seqlens_q": _cu([s] * b), "cu_seqlens_kv": _cu([s] * b)}
        kind = "padding_causal"
    return Made(f"pages, {family.model}", attention, (q, k, v), {"attn_mask_type": kind, **named})


def flash_cache(rng: random.Random, family: Family) -> Made:
    """flash_attn_with_kvcache."""
    d = min(family.head_dim_qk, 256)
    b, s_q = rng.randint(1, 8), rng.choice((1, 1, 2, 5))
    q = torch.empty(b, s_q, family.heads, d, dtype=torch.float16)
    k, v = torch.empty(2, b, 512, family.groups, d, dtype=torch.float16)
    lengths = torch.tensor([rng.randint(s_q, 512) for _ in range(b)], dtype=torch.int32)
    return Made("flash cache", flash_attn_with_kvcache, (q, k, v), {"cache_seqlens": lengths, "causal": True})


def _visible(rng: random.Random, b: int, s_q: int, s_kv: int) -> tuple[str, Tensor]:
    """A pattern that models use, True = takes part: [b, 1, s_q, s_kv] or what broadcasts to it."""
    full = torch.ones(s_q, s_kv, dtype=torch.bool)
    causal = full.tril(s_kv - s_q)
    real = torch.tensor([rng.randint(1, s_kv) for _ in range(b)])[:, None]
    place = torch.arange(s_kv)
    right = (place < real)[:, None, None]  # [b, 1, 1, s_kv]
    left = (place >= s_kv - real)[:, None, None]
    square = s_q == s_kv
    window = causal & ~full.tril(s_kv - s_q - rng.choice((1, 4, 16, 64)))
    names = ["causal", "window", "right padding", "left padding", "causal, left padding", "nothing"]
    names += ["window, left padding", "sinks and window"]
    if square:
        names += ["both pad", "documents", "causal documents", "prefix", "causal, right padding"]
        names += ["band", "global tokens"] + (["not itself"] if s_q > 1 else [])
    else:
        names += ["tree", "both pad across", "cache with an empty tail"]
    name = rng.choice(names)
    documents = torch.randint(0, rng.randint(1, 6), (s_kv,)).sort().values
    same = documents[-s_q:, None] == documents
    band = full.tril(8) & ~full.tril(-9)
    seen = {
        "causal": causal,
        "window": window,
        "right padding": right,
        "left padding": left,
        "causal, left padding": causal & left,
        "causal, right padding": causal & right,
        "window, left padding": window & left,
        "sinks and window": window | (causal & (place < 4)),
        "nothing": full,
        "documents": same,
        "causal documents": same & causal,
        "prefix": causal | (place < s_kv // 3),
        "band": band,
        "global tokens": band | (place < 1) | (torch.arange(s_q) < 1)[:, None],
        "not itself": ~torch.eye(s_q, s_kv, dtype=torch.bool) | (place > s_kv),
        "cache with an empty tail": full.tril(rng.randint(0, max(0, s_kv - s_q))),
    }
    if name == "both pad":
        return name, right & right.transpose(2, 3)
    if name == "both pad across":
        rows = torch.arange(s_q) < torch.tensor([rng.randint(1, s_q) for _ in range(b)])[:, None]
        return name, right & rows[:, None, :, None]
    if name == "tree":
        return name, torch.cat([full[:, s_q:], torch.eye(s_q, dtype=torch.bool) | tree(rng, s_q)], 1)[
            :, :s_kv
        ]
    return name, seen[name]


def tree(rng: random.Random, nodes: int) -> Tensor:
    """[n, n]: each node of a random tree sees its ancestors."""
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[rng.randrange(node)]
    return seen


def masked(rng: random.Random, family: Family) -> Made:
    """A mask with a value for each pair, said in the words of the door."""
    door = _door(rng, family, masks=True)
    s_q = rng.randint(2, _MASKED) if rng.random() < 0.7 else rng.choice((1, 2, 4, 8, 16))
    s_kv = s_q + rng.choice((0, 0, 1, 77, 300))
    b = rng.randint(1, 4)
    if s_q > s_kv or s_q * 2 > s_kv > s_q:
        s_kv = 2 * s_q
    name, seen = _visible(rng, b, s_q, s_kv)
    if seen.dim() == 2 and rng.random() < 0.3:
        seen = seen.expand(b, 1, s_q, s_kv)
    qkv = _qkv(rng, door, family, b, s_q, s_kv)
    if door.name == "sdpa":
        return _made(f"mask: {name}", rng, door, family, qkv, attn_mask=seen)
    if rng.random() < 0.4:
        named: dict[str, Any] = {"attn_mask_type": "arbitrary", "attn_mask": seen}
    else:
        named = {"attn_mask_type": "arbitrary", "attention_mask": ~seen}
    return _made(f"mask: {name}", rng, door, family, qkv, **named)


def padded(rng: random.Random, family: Family) -> Made:
    """TransformerEngine's padding masks [b, 1, 1, s], True = masked out."""
    door = Door(rng.choice(("attention", "module")), rng.choice(("bshd", "sbhd")), torch.bfloat16)
    s, b = _rows(rng, 1024), rng.randint(1, 8)

    def mask(n: int) -> Tensor:
        real = torch.tensor([rng.randint(1, n) for _ in range(b)])
        return (torch.arange(n) >= real[:, None])[:, None, None]

    if rng.random() < 0.3:
        s_kv = _rows(rng, 1024)
        qkv = _qkv(rng, door, family, b, s, s_kv)
        pair = (mask(s), mask(s_kv))
        return _made("padding, cross", rng, door, family, qkv, attn_mask_type="padding", attention_mask=pair)
    kind = rng.choice(("padding", "padding_causal"))
    qkv = _qkv(rng, door, family, b, s, s)
    return _made("padding", rng, door, family, qkv, attn_mask_type=kind, attention_mask=mask(s))


def cross(rng: random.Random, family: Family) -> Made:
    """Images to texts, decoders to encoders, latents to everything."""
    door = _door(rng, family)
    pairs = ((4096, 77), (1024, 77), (1, 1500), (4, 1500), (448, 1500), (100, 850), (32, 257), (512, 4096))
    s_q, s_kv = rng.choice((*pairs, (1, 729), (64, 576), (7, 12), (12, 7), (2, 2048), (256, 1024)))
    return _made("cross", rng, door, family, _qkv(rng, door, family, rng.choice((1, 2, 4)), s_q, s_kv))


def many_short(rng: random.Random, family: Family) -> Made:
    """Windows of an image, frames of each place, columns of a table: a large batch of short sequences."""
    heads, d = rng.choice(
        ((3, 32), (6, 32), (8, 40), (8, 64), (12, 64), (16, 64), (20, 64), (24, 32), (48, 32))
    )
    small = Family("vision", heads, heads, d, d, 0)
    door = _door(rng, small)
    if door.fmt == "sbhd":
        door = Door("attention", "bshd", door.dtype)
    s, b = rng.choice(((49, 64), (49, 256), (64, 512), (144, 64), (196, 25), (8, 196), (8, 1568), (16, 1024)))
    if rng.random() < 0.5:
        s, b = rng.choice(((14, 2304), (25, 576), (32, 1024), (10, 4096), (39, 512), (4, 64), (5, 32)))
    return _made("many short", rng, door, small, _qkv(rng, door, small, b, s, s))


def folded(rng: random.Random, family: Family) -> Made:
    """F.sdpa on [b * h, s, d], and with more leading dimensions than two."""
    s, d = max(2, _rows(rng, 512)), family.head_dim_qk
    if rng.random() < 0.6:
        shape: tuple[int, ...] = (rng.choice((1, 2, 8)) * family.heads, s, d)
    else:
        shape = (2, 3, family.heads, s, d)
    qkv = tuple(torch.empty(shape) for _ in "qkv")
    return Made("folded", scaled_dot_product_attention, qkv, {"is_causal": rng.random() < 0.5})


def alibi(rng: random.Random, family: Family) -> Made:
    """Slopes as the paper makes them, and none for some heads."""
    door = _door(rng, family, masks=True, alibi=True)
    s = _rows(rng, 1024)
    slopes = torch.tensor([2.0 ** (-8 * (n + 1) / family.heads) for n in range(family.heads)])
    if rng.random() < 0.2:
        slopes[: family.heads // 2] = 0.0
    named = {"core_attention_bias_type": "alibi", "alibi_slopes": slopes, "attn_mask_type": "causal"}
    qkv = _qkv(rng, door, family, _batch(rng, s) if s > 4 else 1, s, s)
    return _made("alibi", rng, door, family, qkv, **named)


KINDS = (
    *(prefill, prefill, encoder, first_token, decode, decode, said_top_left, lengths_beside, packed, pages),
    *(flash_cache, masked, masked, masked, padded, cross, many_short, folded, alibi),
)


def drawn(count: int, seed: int) -> Iterator[Made]:
    known = families()
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        torch.manual_seed(rng.getrandbits(32))
        yield rng.choice(KINDS)(rng, rng.choice(known))


# ---- what is said of them ------------------------------------------------------------------------------


class NotRun(dispatch.CallMode):
    """The way of a call up to the choice."""

    def bind(self, selection: Any, call: Call) -> Bound:
        return Bound(compiled.opaque, None, selection, call.settings)

    def check(self, bound: Bound, call: Call) -> bool:
        return False

    def run(self, bound: Bound, call: Call) -> Any:
        out = call.q.new_empty(*call.q.shape[:-1], call.v.shape[-1])
        return call.config.results(out, call.q.new_empty(1, 1, 1), call.q.new_empty(1))


@contextmanager
def no_kernel_runs() -> Iterator[None]:
    before, dispatch.EAGER = dispatch.EAGER, NotRun()
    try:
        yield
    finally:
        dispatch.EAGER = before


def words(made: Made) -> list[str]:
    """What is said of a call that was not made before."""
    debug._announced.clear()
    with no_kernel_runs(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.function(*made.tensors, **made.named)
    return [str(one.message) for one in caught if issubclass(one.category, debug.HintWarning)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    chosen = parser.parse_args()
    tally, said = Counter[str](), 0
    for number, made in enumerate(drawn(chosen.count, chosen.seed)):
        tally[made.what.partition(",")[0]] += 1
        for word in words(made):
            said += 1
            print(f"{number}: {made}\n    {word}")
    print(f"seed {chosen.seed}: {said} words in {chosen.count} calls; {dict(tally)}")
    return SAID if said else 0


if __name__ == "__main__":
    sys.exit(main())
