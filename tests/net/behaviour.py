"""What attention gives today: 3,120 cases through the four doors, a line for each.

A line has the case, in words, from which it is run; for each of its calls what ran, and a digest of the
results (bytes, dtypes, shapes, strides; output, statistics, gradients); and the largest difference from a
float64 definition, in epsilons of the dtype. A case is one to three calls in a row, each differing from the
one before in one respect, so that a cache that confuses two of them shows.

    python tests/net/behaviour.py                        # what differs from the record
    python tests/net/behaviour.py --accept               # record what is, and say how many lines changed
    python tests/proof/net/draw_behaviour.py DOOR COUNT  # draw that many cases more; then accept

Nothing here reaches behind public names, nor shares code with the attention of attnsel: modules may move.
Inputs come from an integer hash, so they are the same with every torch and Python.

Shape letters: b, h query heads, g kv heads, s_q, s_kv, t packed rows, d, e head dimensions of q/k and v.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnsel
from attnsel import flash_attn
from corners import corner

Case = dict[str, Any]  # one call's plain values: what is not there is as in the door's BASE
Numbers = dict[str, Tensor]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
RECORD = Path(__file__).parent / "behaviour"
MOST = 40.0
"""A difference above this, in epsilons of the dtype, is a wrong number and no rounding: never recorded."""
FLOOR, FLOOR_OF_SUMS = 4.0, 16.0
"""On another machine's arithmetic, differences up to this are as good as any that was recorded.

Half dtypes round results of float32 sums: what sums differ by is far below one epsilon of theirs. Where
float32 or float64 is the coarsest dtype it is seen: with one key the gradient of a score is the difference
of two equal sums, which is zero on one processor and some epsilons of the sums on another (AVX2 without
AVX-512: up to 10, where 0 is recorded)."""


def numbers(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [-2, 2) that any machine makes alike: a hash of their position, in 16 bits."""
    start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big")
    x = torch.arange(math.prod(shape), dtype=torch.int64) + start
    for _ in range(2):
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) >> 8) & 0xFFFF
    return (x.double() / 16384.0 - 2.0).to(dtype).reshape(shape)


# ---- tensors in memory ------------------------------------------------------------------------------


def _resized(shape: list[int], axis: int, size: int) -> list[int]:
    made = list(shape)
    made[axis] = size
    return made


LAYOUTS: dict[str, tuple[Callable[[list[int]], list[int]], Callable[[Tensor, list[int]], Tensor]]] = {
    "": (lambda s: s, lambda t, s: t),
    "swap01": (lambda s: [s[1], s[0], *s[2:]], lambda t, s: t.transpose(0, 1)),
    "swap12": (lambda s: [s[0], s[2], s[1], *s[3:]], lambda t, s: t.transpose(1, 2)),
    "last-out": (lambda s: [s[-1], *s[:-1]], lambda t, s: t.movedim(0, -1)),
    "every-2nd": (lambda s: _resized(s, -1, 2 * s[-1]), lambda t, s: t[..., ::2]),
    "row-slice": (lambda s: _resized(s, 1, s[1] + 2), lambda t, s: t[:, 1 : 1 + s[1]]),
    "slice": (lambda s: _resized(s, -1, s[-1] + 3), lambda t, s: t[..., 1 : 1 + s[-1]]),
    "1-in": (lambda s: [1 + math.prod(s)], lambda t, s: t[1:].view(s)),
    "16-in": (lambda s: [16 + math.prod(s)], lambda t, s: t[16:].view(s)),
    "expand0": (lambda s: _resized(s, 0, 1), lambda t, s: t.expand(s)),
    "expand1": (lambda s: _resized(s, 1, 1), lambda t, s: t.expand(s)),
}


def laid(
    layout: str, key: str, shape: list[int], dtype: torch.dtype
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What is allocated, and the way from it to the tensor of this shape."""
    base, view = LAYOUTS[layout]
    return numbers(key, *base(shape), dtype=dtype), lambda t: view(t, shape)


# ---- the definition ---------------------------------------------------------------------------------


def scores_to_out(
    x: Tensor, v: Tensor, hidden: Tensor, sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, largest visible score of each head, from scores [b, h, s_q, s_kv] and v [b, h, s_kv, e]."""
    x = torch.where(hidden, -math.inf, x)
    logits = x if sink is None else torch.cat([x, sink[:, None, None].expand(*x.shape[:3], 1)], -1)
    logits = torch.cat([logits, x.new_full((*x.shape[:3], 1), -math.inf)], -1)  # rows without a key at all
    dead = (logits == -math.inf).all(-1)
    lse = torch.logsumexp(torch.where(dead[..., None], 0.0, logits), -1)
    p = torch.where(x == -math.inf, 0.0, torch.exp(torch.where(x == -math.inf, 0.0, x) - lse[..., None]))
    most = x.detach().amax((0, 2, 3)) if x.numel() else x.new_full(x.shape[1:2], -math.inf)
    return p @ v, torch.where(dead, -math.inf, lse), most


def scale_of(c: Case) -> float:
    return c["d"] ** -0.5 if c["scale"] is None else c["scale"]


def scores(c: Case, q: Tensor, k: Tensor) -> Tensor:
    """[..., h, s_q, s_kv] from q and k, [..., h, s, d]: scaled and capped."""
    x = scale_of(c) * (q @ k.transpose(-1, -2))
    return c["softcap"] * torch.tanh(x / c["softcap"]) if c.get("softcap") else x


def default_slopes(h: int) -> Tensor:
    """ALiBi's own: powers of 2^(-8/n) for the largest power of two n, then every second one of 2n's."""
    n = 2 ** int(math.log2(h))
    first = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    return torch.tensor(first + [2 ** (-4 * (i + 1) / n) for i in range(0, 2 * (h - n), 2)]).double()


def distances(s_q: int, s_kv: int, shift: Tensor | int) -> Tensor:
    """[b or 1, s_q, s_kv]: how far a key stands after the query's own place; ``shift``: [b] or one number."""
    shift = torch.as_tensor(shift).reshape(-1, 1, 1)
    return torch.arange(s_kv) - torch.arange(s_q)[:, None] - shift


def outside_window(distance: Tensor, left: int, right: int) -> Tensor:
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden = hidden | (distance < -left)
    if right >= 0:
        hidden = hidden | (distance > right)
    return hidden[:, None]


# ---- attention and DotProductAttention --------------------------------------------------------------

BASE: Case = {
    "fmt": "bshd", "dtype": "fp32", "b": 2, "h": 2, "g": 2, "sq": 5, "skv": 5, "d": 8, "e": 8,
    "mask": "no_mask", "window": None, "anchor": None, "scale": None, "softcap": 0.0, "sink": "vanilla",
    "bias": None,  # (pre or post, the dimensions of "bhqk" it has, own dtype or "", layout)
    "alibi": None,  # "computed", "h" or "bh"
    "arb": None,  # (dimensions of "bhqk", layout, share that is hidden)
    "lens": None,  # (of queries, of keys)
    "by": "cu",  # how lengths are told: cu, one-cu, masks, one-mask
    "gaps": None,  # packed: rows of no sequence after each, (q, kv)
    "longest": None,  # max_seqlen_* given, and larger than need be by so much
    "pages": None,  # page size of keys and values in pools
    "lse": False, "maxl": False, "drop": 0.0, "det": False, "train": None, "grads": "qkvbs",
    "lay": ("", "", ""), "fused": None, "dout": "", "backend": None, "adapt": None, "ctx": "", "call": False,
    "recompute": False, "numbers": 0,
}  # fmt: skip
TO_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}
FROM_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "bhsd": (0, 1, 2, 3)}


