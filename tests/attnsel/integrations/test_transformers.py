"""Real models of transformers, small and with random weights: attnsel agrees with their eager attention.

Works with transformers 4.5x and 5.x; nothing is downloaded.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch

from attnsel import InvalidInput

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from attnsel.integrations.transformers import attention_forward, register
from attnsel.integrations.visibility import Visible, visible

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
WINDOW = 5
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "GptOss": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    # Multi-head latent attention: 192 for q and k, 128 for v.
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
OTHERS = [name for name in MODELS if name != "Mistral"]  # its window is Gemma2's
BATCH, LENGTH = 3, 12


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register()
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("attnsel", None)


@pytest.fixture(scope="module", params=[pytest.param("Mistral", marks=pytest.mark.slow), *OTHERS])
def pair(request):
    """The same model twice: eager, and attnsel."""
    return build(request.param)


def build(name: str, **changes):
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name], **changes})
    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in eager.parameters():
        # Weights large enough that attention decides something; sinks and biases are no zeros.
        torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 1.0)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("attnsel")
    assert ours.config._attn_implementation == "attnsel"
    return eager.eval(), ours.eval()


def tokens(batch: int = BATCH) -> torch.Tensor:
    return torch.randint(1, 64, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def mask(kind: str) -> torch.Tensor | None:
    """[b, s], 1 = real."""
    if kind == "none":
        return None
    real = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if kind == "full":
        return real
    real[0, 7:] = 0
    real[1, 10:] = 0
    if kind == "holes":
        real[2, 3:5] = 0
    return real.flip(1) if kind == "left" else real


def assert_agree(wanted, actual, real: torch.Tensor | None = None) -> None:
    if real is not None:
        wanted, actual = wanted[real.bool()], actual[real.bool()]
    assert wanted.std() > 0.1, "constant logits would prove nothing"
    torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=2e-5)


# ---- whole models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "left", "holes"])
def test_logits_and_gradients(pair, padding):
    real = mask(padding)
    answers = []
    for model in pair:
        model.zero_grad()
        logits = model(input_ids=tokens(), attention_mask=real, use_cache=False).logits
        weight = torch.ones(BATCH, LENGTH) if real is None else real.float()
        (logits.sin().sum(-1) * weight).sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        answers.append((logits.detach(), grads))
    (logits, grads), (ours, our_grads) = answers
    assert_agree(logits, ours, real)
    assert grads.keys() == our_grads.keys()
    for name, grad in grads.items():
        largest = grad.abs().max().item()
        torch.testing.assert_close(our_grads[name], grad, atol=2e-5 * largest + 1e-6, rtol=1e-4, msg=name)


def test_prefill_and_cached_decode(pair):
    """Eight tokens, three more at once, then one; twice around the window."""
    real = mask("left")
    answers = []
    for model in pair:
        past, logits = DynamicCache(config=model.config), []
        for start, end in ((0, 8), (8, 11), (11, 12)):
            with torch.no_grad():
                step = model(
                    input_ids=tokens()[:, start:end],
                    attention_mask=None if real is None else real[:, :end],
                    past_key_values=past,
                    use_cache=True,
                )
            logits.append(step.logits)
        answers.append(torch.cat(logits, 1))
    assert_agree(*answers, real)


def test_generation_with_a_static_cache():
    """Keys beyond the last row are unwritten memory. (Of one head dimension, so not with DeepseekV3.)"""
    answers = []
    for model in build("GptOss"):
        past = StaticCache(config=model.config, max_cache_len=LENGTH + 4)
        with torch.no_grad():
            whole = model(input_ids=tokens()[:, :9], past_key_values=past, cache_position=torch.arange(9))
            last = model(input_ids=tokens()[:, 9:10], past_key_values=past, cache_position=torch.tensor([9]))
        answers.append(torch.cat([whole.logits, last.logits], 1))
    assert_agree(*answers)


# ---- packed sequences ------------------------------------------------------------------------------------

CUTS = [0, 3, 4, 12]


def apart(model) -> torch.Tensor:
    """Logits of the packed sequences, each on its own."""
    with torch.no_grad():
        parts = [model(input_ids=tokens(1)[:, a:b]).logits for a, b in pairwise(CUTS)]
    return torch.cat(parts, 1)


def restarting() -> torch.Tensor:
    return torch.cat([torch.arange(b - a) for a, b in pairwise(CUTS)])[None]


def test_restarting_positions_and_lengths_of_a_collator_are_packed_sequences(pair):
    eager, ours = pair
    cu = torch.tensor(CUTS, dtype=torch.int32)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 8, "max_length_k": 8}
    wanted = apart(eager)
    for lengths, use_cache in (({}, False), ({}, True), (given, True)):
        with torch.no_grad():
            packed = ours(input_ids=tokens(1), position_ids=restarting(), use_cache=use_cache, **lengths)
        assert_agree(wanted, packed.logits)


# ---- the mask a layer gets -------------------------------------------------------------------------------


@pytest.fixture
def layer_masks(monkeypatch):
    """``layer_masks(model, ...)``: what each layer of an attnsel model gets as attention_mask."""

    def ask(model, **inputs):
        seen = []

        def spy(module, query, key, value, attention_mask, **kwargs):
            seen.append(attention_mask)
            return attention_forward(module, query, key, value, attention_mask, **kwargs)

        monkeypatch.setitem(AttentionInterface._global_mapping, "attnsel", spy)
        with torch.no_grad():
            model(input_ids=tokens(), **inputs)
        return seen

    return ask


@pytest.mark.parametrize("kind", ["none", "full"])
def test_plain_causal_layers_get_no_mask(layer_masks, kind):
    for use_cache in (False, True):
        assert layer_masks(build("Llama")[1], attention_mask=mask(kind), use_cache=use_cache) == [None, None]


@pytest.mark.parametrize("kind", ["right", "left"])
def test_padding_arrives_as_lengths(layer_masks, kind):
    for seen in layer_masks(build("Gemma2")[1], attention_mask=mask(kind)):
        assert isinstance(seen, Visible)
        assert seen.cu_seqlens_q.tolist() == seen.cu_seqlens_kv.tolist()
        assert sorted(seen.cu_seqlens_q.diff().tolist()) == [7, 10, 12]
        assert (seen.order_kv is None) == (kind == "right")


def test_a_window_arrives_as_a_window(layer_masks):
    windows = [None if seen is None else seen.window for seen in layer_masks(build("Gemma2")[1])]
    assert windows == [(WINDOW - 1, -1), None]


def test_what_is_not_recognised_arrives_as_the_mask_that_sdpa_gets():
    def only_even(batch_idx, head_idx, q_idx, kv_idx):
        return kv_idx % 2 == 0

    where = {"cache_position": torch.arange(4), "q_length": 4, "device": "cpu"}
    if int(transformers.__version__.split(".")[0]) < 5:
        where = {"cache_position": torch.arange(4)}
    else:
        del where["cache_position"]
    seen = visible(batch_size=1, kv_length=4, mask_function=only_even, **where)
    assert seen.tolist() == [[[[True, False, True, False]] * 4]]


# ---- the attention function ------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    is_causal = True


def qkv(s_q: int = 4, s_kv: int = 4):
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(2, 2, s, 16, generator=generator) for s in (s_q, s_kv, s_kv))


def reference(q, k, v, added):
    scores = q @ k.transpose(-1, -2) / 4 + added
    return (scores.softmax(-1) @ v).transpose(1, 2)


def test_a_floating_mask_is_added_and_gets_its_gradient():
    bias = torch.randn(2, 1, 4, 4, requires_grad=True)
    out, _ = attention_forward(Layer(), *qkv(), bias)
    torch.testing.assert_close(out, reference(*qkv(), bias), atol=1e-5, rtol=1e-5)
    (mine,) = torch.autograd.grad(out.sin().sum(), bias)
    (wanted,) = torch.autograd.grad(reference(*qkv(), bias).sin().sum(), bias)
    torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-4)


def test_a_two_dimensional_mask_is_padding():
    real = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    added = torch.zeros(2, 1, 4, 4).masked_fill(real[:, None, None] == 0, -torch.inf)
    out, _ = attention_forward(Layer(), *qkv(), real, is_causal=False)
    torch.testing.assert_close(out, reference(*qkv(), added), atol=1e-5, rtol=1e-5)


def test_dropout_takes_place():
    torch.manual_seed(0)
    with_it, without = (attention_forward(Layer(), *qkv(), None, dropout=p)[0] for p in (0.5, 0.0))
    assert not torch.allclose(with_it, without)


@pytest.mark.parametrize(
    ("name", "value"),
    [("output_attentions", True), ("head_mask", torch.ones(2)), ("position_bias", torch.ones(1)), ("new", 3)],
)
def test_an_argument_that_is_not_known_is_named(name, value):
    with pytest.raises(InvalidInput) as caught:
        attention_forward(Layer(), *qkv(), None, **{name: value})
    assert caught.value.field == name
    attention_forward(Layer(), *qkv(), None, **{name: None})


@pytest.mark.parametrize(
    ("mask", "arguments", "field"),
    [
        (Visible(True, None, 5, 5), {}, "attention_mask"),
        (torch.ones(2, 2, 4), {}, "attention_mask"),
        (torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]), {"sliding_window": 2}, "attention_mask"),
        (torch.ones(2, 1, 4, 4, dtype=torch.bool), {"cu_seq_lens_q": torch.tensor([0, 8])}, "cu_seq_lens_q"),
        (None, {"cu_seq_lens_q": torch.tensor([0, 8], dtype=torch.int32)}, "cu_seq_lens_k"),
    ],
)
def test_what_contradicts_is_named(mask, arguments, field):
    with pytest.raises(InvalidInput) as caught:
        attention_forward(Layer(), *qkv(), mask, **arguments)
    assert caught.value.field == field


def test_eager_cannot_be_replaced_because_nobody_looks_it_up():
    with pytest.raises(InvalidInput, match="eager"):
        register("eager")
