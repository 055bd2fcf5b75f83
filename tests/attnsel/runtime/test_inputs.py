"""Bad input: one InvalidInput that names the argument, before anything runs or is remembered. Values of any
other kind: the fuzz target ``wrong_types``."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from attnsel import InvalidInput, attention, cache_info

torch.set_num_threads(1)


def randn(*shape: int, **about: Any) -> Tensor:
    return torch.randn(shape, **about)


def cu(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


B, S, H, D = 2, 5, 4, 8
GOOD = {"q": randn(B, S, H, D), "k": randn(B, S, H, D), "v": randn(B, S, H, D)}
PACKED = {
    "q": randn(7, H, D),
    "k": randn(7, H, D),
    "v": randn(7, H, D),
    "qkv_format": "thd",
    "attn_mask_type": "padding",
    "cu_seqlens_q": cu(0, 3, 7),
    "cu_seqlens_kv": cu(0, 3, 7),
}
PADDED = {**GOOD, "attn_mask_type": "padding"}
LENGTHS = {"cu_seqlens_q": cu(0, 3, 7), "cu_seqlens_kv": cu(0, 3, 7)}
GAPS = {"cu_seqlens_q_padded": cu(0, 3, 7), "cu_seqlens_kv_padded": cu(0, 3, 7)}
MASKED = {**GOOD, "attn_mask_type": "arbitrary"}
BIASED = {**GOOD, "core_attention_bias_type": "post_scale_bias"}


def hole(rows: int = S) -> Tensor:
    mask = torch.zeros(B, 1, 1, rows, dtype=torch.bool)
    mask[0, 0, 0, 1] = True
    return mask


def bools(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


BAD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # what is wrong, a good call, what to change in it, the field that must be named
    ("k of another type", GOOD, {"k": randn(B, S, H, D).double()}, "key_layer.dtype"),
    ("v of another type", GOOD, {"v": randn(B, S, H, D).half()}, "value_layer.dtype"),
    ("k on another device", GOOD, {"k": randn(B, S, H, D, device="meta")}, "key_layer.device"),
    ("v on another device", GOOD, {"v": randn(B, S, H, D, device="meta")}, "value_layer.device"),
    ("integers", GOOD, dict.fromkeys("qkv", torch.ones(B, S, H, D, dtype=torch.int64)), "query_layer.dtype"),
    ("q of three dimensions", GOOD, {"q": randn(S, H, D)}, "query_layer.shape"),
    ("k of five dimensions", GOOD, {"k": randn(1, B, S, H, D)}, "key_layer.shape"),
    ("batch of k", GOOD, {"k": randn(3, S, H, D), "v": randn(3, S, H, D)}, "key_layer.shape"),
    ("batch of v", GOOD, {"v": randn(1, S, H, D)}, "value_layer.shape"),
    ("rows of v", GOOD, {"v": randn(B, S + 1, H, D)}, "value_layer.shape"),
    ("heads of v", GOOD, {"v": randn(B, S, 2, D)}, "value_layer.shape"),
    ("kv heads that do not divide", GOOD, {"k": randn(B, S, 3, D),
     "v": randn(B, S, 3, D)}, "key_layer.shape"),
    ("more kv heads", GOOD, {"k": randn(B, S, 8, D), "v": randn(B, S, 8, D)}, "key_layer.shape"),
    ("no kv heads", GOOD, {"k": randn(B, S, 0, D), "v": randn(B, S, 0, D)}, "key_layer.shape"),
    ("head dimension of k", GOOD, {"k": randn(B, S, H, D + 1)}, "key_layer.shape"),
    ("head dimension of zero", GOOD, {"v": randn(B, S, H, 0)}, "value_layer.shape"),
    ("no tensor", GOOD, {"q": [[1.0]]}, "query_layer"),
    ("sparse", GOOD, {"q": randn(B, S, H, D).to_sparse()}, "query_layer.layout"),
    ("nested", GOOD, {"q": torch.nested.nested_tensor([randn(3, H,
     D), randn(2, H, D)])}, "query_layer.layout"),
    ("unknown format", GOOD, {"qkv_format": "hbsd"}, "qkv_format"),
    ("unknown mask type", GOOD, {"attn_mask_type": "triangular"}, "attn_mask_type"),
    ("unknown bias type", GOOD, {"core_attention_bias_type": "relative"}, "core_attention_bias_type"),
    ("unknown softmax type", GOOD, {"softmax_type": "sparse"}, "softmax_type"),
    ("unknown backend", GOOD, {"backend": "sdpa"}, "backend"),
    ("unknown adapt", GOOD, {"adapt": "always"}, "adapt"),
    ("NaN scale", GOOD, {"softmax_scale": math.nan}, "softmax_scale"),
    ("infinite scale", GOOD, {"softmax_scale": math.inf}, "softmax_scale"),
    ("scale that is no number", GOOD, {"softmax_scale": "0.5"}, "softmax_scale"),
    ("negative softcap", GOOD, {"softcap": -1.0}, "softcap"),
    ("dropout of one", GOOD, {"attention_dropout": 1.0}, "attention_dropout"),
    ("negative dropout", GOOD, {"attention_dropout": -0.1}, "attention_dropout"),
    ("window below -1", GOOD, {"window_size": (-2, 0), "attn_mask_type": "causal"}, "window_size"),
    ("window of one", GOOD, {"window_size": (3,)}, "window_size"),
    ("window that is an int", GOOD, {"window_size": 3}, "window_size"),
    ("diagonal against the mask", GOOD, {"attn_mask_type": "causal",
     "bottom_right_diagonal": True}, "bottom_right_diagonal"),
    ("packed without padding", PACKED, {"attn_mask_type": "causal"}, "attn_mask_type"),
    ("packed without cu_seqlens_q", PACKED, {"cu_seqlens_q": None}, "cu_seqlens_q"),
    ("packed without cu_seqlens_kv", PACKED, {"cu_seqlens_kv": None}, "cu_seqlens_kv"),
    ("packed tokens of v", PACKED, {"v": randn(6, H, D)}, "value_layer.shape"),
    ("packed head dimension", PACKED, {"k": randn(7, H, D + 1)}, "key_layer.shape"),
    ("cu_seqlens int64", PACKED, {"cu_seqlens_q": cu(0, 3, 7, dtype=torch.int64)}, "cu_seqlens_q.dtype"),
    ("cu_seqlens_kv int64", PACKED, {"cu_seqlens_kv": cu(0, 3, 7, dtype=torch.int64)}, "cu_seqlens_kv.dtype"),
    ("cu_seqlens of two dimensions", PACKED, {"cu_seqlens_q": cu(0, 3, 7)[None]}, "cu_seqlens_q.shape"),
    ("cu_seqlens of one value", PACKED, {"cu_seqlens_q": cu(0)}, "cu_seqlens_q.shape"),
    ("cu_seqlens of unequal length", PACKED, {"cu_seqlens_kv": cu(0, 3, 5, 7)}, "cu_seqlens_kv.shape"),
    ("cu_seqlens that is a list", PACKED, {"cu_seqlens_q": [0, 3, 7]}, "cu_seqlens_q"),
    ("cu_seqlens not from 0", PACKED, {"cu_seqlens_q": cu(1, 3, 7)}, "cu_seqlens_q"),
    ("cu_seqlens descending", PACKED, {"cu_seqlens_q": cu(0, 8, 7)}, "cu_seqlens_q"),
    ("cu_seqlens short of the tokens", PACKED, {"cu_seqlens_kv": cu(0, 3, 6)}, "cu_seqlens_kv"),
    ("cu_seqlens beyond the tokens", PACKED, {"cu_seqlens_q": cu(0, 3, 8)}, "cu_seqlens_q"),
    ("a sequence above the maximum", PACKED, {"max_seqlen_q": 3, "max_seqlen_kv": 4}, "cu_seqlens_q"),
    ("maximum that is a tensor", PACKED, {"max_seqlen_q": torch.tensor(4)}, "max_seqlen_q"),
    ("negative maximum", PACKED, {"max_seqlen_kv": -1}, "max_seqlen_kv"),
    ("starts for q alone", PACKED, {"cu_seqlens_q_padded": cu(0, 3, 7)}, "cu_seqlens_q_padded"),
    ("starts descending", PACKED, {**GAPS, "cu_seqlens_q_padded": cu(0, 8, 7)}, "cu_seqlens_q_padded"),
    ("starts beyond the tokens", PACKED, {**GAPS, "cu_seqlens_kv_padded": cu(0,
     3, 9)}, "cu_seqlens_kv_padded"),
    ("no room between starts", PACKED, {**GAPS, "cu_seqlens_q_padded": cu(0, 2, 7)}, "cu_seqlens_q"),
    ("mask beside packed", PACKED, {"attention_mask": bools(B, 1, 1, S)}, "attention_mask"),
    ("padding without lengths", PADDED, {}, "attn_mask_type"),
    ("lengths without padding", GOOD, LENGTHS, "attn_mask_type"),
    ("lengths of q alone", PADDED, {"cu_seqlens_q": cu(0, 3, 7)}, "cu_seqlens_kv"),
    ("lengths of kv alone", PADDED, {"cu_seqlens_kv": cu(0, 3, 7)}, "cu_seqlens_q"),
    ("lengths of another batch", PADDED, dict.fromkeys(LENGTHS, cu(0, 3, 7, 9)), "cu_seqlens_q.shape"),
    ("lengths above the rows", PADDED, dict.fromkeys(LENGTHS, cu(0, 3, 9)), "cu_seqlens_q"),
    ("lengths and a mask", PADDED, {**LENGTHS, "attention_mask": bools(B, 1, 1, S)}, "attention_mask"),
    ("starts beside dense", PADDED, {**LENGTHS, **GAPS}, "cu_seqlens_q_padded"),
    ("padding mask of another shape", PADDED, {"attention_mask": bools(B, S)}, "attention_mask.shape"),
    ("padding mask of numbers", PADDED, {"attention_mask": randn(B, 1, 1, S)}, "attention_mask.dtype"),
    ("padding mask with a hole", PADDED, {"attention_mask": hole()}, "attention_mask (q)"),
    ("padding mask of kv with a hole", PADDED, {"attention_mask": (bools(B,
     1, 1, S), hole())}, "attention_mask (kv)"),
    ("three padding masks", PADDED, {"attention_mask": [bools(B, 1, 1, S)] * 3}, "attention_mask"),
    ("one padding mask for two lengths", PADDED, {"q": randn(B, 3,
     H, D), "attention_mask": bools(B, 1, 1, S)}, "attention_mask"),
    ("arbitrary without a mask", MASKED, {}, "attention_mask"),
    ("mask without arbitrary", GOOD, {"attention_mask": bools(S, S)}, "attention_mask"),
    ("mask beside causal", {**GOOD, "attn_mask_type": "causal"}, {"attention_mask": bools(S,
     S)}, "attention_mask"),
    ("arbitrary mask of numbers", MASKED, {"attention_mask": torch.zeros(S, S)}, "attention_mask.dtype"),
    ("arbitrary mask of another shape", MASKED, {"attention_mask": bools(S + 1, S)}, "attention_mask.shape"),
    ("arbitrary mask of five dimensions", MASKED, {"attention_mask": bools(1,
     1, 1, S, S)}, "attention_mask.shape"),
    ("arbitrary mask that is a pair", MASKED, {"attention_mask": (bools(S, S),) * 2}, "attention_mask"),
    ("mask on another device", MASKED, {"attention_mask": bools(S, S).to("meta")}, "attention_mask.device"),
    ("bias of another shape", BIASED, {"core_attention_bias": randn(S, S + 1)}, "core_attention_bias.shape"),
    ("bias of integers", BIASED, {"core_attention_bias": torch.ones(S,
     S, dtype=torch.int64)}, "core_attention_bias.dtype"),
    ("bias announced and missing", BIASED, {}, "core_attention_bias"),
    ("bias not announced", GOOD, {"core_attention_bias": randn(S, S)}, "core_attention_bias_type"),
    ("bias on another device", BIASED, {"core_attention_bias": randn(S,
     S).to("meta")}, "core_attention_bias.device"),
    ("bias inside a softcap", {**GOOD, "core_attention_bias_type": "pre_scale_bias",
     "softcap": 1.0}, {"core_attention_bias": randn(S, S)}, "core_attention_bias_type"),
    ("slopes without alibi", GOOD, {"alibi_slopes": torch.ones(H)}, "core_attention_bias_type"),
    ("slopes of another shape", {**GOOD, "core_attention_bias_type": "alibi"},
     {"alibi_slopes": torch.ones(H + 1)}, "alibi_slopes"),
    ("slopes in half precision", {**GOOD, "core_attention_bias_type": "alibi"},
     {"alibi_slopes": torch.ones(H).half()}, "alibi_slopes"),
    ("slopes that want a gradient", {**GOOD, "core_attention_bias_type": "alibi"},
     {"alibi_slopes": torch.ones(H, requires_grad=True)}, "alibi_slopes.requires_grad"),
    ("learnable without an offset", GOOD, {"softmax_type": "learnable"}, "softmax_offset"),
    ("offset without learnable", GOOD, {"softmax_offset": torch.zeros(H)}, "softmax_offset"),
    ("offset of another shape", GOOD, {"softmax_type": "learnable",
     "softmax_offset": torch.zeros(H + 1)}, "softmax_offset.shape"),
    ("offset of integers", GOOD, {"softmax_type": "learnable", "softmax_offset": torch.zeros(H,
     dtype=torch.int64)}, "softmax_offset.dtype"),
]  # fmt: skip


def call(base: dict[str, Any], change: dict[str, Any]) -> Any:
    arguments = {**base, **change}
    return attention(**arguments)


def test_bad_input_is_named_and_leaves_nothing_behind() -> None:
    found = {}
    before = cache_info().size
    for what, base, change, field in BAD:
        for _ in range(2):  # the second time, nothing may have been remembered
            with pytest.raises(InvalidInput) as caught:
                call(base, change)
            error = pickle.loads(pickle.dumps(caught.value))
            if error.field != field or not str(error).startswith(f"{field} = ") or not error.allowed:
                found[what] = str(error)
        if cache_info().size != before:
            found[what] = "it was remembered"
    assert found == {}
    assert torch.isfinite(call(GOOD, {})).all()
    assert torch.isfinite(call(PACKED, {})).all()


def test_contents_are_checked_on_every_call_of_a_known_signature() -> None:
    good = call(PACKED, {})
    with pytest.raises(InvalidInput, match="cu_seqlens_q"):
        call(PACKED, {"cu_seqlens_q": cu(0, 8, 7)})
    assert torch.equal(call(PACKED, {}), good)


def test_lengths_under_fake_tensors_are_not_read() -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {name: mode.from_tensor(t) for name, t in {**GOOD, **LENGTHS}.items()}
        assert call(fakes, {"attn_mask_type": "padding"}).shape == (B, S, H, D)


def test_a_value_is_judged_alike_whether_or_not_an_equal_one_came_before() -> None:
    attention(**GOOD, max_seqlen_q=1)
    with pytest.raises(InvalidInput, match="max_seqlen_q = True"):
        attention(**GOOD, max_seqlen_q=True)
