"""With PyTorch alone, windows, padding and packed sequences make no mask and no copy, in whatever layer."""

from __future__ import annotations

from itertools import product

import pytest

from attnsel import AttentionParams, Environment
from attnsel.decision import select


def torch_alone(gpu: str) -> Environment:
    return Environment.describe(gpu, cudnn_frontend=None)


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
