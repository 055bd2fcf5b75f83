"""The calls that tests/gpu makes of cuDNN, with their names, and the question that each answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from attention_cases import Case
from attnsel import AttentionParams
from attnsel.backends.contract import Inputs, Spec
from cudnn_cases import FEATURES, HEAD_DIM_SPECS, HEAD_DIMS, as_carried_out, head_dim_case, made

SCALE = 17  # of lengths on a GPU
_BIAS_SHAPES = {
    ("b", "h", "s_q", "s_kv"): "bhss",
    ("1", "h", "s_q", "s_kv"): "1hss",
    ("b", "1", "s_q", "s_kv"): "b1ss",
    ("s_q", "s_kv"): "11ss",
}


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Case, Spec, Inputs]]:
    """Every call of the features and the head dimensions, as a GPU gets it, with its name."""
    cpu = torch.device("cpu")
    for case in FEATURES:
        spec, inputs = made(case, dtype, cpu, SCALE)
        yield case.name, case, spec, as_carried_out(inputs)
    for d in HEAD_DIMS:
        for options in HEAD_DIM_SPECS:
            case = head_dim_case(options)
            spec, inputs = made(case, dtype, cpu, SCALE, d)
            yield f"head_dim {d}, {options}", case, spec, as_carried_out(inputs)


def params_of(case: Case, spec: Spec, inputs: Inputs) -> AttentionParams | None:
    """The question that a call answers; None for a bias of a shape that no question has."""
    i = inputs
    fields: dict[str, Any] = {}
    if i.bias is not None:
        shape = _BIAS_SHAPES.get(tuple(case.tensors["bias"].split()))
        if shape is None:
            return None
        fields["core_attention_bias_type"] = "post_scale_bias"
        fields["core_attention_bias_shape"] = shape
        fields["core_attention_bias_requires_grad"] = i.bias.requires_grad
    elif i.alibi_slopes is not None:
        fields["core_attention_bias_type"] = "alibi"
    padded = spec.packed or i.seqlens_q is not None or i.seqlens_kv is not None
    kind = "padding" if padded else "no_mask"
    if spec.window_right == 0:
        kind = ("padding_" if padded else "") + "causal" + ("_bottom_right" if spec.bottom_right else "")
    elif spec.window_left >= 0 or spec.window_right >= 0:
        fields["bottom_right_diagonal"] = spec.bottom_right
    if spec.packed:
        assert i.cu_seqlens_q is not None
        assert i.cu_seqlens_kv is not None
        fields["batch_size"] = i.cu_seqlens_q.shape[0] - 1
        fields["max_seqlen_q"] = int(i.cu_seqlens_q.diff().max())
        fields["max_seqlen_kv"] = int(i.cu_seqlens_kv.diff().max())
        fields["pad_between_seqs"] = i.cu_seqlens_q_padded is not None
    else:
        fields["batch_size"], _, fields["max_seqlen_q"], _ = i.q.shape
        fields["max_seqlen_kv"] = i.k.shape[2]
    return AttentionParams(
        dtype=str(i.q.dtype),
        qkv_layout="thd_thd_thd" if spec.packed else "bhsd_bhsd_bhsd",
        num_heads=i.q.shape[1],
        num_gqa_groups=i.k.shape[1],
        head_dim_qk=i.q.shape[-1],
        head_dim_v=i.v.shape[-1],
        attn_mask_type=kind,
        window_size=(spec.window_left, spec.window_right),
        softmax_type=spec.softmax_type,
        return_lse=spec.need_lse,
        is_training=spec.need_grad,
        deterministic=spec.deterministic,
        **fields,
    )
