"""transformers' ``flash_attention_2`` on attnsel's functions, on a CPU, against its eager attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import import_utils

from attnsel import InvalidInput
from attnsel.flash_attn import functions, shim
from attnsel.integrations import transformers_flash

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, dtype=torch.bfloat16,
)  # fmt: skip


@pytest.fixture
def _resolved() -> Iterator[None]:
    assert shim.install(force=True)
    assert transformers_flash.resolve() == "flash_attention_2"
    assert transformers_flash.resolve() == "flash_attention_2"
    yield
    assert transformers_flash.undo()
    assert not transformers_flash.undo()
    shim.uninstall()


def pair() -> tuple[Any, Any]:
    """The same weights under flash_attention_2 and under eager."""
    torch.manual_seed(0)
    flash = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), attn_implementation="flash_attention_2")
    for parameter in flash.parameters():
        torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 1.0)
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), attn_implementation="eager")
    eager.load_state_dict(flash.state_dict())
    return flash.to(torch.bfloat16), eager.to(torch.bfloat16)


@pytest.mark.usefixtures("_resolved")
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_training_step_and_generate(side, monkeypatch):
    calls = []
    real = functions.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(functions, "forward", noted)
    models = pair()
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, : 5 if side == "left" else None] = 0
    if side == "right":
        mask[0, :7] = 1
    results = []
    for model in models:
        logits = model(ids, attention_mask=mask).logits[mask.bool()].float()
        logits.sin().sum().backward()
        results.append({"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters()})
    assert calls, "transformers called attnsel's functions"
    assert models[0].config._attn_implementation == "flash_attention_2"
    for name, wanted in results[1].items():
        largest = wanted.abs().max().item()
        torch.testing.assert_close(results[0][name], wanted, rtol=0, atol=0.06 * largest, msg=name)
    if side == "left":
        said = [
            model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False) for model in models
        ]
        assert torch.equal(*said)


def test_the_checks_are_transformers_own_again():
    checks = {name: getattr(import_utils, name) for name in transformers_flash._ANSWERS}
    method = PreTrainedModel._flash_attn_can_dispatch
    shim.install(force=True)
    transformers_flash.resolve()
    assert import_utils.is_flash_attn_2_available()
    assert transformers.utils.is_flash_attn_2_available()
    assert import_utils.is_flash_attn_greater_or_equal("2.3.3")
    assert not import_utils.is_flash_attn_greater_or_equal("9.0")
    transformers_flash.undo()
    shim.uninstall()
    assert {name: getattr(import_utils, name) for name in checks} == checks
    assert PreTrainedModel._flash_attn_can_dispatch is method
    with pytest.raises((ImportError, ValueError), match=r"[Ff]lash"):
        AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), attn_implementation="flash_attention_2")


def test_without_the_shim_it_is_refused():
    with pytest.raises(InvalidInput, match="flash_attn"):
        transformers_flash.resolve()


@pytest.mark.usefixtures("_resolved")
def test_a_model_that_cannot_says_so_in_transformers_words(monkeypatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_supports_flash_attn", False)
    with pytest.raises(ValueError, match="does not support Flash Attention 2"):
        AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), attn_implementation="flash_attention_2")
