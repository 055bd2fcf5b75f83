"""What transformers would choose, against the transformers that is installed. Other releases: answers.txt."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from attnsel import AttentionParams, Environment
from attnsel.dispatchers import dispatched_by
from attnsel.dispatchers.transformers.implementations import sdpa_call
from attnsel.dispatchers.transformers.switches import read_switches
from tables import each

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
    asked = read_switches({"transformers": transformers.__version__}, AttentionParams())
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
    switches = {"kernels": "false", "transformers": transformers.__version__, **flags}
    switches |= {} if name is None else {"attn_implementation": name}
    answer = dispatched_by("transformers", AttentionParams(is_training=False), CPU, switches)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
        found = model.config._attn_implementation.removeprefix("paged|")
    except (ImportError, ValueError):
        found = None
    assert (None if answer.chosen is None else answer.chosen.name) == found
