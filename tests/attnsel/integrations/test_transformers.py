"""Real models of transformers, small and with random weights: attnsel agrees with their own attention.

Works with transformers 4.5x and 5.x; nothing is downloaded. transformers is imported by the tests: collecting
them does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from attention_function import Layer, qkv, reference
from attnsel import InvalidInput
from attnsel.f_sdpa import function
from attnsel.f_sdpa import shim as f_sdpa_shim
from attnsel.flash_attn import functions
from attnsel.flash_attn import shim as flash_attn_shim
from tables import each

torch.set_num_threads(1)

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = 5
MODELS: dict[str, dict[str, Any]] = {
    "Gemma2": {
        "head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16,
    },
    "GptOss": {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    "DeepseekV3": {  # multi-head latent attention: 192 for q and k, 128 for v
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    },
}  # fmt: skip
BATCH, LENGTH = 3, 12


@pytest.fixture(scope="module", autouse=True)
def hf() -> Iterator[Any]:
    """transformers, which knows attnsel."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from attnsel.integrations.transformers import register

    register()
    yield transformers
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("attnsel", None)


def build(hf: Any, name: str, implementation: str = "eager") -> Any:
    config = getattr(hf, f"{name}Config")(**{**SMALL, **MODELS.get(name, {})})
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():
        # Weights large enough that attention decides something; sinks and biases are no zeros.
        torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 1.0)
    assert model.config._attn_implementation == implementation
    return model.eval()


@pytest.fixture(scope="module", params=["Llama", "Gemma2", "GptOss", "DeepseekV3"])
def pair(request: pytest.FixtureRequest, hf: Any) -> tuple[Any, Any]:
    """The same model twice: eager, and attnsel."""
    return build(hf, request.param), build(hf, request.param, "attnsel")


