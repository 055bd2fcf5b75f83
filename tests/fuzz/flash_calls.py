"""One call of ``attnsel.flash_attn`` from plain values, and what FlashAttention-2 says it gives.

Shape letters: b, s_q, s_k, t_q, t_k, h, g, d. A failure's script is this file, rounding.py and one more line.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnsel import NoBackendError, clear_cache, flash_attn
from attnsel.debug import FallbackWarning
from attnsel.flash_attn import FlashAttentionError
from rounding import unexplained

torch.set_num_threads(1)

CASE: dict[str, Any] = {
    "seed": 0,
    "function": "flash_attn_func",
    "dtype": "float16",
    "lens_q": [3, 3],  # all the same in a dense batch
    "lens_k": [3, 3],
    "g": 1,
    "r": 1,
    "d": 8,
    "scale": None,
    "causal": False,
    "window": (-1, -1),
    "softcap": 0.0,
    "alibi": None,  # h or "b h"
    "deterministic": False,
    "lse": True,
    "grads": True,
    "heads_first": False,  # q, k and v lie in memory as [.., h, s, d]
    "more": 0,  # what max_seqlen_* is above the longest sequences
    "tail": 0,  # rows behind the last sequence
    "pages": None,  # the pages of each sequence, of 256 rows each
    # flash_attn_with_kvcache: lens_k are the rows in use after the append
    "room": 0,  # rows that the cache has beyond the longest
    "new": 0,  # rows that are appended
    "int_length": False,
    "batch_idx": None,
    "leftpad": None,
    "rotary": 0,
    "interleaved": True,
}
PAGE = 256


@dataclass
class Problem:
    case: dict[str, Any]
    leaves: dict[str, Tensor]
    arguments: dict[str, Any]
    dout: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)

    def sequences(self, leaves: dict[str, Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """q [s_q, h, d], k and v [s_k, g, d] of each sequence, views of the leaves."""
        case, found = self.case, []
        if case["function"] == "flash_attn_with_kvcache":
            return self._of_cache(leaves)
        if "qkv" in leaves:
            q, k, v = leaves["qkv"].unbind(-3)
        elif "kv" in leaves:
            q, (k, v) = leaves["q"], leaves["kv"].unbind(-3)
        else:
            q, k, v = (leaves[name] for name in "qkv")
        at_q = at_k = 0
        for n, (s_q, s_k) in enumerate(zip(case["lens_q"], case["lens_k"], strict=True)):
            if "varlen" not in case["function"]:
                found.append((q[n], k[n], v[n]))
                continue
            if case["pages"] is not None:
                one = [t[case["pages"][n]].flatten(0, 1)[:s_k] for t in (k, v)]
            else:
                one = [t[at_k : at_k + s_k] for t in (k, v)]
            found.append((q[at_q : at_q + s_q], *one))
            at_q, at_k = at_q + s_q, at_k + s_k
        return found

    def _of_cache(self, leaves: dict[str, Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        case, found = self.case, []
        cos, sin = self.extra.get("cos"), self.extra.get("sin")
        for n, s_k in enumerate(case["lens_k"]):
            first = s_k - case["new"]
            q = leaves["q"][n]
            held = []
            for name in ("k", "v"):
                cache = leaves[f"{name}_cache"]
                if case["pages"] is not None:
                    rows = cache[case["pages"][n]].flatten(0, 1)
                else:
                    rows = cache[n if case["batch_idx"] is None else case["batch_idx"][n]]
                if case["new"]:
                    new = leaves[name][n]
                    if name == "k" and case["rotary"]:
                        new = turned(new, cos, sin, range(first, s_k), case["interleaved"])
                    rows = torch.cat([rows[:first], new, rows[s_k:]])
                held.append(rows[0 if case["leftpad"] is None else case["leftpad"][n] : s_k])
            if case["rotary"]:
                # As applied: the package's C++ drops a bound that reaches all keys before it asks.
                masked = applied_window(case) != (-1, -1)
                places = [first + (i if masked else 0) for i in range(q.shape[0])]
                q = turned(q, cos, sin, places, case["interleaved"])
            found.append((q, *held))
        return found  # type: ignore[return-value]


def turned(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, places: Sequence[int], interleaved: bool
) -> Tensor:
    """Rows [s, h, d] turned by their places, as complex numbers."""
    assert cos is not None
    assert sin is not None
    half = cos.shape[1]
    part = x[..., : 2 * half]
    pairs = part.unflatten(-1, (half, 2)) if interleaved else part.unflatten(-1, (2, half)).transpose(-1, -2)
    c, s = (t[list(places), None].to(x.dtype) for t in (cos, sin))
    pairs = torch.stack(
        [pairs[..., 0] * c - pairs[..., 1] * s, pairs[..., 0] * s + pairs[..., 1] * c], dim=-1
    )
    part = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([part, x[..., 2 * half :]], dim=-1)


def make(case: dict[str, Any]) -> Problem:
    case = {**CASE, **case}
    function, dtype = case["function"], getattr(torch, case["dtype"])
    gen = torch.Generator().manual_seed(case["seed"])
    b, g, h, d = len(case["lens_q"]), case["g"], case["g"] * case["r"], case["d"]

    def normal(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)
        return made.transpose(-2, -3).contiguous().transpose(-2, -3) if case["heads_first"] else made

    longest_q, longest_k = max(case["lens_q"]), max(case["lens_k"])
    leaves: dict[str, Tensor] = {}
    arguments: dict[str, Any] = {
        "softmax_scale": case["scale"],
        "causal": case["causal"],
        "window_size": case["window"],
        "softcap": case["softcap"],
    }
    if case["alibi"]:
        arguments["alibi_slopes"] = torch.rand((b, h) if case["alibi"] == "b h" else (h,), generator=gen)
    extra: dict[str, Tensor] = {}
    if function == "flash_attn_with_kvcache":
        rows = longest_k + case["room"]
        leaves["q"] = normal(b, longest_q, h, d)
        if case["pages"] is not None:
            shape = (1 + max(max(pages) for pages in case["pages"]), PAGE)
            arguments["block_table"] = torch.tensor(case["pages"], dtype=torch.int32)
        else:
            shape = (b if case["batch_idx"] is None else 1 + max(case["batch_idx"]), rows)
        leaves |= {f"{name}_cache": normal(*shape, g, d) for name in "kv"}
        if case["new"]:
            leaves |= {name: normal(b, case["new"], g, d) for name in "kv"}
        used = [n - case["new"] for n in case["lens_k"]]
        arguments["cache_seqlens"] = used[0] if case["int_length"] else torch.tensor(used, dtype=torch.int32)
        for name in ("batch_idx", "leftpad"):
            if case[name] is not None:
                arguments[f"cache_{name}"] = torch.tensor(case[name], dtype=torch.int32)
        if case["rotary"]:
            capacity = rows if case["pages"] is None else PAGE * len(case["pages"][0])
            angles = 6 * torch.rand(capacity, case["rotary"] // 2, generator=gen)
            extra = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
            arguments |= {"rotary_cos": extra["cos"], "rotary_sin": extra["sin"]}
            arguments["rotary_interleaved"] = case["interleaved"]
        arguments["return_softmax_lse"] = case["lse"]
        return Problem(case, leaves, arguments, normal(b, longest_q, h, d), extra)
    arguments |= {"deterministic": case["deterministic"], "return_attn_probs": case["lse"]}
    if "varlen" in function:
        shapes = {
            "q": (sum(case["lens_q"]) + case["tail"], h, d),
            "k": (sum(case["lens_k"]) + case["tail"], g, d),
        }
        if case["pages"] is not None:
            shapes["k"] = (1 + max(max(pages) for pages in case["pages"]), PAGE, g, d)
            arguments["block_table"] = torch.tensor(case["pages"], dtype=torch.int32)
        cu = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (case["lens_q"], case["lens_k"])]
        longest = [n + case["more"] for n in (longest_q, longest_k)]
        if function == "flash_attn_varlen_qkvpacked_func":
            arguments |= {"cu_seqlens": cu[0], "max_seqlen": longest[0]}
        else:
            arguments |= {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[0] if cu[0].equal(cu[1]) else cu[1]}
            arguments |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    else:
        shapes = {"q": (b, longest_q, h, d), "k": (b, longest_k, g, d)}
    if "_qkvpacked" in function:
        leaves["qkv"] = normal(*shapes["q"][:-2], 3, h, d)
    elif "kvpacked" in function:
        leaves |= {"q": normal(*shapes["q"]), "kv": normal(*shapes["k"][:-2], 2, g, d)}
    else:
        leaves |= {name: normal(*shapes["q" if name == "q" else "k"]) for name in "qkv"}
    for leaf in leaves.values():
        leaf.requires_grad_(case["grads"])
    return Problem(case, leaves, arguments, normal(*shapes["q"]))


# ---- the definition ---------------------------------------------------------------------------------


def applied_window(case: dict[str, Any]) -> tuple[int, int]:
    """(left, right) as the package's C++ applies them to the longest sequences; -1 is no bound."""
    rows, keys = max(case["lens_q"]) + case["more"], max(case["lens_k"]) + case["more"]
    if case["function"] == "flash_attn_with_kvcache":
        keys += case["room"] if case["pages"] is None else PAGE * len(case["pages"][0]) - keys
    left, right = case["window"]
    right = 0 if case["causal"] else right
    left = -1 if left >= keys else left
    right = -1 if right >= keys > 0 else right
    return left, keys if left >= 0 > right and rows > keys + 1 else right


