"""What transformers would choose: against the transformers that is installed, and what other releases do."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from attnsel import AttentionParams, Environment, InvalidInput
from attnsel.dispatchers import Dispatch, dispatched_by, switches_of
from attnsel.dispatchers.transformers.releases import NEWEST, read_for
from attnsel.dispatchers.transformers.sdpa import sdpa_call
from attnsel.dispatchers.transformers.switches import read_switches
from attnsel.environment.versions import Version
from tables import each

H100 = Environment.describe("H100", torch="2.9.0", flash_attn="2.8.3")
GQA = {"num_heads": 16, "num_gqa_groups": 4}


def ask(env: Environment = H100, p: dict[str, Any] | None = None, **switches: str) -> Dispatch:
    switches = {"transformers": "5.23.0", "kernels": "false", **switches}
    return dispatched_by("transformers", AttentionParams(**(p or {})), env, switches)


def chosen(answer: Dispatch) -> str | None:
    return None if answer.chosen is None else answer.chosen.name


# ---- the order --------------------------------------------------------------------------------------


@each("switches, wanted", [
        ({}, "sdpa"),
        ({"_supports_sdpa": "false"}, "eager"),
        ({"attn_implementation": "flash_attention_2"}, "flash_attention_2"),
        ({"attn_implementation": "flash_attention_3"}, None),
        ({"attn_implementation": "flash_attention_3", "kernels": "true"},
         "kernels-community/vllm-flash-attn3"),
        ({"attn_implementation": "flash_attention_4", "transformers": "5.0.0"}, None),
        ({"attn_implementation": "hub:kernels-community/flash-attn2"}, None),
        ({"attn_implementation": "hub:kernels-community/flash-attn2", "kernels": "true"},
         "kernels-community/flash-attn2"),
        ({"attn_implementation": "somebody/flash", "kernels": "true"}, None),
        ({"attn_implementation": "somebody/flash", "kernels": "true", "allow_all_kernels": "true"},
         "somebody/flash"),
    ])  # fmt: skip
def test_what_is_taken(switches, wanted):
    answer = ask(**switches)
    assert chosen(answer) == wanted
    assert (answer.error == "") is (wanted is not None)
    for offer in answer.offers:
        assert all(refusal.source for refusal in offer.refusals)
    assert (answer.chosen is None) or answer.chosen.taken


def test_a_missing_package_leads_to_the_hub_where_kernels_is_installed():
    env = Environment.describe("H100", torch="2.9.0", flash_attn=None)
    asked = {"attn_implementation": "flash_attention_2", "kernels": "true"}
    assert chosen(ask(env, **asked)) == "kernels-community/flash-attn2"
    assert chosen(ask(env, **asked, transformers="4.57.6")) == "kernels-community/flash-attn"
    assert ask(env, **asked, transformers="4.48.3").error.startswith("ImportError")


@each("name, release, gpu, p, wanted", [
        ("sdpa", "5.23.0", "H100", {"softcap": 30.0}, "ValueError"),
        ("sdpa", "5.20.2", "H100", {"softcap": 30.0}, "ignores softcap"),
        ("sdpa", "5.23.0", "H100", {"softmax_type": "learnable"}, "ignores sinks"),
        ("flash_attention_2", "5.23.0", "T4", {"dtype": "fp16"}, "Ampere"),
        ("flash_attention_2", "5.23.0", "H100", {"dtype": "fp32"}, "fp16 and bf16"),
        ("flash_attention_2", "5.23.0", "H100", {"head_dim_qk": 512}, "at most 256"),
        ("flash_attention_2", "5.23.0", "cpu", {}, "no GPU"),
    ])  # fmt: skip
def test_what_an_implementation_ignores_or_refuses(name, release, gpu, p, wanted):
    env = Environment.describe(gpu, torch="2.9.0", flash_attn="2.8.3")
    answer = ask(env, p, attn_implementation=name, transformers=release)
    assert wanted in (answer.error or " ".join(answer.notes))


def test_what_nobody_asked_for_says_all_that_stands_against_it():
    offers = {offer.name: offer for offer in ask(Environment.describe("T4", torch="2.9.0")).offers}
    told = [refusal.text for refusal in offers["flash_attention_4"].refusals]
    assert told[0] == "attn_implementation is not set"
    assert "FlashAttention 4 is not installed" in told
    assert any("compute capability 7.5" in text for text in told)


# ---- what reaches F.sdpa ----------------------------------------------------------------------------


@each(
    "release, p, groups, text",
    [
        ("4.53.3", {}, 16, "repeated 4 times"),
        ("4.57.6", {}, 4, ""),
        ("4.57.6", {"attn_mask_type": "padding_causal"}, 16, "there is a mask"),
        ("5.12.1", {"head_dim_qk": 320}, 4, ""),
        ("5.13.1", {"head_dim_qk": 320}, 16, "320/320"),
        ("5.22.2", {"max_seqlen_q": 1, "head_dim_qk": 320}, 16, "repeated"),
        ("5.23.0", {"max_seqlen_q": 1, "max_seqlen_kv": 64, "head_dim_qk": 320}, 4, "rows of one kv head"),
    ],
)
def test_kv_heads(release, p, groups, text):
    """transformers#46960: head dimensions above 256 fell to math without a word before 5.13."""
    asked = read_switches({"transformers": release})
    call = sdpa_call(AttentionParams(**GQA, **p), H100, asked)
    assert call.params.num_gqa_groups == groups
    assert text in " ".join(call.notes)


