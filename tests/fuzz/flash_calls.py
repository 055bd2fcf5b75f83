"""One call of ``attnsel.flash_attn`` from plain values, and what FlashAttention-2 says it gives.

Shape letters: b, s_q, s_k, t_q, t_k, h, g, d. A failure's script is this file, those of ours that it imports
and one more line.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnsel import NoBackendError, clear_cache, flash_attn
from attnsel.debug import FallbackWarning
from attnsel.flash_attn import FlashAttentionError
from flash_reference import CACHE, cumulative, one_sequence, turned
from rounding import unexplained

torch.set_num_threads(1)

CASE: dict[str, Any] = {
    "seed": 0, "function": "flash_attn_func", "dtype": "float16", "g": 1, "r": 1, "d": 8,
    "lens_q": [3, 3], "lens_k": [3, 3],  # all the same in a dense batch
    "scale": None, "causal": False, "window": (-1, -1), "softcap": 0.0, "drop": 0.0, "deterministic": False,
    "alibi": None,  # h or "b h"
    "lse": True, "grads": True,
    "heads_first": False,  # q, k and v lie in memory as [.., h, s, d]
    "more": 0,  # what max_seqlen_* is above the longest sequences
    "tail": 0,  # rows behind the last sequence
    "pages": None,  # the pages of each sequence, of 256 rows each
    # flash_attn_with_kvcache: lens_k are the rows in use after the append
    "room": 0,  # rows that the cache has beyond the longest
    "new": 0,  # rows that are appended
    "whole": False,  # no length is given: the cache is in use from end to end
    "int_length": False, "batch_idx": None, "leftpad": None, "rotary": 0, "interleaved": True,
}  # fmt: skip
PAGE = 256


@dataclass
class Problem:
    case: dict[str, Any]
    leaves: dict[str, Tensor]
    arguments: dict[str, Any]
    dout: Tensor
    keep: Tensor | None = None  # what dropout left, [b, h, s_q, s_k] or more

    @property
    def packed(self) -> bool:
        return "varlen" in self.case["function"]

    def sequences(self, leaves: dict[str, Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """q [s_q, h, d], k and v [s_k, g, d] of each sequence; what is new is in the caches then."""
        case, found = self.case, []
        if "qkv" in leaves:
            q, k, v = leaves["qkv"].unbind(-3)
        elif "kv" in leaves:
            q, (k, v) = leaves["q"], leaves["kv"].unbind(-3)
        else:
            q, k, v = leaves["q"], *(leaves.get(f"{name}_cache", leaves.get(name)) for name in "kv")
        starts = cumulative(case["lens_q"]).tolist()
        for n, s_k in enumerate(case["lens_k"]):
            rows = q[starts[n] : starts[n + 1]] if self.packed else q[n]
            first = s_k - case["new"]
            if case["new"]:
                for name, cache in (("k", k), ("v", v)):
                    new = leaves[name][n]
                    if name == "k" and case["rotary"]:
                        new = self.turned(new, range(first, s_k))
                    cache[self.keys(n, first, s_k)] = new
            if case["rotary"]:
                # As applied: the package's C++ drops a bound that reaches all keys before it asks.
                masked = applied_window(case) != (-1, -1)
                rows = self.turned(rows, [first + (i if masked else 0) for i in range(len(rows))])
            at = self.keys(n, 0 if case["leftpad"] is None else case["leftpad"][n], s_k)
            found.append((rows, k[at], v[at]))
        return found

    def keys(self, n: int, first: int, last: int) -> Any:
        """Where keys of sequence n lie."""
        case, rows = self.case, torch.arange(first, last)
        if case["pages"] is not None:
            return torch.tensor(case["pages"][n])[rows // PAGE], rows % PAGE
        if self.packed:
            return (rows + sum(case["lens_k"][:n]),)
        return n if case["batch_idx"] is None else case["batch_idx"][n], rows

    def turned(self, x: Tensor, places: Any) -> Tensor:
        angles = self.arguments["rotary_cos"], self.arguments["rotary_sin"]
        return turned(x, *angles, places, self.case["interleaved"])


def make(case: dict[str, Any]) -> Problem:
    case = {**CASE, **case}
    function, dtype, pages = case["function"], getattr(torch, case["dtype"]), case["pages"]
    gen = torch.Generator().manual_seed(case["seed"])
    b, g, h, d = len(case["lens_q"]), case["g"], case["g"] * case["r"], case["d"]
    longest_q, longest_k = (max(case[name]) + case["more"] for name in ("lens_q", "lens_k"))

    def normal(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)
        return made.transpose(-2, -3).contiguous().transpose(-2, -3) if case["heads_first"] else made

    arguments: dict[str, Any] = {
        "softmax_scale": case["scale"],
        "causal": case["causal"],
        "window_size": case["window"],
        "softcap": case["softcap"],
    }
    if case["alibi"]:
        arguments["alibi_slopes"] = torch.rand((b, h) if case["alibi"] == "b h" else (h,), generator=gen)
    rows: list[int] = [b, longest_q]
    keys = [b if case["batch_idx"] is None else 1 + max(case["batch_idx"]), longest_k + case["room"]]
    if "varlen" in function:
        rows, keys = ([sum(case[name]) + case["tail"]] for name in ("lens_q", "lens_k"))
        cu_q, cu_k = cumulative(case["lens_q"]), cumulative(case["lens_k"])
        if "_qkvpacked" in function:
            arguments |= {"cu_seqlens": cu_q, "max_seqlen": longest_q}
        else:
            arguments |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_q if cu_q.equal(cu_k) else cu_k}
            arguments |= {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    if pages is not None:
        keys = [1 + max(max(one) for one in pages), PAGE]
        arguments["block_table"] = torch.tensor(pages, dtype=torch.int32)
    if "_qkvpacked" in function:
        leaves = {"qkv": normal(*rows, 3, h, d)}
    elif "kvpacked" in function:
        leaves = {"q": normal(*rows, h, d), "kv": normal(*keys, 2, g, d)}
    elif function == CACHE:
        leaves = {"q": normal(*rows, h, d), "k_cache": normal(*keys, g, d), "v_cache": normal(*keys, g, d)}
        if case["new"]:
            leaves |= {name: normal(b, case["new"], g, d) for name in "kv"}
        used = [n - case["new"] for n in case["lens_k"]]
        if not case["whole"]:
            length = used[0] if case["int_length"] else torch.tensor(used, dtype=torch.int32)
            arguments["cache_seqlens"] = length
        for name in ("batch_idx", "leftpad"):
            if case[name] is not None:
                arguments[f"cache_{name}"] = torch.tensor(case[name], dtype=torch.int32)
        if case["rotary"]:
            capacity = keys[1] if pages is None else PAGE * len(pages[0])
            angles = 6 * torch.rand(capacity, case["rotary"] // 2, generator=gen)
            arguments |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
            arguments["rotary_interleaved"] = case["interleaved"]
        arguments["return_softmax_lse"] = case["lse"]
    else:
        leaves = {"q": normal(*rows, h, d), "k": normal(*keys, g, d), "v": normal(*keys, g, d)}
    if function != CACHE:
        arguments |= {"dropout_p": case["drop"], "deterministic": case["deterministic"]}
        arguments["return_attn_probs"] = case["lse"]
        for leaf in leaves.values():
            leaf.requires_grad_(case["grads"])
    return Problem(case, leaves, arguments, normal(*rows, h, d))


# ---- the definition ---------------------------------------------------------------------------------


def applied_window(case: dict[str, Any]) -> tuple[int, int]:
    """(left, right) as the package's C++ applies them to the longest sequences; -1 is no bound."""
    rows, keys = max(case["lens_q"]) + case["more"], max(case["lens_k"]) + case["more"]
    if case["function"] == CACHE:
        keys += case["room"] if case["pages"] is None else PAGE * len(case["pages"][0]) - keys
    left, right = case["window"]
    right = 0 if case["causal"] else right
    left = -1 if left >= keys else left
    right = -1 if right >= keys > 0 else right
    return left, keys if left >= 0 > right and rows > keys + 1 else right


