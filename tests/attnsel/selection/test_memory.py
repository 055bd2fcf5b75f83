"""Memory as a policy: what a call takes, and what a limit refuses."""

from __future__ import annotations

import pytest

from attnsel import (
    AttentionParams,
    Environment,
    NoBackendError,
    attention,
    override,
    select,
)
from attnsel.selection.evaluate import memory_parts
from tables import each

H100 = Environment.describe("H100", cudnn="9.13.0", torch="2.9.1")
CPU = Environment.describe("cpu")


LONG = AttentionParams(batch_size=1, max_seqlen_q=65536)  # 16 heads: 768 GiB of scores beside 2 GiB


def test_what_does_not_fit_the_gpu_is_refused_with_both_figures():
    refused = select(LONG, H100)["sdpa.math"]
    assert [found.code for found in refused.reasons] == ["MEMORY001"]
    assert refused.reasons[0].message.endswith(
        "device.memory is 80.0 GiB, needs at least 770 GiB (768 GiB scores, 2.0 GiB tensors)"
    )
    assert select(LONG, H100)["tiled"].eligible


@each(
    "p, env",
    [
        (LONG, CPU),
        (LONG, Environment.describe("sm90").replace(device=H100.device.replace(memory=None))),
        (LONG.replace(max_seqlen_q=65536 * 64, max_seqlen_kv=65536 * 64), H100),
    ],
)
def test_where_it_is_no_measure_of_a_candidate_nothing_is_refused_for_it(p, env):
    codes = {found.code for candidate in select(p, env) for found in candidate.reasons}
    assert "MEMORY001" not in codes


def test_a_call_runs_within_its_limit_or_not_at_all():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
    scores = 9 * 2 * 64 * 64
    with override(memory_limit=scores, backend="sdpa.math"):
        attention(q, k, v)
    with (
        override(memory_limit=scores - 1, backend="sdpa.math"),
        pytest.raises(NoBackendError, match="POLICY004"),
    ):
        attention(q, k, v)


@each("dtype", ["bf16", "fp32"])
@each("training, dropout", [(False, 0.0), (True, 0.0), (True, 0.1)])
def test_the_scores_of_sdpa_math_are_what_the_allocator_sees(dtype, training, dropout):
    torch = pytest.importorskip("torch")
    p = AttentionParams(
        dtype=dtype, batch_size=2, num_heads=4, max_seqlen_q=512, head_dim_qk=16, attn_mask_type="no_mask",
        is_training=training, attention_dropout=dropout,
    )  # fmt: skip
    ((_, expected),) = memory_parts("sdpa.math", p, CPU)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    q, k, v = (torch.randn(2, 4, 512, 16, dtype=kind, requires_grad=training) for _ in range(3))

    def call():
        out = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, None, dropout, False, None)[0]
        if training:
            out.sum().backward()

    assert peak_of(torch, call) == pytest.approx(expected, rel=0.15)


def peak_of(torch, call):
    """The most bytes that were allocated at one time while ``call`` ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    held = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