def tokens(batch: int = BATCH) -> torch.Tensor:
    return torch.randint(3, 64, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def padded(kind: str) -> torch.Tensor | None:
    """[b, s], 1 = real."""
    if kind == "none":
        return None
    real = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if kind != "full":
        real[0, 7:] = 0
        real[1, 10:] = 0
    if kind == "holes":
        real[2, 3:5] = 0
    return real.flip(1) if kind == "left" else real


def step(model: Any, real: torch.Tensor | None, generates: bool = False) -> dict[str, torch.Tensor]:
    """Logits of real tokens and all gradients of one step; and what is generated."""
    model.zero_grad()
    logits = model(input_ids=tokens(), attention_mask=real).logits
    kept = logits if real is None else logits[real.bool()]
    assert kept.std() > 0.1, "constant logits would prove nothing"
    kept.float().sin().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if generates:
        found["tokens"] = model.generate(tokens(), attention_mask=real, max_new_tokens=5, do_sample=False)
    return {"logits": kept.detach(), **found}


def agree(actual: dict[str, Any], wanted: dict[str, Any], tolerance: float = 2e-5) -> None:
    assert actual.keys() == wanted.keys()
    for name, one in wanted.items():
        limit = 0.0 if name == "tokens" else tolerance * one.abs().max().item() + 1e-6
        torch.testing.assert_close(actual[name], one, atol=limit, rtol=min(limit, 1e-4), msg=name)


# ---- whole models ----------------------------------------------------------------------------------------


@each("padding", ["none", "left", "holes"])
def test_logits_and_gradients(pair, padding):
    eager, ours = pair
    agree(step(ours, padded(padding)), step(eager, padded(padding)))


def cached(model: Any, past: Any, ends: tuple[int, ...], real: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of several steps that share a cache."""
    logits = []
    for start, end in pairwise((0, *ends)):
        given = {} if real is None else {"attention_mask": real[:, :end]}
        if real is None:
            given["cache_position"] = torch.arange(start, end)
        with torch.no_grad():
            one = model(input_ids=tokens()[:, start:end], past_key_values=past, use_cache=True, **given)
        logits.append(one.logits)
    return torch.cat(logits, 1)


def test_prefill_and_cached_decode(pair, hf):
    """Eight tokens, three more at once, then one; twice around the window."""
    real = padded("left")
    wanted, actual = (cached(m, hf.DynamicCache(config=m.config), (8, 11, 12), real) for m in pair)
    torch.testing.assert_close(actual[real.bool()], wanted[real.bool()], atol=2e-5, rtol=2e-5)


def test_restarting_positions_and_lengths_of_a_collator_are_packed_sequences(pair):
    eager, ours = pair
    cuts = [0, 3, 4, 12]
    cu = torch.tensor(cuts, dtype=torch.int32)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 8, "max_length_k": 8}
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(cuts)])[None]
    with torch.no_grad():
        wanted = torch.cat([eager(input_ids=tokens(1)[:, a:b]).logits for a, b in pairwise(cuts)], 1)
        for lengths, use_cache in (({}, False), ({}, True), (given, True)):
            packed = ours(input_ids=tokens(1), position_ids=positions, use_cache=use_cache, **lengths)
            torch.testing.assert_close(packed.logits, wanted, atol=2e-5, rtol=2e-5)


# ---- the mask a layer gets -------------------------------------------------------------------------------


def test_what_a_layer_gets_as_its_mask(hf, monkeypatch):
    from transformers.modeling_utils import AttentionInterface

    from attnsel.integrations.transformers import Visible

    seen = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask.seen)
        return attention_forward(module, query, key, value, attention_mask, **kwargs)

    def of(name, **inputs):
        seen.clear()
        with torch.no_grad():
            build(hf, name, "attnsel")(input_ids=tokens(), **inputs)
        return list(seen)

    monkeypatch.setitem(AttentionInterface._global_mapping, "attnsel", spy)
    plain = Visible(True, None, LENGTH, LENGTH)
    for kind in ("none", "full"):
        for use_cache in (False, True):
            assert of("Llama", attention_mask=padded(kind), use_cache=use_cache) == [plain, plain]
    for kind in ("right", "left"):
        for mask in of("Gemma2", attention_mask=padded(kind)):
            assert mask.cu_seqlens_q.tolist() == mask.cu_seqlens_kv.tolist()
            assert sorted(mask.cu_seqlens_q.diff().tolist()) == [7, 10, 12]
            assert (mask.order_kv is None) == (kind == "right")
    window, whole = of("Gemma2")
    assert (window.window, whole) == ((WINDOW - 1, -1), plain)


# ---- the attention function ------------------------------------------------------------------------------


def attention_forward(*given: Any, **more: Any) -> Any:
    from attnsel.integrations import transformers

    return transformers.attention_forward(*given, **more)


def test_a_floating_mask_is_added_and_a_two_dimensional_one_is_padding():
    bias = torch.randn(2, 1, 4, 4, requires_grad=True)
    out, _ = attention_forward(Layer(), *qkv(), bias)
    torch.testing.assert_close(out, reference(bias), atol=1e-5, rtol=1e-5)
    (mine,) = torch.autograd.grad(out.sin().sum(), bias)
    (wanted,) = torch.autograd.grad(reference(bias).sin().sum(), bias)
    torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-4)
    real = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    added = torch.zeros(2, 1, 4, 4).masked_fill(real[:, None, None] == 0, -torch.inf)
    out, _ = attention_forward(Layer(), *qkv(), real, is_causal=False)
    torch.testing.assert_close(out, reference(added), atol=1e-5, rtol=1e-5)
    with_it, without = (attention_forward(Layer(), *qkv(), None, dropout=p)[0] for p in (0.5, 0.0))
    assert not torch.allclose(with_it, without)


def test_what_is_not_known_or_contradicts_is_named():
    from attnsel.integrations.transformers import Visible, register

    packed = torch.tensor([0, 8])
    for mask, arguments, field in (
        (None, {"output_attentions": True}, "output_attentions"),
        (None, {"head_mask": torch.ones(2)}, "head_mask"),
        (None, {"new": 3}, "new"),
        (Visible(True, None, 5, 5), {}, "attention_mask"),
        (torch.ones(2, 2, 4), {}, "attention_mask"),
        (torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]), {"sliding_window": 2}, "attention_mask"),
        (torch.ones(2, 1, 4, 4, dtype=torch.bool), {"cu_seq_lens_q": packed}, "cu_seq_lens_q"),
        (None, {"cu_seq_lens_q": packed.int()}, "cu_seq_lens_k"),
    ):
        with pytest.raises(InvalidInput) as caught:
            attention_forward(Layer(), *qkv(), mask, **arguments)
        assert caught.value.field == field
        attention_forward(Layer(), *qkv(), None, **dict.fromkeys(arguments))
    with pytest.raises(InvalidInput, match="eager"):  # nobody looks it up
        register("eager")


# ---- models that know nothing of attnsel -----------------------------------------------------------------


@contextmanager
def counted(module: Any, name: str) -> Iterator[list[Any]]:
    calls: list[Any] = []
    real = getattr(module, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, lambda *args, **more: calls.append(args) or real(*args, **more))
        yield calls


def test_a_model_with_f_sdpa_replaced(hf):
    model, real = build(hf, "Llama", "sdpa"), padded("left")
    wanted = step(model, real, generates=True)
    with counted(function, "attend") as calls:
        assert f_sdpa_shim.install()
        try:
            found = step(model, real, generates=True)
        finally:
            f_sdpa_shim.uninstall()
    assert calls
    agree(found, wanted)


@pytest.fixture
def _resolved(hf) -> Iterator[None]:
    """``flash_attention_2`` is attnsel's functions, and afterwards transformers' checks are its own."""
    from transformers.utils import import_utils

    from attnsel.integrations import program as transformers_flash

    assert flash_attn_shim.install(force=True)
    assert [transformers_flash.resolve() for _ in range(2)] == ["flash_attention_2"] * 2
    checks = {name: getattr(import_utils, name) for name in transformers_flash._ANSWERS}
    yield
    assert transformers_flash.undo()
    assert not [name for name, check in checks.items() if getattr(import_utils, name) is check]
    assert not transformers_flash.undo()
    flash_attn_shim.uninstall()


@pytest.mark.usefixtures("_resolved")
def test_a_training_step_and_generate_with_flash_attention_2(hf, monkeypatch):
    flash = build(hf, "Llama", "flash_attention_2").to(torch.bfloat16)
    eager = build(hf, "Llama").to(torch.bfloat16)
    for side in ("left", "right"):
        with counted(functions, "forward") as calls:
            found = step(flash, padded(side), generates=side == "left")
        assert calls, "transformers called attnsel's functions"
        agree(found, step(eager, padded(side), generates=side == "left"), tolerance=0.06)
    monkeypatch.setattr(hf.LlamaForCausalLM, "_supports_flash_attn", False)
    with pytest.raises(ValueError, match="does not support Flash Attention 2"):
        build(hf, "Llama", "flash_attention_2")