def definition(problem: Problem, dtype: torch.dtype, change: float = 0.0, seed: int = 0) -> dict[str, Tensor]:
    """out, lse and the gradients of the leaves, one sequence at a time."""
    case = problem.case
    gen = torch.Generator().manual_seed(seed)

    def widened(t: Tensor) -> Tensor:
        t = t.detach().to(dtype)
        return t * (1 + change * (2 * torch.rand(t.shape, generator=gen, dtype=dtype) - 1)) if change else t

    leaves = {name: widened(t).requires_grad_(t.requires_grad) for name, t in problem.leaves.items()}
    slopes = problem.arguments.get("alibi_slopes")
    left, right = applied_window(case)
    outs, lses, live = [], [], []
    for n, (q, k, v) in enumerate(problem.sequences(leaves)):
        s_q, s_k = q.shape[0], k.shape[0]
        k, v = (t.repeat_interleave(case["r"], dim=1).transpose(0, 1) for t in (k, v))
        x = (q.transpose(0, 1) @ k.transpose(1, 2)) * (
            case["d"] ** -0.5 if case["scale"] is None else case["scale"]
        )
        if case["softcap"] > 0:
            x = case["softcap"] * torch.tanh(x / case["softcap"])
        distance = torch.arange(s_k) - torch.arange(s_q)[:, None] - (s_k - s_q)
        if slopes is not None:
            own = slopes if slopes.dim() == 1 else slopes[n]
            x = x - own.to(dtype)[:, None, None] * distance.abs()
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        hidden = hidden | (distance < -left) if left >= 0 else hidden
        hidden = hidden | (distance > right) if right >= 0 else hidden
        dead = hidden.all(-1)
        x = torch.cat(
            [x.masked_fill(hidden & ~dead[:, None], -math.inf), x.new_full((*x.shape[:2], 1), -math.inf)], -1
        )
        x = torch.where(dead[:, None], 0.0, x)
        lse = torch.logsumexp(x, dim=-1)
        p = torch.softmax(x, dim=-1)[..., :-1].masked_fill(dead[:, None], 0.0)
        outs.append((p @ v).transpose(0, 1))
        lses.append(lse.detach().masked_fill(dead, math.inf))
        live.append(lse.masked_fill(dead, 0.0))
    if "varlen" in case["function"]:
        h, tail = problem.dout.shape[1], case["tail"]
        out = torch.cat([*outs, problem.dout.new_zeros(tail, h, case["d"], dtype=dtype)])
        lse = torch.cat([*lses, torch.full((h, tail), math.inf, dtype=dtype)], dim=1)
    else:
        out, lse = torch.stack(outs), torch.stack(lses)
    found = {"out": out.detach(), "lse": lse}
    if any(t.requires_grad for t in leaves.values()):
        into: dict[str, list[Tensor]] = {"outputs": [out], "grad_outputs": [widened(problem.dout)]}
        if change:  # dout.v and dout.out are rounded apart from each other: see attention_calls.py
            sizes = (problem.dout.to(dtype) * out).abs().sum(-1).detach() * change
            rows = sizes.unbind(0)
            if "varlen" in case["function"]:
                rows = sizes.split([*case["lens_q"], case["tail"]])
            into["outputs"] += live
            into["grad_outputs"] += [widened(row).T for row, _ in zip(rows, live, strict=False)]
        grads = torch.autograd.grad(**into, inputs=list(leaves.values()))  # type: ignore[call-overload]
        found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found


