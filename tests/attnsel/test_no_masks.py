"""With PyTorch alone, windows, padding and packed sequences make no mask and no copy, in whatever layer."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from attnsel import AttentionParams, Environment
from attnsel.decision import select
from attnsel.selection.memory import memory_parts

GPUS = ("A100", "H100", "H200", "B200", "RTX 4090")
CALLS: dict[str, dict[str, Any]] = {
    "window 1024 at 16k": {"max_seqlen_q": 16384, "window_size": (1024, 0)},
    "two-sided window": {"attn_mask_type": "no_mask", "window_size": (512, 512)},
    "window, chunked prefill": {
        "attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 8192,
        "window_size": (1024, 0), "is_training": False,
    },
    "padding": {"attn_mask_type": "padding"},
    "padding_causal": {"attn_mask_type": "padding_causal"},
    "padding and window": {"attn_mask_type": "padding_causal", "window_size": (256, 0)},
    "padding, cross attention": {"attn_mask_type": "padding", "max_seqlen_q": 512},
    "packed": {"qkv_layout": "thd", "attn_mask_type": "padding_causal"},
    "packed, grouped heads": {"qkv_layout": "thd", "attn_mask_type": "padding_causal", "num_gqa_groups": 4},
    "packed, gaps, window": {
        "qkv_layout": "thd", "attn_mask_type": "padding_causal", "pad_between_seqs": True,
        "window_size": (128, 0),
    },
    "packed, dropout": {
        "qkv_layout": "thd", "attn_mask_type": "padding_causal", "attention_dropout": 0.1,
    },
}  # fmt: skip


def torch_alone(gpu: str) -> Environment:
    return Environment.describe(gpu, cudnn_frontend=None)


@pytest.mark.parametrize("name", CALLS)
def test_the_first_candidate_makes_no_mask_and_no_copy(name: str) -> None:
    """It was sdpa.cudnn with a mask: 512 MiB for the window, at every call and in every layer."""
    gpu = GPUS[list(CALLS).index(name) % len(GPUS)]
    env, p = torch_alone(gpu), AttentionParams(**CALLS[name])
    first = select(p, env).candidates[0]
    assert first.verdict == "eligible"
    assert first.adaptations == ()
    assert memory_parts(first.name, p, env, first.adaptations) == ()


def test_half_of_a_causal_matrix_is_half_of_the_work() -> None:
    """What a mask makes a kernel compute counts against it: 15 times the work of this window."""
    plain = AttentionParams(max_seqlen_q=16384, attn_mask_type="no_mask")
    causal, window = plain.replace(attn_mask_type="causal"), plain.replace(window_size=(1023, 0))
    assert causal.flops / plain.flops == pytest.approx(0.5, rel=1e-3)
    assert window.flops / plain.flops == pytest.approx(1024 / 16384, rel=0.05)
    selection = select(window, torch_alone("H100"))
    (folded,) = selection["sdpa.cudnn"].adaptations
    assert folded.name == "fold_mask"
    assert folded.flops == plain.flops - window.flops


def test_visible_pairs_are_those_that_are_visible() -> None:
    sizes = [(6, 6), (4, 9), (9, 4), (1, 5)]
    for left, right, (s_q, s_kv), bottom_right in product((-1, 0, 2, 7), (-1, 1, 3), sizes, (False, True)):
        p = AttentionParams(
            attn_mask_type="no_mask", max_seqlen_q=s_q, max_seqlen_kv=s_kv, window_size=(left, right),
            bottom_right_diagonal=bottom_right,
        )  # fmt: skip
        shift = s_kv - s_q if bottom_right else 0
        pairs = [(j - i - shift) for i in range(s_q) for j in range(s_kv)]
        seen = sum((left < 0 or -left <= n) and (right < 0 or n <= right) for n in pairs)
        assert p.visible_pairs == seen, (left, right, s_q, s_kv, bottom_right)
