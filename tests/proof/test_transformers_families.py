"""What models do with masks, and what they add to scores: a part of what ``transformers_families`` asks.

transformers is imported by the tests: collecting them does not wait for it.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from attention_function import Layer, qkv, reference
from attnsel import InvalidInput

SEEN = torch.ones(4, 4, dtype=torch.bool).tril()


@pytest.fixture(autouse=True)
def _transformers() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")


def attended(mask: Any, **more: Any) -> torch.Tensor:
    from attnsel.integrations.transformers import attention_forward

    out, _ = attention_forward(Layer(), *qkv(), mask, **more)
    return out


def hidden(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(4, 4).masked_fill(~seen, -torch.inf)


def test_a_mask_that_is_looked_at_is_the_one_that_was_seen() -> None:
    """Code of models writes to a view of its mask, moves it, makes it another type, and pickles it."""
    from attnsel.integrations.transformers import LazyMask, visible

    def mask() -> Any:
        return visible(batch_size=1, q_length=4, kv_length=4, q_offset=0, kv_offset=0, dtype=torch.float32)

    for kept in (mask().contiguous(), mask().detach(), mask().to("cpu"), mask()):
        assert type(kept) is LazyMask
        assert kept.seen is not None
    assert mask().float().equal(SEEN[None, None].float())
    assert (mask() | torch.zeros(4, dtype=torch.bool)).equal(SEEN[None, None])
    assert pickle.loads(pickle.dumps(mask())).equal(SEEN[None, None])
    written = mask()
    written[..., 1:, 0] = False
    torch.testing.assert_close(attended(written), reference(hidden(written.dense()[0, 0])))


def test_scores_and_keys_that_a_model_adds() -> None:
    """A position_bias, and the indices of DeepSeek-V3.2, beside a mask."""
    bias = torch.randn(1, 2, 4, 4)
    for mask in (None, SEEN[None, None], hidden(SEEN)[None, None]):
        out = attended(mask, position_bias=bias)
        torch.testing.assert_close(out, reference(bias.masked_fill(~SEEN, -torch.inf)))
    chosen = torch.tensor([[[0, 1], [0, 1], [1, 2], [0, 3]]] * 2, dtype=torch.int32)
    kept = SEEN & torch.zeros(4, 4, dtype=torch.bool).scatter(-1, chosen[0].long(), True)
    torch.testing.assert_close(attended(SEEN[None, None], indices=chosen), reference(hidden(kept)))
    with pytest.raises(InvalidInput, match="indices"):
        attended(None, indices=chosen)


CASES = {  # what the default tier shows of each family; all that generates runs nightly
    "mistral": ("generate offloaded",),
    "gemma2": ("generate static",),
    "paligemma": ("forward none",),
    "deepseek_v4": ("forward left", "chunks dynamic"),
    "deepseek_v32": ("forward left",),
    "afmoe": ("forward right",),
    "diffusion_gemma": ("forward none",),  # a window beside no mask
    "qwen3_vl_vision": ("forward none",),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_family_agrees_with_its_eager_code(kind: str) -> None:
    from transformers_families import family

    for case in CASES[kind]:
        told = list(family(kind, case))
        assert told
        assert [one.word for one in told if one.case == case] == ["equal"], told


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["llama", "gemma3_text", "gpt_oss", "qwen3", "mixtral", "bert", "t5gemma", "vit"]
)
def test_every_case_of_a_family(kind: str) -> None:
    from transformers_families import answers

    assert not [one for one in answers(kind, "", "-", 240.0) if one.word in ("differs", "error", "time")]
