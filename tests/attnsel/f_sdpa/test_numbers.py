"""Random calls of ``attnsel.scaled_dot_product_attention`` against F.sdpa in float64, with gradients."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnsel import scaled_dot_product_attention

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
MASKS = ("none", "is_causal", "bool", "float", "causal", "bottom_right", "open", "keys")


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    options: dict[str, Any]


def draw(seed: int) -> Case:
    """Any leading dimensions, head dimensions, strides and masks that F.sdpa takes."""
    pick, torch_random = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = pick.choice(list(TOLERANCE))
    rank = pick.choice((2, 3, 3, 4, 4, 4, 4, 5))
    rows, keys = pick.choice((1, 2, 5, 8, 17)), pick.choice((1, 3, 5, 8, 19))
    d = pick.choice((1, 5, 8, 16, 24))
    e = pick.choice((d, d, d, 8, 3))
    groups = pick.choice((1, 2))
    repeat = pick.choice((1, 1, 2, 3)) if rank > 2 else 1
    batch = tuple(pick.choice((1, 2, 3)) for _ in range(max(rank - 3, 0)))
    head = () if rank == 2 else (groups,)
    kv_batch = tuple(1 if pick.random() < 0.1 else n for n in batch)

    def tensor(*shape: int) -> Tensor:
        made = torch.randn(*shape, dtype=torch.float64, generator=torch_random).to(dtype)
        if len(shape) > 2 and pick.random() < 0.4:  # [..., s, h, d] in memory, as projections leave it
            made = made.transpose(-3, -2).contiguous().transpose(-3, -2)
        if pick.random() < 0.1:
            made = made.mT.contiguous().mT
        return made.requires_grad_(pick.random() < 0.8)

    q = tensor(*batch, *(n * repeat for n in head), rows, d)
    k, v = tensor(*kv_batch, *head, keys, d), tensor(*kv_batch, *head, keys, e)
    options: dict[str, Any] = {"enable_gqa": True} if repeat > 1 else {}
    if pick.random() < 0.3:
        options["scale"] = pick.choice((0.3, 1.0, -0.5, 2))
    kind = pick.choice(MASKS)
    if kind == "is_causal":
        options["is_causal"] = True
    lead = q.shape[:-2]
    return Case(q, k, v, mask_of(kind, lead, rows, keys, dtype, pick, torch_random), options)


def mask_of(
    kind: str, lead: Any, rows: int, keys: int, dtype: torch.dtype, pick: random.Random, g: torch.Generator
) -> Tensor | None:
    if kind in ("none", "is_causal"):
        return None
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


def results(function: Any, case: Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """out and the gradient of each argument that has one; in ``dtype``, where one is given."""
    named = {"query": case.q, "key": case.k, "value": case.v, "attn_mask": case.mask}
    made = {}
    for name, t in named.items():
        as_given = dtype is None or t is None or t.dtype == torch.bool
        made[name] = (
            t if t is None else t.detach().to(t.dtype if as_given else dtype).requires_grad_(t.requires_grad)
        )
    out = function(**made, **case.options)
    if out.requires_grad:
        out.double().sin().sum().backward()
    grads = {f"d{name}": t.grad for name, t in made.items() if t is not None and t.grad is not None}
    return {"out": out.detach(), **grads}


def check(seed: int) -> None:
    case = draw(seed)
    with sdpa_kernel(SDPBackend.MATH):  # its flash kernel for CPUs gives NaN for causal with a negative scale
        wanted = results(F.scaled_dot_product_attention, case, torch.float64)
    plain = results(F.scaled_dot_product_attention, case)
    found = results(scaled_dot_product_attention, case)
    assert found.keys() == plain.keys() == wanted.keys()
    for name, one in found.items():
        assert (one.shape, one.dtype) == (plain[name].shape, plain[name].dtype), (seed, name)
        scale = max(1.0, wanted[name].abs().max().item())
        error = (one.double() - wanted[name]).abs().max().item() / scale
        theirs = (plain[name].double() - wanted[name]).abs().max().nan_to_num(0.0).item() / scale
        tolerance = max(TOLERANCE[case.q.dtype], TOLERANCE[one.dtype])
        assert error <= max(tolerance, 2 * theirs), (seed, name, error, theirs)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_calls() -> None:
    for seed in range(90):
        check(seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("part", range(10))
def test_many_random_calls(part: int) -> None:
    for seed in range(1000 + part * 300, 1000 + part * 300 + 300):
        check(seed)
