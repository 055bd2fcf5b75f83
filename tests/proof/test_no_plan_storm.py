"""A cache that grows by a token a call: how many plans and compiled kernels 500 calls make."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

from attnsel import AttentionParams, Environment
from attnsel.backends.registry import CANDIDATES
from attnsel.decision import select

MOST = 16
STEPS = range(1, 501)


@pytest.mark.skipif(None in map(importlib.util.find_spec, ("torch", "triton")), reason="they compile")
@pytest.mark.parametrize(("arch", "processors"), [(75, 40), pytest.param(90, 132, marks=pytest.mark.slow)])
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


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it runs")
@pytest.mark.parametrize("padded", [False, True])
def test_prompts_of_100_lengths_make_few_plans(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, one for each length. The library's part is counted where it would plan; Triton has its own."""
    import torch

    from attnsel import attention, override
    from attnsel.backends.contract import Inputs, Result, Spec
    from attnsel.runtime import dispatch, kernels

    env = Environment.describe("H200")
    planned: list[tuple[int, ...]] = []

    def forward(spec: Spec, inputs: Inputs) -> Result:
        return Result(torch.zeros_like(inputs.q), None)

    def prepare(spec: Spec, inputs: Inputs) -> None:
        planned.append(tuple(inputs.q.shape))

    monkeypatch.setattr(dispatch, "environment_of", lambda q: env)
    no_kernel = dict.fromkeys(CANDIDATES, kernels.Kernel(forward, forward, lambda spec, inputs: None))
    whole = kernels.Kernel(forward, forward, prepare)
    monkeypatch.setattr(kernels, "KERNELS", {**no_kernel, "cudnn": whole, "sdpa.cudnn": whole})
    dispatch.clear_cache()
    lengths = random.Random(7).sample(range(17, 2001), 100)
    try:
        with override(selfcheck=False):
            for length in lengths * 2:
                q = torch.zeros((length, 1, 2, 64) if padded else (1, length, 2, 64), dtype=torch.bfloat16)
                more: dict[str, Any] = {"attn_mask_type": "causal"}
                if padded:
                    cu = torch.tensor([0, length - 1], dtype=torch.int32)
                    more = {"attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
                attention(q, q, q, qkv_format="sbhd" if padded else "bshd", **more)
    finally:
        dispatch.clear_cache()
    assert 0 < len(planned) <= MOST


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it counts what runs")
def test_lengths_are_counted_for_each_call_apart_and_training_is_not() -> None:
    from attnsel.runtime.cache import FEW, _planned, record_length, with_lengths
    from attnsel.verdicts.reasons import NO_EVIDENCE

    env = Environment.describe("H200")
    prompt = AttentionParams(max_seqlen_q=1000, max_seqlen_kv=1000, is_training=False)
    _planned.clear()
    try:
        for training in (True, False):
            for n in range(20, 20 + FEW):
                p = prompt.replace(max_seqlen_q=n, max_seqlen_kv=n, is_training=training)
                record_length(select(p, env))
            new = with_lengths(NO_EVIDENCE, prompt.replace(is_training=training), env)
            assert new.many_lengths is not training
        assert select(prompt, env, evidence=new).backend == "sdpa.flash"
        assert select(prompt, env).backend == "cudnn"
        seen = prompt.replace(max_seqlen_q=20, max_seqlen_kv=20)
        assert with_lengths(NO_EVIDENCE, seen, env) is NO_EVIDENCE
        for other in ({"num_heads": 8}, {"dtype": "fp16"}, {"attn_mask_type": "no_mask"}):
            assert with_lengths(NO_EVIDENCE, prompt.replace(**other), env) is NO_EVIDENCE
        assert with_lengths(NO_EVIDENCE, prompt, Environment.describe("B200")) is NO_EVIDENCE
    finally:
        _planned.clear()
