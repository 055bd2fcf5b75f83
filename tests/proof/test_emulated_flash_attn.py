"""The stand-ins for flash-attn 2, 3 and 4: their signatures, their numbers, and what they refuse."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated_flash_attn as emulated
from emulated_flash_cases import OF_TWO, RELEASES, drawn, expected, functions, near
from flash_reference import cumulative


def has(generation: int, version: str, function: str, argument: str) -> bool:
    return argument in emulated.signature(generation, version, function).parameters


# ---- signatures ----


@pytest.mark.parametrize(("generation", "version"), RELEASES)
def test_functions_have_the_recorded_signatures(generation: int, version: str) -> None:
    recorded = emulated.RECORD[str(generation)][version]["functions"]
    package = functions(generation, version)
    for name, function in recorded.items():
        parameters = inspect.signature(getattr(package, name)).parameters.values()
        read = [[p.name, p.default, p.kind.name.lower()] for p in parameters]
        wanted = [
            [parameter, inspect.Parameter.empty if default is None else emulated.value_of(default), kind]
            for parameter, default, kind in function["parameters"]
        ]
        assert read == wanted, name
        with pytest.raises(TypeError):
            getattr(package, name)(**dict.fromkeys(p.name for p in parameters), colour=None)


# ---- numbers, of every release ----

NEWEST = [(2, "2.8.3"), (3, "3.0.0"), (4, "4.0.0b36")]
CASES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"window_size": (4, -1)},
    {"causal": True, "window_size": (3, -1)},
    {"softcap": 0.7, "causal": True},
    {"softmax_scale": 0.3},
    {"alibi_slopes": "h"},
    {"alibi_slopes": "bh", "causal": True},
]
LENGTHS = [([6, 6], [9, 9]), ([9, 9], [6, 6])]  # fewer and more queries than keys, both with rows of no keys


def argument(generation: int, given: dict[str, Any]) -> dict[str, Any]:
    """As this generation says it: an open side of a window is None in FlashAttention 4, and -1 before."""
    made = dict(given)
    if generation == 4 and "window_size" in made:
        made["window_size"] = tuple(None if side < 0 else side for side in made["window_size"])
    return made


def meant(generation: int, how: dict[str, Any], longest_k: int) -> dict[str, Any]:
    """FlashAttention 2 takes an open right side beside a bounded left one for the longest keys' length: a row
    of many more queries than keys does not see all of them (set_params_fprop, v2.8.3 flash_api.cpp:142)."""
    left, right = how.get("window_size", (-1, -1))
    if generation == 2 and right < 0 <= left and not how.get("causal"):
        return how | {"window_size": (left, longest_k)}
    return how


def leaves(given: SimpleNamespace, batch: int | None) -> list[Tensor]:
    parts = (given.q, given.k, given.v)
    made = parts if batch is None else [t.unflatten(0, (batch, -1)) for t in parts]
    return [t.clone().requires_grad_() for t in made]


def public(generation: int, version: str, given: SimpleNamespace, how: dict[str, Any], varlen: bool) -> Any:
    """out, lse (None where a release does not give it) and gradients of the public function, packed."""
    package, batch = functions(generation, version), len(given.lengths[0])
    tensors = leaves(given, None if varlen else batch)
    name = "flash_attn_varlen_func" if varlen else "flash_attn_func"
    how = argument(generation, how)
    if varlen:
        longest = [max(one) for one in given.lengths]
        cu = [cumulative(one) for one in given.lengths]
        how |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu, strict=True))
        how |= dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True))
        if version == "3.0.0b1+early":
            how |= {"seqused_q": None, "seqused_k": None}
    for flag in ("return_attn_probs", "return_lse"):
        if has(generation, version, name, flag):
            how[flag] = True
    made = getattr(package, name)(*tensors, **how)
    out, lse = (made, None) if isinstance(made, Tensor) else made[:2]
    grads = torch.autograd.grad(out, tensors, given.dout.view_as(out))
    if not varlen:
        out, *grads = (t.flatten(0, 1) for t in (out, *grads))
        lse = None if lse is None else lse.transpose(0, 1).flatten(1)
    elif lse is not None and generation == 2 and lse.dim() == 3:
        lse = torch.cat([lse[n, :, :m] for n, m in enumerate(given.lengths[0])], 1)
    return out.detach(), lse, grads


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(
    ("generation", "version"),
    [pytest.param(*release, marks=() if release in NEWEST else pytest.mark.slow) for release in RELEASES],
)
def test_numbers_are_the_definitions(generation: int, version: str, varlen: bool) -> None:
    name = "flash_attn_varlen_func" if varlen else "flash_attn_func"
    ran = 0
    for case in CASES:
        if not all(has(generation, version, name, argument) for argument in case):
            continue
        if varlen and case.get("softcap") and version == "4.0.0b20":
            continue  # refused there: test_refusals
        for lengths in (*LENGTHS, *([([5, 0, 9], [7, 4, 3])] if varlen else [])):
            how = dict(case)
            if "alibi_slopes" in how:
                shape = (4,) if how["alibi_slopes"] == "h" else (len(lengths[0]), 4)
                how["alibi_slopes"] = torch.rand(shape, generator=torch.Generator().manual_seed(1)) / 3
            given = drawn(*lengths, d=16 if generation > 2 else 20)
            if generation > 2 and version != "3.0.0b1+early":
                given = drawn(*lengths, d=16, e=24)
            wanted = expected(given, meant(generation, how, max(lengths[1])))
            out, lse, grads = public(generation, version, given, how, varlen)
            near(out, wanted["out"])
            for name_of, grad in zip(("dq", "dk", "dv"), grads, strict=True):
                near(grad, wanted[name_of])
            if lse is not None:
                empty = wanted["lse"].isinf()
                none = math.inf if generation == 2 else -math.inf
                assert (lse[empty] == none).all()
                if not (how.get("causal") and "alibi_slopes" in how):
                    near(lse[~empty], wanted["lse"][~empty])
            ran += 1
    assert ran >= 10


@pytest.mark.parametrize("version", OF_TWO[-1:])
@pytest.mark.parametrize("name", ["kvpacked", "qkvpacked", "varlen_kvpacked", "varlen_qkvpacked"])
def test_packed_functions_of_two(version: str, name: str) -> None:
    lengths = [7, 7] if "varlen" not in name else [7, 4]
    given, batch = drawn(lengths, lengths), 2
    given.k, given.v = (t.repeat_interleave(2, 1) for t in (given.k, given.v))
    parts = [given.q, torch.stack([given.k, given.v], 1)]
    if "qkv" in name:
        parts = [torch.stack([given.q, given.k, given.v], 1)]
    if "varlen" not in name:
        parts = [t.unflatten(0, (batch, -1)) for t in parts]
    parts = [t.requires_grad_() for t in parts]
    cu, longest = cumulative(lengths), max(lengths)
    once = 1 if "qkv" in name else 2
    more = [*[cu] * once, *[longest] * once] if "varlen" in name else []
    out = getattr(functions(2, version), f"flash_attn_{name}_func")(*parts, *more, causal=True)
    wanted = expected(given, {"causal": True})
    near(out.detach().reshape(wanted["out"].shape), wanted["out"])
    grads = torch.autograd.grad(out, parts, given.dout.view_as(out))
    packed = torch.stack([wanted["dk"], wanted["dv"]], 1)
    last = torch.cat([wanted["dq"][:, None], packed], 1) if "qkv" in name else packed
    near(grads[-1].reshape(last.shape), last)


def test_packed_functions_of_three() -> None:
    lengths = [7, 7]
    given = drawn(lengths, lengths)
    wanted = expected(given, {"causal": True})
    qkv = torch.cat([given.q, given.k, given.v], 1).unflatten(0, (2, -1)).requires_grad_()
    for version in ("3.0.0b1", "3.0.0"):
        out = functions(3, version).flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
        near(out.detach().flatten(0, 1), wanted["out"])
        (grad,) = torch.autograd.grad(out, qkv, given.dout.view_as(out))
        near(grad.flatten(0, 1), torch.cat([wanted["dq"], wanted["dk"], wanted["dv"]], 1))
    with pytest.raises(TypeError):  # broken there: it calls its half-private function with too little
        functions(3, "3.0.0b1+early").flash_attn_qkvpacked_func(torch.randn(2, 7, 3, 4, 16).half())


# ---- being installed ----


@pytest.mark.parametrize(("generation", "version"), NEWEST)
def test_installed_is_found_and_leaves_nothing(generation: int, version: str) -> None:
    before = dict(sys.modules)
    name = emulated.distribution(generation, version)
    with emulated.installed(generation, version) as modules:
        assert importlib.metadata.version(name) == version.split("+")[0]
        for module in modules:
            assert importlib.util.find_spec(module) is not None
        top = sorted({module.partition(".")[0] for module in modules})
        assert name in importlib.metadata.packages_distributions()[top[0]]
    assert {m: sys.modules.get(m) for m in modules} == {m: before.get(m) for m in modules}
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(name)


@pytest.mark.parametrize("order", [(2, 4), (4, 2)])
def test_two_and_four_share_a_folder(order: tuple[int, int]) -> None:
    version = {2: "2.8.3", 4: "4.0.0b36"}
    with emulated.installed(order[0], version[order[0]]), emulated.installed(order[1], version[order[1]]):
        import flash_attn
        import flash_attn.cute.interface as four

        assert flash_attn.flash_attn_func is not flash_attn.cute.flash_attn_func
        assert four.flash_attn_func is flash_attn.cute.flash_attn_func
        assert importlib.metadata.version("flash-attn") == "2.8.3"
        assert importlib.metadata.version("flash-attn-4") == "4.0.0b36"
    assert "flash_attn" not in sys.modules
