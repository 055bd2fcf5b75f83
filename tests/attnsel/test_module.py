"""``DotProductAttention``: TransformerEngine's arguments, each acted on or refused, none ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnsel
from attnsel import DotProductAttention, InvalidInput, attention
from attnsel.runtime import refusals
from attnsel.verdicts.reasons import Evidence, Refusal

torch.set_num_threads(1)


def qkv(s: int = 6, h: int = 4, g: int = 4, d: int = 8, e: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, s, n, m, generator=gen) for n, m in ((h, d), (g, d), (g, e)))
    return q, k, v


def build(**arguments: Any) -> DotProductAttention:
    given = {"num_attention_heads": 4, "kv_channels": 8, "qkv_format": "bshd", **arguments}
    return DotProductAttention(**given)


# A call's own arguments: test_nothing_dropped.py. Here, where they meet the module's.


def test_mask_type_of_a_call_takes_its_own_corner() -> None:
    module = build(attn_mask_type="causal_bottom_right", bottom_right_diagonal=True)
    q, k, v = qkv()
    out = module(q[:, :3], k, v, attn_mask_type="causal")
    assert torch.equal(out, attention(q[:, :3], k, v, attn_mask_type="causal").flatten(-2))


# Asking instead of running


def test_explain_takes_the_arguments_of_forward_by_position_too() -> None:
    mask = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    module = build(attn_mask_type="arbitrary")
    given = (*qkv(), mask, "bshd", None, None, None, None, None, None, "arbitrary", (2, 2))
    module(*given)
    assert module.last_selection is module.explain(*given, checkpoint_core_attention=True)
    assert module.last_selection.params.window_size == (2, 2)
    with pytest.raises(TypeError, match="too many positional arguments"):
        module.explain(*[None] * 26)
    with pytest.raises(TypeError, match="multiple values for argument 'attention_mask'"):
        module.explain(*qkv(), mask, attention_mask=mask)


def test_explain_of_tensors_here_on_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module, tensors = build(), [t.bfloat16() for t in qkv()]
    here = module.explain(*tensors)
    hopper = attnsel.Environment.describe("H100", cudnn="9.10.2")
    there = module.explain(*tensors, environment=hopper)
    assert (here.environment.detected, here.environment.device.type) == (True, "cpu")
    assert (there.environment.device.name, there.backend) == ("H100", "cudnn")
    assert there.params == here.params
    assert there.params.dtype == "bf16"
    with pytest.raises(InvalidInput, match="environment = 'H100': must be an instance of Environment"):
        module.explain(*tensors, environment="H100")
    # What a kernel refused here says nothing of another GPU.
    refused = Evidence().plus(Refusal("cudnn", there.params, "not here"))
    monkeypatch.setattr(refusals, "_evidence", refused)
    assert module.explain(*tensors, environment=hopper).backend == "cudnn"
    assert module.explain(*tensors)["cudnn"].verdict == "refused"
