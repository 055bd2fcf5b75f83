"""A test that fails where attention silently runs on another kernel: @pytest.mark.attention, from attnsel.

    pytest examples/check_in_ci

On a CPU F.sdpa has its own flash kernel. A softcap has no argument there, so the second function writes
attention out; its test says so, and would fail with kernel="sdpa.flash" and the reason.
"""

import pytest
import torch
import torch.nn.functional as F


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_capped(q, k, v, cap=30.0):
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 / cap)
    return torch.softmax(scores, -1) @ v


@pytest.fixture
def qkv():
    return [torch.randn(1, 4, 64, 32) for _ in "qkv"]  # [b, h, s, d]


@pytest.mark.attention(kernel="sdpa.flash", max_score_bytes=0)
def test_attention_is_one_kernel_and_stores_no_scores(qkv):
    assert attend(*qkv).shape == (1, 4, 64, 32)


@pytest.mark.attention(kernel="by hand", max_score_bytes=1 << 20)
def test_capped_attention_stores_scores_and_is_known_to(qkv):
    assert attend_capped(*qkv).isfinite().all()
