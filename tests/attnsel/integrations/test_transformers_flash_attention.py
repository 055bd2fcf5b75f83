"""transformers' door to ``flash_attn.2``, ``.3`` and ``.4``: a small model on their stand-ins gives what it
gives on ``tiled``, logits and gradients of a padded batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from attnsel import Environment, override
from attnsel.integrations.transformers import register
from attnsel.runtime import dispatch
from emulated_flash_attn import installed

RELEASES = [
    ("flash_attn.2", "flash_attn", "2.8.3"),
    ("flash_attn.3", "flash_attn_3", "3.0.0"),
    ("flash_attn.4", "flash_attn_4", "4.0.0b36"),
]
BATCH, LENGTH = 2, 12


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    register()
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("attnsel", None)


@pytest.fixture(params=RELEASES, ids=lambda release: "-".join(release[::2]))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name, component, version = request.param
    env = Environment.describe("H100", cudnn_frontend=None, triton=None, **{component: version})
    monkeypatch.setattr(dispatch, "environment_of", lambda q: env)
    dispatch.clear_cache()
    with installed(int(name[-1]), version):
        yield name
    dispatch.clear_cache()


def step(model: Any, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits of real tokens and all gradients of one step."""
    ids = torch.randint(1, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=real, use_cache=False).logits
    kept = logits[real.bool()]
    kept.float().sin().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": kept.detach(), **grads}


def test_a_small_llama(backend: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 1.0)
    model.set_attn_implementation("attnsel")
    real = torch.ones(BATCH, LENGTH, dtype=torch.long)
    real[0, 7:] = 0
    with override(allow=("tiled",)):
        wanted = step(copy.deepcopy(model), real)
    with override(allow=(backend,)):
        actual = step(model, real)
    assert actual.keys() == wanted.keys()
    for name, one in wanted.items():
        largest = one.abs().max().item()
        torch.testing.assert_close(actual[name], one, rtol=0, atol=0.06 * largest, msg=name)