def lengths(c: Case, side: int) -> tuple[int, ...]:
    return c["lens"][side] if c["lens"] else (c["skv" if side else "sq"],) * c["b"]


def starts(c: Case, side: int) -> list[int]:
    """Packed: where each sequence starts in memory, and behind the last one how many rows there are."""
    gaps = c["gaps"][side] if c["gaps"] else (0,) * c["b"]
    return [0, *itertools.accumulate(n + gap for n, gap in zip(lengths(c, side), gaps, strict=True))]


def qkv_shape(c: Case, name: str) -> list[int]:
    side = int(name != "q")
    if c["pages"] and side:
        return [block_table(c).numel() + 1, c["pages"], c["g"], c["d" if name == "k" else "e"]]
    sizes = {"b": c["b"], "s": c["skv" if side else "sq"], "h": c["g" if side else "h"]}
    sizes |= {"d": c["e"] if name == "v" else c["d"], "t": starts(c, side)[-1]}
    return [sizes[letter] for letter in c["fmt"]]


def block_table(c: Case) -> Tensor:
    """Pages from the last one down: none lies where it would by itself."""
    pages = -(-max(1, c["skv"]) // c["pages"])
    return torch.arange(c["b"] * pages, 0, -1, dtype=torch.int32).reshape(c["b"], pages)


class Made(NamedTuple):
    """A call's tensors: what gradients are asked for, as allocated, the way to q, k and v, and the others."""

    leaves: Numbers
    views: dict[str, Callable[[Tensor], Tensor]]
    others: dict[str, Any]
    dout: Tensor
    axis: int = -3  # where k and v, or all three, lie beside one another in one leaf

    def given(self, leaves: Numbers) -> Numbers:
        """q, k, v and the bias, as views of these leaves."""
        found = {name: view(leaves[name]) for name, view in self.views.items()}
        for fused in ("qkv", "qkv_layer", "kv", "kv_layer"):
            if fused in leaves:
                found |= dict(zip(fused.removesuffix("_layer"), leaves[fused].unbind(self.axis), strict=True))
        return found

    def wide(self) -> Numbers:
        """The leaves in float64."""
        return {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in self.leaves.items()}


def named(result: Any, *names: str) -> Numbers:
    """What a call gives: out, and what else was asked for."""
    results = result if isinstance(result, tuple) else (result,)
    return dict(zip(("out", *names), results, strict=True))


def made(c: Case) -> Made:
    dtype, key = DTYPES[c["dtype"]], f"{c['numbers']}"
    leaves: Numbers = {}
    views: dict[str, Callable[[Tensor], Tensor]] = {}
    fused = c["fused"]
    if fused is not None:
        shape = qkv_shape(c, "k")
        shape.insert(len(shape) + 1 + fused[1], len(fused[0]))
        leaves[f"{fused[0]}_layer"] = numbers(f"fused {key}", *shape, dtype=dtype)
    for n, name in enumerate("qkv"):
        if fused is None or name not in fused[0]:
            leaves[name], views[name] = laid(c["lay"][n], f"{name} {key}", qkv_shape(c, name), dtype)
    full = {"b": c["b"], "h": c["h"], "q": c["sq"], "k": c["skv"]}

    def broadcast(dims: str) -> list[int]:
        return [full[n] if n in dims else 1 for n in "bhqk"[min(map("bhqk".index, dims)) :]]

    if c["bias"] is not None:
        own = DTYPES[c["bias"][2]] if c["bias"][2] else dtype
        leaves["bias"], views["bias"] = laid(c["bias"][3], f"bias {key}", broadcast(c["bias"][1]), own)
    if c["sink"] == "learnable":
        leaves["offset"] = numbers(f"offset {key}", c["h"])
    for name, leaf in leaves.items():
        letter = {"bias": "b", "offset": "s"}.get(name, name)
        leaf.requires_grad_(letter in c["grads"] if len(letter) == 1 else "q" in c["grads"])
    others: dict[str, Any] = {}
    if c["alibi"] in ("h", "bh"):
        shape = [full[n] for n in c["alibi"]]
        others["alibi_slopes"] = numbers(f"slopes {key}", *shape).abs()
    if c["arb"] is not None:
        dims, layout, share = c["arb"]
        scores, view = laid(layout, f"arb {key}", broadcast(dims), torch.float32)
        others["attention_mask"] = view(scores < 4 * share - 2)
    elif c["lens"] is not None and "mask" in c["by"]:
        pair = [
            (torch.arange(full["qk"[side]]) >= torch.tensor(lengths(c, side))[:, None])[:, None, None]
            for side in (0, 1)
        ]
        others["attention_mask"] = pair[0] if c["by"] == "one-mask" else tuple(pair)
    elif c["lens"] is not None:
        for side, name in enumerate(("q", "kv")):
            ends = [0, *itertools.accumulate(lengths(c, side))]
            others[f"cu_seqlens_{name}"] = torch.tensor(ends, dtype=torch.int32)
            if c["gaps"]:
                others[f"cu_seqlens_{name}_padded"] = torch.tensor(starts(c, side), dtype=torch.int32)
            if c["longest"] is not None:
                others[f"max_seqlen_{name}"] = max(lengths(c, side)) + c["longest"]
        if c["by"] == "one-cu":
            others["cu_seqlens_kv"] = others["cu_seqlens_q"]
    if c["pages"]:
        others["block_table"] = block_table(c)
    shape = [*qkv_shape(c, "q")[:-1], c["e"]]
    if c["dout"]:
        dout = torch.ones((), dtype=dtype).expand(shape)
    else:
        dout = numbers(f"dout {key}", *shape, dtype=dtype)
    return Made(leaves, views, others, dout, fused[1] if fused else 0)


@contextmanager
def context(name: str) -> Iterator[None]:
    """What is in force around a call."""
    policies: dict[str, dict[str, Any]] = {
        "deny-flash": {"deny": ("sdpa.flash",)},
        "never": {"adapt": "never"},
        "allow-tiled": {"allow": ("tiled",)},
    }
    with ExitStack() as stack:
        if name == "no_grad":
            stack.enter_context(torch.no_grad())
        elif name == "inference":
            stack.enter_context(torch.inference_mode())
        elif name == "autocast":
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        elif name == "deterministic":
            stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            torch.use_deterministic_algorithms(True)
        elif name == "math":
            stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        elif name:
            stack.enter_context(attnsel.override(**policies[name]))
        yield


def named_arguments(c: Case, m: Made) -> dict[str, Any]:
    """What ``attention`` takes beside q, k and v; of a fused layer, that too."""
    arguments: dict[str, Any] = {
        "qkv_format": c["fmt"], "attn_mask_type": c["mask"], "window_size": c["window"],
        "bottom_right_diagonal": c["anchor"], "softmax_scale": c["scale"], "softcap": c["softcap"],
        "softmax_type": c["sink"], "attention_dropout": c["drop"], "is_training": c["train"],
        "deterministic": c["det"], "return_lse": c["lse"], "return_max_logit": c["maxl"],
        "backend": c["backend"], "adapt": c["adapt"], **m.others,
    }  # fmt: skip
    if c["bias"] is not None:
        arguments["core_attention_bias_type"] = f"{c['bias'][0]}_scale_bias"
        arguments["core_attention_bias"] = m.views["bias"](m.leaves["bias"])
    elif c["alibi"] is not None:
        arguments["core_attention_bias_type"] = "alibi"
    if c["fused"] is not None:
        arguments[f"{c['fused'][0]}_layer"] = m.leaves[f"{c['fused'][0]}_layer"]
        arguments["qkv_interleave_dim"] = c["fused"][1]
    return arguments


def run_attention(c: Case, kept: dict[str, Any]) -> Numbers:
    m = made(c)
    arguments = named_arguments(c, m)
    if c["sink"] == "learnable":
        arguments["softmax_offset"] = m.leaves["offset"]
    views = m.given(m.leaves)
    with context(c["ctx"]):
        result = attnsel.attention(*[views[name] for name in "qkv" if name in m.leaves], **arguments)
    found = named(result, *[name for name in ("lse", "maxl") if c[name]])
    return found | gradients(found["out"], m.leaves, m.dout)


def run_module(c: Case, kept: dict[str, Any]) -> Numbers:
    m = made(c)
    built = named_arguments(c, m)
    for name in ("is_training", "return_lse"):
        del built[name]
    per_call = {"attention_mask", "core_attention_bias_type", "core_attention_bias", "alibi_slopes"}
    per_call |= {"block_table", "qkv_interleave_dim", "qkv_layer", "kv_layer"}
    if c["call"]:
        per_call |= {"qkv_format", "attn_mask_type", "window_size", "softmax_scale", "bottom_right_diagonal"}
    names = [name for name in built if name in per_call or name.startswith(("cu_", "max_"))]
    of_call = {name: built.pop(name) for name in names}
    built |= {"num_attention_heads": c["h"], "num_gqa_groups": c["g"], "kv_channels": (c["d"], c["e"])}
    layer = kept.setdefault(repr(built), None) or attnsel.DotProductAttention(**built)
    kept[repr(built)] = layer
    layer.train(bool(c["train"]))
    leaves = dict(m.leaves)
    if c["sink"] == "learnable":
        with torch.no_grad():
            layer.softmax_offset.copy_(leaves["offset"].reshape(1, -1, 1, 1))
        leaves["offset"] = layer.softmax_offset.requires_grad_("s" in c["grads"])
    views = m.given(leaves)
    with context(c["ctx"]):
        result = layer(
            *[views[name] for name in "qkv" if name in leaves],
            checkpoint_core_attention=c["recompute"],
            **of_call,
        )
        found = named(result, *["maxl"] * c["maxl"])
        if c["recompute"]:  # under what was in force: it runs again
            found |= gradients(found["out"], leaves, m.dout.flatten(-2))
    kept["ran"] = layer.last_selection
    if not c["recompute"]:
        found |= gradients(found["out"], leaves, m.dout.flatten(-2))
    return found


def gradients(out: Tensor, leaves: Numbers, dout: Tensor) -> Numbers:
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    if not wanted or not out.requires_grad:
        return {}
    found = torch.autograd.grad(out, list(wanted.values()), dout.to(out.dtype), allow_unused=True)
    return {f"d{name}": g for name, g in zip(wanted, found, strict=True) if g is not None}


def define_attention(c: Case) -> Numbers:
    """What the call is, in float64; without gradients where the call records none."""
    m = made(c)
    leaves = m.wide()
    views = m.given(leaves)
    real = [torch.arange(c["skv" if s else "sq"]) < torch.tensor(lengths(c, s))[:, None] for s in (0, 1)]

    def dense(name: str) -> Tensor:
        """[b, heads, s, d], zeros in rows that are not real."""
        t, side = views[name], int(name != "q")
        s = c["skv" if side else "sq"]
        if c["pages"] and side:
            t = t[block_table(c).long()].flatten(1, 2)[:, :s].transpose(1, 2)
        elif c["fmt"] == "thd":
            places = starts(c, side)
            rows = [t[at : at + n] for at, n in zip(places, lengths(c, side), strict=False)]
            rows = [torch.cat([r, r.new_zeros(s - r.shape[0], *r.shape[1:])]) for r in rows]
            t = torch.stack(rows).transpose(1, 2)
        else:
            t = t.permute(TO_BHSD[c["fmt"]])
        return torch.where(real[side][:, None, :, None], t, 0.0)

    q, k, v = dense("q"), dense("k"), dense("v")
    k, v = (t.repeat_interleave(c["h"] // c["g"], 1) for t in (k, v))
    causal = "causal" in c["mask"]
    bottom_right = "bottom_right" in c["mask"] if causal else c["anchor"] is not False
    shift = real[1].sum(1) - real[0].sum(1)
    distance = distances(c["sq"], c["skv"], shift if bottom_right else 0)
    left, right = c["window"] or (-1, -1)
    hidden = outside_window(distance, left, 0 if causal else right)
    hidden = hidden | ~(real[0][:, None, :, None] & real[1][:, None, None, :])
    if c["arb"] is not None:
        hidden = hidden | m.others["attention_mask"]
    x = scores(c, q, k)
    if c["bias"] is not None:
        x = x + views["bias"] * (scale_of(c) if c["bias"][0] == "pre" else 1.0)
    elif c["alibi"] is not None:
        slopes = m.others["alibi_slopes"].double() if "alibi_slopes" in m.others else default_slopes(c["h"])
        x = x - slopes[..., None, None] * distance.abs()[:, None]
    sink = {"vanilla": None, "off-by-one": torch.zeros(c["h"], dtype=torch.float64)}.get(
        c["sink"], leaves.get("offset")
    )
    out, lse, most = scores_to_out(x, v, hidden, sink)
    out = torch.where(real[0][:, None, :, None], out, 0.0)
    lse = torch.where(real[0][:, None, :], lse, -math.inf)
    if c["fmt"] == "thd":
        places = starts(c, 0)
        flat = out.new_zeros(places[-1], c["h"], c["e"])
        wide = lse.new_full((c["h"], places[-1]), -math.inf)
        for n, (at, rows) in enumerate(zip(places, lengths(c, 0), strict=False)):
            here = torch.arange(at, at + rows)
            flat = flat.index_put((here,), out[n, :, :rows].transpose(0, 1))
            wide[:, at : at + rows] = lse[n, :, :rows].detach()
        out, lse = flat, wide
    else:
        out = out.permute(FROM_BHSD[c["fmt"]])
    return {"out": out, "lse": lse, "maxl": most} | gradients(out, leaves, m.dout.double())


# ---- flash_attn -------------------------------------------------------------------------------------

FLASH: Case = {
    "fn": "func", "dtype": "fp16", "b": 2, "h": 2, "g": 2, "sq": 5, "skv": 5, "d": 8, "causal": False,
    "window": (-1, -1), "scale": None, "softcap": 0.0, "alibi": None, "det": False, "probs": False,
    "drop": 0.0, "lens": None, "grads": "qkv", "lay": ("", "", ""), "ctx": "",
    "tail": 0,  # packed: rows behind the last sequence
    "one": False,  # packed: one tensor for the lengths of queries and keys
    "more": 0,  # packed: what max_seqlen_* say beyond the longest
    "room": 9, "new": 0, "used": None, "index": False, "leftpad": None, "pages": False, "numbers": 0,
}  # fmt: skip


def flash_made(c: Case) -> Made:
    dtype, key, fn = DTYPES[c["dtype"]], f"flash {c['numbers']}", c["fn"]
    packed = "varlen" in fn
    sizes = [sum(n) + c["tail"] for n in c["lens"]] if packed else [c["sq"], c["skv"]]
    lead = [] if packed else [c["b"]]
    leaves: Numbers = {}
    views: dict[str, Callable[[Tensor], Tensor]] = {}
    q, kv = [*lead, sizes[0], c["h"], c["d"]], [*lead, sizes[1], c["g"], c["d"]]
    if fn == "kvcache":
        kv = [c["b"] * (2 if c["pages"] else 1) + 1, c["room"], c["g"], c["d"]]
        for name in ("k_new", "v_new") if c["new"] else ():
            leaves[name] = numbers(f"{name} {key}", c["b"], c["new"], c["g"], c["d"], dtype=dtype)
    if "qkv" in fn:
        shapes = {"qkv": [*lead, sizes[0], 3, c["g"], c["d"]]}
    elif fn in ("kvpacked", "varlen_kv"):
        shapes = {"q": q, "kv": [*lead, sizes[1], 2, c["g"], c["d"]]}
    else:
        shapes = {"q": q, "k": kv, "v": kv}
    for n, (name, shape) in enumerate(shapes.items()):
        leaves[name], views[name] = laid(c["lay"][n], f"{name} {key}", shape, dtype)
        leaves[name].requires_grad_(not set(name).isdisjoint(c["grads"]))
    others: dict[str, Any] = {}
    if c["alibi"]:
        others["alibi_slopes"] = numbers(f"slopes {key}", *[c[n] for n in c["alibi"]]).abs()
    dout = numbers(f"dout {key}", *lead, sizes[0], c["h"], c["d"], dtype=dtype)
    return Made(leaves, views, others, dout)


def run_flash(c: Case, kept: dict[str, Any]) -> Numbers:
    m = flash_made(c)
    positional: list[Any] = [view(m.leaves[name]) for name, view in m.views.items()]
    arguments: dict[str, Any] = {name: c[name] for name in ("causal", "softcap")} | m.others
    arguments |= {"softmax_scale": c["scale"], "window_size": c["window"]}
    if c["fn"] == "kvcache":
        used = torch.tensor(c["used"], dtype=torch.int32) if isinstance(c["used"], tuple) else c["used"]
        arguments |= {"cache_seqlens": used, "return_softmax_lse": c["probs"]}
        arguments["block_table" if c["pages"] else "cache_batch_idx"] = cache_table(c)
        if c["leftpad"]:
            arguments["cache_leftpad"] = torch.tensor(c["leftpad"], dtype=torch.int32)
        if c["new"]:
            arguments |= {"k": m.leaves["k_new"], "v": m.leaves["v_new"]}
        with context(c["ctx"]):
            result = flash_attn.flash_attn_with_kvcache(*positional, **arguments)
        found = named(result, *["lse"] * c["probs"])
        return {"out": found.pop("out"), "k": positional[1], "v": positional[2]} | found
    arguments |= {"dropout_p": c["drop"], "deterministic": c["det"], "return_attn_probs": c["probs"]}
    if c["lens"]:
        cu = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in c["lens"]]
        longest = [max(n) + c["more"] for n in c["lens"]]
        if c["fn"] == "varlen_qkv":
            positional += [cu[0], longest[0]]
        else:
            positional += [cu[0], cu[0 if c["one"] else 1], *longest]
    packed = {"func": "", "varlen_kv": "varlen_kvpacked_", "varlen_qkv": "varlen_qkvpacked_"}
    function = getattr(flash_attn, f"flash_attn_{packed.get(c['fn'], c['fn'] + '_')}func")
    with context(c["ctx"]):
        result = function(*positional, **arguments)
    found = named(result, *(("lse", "dmask") if c["probs"] else ()))
    return found | gradients(found["out"], m.leaves, m.dout)


def cache_table(c: Case) -> Tensor | None:
    if c["pages"]:
        return torch.arange(2 * c["b"], 0, -1, dtype=torch.int32).reshape(c["b"], 2)
    return torch.arange(c["b"], 0, -1, dtype=torch.int32) if c["index"] else None


def define_flash(c: Case) -> Numbers:
    m = flash_made(c)
    leaves = m.wide()
    views = m.given(leaves)
    q, k, v = (views[name] for name in "qkv")
    lens = c["lens"] or ((c["sq"],) * c["b"], (c["skv"],) * c["b"])
    if c["fn"] == "kvcache":
        k, v, keys = cached(c, k, v, leaves)
        lens = lens[0], keys
    packed = bool(c["lens"])
    outs, lses = [], []
    for n, (rows, keys) in enumerate(zip(*lens, strict=True)):
        if packed:
            at_q, at_k = sum(lens[0][:n]), sum(lens[1][:n])
            one = q[at_q : at_q + rows], k[at_k : at_k + keys], v[at_k : at_k + keys]
        else:
            one = q[n, :rows], k[n, :keys], v[n, :keys]
        a, b, w = (t.transpose(0, 1)[None] for t in one)
        b, w = (t.repeat_interleave(c["h"] // c["g"], 1) for t in (b, w))
        x = scores(c, a, b)
        distance = distances(rows, keys, keys - rows)
        if c["alibi"]:
            slopes = m.others["alibi_slopes"].double()
            x = x - (slopes[n] if slopes.dim() == 2 else slopes)[:, None, None] * distance.abs()[:, None]
        left, right = c["window"]
        # As the package reads windows: a bound as wide as the longest keys is none, and beside a left bound
        # no right bound is one of that many keys.
        longest = (max(lens[0]) + c["more"], max(lens[1]) + c["more"]) if packed else (c["sq"], c["skv"])
        if c["fn"] == "kvcache":
            longest = (c["sq"], c["room"] * (2 if c["pages"] else 1))
        if c["causal"]:
            right = 0
        left = -1 if left >= longest[1] else left
        right = -1 if right >= longest[1] > 0 else right
        if left >= 0 and right < 0 and longest[0] > longest[1] + 1:
            right = longest[1]
        out, lse, _ = scores_to_out(x, w, outside_window(distance, left, right))
        outs.append(out[0].transpose(0, 1))
        lses.append(torch.where(lse == -math.inf, math.inf, lse)[0].detach())
    if packed:
        tail = c["tail"]
        out = torch.cat([*outs, q.new_zeros(tail, c["h"], c["d"])])
        lse = torch.cat([*lses, q.new_full((c["h"], tail), math.inf)], 1)
    else:
        out, lse = torch.stack(outs), torch.stack(lses)
    return {"out": out, "lse": lse} | gradients(out, leaves, m.dout.double())


def cached(c: Case, k: Tensor, v: Tensor, leaves: Numbers) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Each sequence's own rows of the cache after the append, and how many there are."""
    table = cache_table(c)
    if c["pages"]:
        k, v = (t[table.long()].flatten(1, 2) for t in (k, v))
    else:
        k, v = (t[: c["b"]] if table is None else t[table.long()] for t in (k, v))
    used, first = c["used"], c["leftpad"] or (0,) * c["b"]
    if not isinstance(used, tuple):
        used = (k.shape[1] if used is None else used,) * c["b"]
    rows = []
    for name, t in (("k_new", k), ("v_new", v)):
        new = leaves[name] if c["new"] else t[:, :0]
        rows.append([torch.cat([t[n, : used[n]], new[n]])[first[n] :] for n in range(c["b"])])
    k, v = (torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in rows)
    return k, v, tuple(one.shape[0] for one in rows[0])


# ---- F.scaled_dot_product_attention's place ---------------------------------------------------------

F_SDPA: Case = {
    "lead": (2, 2), "dtype": "fp32", "g": None, "sq": 5, "skv": 5, "d": 8, "e": 8, "mask": None,
    "causal": False, "scale": None, "drop": 0.0, "grads": "qkv", "lay": ("", "", ""), "ctx": "", "numbers": 0,
}  # fmt: skip


def f_sdpa_made(c: Case) -> Made:
    dtype, key = DTYPES[c["dtype"]], f"f_sdpa {c['numbers']}"
    lead, leaves, views = list(c["lead"]), {}, {}
    kv_lead = lead if c["g"] is None else [*lead[:-1], c["g"]]
    shapes = {"q": [*lead, c["sq"], c["d"]]}
    shapes |= {"k": [*kv_lead, c["skv"], c["d"]], "v": [*kv_lead, c["skv"], c["e"]]}
    for n, (name, shape) in enumerate(shapes.items()):
        leaves[name], views[name] = laid(c["lay"][n], f"{name} {key}", shape, dtype)
        leaves[name].requires_grad_(name in c["grads"])
    others: dict[str, Any] = {}
    if c["mask"] is not None:
        full, mask = [*lead, c["sq"], c["skv"]], c["mask"]
        shape = full if mask.endswith("full") else full[-1:] if mask.endswith("-k") else full[-2:]
        tril = torch.ones(c["sq"], c["skv"], dtype=torch.bool).tril()
        if mask.startswith("float"):
            own = torch.float32 if mask.startswith("float32") else dtype
            leaves["mask"] = numbers(f"mask {key}", *shape, dtype=own).requires_grad_("m" in c["grads"])
        else:
            others["attn_mask"] = {
                "tril": lambda: tril,
                "tril--inf": lambda: torch.zeros(full[-2:], dtype=dtype).masked_fill(~tril, -math.inf),
                "none-hidden": lambda: torch.ones(full[-2:], dtype=torch.bool),
                "zeros": lambda: torch.zeros(full[-2:], dtype=dtype),
                "one": lambda: torch.ones(1, 1, dtype=torch.bool),
                "upper-left": lambda: corner("upper_left", c["sq"], c["skv"]),
                "lower-right": lambda: corner("lower_right", c["sq"], c["skv"]),
                "band": lambda: tril & tril.flip(0, 1),
                "all-but-a-row": lambda: torch.arange(c["sq"])[:, None].expand(full[-2:]) != 0,
            }.get(mask, lambda: numbers(f"mask {key}", *shape) > -0.8)()
    return Made(leaves, views, others, numbers(f"dout {key}", *lead, c["sq"], c["e"], dtype=dtype))


def run_f_sdpa(c: Case, kept: dict[str, Any]) -> Numbers:
    m = f_sdpa_made(c)
    mask = m.leaves.get("mask", m.others.get("attn_mask"))
    q, k, v = (m.views[name](m.leaves[name]) for name in "qkv")
    with context(c["ctx"]):
        out = attnsel.scaled_dot_product_attention(
            q, k, v, mask, c["drop"], c["causal"], scale=c["scale"], enable_gqa=c["g"] is not None
        )
    return {"out": out} | gradients(out, m.leaves, m.dout)


def define_f_sdpa(c: Case) -> Numbers:
    m = f_sdpa_made(c)
    leaves = m.wide()
    q, k, v = (m.views[name](leaves[name]) for name in "qkv")
    if c["g"] is not None:
        k, v = (t.repeat_interleave(c["lead"][-1] // c["g"], -3) for t in (k, v))
    q, k, v = (t.reshape(-1, 1, *t.shape[-2:]) for t in (q, k, v))
    x = scores(c, q, k)
    tril, hidden = torch.ones(c["sq"], c["skv"], dtype=torch.bool).tril(), torch.zeros((), dtype=torch.bool)
    mask = leaves.get("mask", m.others.get("attn_mask"))
    if c["causal"] or c["mask"] == "upper-left":
        hidden = ~tril
    elif c["mask"] == "lower-right":
        hidden = ~torch.ones(c["sq"], c["skv"], dtype=torch.bool).tril(c["skv"] - c["sq"])
    elif mask is not None:
        mask = mask.expand(*c["lead"], c["sq"], c["skv"]).reshape(-1, 1, c["sq"], c["skv"])
        if mask.dtype == torch.bool:
            hidden = ~mask
        else:
            x = x + mask
    out, _, _ = scores_to_out(x, v, hidden)
    out = out.reshape(*c["lead"], c["sq"], c["e"])
    return {"out": out} | gradients(out, leaves, m.dout.double())


# ---- the doors, and what a case gives ---------------------------------------------------------------


class Door(NamedTuple):
    base: Case
    run: Callable[[Case, dict[str, Any]], Numbers]
    define: Callable[[Case], Numbers]
    apart: bool = False  # in a process of its own, with the candidates of plugin/


DOORS = {
    "attention": Door(BASE, run_attention, define_attention),
    "module": Door(BASE, run_module, define_attention),
    "flash_attn": Door(FLASH, run_flash, define_flash),
    "f_sdpa": Door(F_SDPA, run_f_sdpa, define_f_sdpa),
    "adapted": Door(BASE, run_attention, define_attention, apart=True),
}


def calls(door: str, described: str) -> list[Case]:
    """The calls of a case, in a row, from its words: the first call's values that are not the usual ones, and
    what changes after it."""
    row = [DOORS[door].base]
    for words in described.split(" then "):
        pairs = (word.partition("=") for word in words.split())
        row.append({**row[-1], **{name: _value(name, text) if sign else True for name, sign, text in pairs}})
    return row[1:]


def _value(name: str, text: str) -> Any:
    """``1/3`` are two tuples of one, ``2,1`` is a tuple of two; a lone number is mostly none."""
    if "/" in text:
        return tuple(_value("lead", part) for part in text.split("/"))
    if "," in text or name in ("lead", "leftpad"):
        return () if text == "none" else tuple(_value("", part) for part in text.split(","))
    constants = {"True": True, "False": False, "None": None}
    if text in constants:
        return constants[text]
    return text if not re.fullmatch(r"-?[\d.]+", text) else float(text) if "." in text else int(text)


class Line(NamedTuple):
    what: str
    ran: str
    digest: str
    difference: str  # of the case's largest; "-" where the definition does not say it

    def __str__(self) -> str:
        return " | ".join(self)


def digest(found: Numbers) -> str:
    h = hashlib.blake2b(digest_size=4)
    for name, t in found.items():
        t = t.detach()
        h.update(f"{name} {t.dtype} {tuple(t.shape)} {t.stride()} ".encode())
        h.update(t.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def dtypes_of(c: Case) -> set[torch.dtype]:
    """What is given in, a bias's own dtype too."""
    own = c["bias"][2] if c.get("bias") else ""
    return {DTYPES[c["dtype"]], *([DTYPES[own]] if own else [])}


def difference(found: Numbers, wanted: Numbers, given: set[torch.dtype]) -> float:
    """The largest difference of any result, relative to it, in epsilons of the coarsest dtype there."""
    worst = 0.0
    for name, t in found.items():
        if name not in wanted:
            continue
        t, w = t.detach(), wanted[name].detach().reshape(t.shape)
        eps = max(torch.finfo(x).eps for x in {t.dtype, found["out"].dtype, *given})
        gone = ~torch.isfinite(w)
        if not torch.equal(torch.where(gone, w, 0.0), torch.where(gone, t.double(), 0.0)):
            return math.inf
        off = torch.where(gone, 0.0, (t.double() - w).abs())
        if off.numel():
            most = float(torch.where(gone, 0.0, w).abs().max())
            worst = max(worst, float(off.nan_to_num(math.inf).max()) / (eps * max(1.0, most)))
    return worst


VERBS = {
    "pads head_dim_qk": "pad_head_dim_qk", "pads head_dim_v": "pad_head_dim_v", "pads": "pad_sequence",
    "folds": "fold_mask", "copies": "contiguous", "repeats": "expand_gqa", "unpacks": "unpack",
    "packs": "pack", "zeroes": "zero_padding", "drops": "drop_mask",
}  # fmt: skip
"""What ATTNSEL_DEBUG=1 says of an adaptation begins so; a module's ``last_selection`` has the names."""

_SAID = re.compile(r"([\w.]+) runs(?: \((.*?)\))?(?:; next |; refused: |; to get | \[)")
_serial = itertools.count(1)


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        said = _SAID.search(record.getMessage())
        if said is None:
            return
        changes = [
            next((name for verb, name in VERBS.items() if text.startswith(verb)), text)
            for text in (said[2] or "").split("; ")
            if text
        ]
        self.ran.append("+".join([said[1], *changes]))


@contextmanager
def overheard() -> Iterator[_Said]:
    """What is announced as chosen. A limit of its own that nothing reaches makes every choice a new one."""
    logger, said = logging.getLogger("attnsel"), _Said()
    before = logger.propagate, logger.level, list(logger.handlers)
    logger.propagate, logger.handlers = False, [said]
    try:
        with attnsel.override(
            policy=attnsel.Policy(memory_limit=2**62 - next(_serial)),
            debug=1,
            debug_format="text",
            debug_file=None,
        ):
            yield said
    finally:
        logger.propagate, logger.handlers = before[0], before[2]
        logger.setLevel(before[1])


def line_of(door: str, number: int, described: str, *, numbers_too: bool) -> Line:
    """Run a case. ``numbers_too``: hold it against the definition, else the difference is left open ("?")."""
    ran, digests, worst, kept = [], [], -1.0, dict[str, Any]()
    with warnings.catch_warnings(), overheard() as said:
        warnings.simplefilter("ignore")
        for c in calls(door, described):
            said.ran.clear()
            before = attnsel.cache_info()[:2]
            torch.default_generator.manual_seed(number)  # the CPU's: others keep a stack for each seed
            try:
                found = DOORS[door].run(c, kept)
            except Exception as error:
                words = re.sub(r"[|\s]+", " ", str(error))
                ran.append(f"{type(error).__name__}: {' '.join(words.split()[:8])}")
                digests.append("-")
                continue
            chosen = ">".join(said.ran)  # more than one: the first ones refused
            if not chosen:  # nothing new was chosen: what ran before, or PyTorch's own function
                chosen = "=" if door != "f_sdpa" or attnsel.cache_info()[:2] != before else "theirs"
            last = kept.pop("ran", None)
            if last is not None and chosen != "=":
                chosen = "+".join([last.backend, *(a.name for a in last.chosen.adaptations)])
            ran.append(chosen)
            digests.append(digest(found))
            if numbers_too and not (c["drop"] and c.get("train") is not False):
                worst = max(worst, difference(found, DOORS[door].define(c), dtypes_of(c)))
    shown = "?" if not numbers_too else "-" if worst < 0 else f"{worst:.1g}" if worst < 1000 else "wrong"
    return Line(described, ", ".join(ran), " ".join(digests), shown)


def lines_of(door: str, part: range, *, numbers_too: bool) -> list[Line]:
    """What the cases of the record give now."""
    if not DOORS[door].apart or "--lines" in sys.argv:
        recorded = read(door).lines
        with one_thread():
            return [line_of(door, n, recorded[n].what, numbers_too=numbers_too) for n in part]
    here = Path(__file__).parent
    path = [here / "plugin", here, here.parent / "support", Path(attnsel.__file__).parent.parent]
    environment = {n: v for n, v in os.environ.items() if not n.startswith("ATTNSEL_")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONIOENCODING": "utf-8"}
    asked = ["--lines", door, str(part.start), str(part.stop), "float64" if numbers_too else ""]
    answer = subprocess.run(
        [sys.executable, __file__, *asked], env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    if answer.returncode:
        raise RuntimeError(f"the process that runs {door} failed:\n{answer.stderr}")
    return [Line(*line.split(" | ")) for line in answer.stdout.splitlines()]


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums are split by threads: the record is of one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fingerprint() -> str:
    """Of this machine's arithmetic in plain torch: equal ones give the same bits here."""
    h = hashlib.blake2b(digest_size=6)
    with one_thread():
        for dtype in DTYPES.values():
            for b, m, k, n in ((1, 3, 5, 7), (2, 17, 8, 21), (3, 64, 48, 33), (2, 5, 16, 24)):
                x, y = numbers("x", b, m, k, dtype=dtype), numbers("y", b, n, k, dtype=dtype)
                mixed = numbers("z", n, b, k, dtype=dtype).transpose(0, 1)
                products = x @ y.transpose(1, 2)
                made = [
                    products,
                    torch.bmm(x, mixed.transpose(1, 2)),
                    products.softmax(-1),
                    x.exp(),
                    x.tanh(),
                ]
                made += [x.sum(1), torch.logsumexp(products.float(), -1)]
                made.append(x[..., ::2] @ y[..., ::2].transpose(1, 2))
                q, kv = x[:, None].requires_grad_(), y[:, None].requires_grad_()
                for causal in (False, True):
                    out = torch.nn.functional.scaled_dot_product_attention(q, kv, kv, is_causal=causal)
                    made += [out, *torch.autograd.grad(out, (q, kv), numbers("d", *out.shape, dtype=dtype))]
                h.update(digest({str(n): t for n, t in enumerate(made)}).encode())
    return h.hexdigest()


# ---- the record -------------------------------------------------------------------------------------


class Recorded(NamedTuple):
    torch: str
    fingerprint: str
    lines: list[Line]


def release(version: str) -> str:
    return version.partition("+")[0]


def read(door: str) -> Recorded:
    head, *lines = (RECORD / f"{door}.txt").read_text(encoding="utf-8").splitlines()
    words = head.split()
    return Recorded(words[2], words[4], [Line(*line.split(" | ")[1:]) for line in lines])


def write(door: str, lines: list[Line]) -> None:
    head = f"# torch {release(torch.__version__)} arithmetic {fingerprint()} ({platform.machine()})"
    body = [f"{n:04} | {line}" for n, line in enumerate(lines)]
    (RECORD / f"{door}.txt").write_text("\n".join([head, *body]) + "\n", encoding="utf-8")


def floor_of(door: str, described: str) -> float:
    """Up to where a case may differ on another machine, by what its calls are given or cast to."""
    row = calls(door, described)
    halves = any(c["ctx"] == "autocast" or dtypes_of(c) & {torch.bfloat16, torch.float16} for c in row)
    return FLOOR if halves else FLOOR_OF_SUMS


def complaint(recorded: Line, found: Line, *, floor: float, same_arithmetic: bool, same_torch: bool) -> str:
    """What changed of one case, before and after; nothing if nothing did that this machine can tell."""
    told = []
    if same_torch and recorded.ran != found.ran:
        told.append(("ran", recorded.ran, found.ran))
    if same_arithmetic and recorded.digest != found.digest:
        told.append(("results", recorded.digest, found.digest))
    if not same_arithmetic and found.difference not in ("-", "?"):
        most = floor if recorded.difference == "-" else max(floor, 4 * float(recorded.difference))
        if found.difference == "wrong" or float(found.difference) > most:
            told.append(("difference from float64", recorded.difference, found.difference))
    return "".join(f"\n    {name}: {before}  ->  {after}" for name, before, after in told)


def differing(door: str, part: range) -> tuple[str, list[str]]:
    """How the record was compared here, and what is said of each case that differs."""
    recorded = read(door)
    same_torch = recorded.torch == release(torch.__version__)
    same = same_torch and recorded.fingerprint == fingerprint()
    how = "bit by bit" if same else "by what ran and by float64" if same_torch else "by float64 alone"
    told = []
    for number, found in zip(part, lines_of(door, part, numbers_too=not same), strict=True):
        floor = floor_of(door, found.what)
        said = complaint(
            recorded.lines[number], found, floor=floor, same_arithmetic=same, same_torch=same_torch
        )
        if said:
            told.append(f"{door} {number:04} {found.what}{said}")
    return how, told


def accept(door: str) -> bool:
    """Record what the cases of a door give now, and say how many lines changed; nothing if one is wrong."""
    before = read(door).lines
    lines = lines_of(door, range(len(before)), numbers_too=True)
    bad = [
        f"{door} {n:04} {line}"
        for n, line in enumerate(lines)
        if line.difference == "wrong" or (line.difference not in "-?" and float(line.difference) > MOST)
    ]
    if bad:
        print(
            *bad, f"{door}: these differ from float64 by more than {MOST:g} epsilons: not recorded", sep="\n"
        )
        return False
    write(door, lines)
    count = sum(old != new for old, new in zip(before, lines, strict=True))
    print(f"{door}: {count} of {len(lines)} lines changed")
    return True


def main(arguments: list[str]) -> int:
    for name in [name for name in os.environ if name.startswith("ATTNSEL_")]:
        del os.environ[name]
    if arguments[:1] == ["--lines"]:
        door, start, stop, numbers_too = arguments[1:]
        print(*lines_of(door, range(int(start), int(stop)), numbers_too=bool(numbers_too)), sep="\n")
        return 0
    if arguments == ["--accept"]:
        wrong = [door for door in DOORS if not accept(door)]
        return int(bool(wrong))
    found = 0
    for door in DOORS:
        count = len(read(door).lines)
        how, told = differing(door, range(count))
        print(*told, f"{door}: {len(told)} of {count} cases differ, compared {how}", sep="\n")
        found += len(told)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
