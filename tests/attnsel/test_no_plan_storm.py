"""A cache that grows by a token a call: how many plans and compiled kernels 2,000 calls make."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from attnsel import AttentionParams, Environment
from attnsel.candidates import CANDIDATES
from attnsel.selection.select import select

MOST = 16
STEPS = range(1, 2001)


def decoded(keys: int, **fields: Any) -> AttentionParams:
    return AttentionParams(
        batch_size=1, num_heads=16, num_gqa_groups=4, head_dim_qk=64, head_dim_v=64, max_seqlen_q=1,
        max_seqlen_kv=keys, attn_mask_type="causal_bottom_right", is_training=False, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("frontend", ["1.28.0", None], ids=["with cudnn-frontend", "without"])
@pytest.mark.parametrize(
    ("gpu", "dtype"), [("H200", "bf16"), ("A100", "bf16"), ("B200", "bf16"), ("T4", "fp16")]
)
def test_decoding_makes_few_plans(gpu: str, dtype: Any, frontend: str | None) -> None:
    """Before PREF011 cudnn, or sdpa.cudnn, was first on H200 and B200: a plan for each of the lengths."""
    env = Environment.describe(gpu, cudnn_frontend=frontend)
    plans = set()
    for keys in STEPS:
        name = select(decoded(keys, dtype=dtype), env).backend
        assert name is not None
        plans.add((name, keys if CANDIDATES[name].plan_per_length else 0))
    assert len(plans) <= MOST


def test_one_plan_serves_what_lengths_or_pages_say() -> None:
    """cuDNN keeps its place where the cache has one size, and where a call is longer than a draft."""
    env = Environment.describe("H200")
    static = AttentionParams(
        max_seqlen_q=1, max_seqlen_kv=4096, attn_mask_type="padding_causal_bottom_right", is_training=False
    )
    assert select(static, env).backend == "cudnn"
    assert select(static.derive(attn_mask_type="causal_bottom_right"), env).backend == "sdpa.flash"
    assert (
        select(AttentionParams(max_seqlen_q=17, max_seqlen_kv=17, is_training=False), env).backend == "cudnn"
    )
    assert select(AttentionParams(max_seqlen_q=16, max_seqlen_kv=16), env).backend == "cudnn"


@pytest.mark.skipif(None in map(importlib.util.find_spec, ("torch", "triton")), reason="they compile")
@pytest.mark.parametrize(("arch", "processors"), [(75, 40), (80, 108), (90, 132)])
def test_triton_compiles_few_kernels_while_a_cache_grows(arch: int, processors: int) -> None:
    """Through Triton's own launching path; prompts of every length are two of the kernels."""
    import torch

    import mock_gpu
    from attnsel.backends.contract import Inputs, Spec
    from attnsel.backends.triton.run import forward

    spec = Spec(softmax_scale=0.125, window_right=0, bottom_right=True)
    cache = torch.zeros(2, 4, len(STEPS), 64, dtype=torch.float16)
    q = torch.zeros(1, 16, 1, 64, dtype=torch.float16)
    with mock_gpu.launching(arch, processors) as seen:
        for keys in STEPS:
            k, v = (one[None, :, :keys] for one in cache)
            forward(spec, Inputs(q, k, v))
        for rows in range(17, 517, 7):
            prompt = torch.zeros(1, 16, rows, 64, dtype=torch.float16)
            k, v = (one[None, :, :rows] for one in cache)
            forward(spec, Inputs(prompt, k, v))
        assert len(seen) > len(STEPS)
        assert mock_gpu.compiled() <= MOST
