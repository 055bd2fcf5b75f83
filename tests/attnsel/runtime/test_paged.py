"""Keys and values in pages, through the public API: the same numbers as without pages, or a clear error."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import attnsel
from attnsel import attention

BACKENDS = ["tiled", pytest.param("triton", marks=pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
))]  # fmt: skip
LENGTHS_Q, LENGTHS_KV = [3, 1, 4], [21, 0, 33]
H, G, D, E, PAGE = 4, 2, 16, 8, 8


def cu(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


class Cache:
    """Three sequences in shuffled pages, and the same keys and values packed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        used = [-(-n // PAGE) for n in LENGTHS_KV]
        pages = torch.randperm(sum(used) + 3).tolist()
        self.k = torch.full((len(pages), PAGE, G, D), float("nan"))
        self.v = torch.full((len(pages), PAGE, G, E), float("nan"))
        self.table = torch.full((3, max(used) + 1), -7, dtype=torch.int32)
        self.packed_k, self.packed_v = torch.randn(sum(LENGTHS_KV), G, D), torch.randn(sum(LENGTHS_KV), G, E)
        row = 0
        for sequence, length in enumerate(LENGTHS_KV):
            for first in range(0, length, PAGE):
                page, count = pages.pop(), min(PAGE, length - first)
                self.table[sequence, first // PAGE] = page
                self.k[page, :count] = self.packed_k[row : row + count]
                self.v[page, :count] = self.packed_v[row : row + count]
                row += count


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["padding", "padding_causal_bottom_right"])
def test_packed_queries_over_pages_equal_packed_keys(backend: str, kind: str) -> None:
    cache, q, lengths = Cache(), torch.randn(sum(LENGTHS_Q), H, D), cu(LENGTHS_KV)
    cu_q = cu(LENGTHS_Q)
    paged = attention(
        q, cache.k, cache.v, qkv_format="thd", attn_mask_type=kind, cu_seqlens_q=cu_q, cu_seqlens_kv=lengths,
        block_table=cache.table, backend=backend, return_lse=True,
    )  # fmt: skip
    plain = attention(
        q, cache.packed_k, cache.packed_v, qkv_format="thd", attn_mask_type=kind, cu_seqlens_q=cu_q,
        cu_seqlens_kv=lengths, backend="tiled", return_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(paged, plain, rtol=1e-5, atol=1e-5)


def test_the_module_reads_pages() -> None:
    cache, q = Cache(), torch.randn(3, 1, H, D)
    module = attnsel.DotProductAttention(H, (D, E), G, qkv_format="bshd").eval()
    arguments = {
        "attn_mask_type": "padding_causal_bottom_right",
        "cu_seqlens_kv": cu(LENGTHS_KV),
        "block_table": cache.table,
    }
    out = module(q, cache.k, cache.v, **arguments)
    chosen = module.explain(q, cache.k, cache.v, **arguments)
    assert out.shape == (3, 1, H * E)
    assert chosen.backend == "tiled"
    assert chosen.params.qkv_layout == "paged_kv_bshd_bshd_bshd"
    assert chosen.params.page_size == PAGE
    assert {r.code for r in chosen["sdpa.efficient"].reasons} >= {"SDPA008"}
    assert out[1].eq(0).all()  # an empty sequence


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_pages_compile_without_a_graph_break(dynamic: bool) -> None:
    cache, q, lengths = Cache(), torch.randn(3, 1, H, D), cu(LENGTHS_KV)

    def call(q: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return attention(
            q, cache.k, cache.v, attn_mask_type="padding", cu_seqlens_kv=lengths, block_table=table
        )

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(q, cache.table), call(q, cache.table))
