"""Models of transformers that know nothing of attnsel, with F.sdpa replaced: logits, gradients, generate."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from attnsel.f_sdpa import function, shim

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GQA = {**SMALL, "num_key_value_heads": 2}
MODELS = {
    "Llama": (transformers.LlamaConfig, GQA),
    "Mistral": (transformers.MistralConfig, {**GQA, "sliding_window": 5}),
    "Qwen3": (transformers.Qwen3Config, {**GQA, "head_dim": 8}),
    "Phi3": (transformers.Phi3Config, GQA),
    "GPT2": (transformers.GPT2Config, {
        "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }),
    "OPT": (transformers.OPTConfig, {
        **SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0,
    }),
    "Bert": (transformers.BertConfig, {
        **SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }),
    "ModernBert": (transformers.ModernBertConfig, {**SMALL, "global_attn_every_n_layers": 2}),
}  # fmt: skip
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "Llama"]


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """F.sdpa is attnsel's; the calls that go its way."""
    calls: list[Any] = []
    real = function.attend
    with monkeypatch.context() as patched:
        patched.setattr(function, "attend", lambda *args: calls.append(args[0]) or real(*args))
        assert shim.install()
        try:
            yield calls
        finally:
            shim.uninstall()


def run(model: Any, generates: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    logits = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    logits.sin().sum().backward()
    found = {"logits": logits.detach()}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if generates:
        found["tokens"] = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    return found


@pytest.mark.parametrize("name", ["Llama", *SLOW])
def test_a_model_with_f_sdpa_replaced(name, monkeypatch):
    make, given = MODELS[name]
    config = make(**given, attn_implementation="sdpa")
    generates = name not in ("Bert", "ModernBert")
    kind = transformers.AutoModelForCausalLM if generates else transformers.AutoModelForMaskedLM
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    other = copy.deepcopy(model)
    wanted = run(model, generates)
    with counted(monkeypatch) as calls:
        found = run(other, generates)
    assert calls
    assert model.config._attn_implementation == "sdpa"
    assert found.keys() == wanted.keys()
    for part, one in wanted.items():
        torch.testing.assert_close(found[part], one, rtol=1e-4, atol=1e-4, msg=part)
