"""``flash_attn_with_kvcache``: the rows it writes into the cache, and its output over the cache then."""

from __future__ import annotations

import ast
import importlib.util

import flash_calls
import pytest
import torch

import attnsel
from attnsel.flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_reference import CACHE
from tables import cells_of

CASES = {name: ast.literal_eval(case) for name, case in cells_of(__file__, "cache_calls.txt")}


def right(name: str) -> None:
    """Three sequences of 5, 0 and 31 rows before what is new."""
    changes = dict(CASES[name])
    new, rows = changes.get("new", 0), changes.pop("q", 1)
    case = {"function": CACHE, "g": 2, "r": 2, "d": 32, "lens_k": [5 + new, new, 31 + new], **changes}
    case |= {"lens_q": [rows] * 3, "room": 40 - max(case["lens_k"])}
    assert flash_calls.outcome(case) == ("right", ""), name


def test_against_the_definition() -> None:
    for name in CASES:
        right(name)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is missing")
def test_triton_interpreted() -> None:
    with attnsel.override(backend="triton"):
        right("rotary, pages")


def test_num_splits_changes_no_bit() -> None:
    q, cache = torch.randn(2, 1, 4, 32).half(), torch.randn(2, 300, 2, 32).half()
    wanted = flash_attn_with_kvcache(q, cache, cache)
    assert torch.equal(flash_attn_with_kvcache(q, cache, cache, num_splits=128), wanted)


def test_decoding_token_by_token_equals_the_whole_sequence_at_once() -> None:
    """One int for all lengths: the new rows go in as a slice. What requires a gradient gets none."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 12, heads, 32).half().requires_grad_() for heads in (4, 2, 2))
    caches = [torch.zeros(3, 64, 2, 32).half() for _ in range(2)]
    rows = [
        flash_attn_with_kvcache(
            q[:, i : i + 1], *caches, k=k[:, i : i + 1], v=v[:, i : i + 1], cache_seqlens=i, causal=True
        )
        for i in range(12)
    ]
    out = torch.cat(rows, 1)
    torch.testing.assert_close(out, flash_attn_func(q, k, v, causal=True).detach(), rtol=2e-3, atol=2e-3)
    assert torch.equal(caches[0][:2, :12], k)
    assert torch.equal(caches[1][:2, :12], v)
    assert not any(cache[2].any() or cache[:, 12:].any() or cache.requires_grad for cache in caches)
    assert not out.requires_grad
    caches[0][0, 0, 0, 0] = torch.nan  # an empty cache is not read
    out, lse = flash_attn_with_kvcache(q, *caches, cache_seqlens=0, return_softmax_lse=True)
    assert (out == 0).all()
    assert (lse == torch.inf).all()


def test_a_growing_cache_is_few_call_signatures() -> None:
    """Lengths on the host are rounded up in steps of 256 rows, so a decode loop hits the cache of kernels."""
    q, cache = torch.randn(1, 1, 4, 32).half(), torch.randn(1, 600, 2, 32).half()
    new = torch.randn(1, 1, 2, 32).half()
    attnsel.clear_cache()
    for length in (0, 100, 255, 256, 300, 511):
        flash_attn_with_kvcache(q, cache, cache.clone(), k=new, v=new, cache_seqlens=length, causal=True)
    assert attnsel.cache_info().misses == 2