def definition(problem: Problem, dtype: torch.dtype, change: float = 0.0, seed: int = 0) -> dict[str, Tensor]:
    """out, lse, the caches afterwards and the gradients of the leaves, one sequence at a time."""
    case = problem.case
    gen = torch.Generator().manual_seed(seed)

    def widened(t: Tensor) -> Tensor:
        t = t.detach().to(dtype, copy=True)
        return t * (1 + change * (2 * torch.rand(t.shape, generator=gen, dtype=dtype) - 1)) if change else t

    leaves = {name: widened(t).requires_grad_(t.requires_grad) for name, t in problem.leaves.items()}
    slopes, keep = problem.arguments.get("alibi_slopes"), problem.keep
    outs, lses = [], []
    for n, (q, k, v) in enumerate(problem.sequences(leaves)):
        out, lse = one_sequence(
            q, k, v, softmax_scale=case["scale"], window_size=applied_window(case), softcap=case["softcap"],
            slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[n], dropout_p=case["drop"],
            keep=None if keep is None else keep[n, :, : len(q), : len(k)],
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    if problem.packed:
        h, tail = problem.dout.shape[1], case["tail"]
        out = torch.cat([*outs, problem.dout.new_zeros(tail, h, case["d"], dtype=dtype)])
        lse = torch.cat([*lses, torch.full((h, tail), math.inf, dtype=dtype)], dim=1)
    else:
        out, lse = torch.stack(outs), torch.stack(lses)
    found = {"out": out.detach(), "lse": lse.detach()}
    if any(t.requires_grad for t in leaves.values()):
        into: dict[str, list[Tensor]] = {"outputs": [out], "grad_outputs": [widened(problem.dout)]}
        if change:  # dout.v and dout.out are rounded apart from each other: see attention_calls.py
            sizes = (problem.dout.to(dtype) * out).abs().sum(-1).detach() * change
            rows = sizes.split([*case["lens_q"], case["tail"]]) if problem.packed else sizes.unbind(0)
            into["outputs"] += [lse.masked_fill(lse == math.inf, 0.0) for lse in lses]
            into["grad_outputs"] += [widened(row).T for row, _ in zip(rows, lses, strict=False)]
        grads = torch.autograd.grad(**into, inputs=list(leaves.values()))  # type: ignore[call-overload]
        found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found | {name: t for name, t in leaves.items() if name.endswith("_cache")}


# ---- the call ---------------------------------------------------------------------------------------


def carried_out(problem: Problem) -> dict[str, Tensor]:
    case, leaves = problem.case, problem.leaves
    given = {name: t.clone() if name.endswith("_cache") else t for name, t in leaves.items()}
    torch.manual_seed(case["seed"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", FallbackWarning)
        result = getattr(flash_attn, case["function"])(**given, **problem.arguments)
        out, *more = result if isinstance(result, tuple) else (result,)
        found = {"out": out.detach()}
        if case["lse"]:
            found["lse"] = more[0]
        if case["drop"]:
            problem.keep = ~torch.signbit(more[1])
        if out.requires_grad:
            grads = torch.autograd.grad(out, list(leaves.values()), problem.dout)
            found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found | {name: t for name, t in given.items() if name.endswith("_cache")}


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
    return "right", wrong_in(problem, actual)


def wrong_in(problem: Problem, actual: dict[str, Tensor]) -> str:
    """What is wrong in the results of a problem, if something is."""
    dtype = problem.dout.dtype
    if any(t.dtype != (torch.float32 if name == "lse" else dtype) for name, t in actual.items()):
        return f"dtypes {[(name, t.dtype) for name, t in actual.items()]}"
    return unexplained(actual, partial(definition, problem), dtype, dtype)
