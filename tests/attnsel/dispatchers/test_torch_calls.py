"""What a question becomes as a call of F.sdpa, and what switches do to the choice."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnsel import AttentionParams, Environment, InvalidInput
from attnsel.dispatchers import Dispatch, dispatched_by
from attnsel.dispatchers.torch import held
from attnsel.params import Tensors, TensorSpec
from tables import each

H100 = Environment.describe("H100", torch="2.13.0")
A100 = Environment.describe("A100", torch="2.13.0")
CPU = Environment.describe("cpu", torch="2.13.0")


def of(env: Environment = A100, switches: dict[str, str] | None = None, **fields: object) -> Dispatch:
    return dispatched_by("torch", AttentionParams.model_validate(fields), env, switches or {})


def taken(dispatch: Dispatch) -> str | None:
    return None if dispatch.chosen is None else dispatch.chosen.name


TURNED = Tensors(mask=TensorSpec(shape=(4096, 4096), stride=(1, 4096), dtype="bool"))
BIAS = {"core_attention_bias_type": "post_scale_bias"}
SHORT = {"batch_size": 2, "num_heads": 4, "max_seqlen_q": 8, "head_dim_qk": 64}


@each(
    "fields, arguments",
    [
        ({"attn_mask_type": "no_mask"}, ""),
        ({"attn_mask_type": "causal"}, "is_causal=True"),
        ({"attn_mask_type": "causal_bottom_right"}, "is_causal=True"),
        ({"attn_mask_type": "causal_bottom_right", "max_seqlen_kv": 16}, "attn_mask=bool[8, 16]"),
        ({"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1, "max_seqlen_kv": 16}, ""),
        ({"attn_mask_type": "padding"}, "attn_mask=bool[2, 1, 1, 8]"),
        ({"attn_mask_type": "padding_causal"}, "attn_mask=bool[2, 1, 8, 8]"),
        ({"attn_mask_type": "causal", "window_size": (4, 0)}, "attn_mask=bool[8, 8]"),
        ({"attn_mask_type": "causal", "window_size": (8, 0)}, "is_causal=True"),
        ({"core_attention_bias_type": "alibi"}, "attn_mask=bf16[1, 4, 8, 8]"),
        ({"core_attention_bias_type": "alibi", "alibi_slopes_shape": (2, 4)}, "attn_mask=bf16[2, 4, 8, 8]"),
        ({**BIAS, "core_attention_bias_shape": "111s", "attn_mask_type": "no_mask"}, "attn_mask=bf16[1, 8]"),
        ({**BIAS, "core_attention_bias_shape": "b1ss"}, "attn_mask=bf16[2, 1, 8, 8]"),
        ({"attention_dropout": 0.1}, "is_causal=True, dropout_p=0.1"),
        ({"attention_dropout": 0.1, "is_training": False}, "is_causal=True"),
        ({"num_gqa_groups": 2}, "is_causal=True, enable_gqa=True"),
        ({"attn_mask_type": "padding", "tensors": Tensors(rank=3)}, "attn_mask=bool[8, 1, 8]"),
    ],
)
def test_a_question_is_a_call(fields: dict[str, object], arguments: str) -> None:
    inside = ", ".join(filter(None, ("q, k, v", arguments)))
    assert of(**{**SHORT, **fields}).call == f"F.scaled_dot_product_attention({inside})"


@each(
    "fields, text",
    [
        ({"softcap": 30.0}, "softcap"),
        ({"softmax_type": "learnable"}, "sinks"),
        ({"qkv_layout": "thd", "attn_mask_type": "padding"}, "packed"),
        ({"return_lse": True}, "log-sum-exp"),
        ({"return_max_logit": True}, "largest score"),
    ],
)
def test_what_it_has_no_word_for_is_said(fields: dict[str, object], text: str) -> None:
    dispatch = of(**fields)
    assert dispatch.chosen is None
    assert "cannot express it" in dispatch.error
    assert text in dispatch.error


@each(
    "switches, kernel",
    [
        ({}, "cudnn"),
        ({"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}, "flash"),
        ({"TORCH_CUDNN_SDPA_DEPRIORITIZED": "0"}, "cudnn"),
        ({"enable_cudnn_sdp": "false"}, "flash"),
        ({"sdpa_kernel": "EFFICIENT_ATTENTION,SDPBackend.MATH"}, "mem_efficient"),
        ({"sdpa_kernel": "math,flash"}, "flash"),
        ({"sdpa_kernel": "overrideable,flash", "set_priority": "true"}, "flash"),
        ({"sdpa_kernel": "math,flash", "set_priority": "true"}, "math"),
        ({"use_deterministic_algorithms": "true"}, "flash"),
        ({"use_deterministic_algorithms": "warn_only"}, "cudnn"),
    ],
)
def test_switches_change_the_choice(switches: dict[str, str], kernel: str) -> None:
    dispatch = of(H100, switches)
    assert taken(dispatch) == kernel
    assert dispatch.switches == tuple(sorted(switches.items()))
    if switches.get("set_priority"):
        assert taken(of(CPU, switches)) == "flash", "a priority is not for CPUs"


@each("rank", [3, 4])
def test_groups_without_the_flag_raise_what_torch_raises(rank: int) -> None:
    q, k = (torch.zeros(*(1, heads, 8, 8)[4 - rank :]) for heads in (16, 4))
    with pytest.raises(RuntimeError) as raised:
        torch.nn.functional.scaled_dot_product_attention(q, k, k)
    fields = {"num_gqa_groups": 4, "batch_size": 1, "tensors": Tensors(rank=rank)}
    dispatch = of(CPU, {"enable_gqa": "false"}, **fields)
    assert dispatch.chosen is None
    assert re.search(r"ize of tensor a .*", str(raised.value))[0] in dispatch.error


def test_another_flash_attention_raises_where_it_does_not_run() -> None:
    dispatch = of(A100, {"activate_flash_attention_impl": "FA3"})
    assert dispatch.chosen is None
    flash = next(offer for offer in dispatch.offers if offer.name == "flash")
    assert [refusal.code for refusal in flash.refusals] == ["SDPA120"]


def test_with_no_kernel_left_it_says_so() -> None:
    assert of(H100, {"sdpa_kernel": "OVERRIDEABLE"}).error.startswith("No viable backend")
    assert of(H100, {"sdpa_kernel": "flash"}, dtype="fp32").error.startswith("No available kernel")


def test_a_known_bug_of_the_kernel_that_is_taken_is_noted() -> None:
    env = Environment.describe("H100", torch="2.5.0")
    dispatch = of(env)
    assert taken(dispatch) == "cudnn"
    assert any("BUG030" in note for note in dispatch.notes)


@each(
    "asked, read, inferred",
    [
        ("2.13.0", "2.13.0", False),
        ("2.4.1", "2.4.0", True),
        ("2.15.0", "2.14.1", True),
        ("2.2.0", "2.2.2", True),
    ],
)
def test_the_release_that_was_read_is_named(asked: str, read: str, inferred: bool) -> None:
    dispatch = of(Environment.describe("A100", torch=asked))
    assert (dispatch.read, bool(dispatch.inferred)) == (read, inferred)


@each(
    "gpu, release, fields, kernel",
    [
        ("T4", "2.2.2", {"head_dim_qk": 64}, "math"),
        ("gfx942", "2.3.1", {}, "flash"),
        ("gfx942", "2.2.2", {}, "math"),
        ("gfx942", "2.5.1", {"num_gqa_groups": 4}, "math"),
        ("gfx942", "2.10.0", {"head_dim_qk": 60, "attn_mask_type": "padding"}, "math"),
        ("gfx906", "2.10.0", {}, "math"),
        ("mps", "2.13.0", {}, "math"),
        ("cpu", "2.2.2", {}, "flash"),
        ("cpu", "2.2.2", {"dtype": "fp16"}, "math"),
        ("cpu", "2.2.2", {"attn_mask_type": "padding"}, "math"),
        ("cpu", "2.3.1", {"attn_mask_type": "padding"}, "flash"),
        ("cpu", "2.8.0", {"num_gqa_groups": 4}, "math"),
        ("cpu", "2.9.0", {"num_gqa_groups": 4}, "flash"),
        ("cpu", "2.7.1", {"attn_mask_type": "arbitrary", "tensors": TURNED}, "math"),
        ("cpu", "2.8.0", {"attn_mask_type": "arbitrary", "tensors": TURNED}, "flash"),
        ("cpu", "2.13.0", {"tensors": Tensors(rank=3)}, "math"),
        ("cpu", "2.14.1", {"tensors": Tensors(rank=3)}, "flash"),
        ("cpu", "2.11.0", {"max_seqlen_kv": 0}, "math"),
        ("cpu", "2.12.0", {"max_seqlen_kv": 0}, "zeros"),
    ],
)
def test_other_devices_and_older_releases(
    gpu: str, release: str, fields: dict[str, object], kernel: str | None
) -> None:
    assert taken(of(Environment.describe(gpu, torch=release), **fields)) == kernel


def test_a_kernel_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidInput, match="sdpa_kernel"):
        of(H100, {"sdpa_kernel": "flash,fast"})
    with pytest.raises(InvalidInput, match="torch"):
        of(Environment.describe("A100", torch=None))


def test_what_this_process_has_set_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEPRIORITIZED", "PREFERRED"):
        monkeypatch.delenv(f"TORCH_CUDNN_SDPA_{name}", raising=False)
    here = Environment.detect("cpu")
    before = held(here)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        found = held(here)
        assert "sdpa_kernel" not in held(CPU)  # another machine
    assert found["sdpa_kernel"] == "math,mem_efficient"
    assert found["set_priority"] == "true"
    assert found["enable_flash_sdp"] == found["enable_cudnn_sdp"] == "false"
    assert held(here) == before
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    monkeypatch.setenv("TORCH_CUDNN_SDPA_PREFERRED", "maybe")  # PyTorch ignores it, with a warning
    assert held(here) == {**before, "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