# ---- the call ---------------------------------------------------------------------------------------


def carried_out(problem: Problem) -> dict[str, Tensor]:
    case, leaves = problem.case, problem.leaves
    given = {name: t.clone() if name.endswith("_cache") else t for name, t in leaves.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", FallbackWarning)
        result = getattr(flash_attn, case["function"])(**given, **problem.arguments)
        out, *more = result if isinstance(result, tuple) else (result,)
        found = {"out": out.detach()}
        if case["lse"]:
            found["lse"] = more[0]
        if out.requires_grad:
            grads = torch.autograd.grad(out, list(leaves.values()), problem.dout)
            found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found


def outcome(case: dict[str, Any]) -> tuple[str, str]:
    """A word for the tally, and what is wrong, if something is."""
    problem = make(case)
    try:
        actual = carried_out(problem)
    except (FlashAttentionError, NoBackendError) as refused:
        clear_cache()
        return type(refused).__name__, f"a valid call: {refused}"
    except Exception as other:
        clear_cache()
        return "error", f"{type(other).__name__}: {other}"
    dtype = problem.dout.dtype
    if any(t.dtype != (torch.float32 if name == "lse" else dtype) for name, t in actual.items()):
        return "right", f"dtypes {[(name, t.dtype) for name, t in actual.items()]}"
    return "right", unexplained(actual, partial(definition, problem), dtype, dtype)
