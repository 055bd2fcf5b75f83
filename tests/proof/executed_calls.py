"""Calls of the Triton kernels, executed as PTX and interpreted by Triton with the same tiles."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Result, Spec
from rounding import UNITS, error

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CAUSAL = {"window_right": 0}
BOTTOM_RIGHT = {"window_right": 0, "bottom_right": True}
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "bottom right": BOTTOM_RIGHT,
    "window": {"window_left": 37, "window_right": 5},
    "softcap": {"softcap": 1.3},
    "sinks": {"softmax_type": "learnable"},
    "alibi": CAUSAL,
    "bias": {},
    "mask": {},
    "dropout": {"dropout_p": 0.3},
    "lengths": BOTTOM_RIGHT,
    "packed": {"packed": True, **CAUSAL},
    "decode": BOTTOM_RIGHT,
    "pages": BOTTOM_RIGHT,
}
FORWARD_ONLY = ("decode", "pages")
APART = 2  # units of rounding: one where two sums round to either side, and what that does further on
PAGE = 16


def dense(case: dict[str, Any], heads: int, length: int, width: int) -> Tensor:
    """[b, heads, length, width] in one of three layouts."""
    b, dtype = case["b"], DTYPES[case["dtype"]]
    if case["layout"] == "bhsd":
        return torch.randn(b, heads, length, width, dtype=dtype)
    gap = 16 if case["layout"] == "gaps" else 0
    return torch.randn(b, length, heads, width + gap, dtype=dtype)[..., :width].transpose(1, 2)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def build(case: dict[str, Any]) -> tuple[Spec, Inputs]:
    torch.manual_seed(case["seed"])
    feature, dtype, d = case["feature"], DTYPES[case["dtype"]], case["d"]
    b, g, h, s_q, s_kv = case["b"], case["g"], case["g"] * case["r"], case["s_q"], case["s_kv"]
    spec = Spec(softmax_scale=d**-0.5, need_lse=True, need_grad=case["backward"], **FEATURES[feature])
    made: dict[str, Any] = {}
    if feature == "packed":
        for side, lengths in (("q", case["lens_q"]), ("kv", case["lens_kv"])):
            made[f"cu_seqlens_{side}"] = starts(lengths)
        q, kv = sum(case["lens_q"]), sum(case["lens_kv"])
        shapes = {"q": (q, h, d), "k": (kv, g, d), "v": (kv, g, case["e"])}
        made |= {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    else:
        made["q"] = dense(case, h, s_q, d)
        made["k"], made["v"] = dense(case, g, s_kv, d), dense(case, g, s_kv, case["e"])
    if feature == "sinks":
        made["softmax_offset"] = torch.randn(h, dtype=dtype)
    elif feature == "alibi":
        made["alibi_slopes"] = torch.rand(h) / 20
    elif feature == "bias":
        made["bias"] = torch.randn(1, h, s_q, s_kv, dtype=dtype).requires_grad_(case["backward"])
    elif feature == "mask":
        made["attn_mask"] = torch.randn(b, 1, s_q, s_kv) > 0.5
    elif feature == "dropout":
        made |= {"dropout_seed": torch.tensor([case["seed"]]), "dropout_offset": torch.tensor([11])}
    elif feature == "lengths":
        made["seqlens_q"] = torch.tensor([max(0, s_q - 7 * k) for k in range(b)], dtype=torch.int32)
        made["seqlens_kv"] = torch.tensor([max(0, s_kv - 40 * k) for k in range(b)], dtype=torch.int32)
        for k in range(b):  # what lies behind a sequence reaches nothing
            made["k"][k, :, max(0, s_kv - 40 * k) :] = math.nan
            made["v"][k, :, max(0, s_kv - 40 * k) :] = math.nan
    elif feature == "pages":
        made |= in_pages(made["k"], made["v"])
    return spec, Inputs(**made)


def in_pages(k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The keys in pages in another order, NaN where no row lies."""
    b, g, length, _ = k.shape
    each = -(-length // PAGE)
    table = torch.randperm(b * each + 1)[: b * each].view(b, each).to(torch.int32)
    made = {"block_table": table, "seqlens_kv": torch.full((b,), length, dtype=torch.int32)}
    for name, t in (("k", k), ("v", v)):
        pool = torch.full((b * each + 1, g, PAGE, t.shape[-1]), math.nan, dtype=t.dtype)
        for n in range(b):
            for page in range(each):
                part = t[n, :, page * PAGE : (page + 1) * PAGE]
                pool[table[n, page], :, : part.shape[1]] = part
        made[name] = pool
    return made


def outcome(case: dict[str, Any]) -> tuple[str, str]:
    """A word for the tally, and what is wrong."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed", ""
    executed, interpreted, faults = both_ways(case)
    if faults:
        return "", str(faults[0])
    for name, apart in differences(case, executed, interpreted).items():
        if not apart <= APART:
            return "", f"{name}: executed and interpreted are {apart:.3g} units of rounding apart"
    return f"alike on sm{case['arch']}", ""


def both_ways(case: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
    """The results of either, and the faults of what was executed. The backward starts from one forward."""
    from attnsel.backends.triton import run
    from attnsel.backends.triton.blocks import Tiles
    from attnsel.backends.triton.launch import make_call
    from ptx_interpreter.run import Executed, executed_on

    spec, inputs = build(case)
    call = make_call(spec, inputs)
    names = ("forward", "dkdv", "dq", "dbias", "decode")
    tiles = Tiles(*[call.block(name, case["arch"]) for name in names])
    splits = case["splits"] if case["feature"] in FORWARD_ONLY else 0
    done: list[Executed] = []
    with executed_on(case["arch"], done):
        first = run.forward(replace(spec, need_grad=False), inputs, splits=splits)
    second = run.forward(replace(spec, need_grad=False), inputs, splits=splits, tiles=tiles)
    executed, interpreted = named(first), named(second)
    if case["backward"]:
        dout, dlse = torch.randn_like(first.out), torch.randn_like(executed["lse"])
        with executed_on(case["arch"], done):
            grads = run.backward(spec, inputs, first, dout, dlse)
        others = run.backward(spec, inputs, first, dout, dlse, tiles=tiles)
        executed |= {f"d{name}": t for name, t in grads._asdict().items() if t is not None}
        interpreted |= {f"d{name}": t for name, t in others._asdict().items() if t is not None}
    return executed, interpreted, [fault for each in done for fault in each.faults]


def named(result: Result) -> dict[str, Tensor]:
    assert result.lse is not None
    return {"out": result.out, "lse": result.lse}


def differences(
    case: dict[str, Any], executed: dict[str, Tensor], interpreted: dict[str, Tensor]
) -> dict[str, float]:
    """By result, the largest difference, in units of rounding of the largest value.

    Both multiply exactly and add in float32, in another order: what is rounded to 16 bits on the way falls to
    the other side now and then.
    """
    found = {}
    for name, t in interpreted.items():
        finite = t[t.isfinite()]
        size = finite.abs().max().item() if finite.numel() else 0.0
        if name == "lse":  # a logarithm: what is a unit of the sum is one of 1 here
            unit, size = UNITS[torch.float32], max(size, 1.0)
        else:
            unit = UNITS[DTYPES[case["dtype"]]]
        off = error(executed[name], t)
        found[name] = off / (unit * size) if size else (0.0 if off == 0 else math.inf)
    return found
