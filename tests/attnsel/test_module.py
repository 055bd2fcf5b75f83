"""``DotProductAttention``: TransformerEngine's arguments, each acted on or refused, none ignored."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attnsel
from attnsel import DotProductAttention, InvalidInput, attention
from attnsel.runtime import refusals
from attnsel.verdicts.evidence import Evidence, Refusal

torch.set_num_threads(1)


def qkv(s: int = 6, h: int = 4, g: int = 4, d: int = 8, e: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, s, n, m, generator=gen) for n, m in ((h, d), (g, d), (g, e)))
    return q, k, v


def build(**arguments: Any) -> DotProductAttention:
    given = {"num_attention_heads": 4, "kv_channels": 8, "qkv_format": "bshd", **arguments}
    return DotProductAttention(**given)


# Construction


def test_defaults_are_transformer_engines() -> None:
    parameters = inspect.signature(DotProductAttention.__init__).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert list(parameters)[1:4] == ["num_attention_heads", "kv_channels", "num_gqa_groups"]
    assert (defaults["qkv_format"], defaults["attn_mask_type"]) == ("sbhd", "causal")
    assert defaults["attention_dropout"] == 0.0
    assert defaults["softmax_type"] == "vanilla"
    forward = inspect.signature(DotProductAttention.forward).parameters
    assert list(forward)[1:6] == ["query_layer", "key_layer", "value_layer", "attention_mask", "qkv_format"]


BAD_CONSTRUCTION: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_gqa_groups": 3}, "num_gqa_groups"),
    ({"tp_size": 3}, "tp_size"),
    ({"num_gqa_groups": 2, "tp_size": 4}, "tp_size"),
    ({"kv_channels": 0}, "kv_channels"),
    ({"kv_channels": (8, -8)}, "kv_channels"),
    ({"attention_dropout": 1.0}, "attention_dropout"),
    ({"qkv_format": "bhsd"}, "qkv_format"),
    ({"attn_mask_type": "diagonal"}, "attn_mask_type"),
    ({"attention_type": "both"}, "attention_type"),
    ({"softmax_scale": math.nan}, "softmax_scale"),
    ({"window_size": (-2, 0)}, "window_size"),
    ({"backend": "flash"}, "backend"),
    ({"adapt": "sometimes"}, "adapt"),
    ({"num_gqa_groups": 8}, "num_gqa_groups"),
    ({"kv_channels": (8,)}, "kv_channels"),
    ({"softcap": -1.0}, "softcap"),
    ({"window_size": 5}, "window_size"),
    # of another type than the argument's
    ({"num_attention_heads": 4.0}, "num_attention_heads"),
    ({"layer_number": [1]}, "layer_number"),
    ({"cp_comm_type": {}}, "cp_comm_type"),
    ({"attention_dropout": torch.ones(2)}, "attention_dropout"),
    ({"num_attention_heads": 10**400}, "num_attention_heads"),
    ({"sequence_parallel": "no"}, "sequence_parallel"),
    ({"deterministic": 2}, "deterministic"),
    ({"get_rng_state_tracker": 1}, "get_rng_state_tracker"),
    ({"cp_stream": torch.ones(2)}, "cp_stream"),
]


def test_bad_construction_is_named() -> None:
    for arguments, field in BAD_CONSTRUCTION:
        with pytest.raises(InvalidInput) as caught:
            build(**arguments)
        assert caught.value.field == field, arguments


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


def test_a_flag_of_a_call_that_is_none_is_named() -> None:
    core, q = DotProductAttention(2, 8, qkv_format="bshd"), torch.ones(1, 2, 2, 8)
    for name in ("checkpoint_core_attention", "fast_zero_fill", "pad_between_seqs"):
        with pytest.raises(InvalidInput) as caught:
            core(q, q, q, **{name: torch.ones(2)})
        assert caught.value.field == name
