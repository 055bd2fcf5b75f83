"""The calls that tests/gpu makes of cuDNN: the same list there, and where their graphs are planned without a
GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attention_cases import BOTTOM_RIGHT, CASES, CAUSAL, Case, build, onto, packed
from attnsel.backends.checks import default_slopes
from attnsel.backends.contract import Inputs, Spec

ALIBI = Case("alibi, cuDNN's own slopes", CAUSAL)
FEATURES = [
    case
    for case in CASES
    if not {"attn_mask", "alibi_slopes"} & case.tensors.keys()
    and not {"softcap", "q_offset", "kv_offset", "dropout_p"} & case.spec.keys()
    and "head_dim" not in case.name
    and case.name != "bias broadcast over queries"  # wrong gradients on a card: BUG015
] + [
    ALIBI,
    packed("window", {"window_left": 3, "window_right": 0}),
    packed("sinks", {**CAUSAL, "softmax_type": "learnable"}, {"softmax_offset": "h"}),
]
HEAD_DIMS = (64, 128, 192, 256)
HEAD_DIM_SPECS: list[dict[str, Any]] = [{}, CAUSAL, BOTTOM_RIGHT, {"window_left": 9, "window_right": 0}]


def head_dim_case(spec: dict[str, Any]) -> Case:
    return Case("", spec, {}, {"s_kv": 40})


def made(
    case: Case, dtype: torch.dtype, device: torch.device, scale: int, d: int = 64
) -> tuple[Spec, Inputs]:
    case = dataclasses.replace(case, sizes={"d": d, "e": d, **case.sizes})
    spec, inputs = build(case, dtype, scale=scale)
    # The largest score has a graph of its own, which not every version has.
    spec = dataclasses.replace(spec, return_max_logit=False)
    inputs = onto(device, inputs)
    if case.name == ALIBI.name:
        inputs = inputs._replace(alibi_slopes=default_slopes(inputs.q.shape[1], inputs.q.device))
    return spec, inputs


def as_carried_out(inputs: Inputs) -> Inputs:
    """With a bias that wants its gradient: what is carried out asks for it, so must what is planned."""
    if inputs.bias is None:
        return inputs
    return inputs._replace(bias=inputs.bias.detach().requires_grad_())
