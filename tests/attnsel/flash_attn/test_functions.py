"""The six functions on whole batches: what no drawn case shows.

Every feature against the definition in float64, with gradients: the fuzz target ``flash``, and
tests/net/behaviour.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import flash_calls
import pytest
import torch

import attnsel
from attnsel import flash_attn
from attnsel.flash_attn import flash_attn_func
from flash_reference import VARLEN

INF = float("inf")
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
MIXED = {"drop": 0.2, "causal": True, "window": (8, -1), "softcap": 2.0, "alibi": "h"}


def case(function: str, **changes: Any) -> dict[str, Any]:
    """Lengths that differ from each other as far as the function lets them."""
    sizes: dict[str, Any] = {"function": function, "g": 2, "r": 2, "d": 16}
    sizes |= {"lens_q": [21, 21], "lens_k": [27, 27]}
    if function in VARLEN:  # the last has no queries, the one before it no keys
        sizes |= {"lens_q": [19, 30, 1, 0], "lens_k": [33, 11, 0, 9]}
    if "_qkvpacked" in function:
        sizes |= {"r": 1, "lens_k": sizes["lens_q"]}
    return sizes | changes


def right(given: dict[str, Any]) -> None:
    assert flash_calls.outcome(given) == ("right", ""), given


def test_sizes_that_are_not_drawn() -> None:
    for changes in (
        {"d": 7, "deterministic": True},
        {"d": 256},
        {"window": (1000, 1000), "heads_first": True},
    ):
        right(case("flash_attn_func", causal=True, **changes))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is missing")
def test_triton_interpreted() -> None:
    with attnsel.override(backend="triton"):
        right(case("flash_attn_varlen_func", **MIXED, lens_q=[9, 14], lens_k=[13, 6], g=1))


@pytest.mark.parametrize("grads", [False, True])
def test_packed_queries_over_pages(grads: bool) -> None:
    """With a gradient, which goes to the pages; one that is not needed may be anything in the table."""
    paged = case("flash_attn_varlen_func", lens_q=[5, 40], lens_k=[270, 130], pages=[[3, 1], [4, 0]], r=1)
    for changes in ({"causal": True, "window": (100, 0)}, {"drop": 0.3}):
        p = flash_calls.make(paged | changes | {"grads": grads})
        p.arguments["block_table"][1, 1] = -7
        assert flash_calls.wrong_in(p, flash_calls.carried_out(p)) == ""


def test_arguments_by_position_and_as_tensors() -> None:
    q, k, v = flash_calls.make(case("flash_attn_func")).leaves.values()
    by_position = flash_attn_func(q, k, v, 0.0, 0.3, True, (5, 0), 1.5, SLOPES, True, True)
    by_name = flash_attn_func(
        q, k, v, softmax_scale=torch.tensor(0.3).double(), causal=True, softcap=1.5, alibi_slopes=SLOPES,
        window_size=tuple(torch.tensor([5, 0]).unbind()), return_attn_probs=True,
    )  # fmt: skip
    for one, other in zip(by_position, by_name, strict=True):
        assert torch.allclose(one, other, atol=1e-3)
    assert not by_name[1].requires_grad
    assert by_name[2].shape == (0,)


def test_s_dmask_of_queries_without_any_key_is_empty() -> None:
    cu_q, none = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    q, k = torch.randn(3, 1, 8).half(), torch.zeros(0, 1, 8).half()
    out, lse, s_dmask = flash_attn.flash_attn_varlen_func(
        q, k, k, cu_q, none, 3, 1, 0.3, return_attn_probs=True
    )
    assert not out.any()
    assert (lse == INF).all()
    assert not s_dmask.any()


def test_s_dmask_is_what_the_package_documents() -> None:
    """Rounded to 128, negative where dropped, normalised as the package does: block maxima from the right.
    Exact under autocast too: its scores stay in float32, where in bfloat16 they would be off by 0.4 %."""
    q, k, v = (torch.randn(2, s, 2, 32).half() for s in (70, 200, 200))
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse, s_dmask = flash_attn_func(q, k, v, 0.25, causal=True, return_attn_probs=True)
    assert out.dtype == torch.float16
    assert s_dmask.shape == (2, 2, 128, 256)
    assert s_dmask.dtype == torch.float16
    dropped = torch.signbit(s_dmask[:, :, :70, :200])
    visible = torch.ones(70, 200).tril(130).bool().expand(2, 2, -1, -1)
    assert abs(dropped[visible].float().mean() - 0.25) < 0.02
    block = flash_attn.interface._get_block_size_n(q.device, 32, True, True)
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * 32**-0.5
    scores = scores.masked_fill(~visible, -INF)
    factors = [
        (scores[..., first:].amax(-1, keepdim=True) - lse[..., None]).exp().expand(-1, -1, -1, block)
        for first in range(0, 200, block)
    ]
    normalised = s_dmask[:, :, :70, :200].float().abs() * torch.cat(factors, -1)[..., :200]
    torch.testing.assert_close(normalised, scores.softmax(-1), rtol=2e-3, atol=1e-5)


def test_blocks_of_keys_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """_get_block_size_n of flash_attn_interface.py v2.8.3: by architecture, head_dim, dropout, causal."""
    for capability, head_dim, dropout, causal, wanted in (
        ((8, 0), 32, True, False, 128),
        ((8, 0), 64, False, False, 128),
        ((8, 0), 64, True, False, 64),
        ((8, 0), 96, True, False, 64),
        ((8, 0), 128, True, True, 32),
        ((8, 0), 128, False, False, 64),
        ((8, 6), 128, False, False, 32),
        ((8, 6), 128, False, True, 64),
        ((9, 0), 128, False, False, 64),
        ((8, 6), 256, True, False, 64),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        block = flash_attn.interface._get_block_size_n(torch.device("cuda"), head_dim, dropout, causal)
        assert block == wanted, (capability, head_dim, dropout, causal)


def test_a_last_dimension_with_gaps_is_copied() -> None:
    q, k, v = flash_calls.make(case("flash_attn_func")).leaves.values()
    gaps = [torch.stack([t, t + 1], -1).flatten(-2)[..., ::2] for t in (q, k, v)]
    assert torch.allclose(flash_attn_func(*gaps), flash_attn_func(q, k, v), atol=2e-3)


def test_torch_compile_in_one_graph() -> None:
    q, k, v = flash_calls.make(case("flash_attn_func")).leaves.values()

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=True, window_size=(6, 0)) + flash_attn_func(q, k, v)

    wanted = flash_attn_func(q, k, v, causal=True, window_size=(6, 0)) + flash_attn_func(q, k, v)
    torch.testing.assert_close(compiled(q, k, v), wanted)
