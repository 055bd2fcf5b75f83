"""What attnsel.recommend returns is taken by the library that it is for."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.attention import sdpa_kernel
from transformers import AutoModel, LlamaConfig

import attnsel
from attnsel import AttentionParams, Environment, InvalidInput
from tables import each

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@each("seed", range(24))
def test_what_is_recommended_runs_in_torch(seed) -> None:
    pick = random.Random(seed)
    heads = pick.choice((1, 4, 8))
    groups = pick.choice([n for n in (1, 2, 4, 8) if heads % n == 0])
    rows, keys, width = pick.choice((1, 7, 64)), pick.choice((7, 64)), pick.choice((16, 64, 80, 128))
    dtype, causal = pick.choice(DTYPES), pick.random() < 0.4
    q = torch.randn(2, heads, rows, width, dtype=dtype, requires_grad=pick.random() < 0.5)
    k, v = (torch.randn(2, groups, keys, width, dtype=dtype) for _ in range(2))
    found = attnsel.recommend("sdpa", (q, k, v), attn_mask_type="causal" if causal else "no_mask")
    assert found.why
    for only in found:
        with sdpa_kernel([only]):
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=heads != groups
            )


def test_what_is_recommended_runs_in_transformers() -> None:
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=64, num_attention_heads=4, vocab_size=32
    )
    name = attnsel.recommend("transformers", config)
    model = AutoModel.from_config(config, attn_implementation=name)
    model(torch.zeros(1, 4, dtype=torch.long))
    assert model.config._attn_implementation == name


@each(
    ("library", "gpu", "wanted"),
    (
        ("transformers", "H100", "flash_attention_2"),
        ("transformers", "T4", "sdpa"),
        ("te", "H100", {}),
    ),
)
def test_a_whole_model_on_a_described_machine(library, gpu, wanted) -> None:
    env = Environment.describe(gpu, flash_attn="2.8.3", transformer_engine="2.20")
    assert attnsel.recommend(library, "gemma-3-4b", env) == wanted


def test_a_call_that_a_library_has_no_kernel_for_is_refused() -> None:
    with pytest.raises(InvalidInput, match="cannot run this call"):
        attnsel.recommend("sdpa", AttentionParams(softcap=30.0), Environment.describe("H100"))
    with pytest.raises(InvalidInput, match="must be a model"):
        attnsel.recommend("sdpa", 3)