@each("release, mask, bias", [("4.48.3", "no_mask", "post_scale_bias"), ("4.53.3", "arbitrary", "no_bias")])
def test_masks_were_added_before_4_53(release, mask, bias):
    asked = read_switches({"transformers": release})
    call = sdpa_call(AttentionParams(attn_mask_type="padding_causal"), H100, asked).params
    assert (call.attn_mask_type, call.core_attention_bias_type) == (mask, bias)


def test_the_kernel_is_the_one_that_f_sdpa_takes():
    answer = ask(Environment.describe("A100", torch="2.9.0"), {**GQA, "attn_mask_type": "padding_causal"})
    assert (chosen(answer), answer.chosen.candidate) == ("sdpa", "sdpa.efficient")
    assert "F.sdpa takes mem_efficient" in answer.chosen.note
    assert any(note.startswith("F.sdpa passes over flash: ") for note in answer.notes)
    fa3 = Environment.describe("A100", torch="2.13.0").replace(torch_flash="FA3")
    assert ask(fa3).error.startswith("RuntimeError: ")


# ---- switches and releases --------------------------------------------------------------------------


@each(
    "switches, told",
    [
        ({"transformers": "4.40.0"}, "4.48 or newer"),
        ({"transformers": "new"}, "must be a version"),
        ({"attn_implementation": "paged|"}, "must name"),
        ({"output_attentions": "maybe"}, "true, false"),
        ({"atn_implementation": "sdpa"}, "attn_implementation"),
    ],
)
def test_bad_switches(switches, told):
    with pytest.raises(InvalidInput, match=told):
        dispatched_by("transformers", AttentionParams(), H100, switches)


def test_releases_that_were_not_read_say_so():
    assert read_for(Version.parse("5.23.0")) == ("5.23.0", "")
    assert read_for(Version.parse("5.5.0")) == ("5.4.0", "the nearest older release that was read")
    assert read_for(Version.parse("9.0"))[0] == str(NEWEST)
    assert {"attn_implementation", "transformers"} <= switches_of("transformers").keys()


# ---- against what is installed ----------------------------------------------------------------------

CPU = Environment.describe("cpu", torch="2.13.0")
FLAGS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")


def test_the_call_of_f_sdpa_is_what_the_installed_release_makes(monkeypatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.20")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import (
        causal_mask_function,
        sdpa_mask,
        sliding_window_causal_mask_function,
    )

    calls: list[dict[str, Any]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def noted(query: Any, key: Any, value: Any, **given: Any) -> Any:
        calls.append({"q": query.shape, "k": key.shape, **given})
        return real(query, key, value, **given)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    pick = random.Random(1)
    asked = read_switches({"transformers": transformers.__version__})
    for _ in range(100):
        rows, past = pick.choice([1, 2, 7]), pick.choice([0, 0, 5])
        keys, groups, window = rows + past, pick.choice([1, 2, 4]), pick.choice([None, None, 3])
        padded, d = pick.random() < 0.3, pick.choice([8, 8, 264])
        e = pick.choice([d, d, 4])
        p = AttentionParams(
            dtype="fp32", batch_size=2, num_heads=4, num_gqa_groups=groups, max_seqlen_q=rows,
            max_seqlen_kv=keys, head_dim_qk=d, head_dim_v=e,
            attn_mask_type="padding_causal_bottom_right" if padded else "causal_bottom_right",
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )  # fmt: skip
        padding = torch.ones(2, keys, dtype=torch.bool)
        padding[0, 0] = not padded
        seen = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        mask = sdpa_mask(2, rows, keys, past, 0, seen, padding, window)
        shapes = ((2, 4, rows, d), (2, groups, keys, d), (2, groups, keys, e))
        module = SimpleNamespace(num_key_value_groups=4 // groups, is_causal=True)
        sdpa_attention_forward(module, *(torch.zeros(shape) for shape in shapes), mask)
        found, said = calls[-1], sdpa_call(p, CPU, asked)
        assert (found["attn_mask"] is not None) is (said.params.attn_mask_type == "arbitrary"), p
        assert found["is_causal"] is (said.params.attn_mask_type == "causal"), p
        assert found.get("enable_gqa", False) is ("enable_gqa=True" in said.text), p
        assert (found["q"][1], found["k"][1]) == (said.params.num_heads, said.params.num_gqa_groups), p
        assert (found["q"][2], found["k"][2]) == (said.params.max_seqlen_q, said.params.max_seqlen_kv), p


NAMES = [None, "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention", "paged|eager"]
NAMES += ["nonsense", "kernels-community/flash-attn2"]


@each("supports", [True, False])
@each("name", NAMES)
def test_the_name_resolves_as_in_the_installed_release(name, supports, monkeypatch):
    transformers = pytest.importorskip("transformers", minversion="5.20")
    pytest.importorskip("torch")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    for flag in FLAGS:
        monkeypatch.setattr(transformers.LlamaPreTrainedModel, flag, supports)
    flags = dict.fromkeys(FLAGS, str(supports).lower())
    switches = {} if name is None else {"attn_implementation": name}
    answer = ask(CPU, {"is_training": False}, **switches, **flags, transformers=transformers.__version__)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
        found = model.config._attn_implementation.removeprefix("paged|")
    except (ImportError, ValueError):
        found = None
    assert chosen(answer) == found
