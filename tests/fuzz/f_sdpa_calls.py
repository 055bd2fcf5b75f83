"""Random calls of ``attnsel.scaled_dot_product_attention`` against F.sdpa in float64, with gradients."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import Case, Target, Wrong
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnsel import clear_cache, scaled_dot_product_attention
from corners import corner
from rounding import UNITS, unexplained

torch.set_num_threads(1)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MASKS = ("none", "is_causal", "bool", "float", "causal", "bottom_right", "open", "keys", "bias")


class RandomCall(NamedTuple):
    """``tensors``: query, key, value and attn_mask. ``options``: the other arguments."""

    tensors: dict[str, Any]
    options: dict[str, Any]

    def run(self, function: Any) -> Tensor:
        return function(**self.tensors, **self.options)


def a_call(pick: random.Random) -> RandomCall:
    values = torch.Generator().manual_seed(pick.getrandbits(32))
    dtype, rank = pick.choice(DTYPES), pick.choice((2, 3, 3, 4, 4, 4, 4, 4, 5))
    rows = pick.choice((1, 2, 5, 8, 17))
    keys = rows if pick.random() < 0.4 else pick.choice((1, 3, 5, 8, 19))
    d = pick.choice((1, 5, 8, 16, 24))
    e = pick.choice((d, d, d, d, 8, 3))
    groups, repeat = pick.choice((1, 2)), pick.choice((1, 1, 1, 2, 3)) if rank > 2 else 1
    batch = tuple(pick.choice((1, 2, 3)) for _ in range(max(rank - 3, 0)))
    kv_batch = tuple(1 if pick.random() < 0.1 else n for n in batch)

    def tensor(*shape: int) -> Tensor:
        made = torch.randn(*shape, dtype=torch.float64, generator=values).to(dtype)
        way = pick.random() if len(shape) > 2 else 1.0
        if way < 0.3:  # [..., s, h, d] in memory, as projections leave it
            made = made.transpose(-3, -2).contiguous().transpose(-3, -2)
        elif way < 0.4:  # head_dim is not the last in memory
            made = made.mT.contiguous().mT
        elif way < 0.45:
            made = made.repeat_interleave(2, -1)[..., ::2]
        return made.requires_grad_(pick.random() < 0.5)

    lead, head = (groups * repeat,) * (rank > 2), (groups,) * (rank > 2)
    q = tensor(*batch, *lead, rows, d)
    k, v = tensor(*kv_batch, *head, keys, d), tensor(*kv_batch, *head, keys, e)
    options: dict[str, Any] = {"enable_gqa": True} if repeat > 1 else {}
    if pick.random() < 0.3:
        options["scale"] = pick.choice((0.3, 1.0, -0.5, 2))
    kind = pick.choice(MASKS)
    if kind == "is_causal":
        options["is_causal"] = True
    mask = _mask(kind, (*batch, *lead), rows, keys, dtype, pick, values)
    return RandomCall({"query": q, "key": k, "value": v, "attn_mask": mask}, options)


def _mask(
    kind: str,
    lead: Sequence[int],
    rows: int,
    keys: int,
    dtype: torch.dtype,
    pick: random.Random,
    g: torch.Generator,
) -> Tensor | None:
    if kind in ("none", "is_causal") or (kind == "bias" and rows > keys):
        return None
    if kind == "bias":
        return corner(pick.choice(["upper_left", "lower_right"]), rows, keys)
    shape = (*(pick.choice((1, n)) for n in lead[pick.randrange(len(lead) + 1) :]), rows, keys)
    if kind == "keys":
        return torch.rand(*shape[:-2], 1, keys, generator=g) > 0.4
    if kind == "float":
        made = torch.randn(*shape, generator=g).to(pick.choice((dtype, torch.float32)))
        made[torch.rand(*shape, generator=g) > 0.9] = -torch.inf
        return made.requires_grad_(pick.random() < 0.5)
    seen = torch.rand(*shape, generator=g) > 0.3
    if kind != "bool":
        full = torch.ones(rows, keys, dtype=torch.bool)
        seen = {"causal": full.tril(), "bottom_right": full.tril(keys - rows), "open": full}[kind]
        seen = seen.expand(shape)
    if pick.random() < 0.3:
        return torch.zeros(shape, dtype=dtype).masked_fill(~seen, -torch.inf)
    return seen


def results(
    function: Any, call: RandomCall, dtype: torch.dtype | None = None, change: float = 0.0, seed: int = 0
) -> dict[str, Tensor]:
    """out and the gradients of what has one; in ``dtype``, and of inputs changed by up to ``change``."""
    made, noise = {}, torch.Generator().manual_seed(seed)

    def widened(t: Tensor) -> Tensor:
        return (
            t * (1 + change * (2 * torch.rand(t.shape, generator=noise, dtype=t.dtype) - 1)) if change else t
        )

    for name, t in call.tensors.items():
        made[name] = t
        if isinstance(t, Tensor) and type(t).__name__ != "CausalBias" and t.dtype != torch.bool:
            made[name] = widened(t.detach().to(dtype or t.dtype)).requires_grad_(t.requires_grad)
    out = RandomCall(made, call.options).run(function)
    if out.requires_grad:
        loss = out.double().sin().sum()
        if change:  # dout.v and dout.out are rounded apart from each other: see attention_calls.py
            size = (out.cos() * out).abs().sum(-1).detach()
            loss = loss + (lse_of(made, call.options) * widened(size) * change).sum()
        loss.backward()
    grads = {f"d{name}": t.grad for name, t in made.items() if t is not None and t.grad is not None}
    return {"out": out.detach(), **grads}


def lse_of(made: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """[.., s_q], of rows that see a key."""
    q, k, mask = (made[name] for name in ("query", "key", "attn_mask"))
    if options.get("enable_gqa"):
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q @ k.mT * options.get("scale", q.shape[-1] ** -0.5)
    if type(mask).__name__ == "CausalBias":
        mask = mask._materialize(q.device)
    if options.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.nan_to_num(neginf=-1e30).logsumexp(-1)


def attempt(case: Case) -> str:
    call = a_call(random.Random(case["number"]))
    kinds = {t.dtype for t in call.tensors.values() if t is not None and t.dtype in UNITS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = results(F.scaled_dot_product_attention, call)
        try:
            found = results(scaled_dot_product_attention, call)
        except Exception as other:
            clear_cache()
            raise Wrong(f"{type(other).__name__}: {other}") from other
        if [(n, t.shape, t.dtype) for n, t in found.items()] != [
            (n, t.shape, t.dtype) for n, t in plain.items()
        ]:
            raise Wrong("results, shapes or dtypes are not those of F.sdpa")
        with sdpa_kernel(SDPBackend.MATH):  # flash on CPUs gives NaN for causal with a negative scale
            definition = partial(results, F.scaled_dot_product_attention, call)
            wrong = unexplained(
                found, definition, call.tensors["query"].dtype, max(kinds, key=UNITS.__getitem__)
            )
    if wrong:
        raise Wrong(wrong)
    return "right"


def script(case: Case) -> str:
    """With tests/fuzz and tests/support on the path."""
    return f"from f_sdpa_calls import attempt\n\nattempt({case!r})\n"


TARGET = Target("f_sdpa", st.integers(0, 2**62).map(lambda n: {"number": n}), attempt, script, gate=90)
