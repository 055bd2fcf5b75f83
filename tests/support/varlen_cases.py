"""Calls of PyTorch's flash op with lengths and windows: the same on a CPU stand-in and on a GPU."""

from __future__ import annotations

import dataclasses

import torch

from attention_cases import BOTTOM_RIGHT, CASES, CAUSAL, Case, build, int32, packed
from attnsel.backends.contract import Inputs, Spec

WITHOUT = {"softcap", "softmax_type", "q_offset", "kv_offset", "dropout_p"}
SELF = {"s_q": 27, "s_kv": 27}
MORE = [
    Case("self lengths, causal", CAUSAL, {"seqlens": "b"}, SELF),
    Case("self lengths, window", {"window_left": 3, "window_right": 2}, {"seqlens": "b"}, SELF),
    Case("self lengths, bottom-right", BOTTOM_RIGHT, {"seqlens": "b"}, SELF),
    Case("lengths, window bottom-right", {"window_left": 3, **BOTTOM_RIGHT},
         {"seqlens_q": "b", "seqlens_kv": "b"}),
    Case("lengths of queries", {}, {"seqlens_q": "b"}),
    Case("lengths of keys, bottom-right", BOTTOM_RIGHT, {"seqlens_kv": "b"}),
    Case("one sequence, padded", {}, {"seqlens_q": "b", "seqlens_kv": "b"}, {"b": 1}),
    Case("one query row, padded keys", BOTTOM_RIGHT, {"seqlens_kv": "b"}, {"s_q": 1}),
    Case("top-left window of more queries", {"window_left": 30, "window_right": 2}, sizes={"s_q": 40}),
    packed("self, causal", CAUSAL, {"self": ""}),
    packed("self, window", {"window_left": 4, "window_right": 0}, {"self": ""}),
    packed("self, gaps, causal", CAUSAL, {"self": "", "cu_seqlens_padded": ""}),
    packed("gaps, bottom-right", BOTTOM_RIGHT, {"cu_seqlens_padded": ""}),
    packed("gaps, two-sided window", {"window_left": 4, "window_right": 3, "bottom_right": True},
           {"cu_seqlens_padded": ""}),
    packed("no longest given", BOTTOM_RIGHT, {"no max": ""}),
    packed("negative scale", {**BOTTOM_RIGHT, "softmax_scale": -0.4}),
    Case("negative scale", {**CAUSAL, "softmax_scale": -0.4}, sizes=SELF),
]  # fmt: skip


def expressible(case: Case) -> bool:
    """What the op has arguments for; a top-left diagonal only where queries are as many as keys, or more."""
    plain = not (WITHOUT & set(case.spec)) and not ({"bias", "attn_mask", "alibi_slopes"} & set(case.tensors))
    bounded = {"window_left", "window_right"} & set(case.spec)
    apart = case.spec.get("packed") or {"seqlens_q", "seqlens_kv"} & set(case.tensors)
    known = case.spec.get("bottom_right") or {"self", "seqlens"} & set(case.tensors)
    wide = case.sizes.get("s_q", 21) < 27 and case.spec.get("window_right", 99) < 6
    return bool(plain and (not bounded or known or not (apart or wide)) and "e" not in case.sizes)


USED = [case for case in CASES if expressible(case)] + MORE


def made(case: Case, dtype: torch.dtype = torch.float64, scale: int = 1) -> tuple[Spec, Inputs]:
    """The call, with q, k and v as a program has them: bshd, or packed."""
    spec, inputs = build(dataclasses.replace(case, tensors={
        name: shape for name, shape in case.tensors.items() if name not in ("self", "seqlens", "no max")
    }), dtype, scale=scale)  # fmt: skip
    spec = dataclasses.replace(spec, return_max_logit=False)
    if "seqlens" in case.tensors:
        lengths = int32([max(0, inputs.q.shape[2] - 9 * scale * n) for n in range(inputs.q.shape[0])])
        inputs = inputs._replace(seqlens_q=lengths, seqlens_kv=lengths)
    if "self" in case.tensors:
        t = inputs.q.shape[0]
        k, v = (torch.randn(t, *one.shape[1:], dtype=dtype) for one in (inputs.k, inputs.v))
        inputs = inputs._replace(
            k=k, v=v, cu_seqlens_kv=inputs.cu_seqlens_q, cu_seqlens_kv_padded=inputs.cu_seqlens_q_padded
        )
    if spec.packed and "no max" not in case.tensors:
        longest = [int(cu.diff().max()) for cu in (inputs.cu_seqlens_q, inputs.cu_seqlens_kv)]
        inputs = inputs._replace(max_seqlen_q=longest[0], max_seqlen_kv=longest[1])
    if not spec.packed:  # bshd: the rows of sequences one behind the other
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs[:3])
        inputs = inputs._replace(q=q, k=k, v=v)
    return spec, inputs
