"""cudnn as a candidate that runs: chosen, bound, differentiated, refused and passed over.

The environment is a described H100 and the library an emulation on CPU tensors
(tests/support/emulated_cudnn.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import emulated_cudnn
from attnsel import AttentionParams, DotProductAttention, Environment, attention, clear_cache, override
from attnsel.backends.cudnn import plans as session
from attnsel.backends.cudnn.plans import PLANS
from attnsel.debug import FallbackWarning, SlowPathWarning
from attnsel.decision import select
from attnsel.rules import REGISTRY
from attnsel.rules.cudnn.words import sentences
from attnsel.runtime import dispatch
from attnsel.runtime.refusals import likely_rules
from tables import each

torch.set_num_threads(1)
H100 = Environment.describe(gpu="H100", cudnn="9.13.0")


@pytest.fixture(autouse=True)
def an_h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = session.Session(emulated_cudnn, object(), torch.device("cpu"), ("9.13.0", "1.23.0"))
    monkeypatch.setattr(session, "current", lambda device: made)
    monkeypatch.setattr(dispatch, "environment_of", lambda q: H100)
    emulated_cudnn.built.clear()
    emulated_cudnn.refuse.clear()
    PLANS.clear()
    clear_cache()
    with override(allow=("cudnn", "tiled")), warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)
        yield
    clear_cache()
    PLANS.clear()


def qkv() -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    made = [torch.randn(2, 24, heads, 16, generator=gen).bfloat16() for heads in (4, 2, 2)]
    return tuple(t.requires_grad_() for t in made)


def test_it_is_chosen_runs_and_is_differentiated() -> None:
    module = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="causal")
    dout = torch.randn(2, 24, 64).bfloat16()
    found = []
    for backend in ("cudnn", "tiled"):
        q, k, v = qkv()
        with override(allow=(backend,)):
            out = module(q, k, v)
        assert module.last_selection is not None
        assert module.last_selection.backend == backend
        found.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0.05, atol=0.03)
    assert [graph.node for graph in emulated_cudnn.built] == ["sdpa", "sdpa_backward"]


def test_checkpointing_drops_the_same_entries_again() -> None:
    q, k, v = qkv()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, attention_dropout=0.3, is_training=True, backend="cudnn")
        return out

    grads = []
    for way in (layer, lambda *t: checkpoint(layer, *t, use_reentrant=False)):
        torch.manual_seed(3)
        out = way(q, k, v)
        grads.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)


@each("node", ["sdpa", "sdpa_backward"])
def test_a_plan_that_does_not_build_is_a_reason_one_warning_and_the_next_candidate(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated_cudnn.refuse[:] = [node]
    PLANS.clear()
    clear_cache()
    monkeypatch.setattr(emulated_cudnn, "reason", "Num hidden_dim should be less than or equal to 128")
    module = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="causal")
    q, k, v = qkv()
    with pytest.warns(FallbackWarning, match="hidden_dim should be") as caught:
        out = module(q, k, v)
    assert len([one for one in caught if one.category is FallbackWarning]) == 1
    out.sum().backward()  # the forward of the refused backward never ran
    assert module.last_selection is not None
    assert module.last_selection.backend == "tiled"
    (reason,) = module.last_selection["cudnn"].reasons
    assert reason.code == "RUNTIME001"
    direction = "backward" if node == "sdpa_backward" else "forward"
    assert f"cuDNN builds no {direction} plan (check_support)" in reason.message
    assert "engine 8: Num hidden_dim should be" in reason.message
    assert "closest to CUDNN235" in reason.message
    assert "RUNTIME001" in module.last_selection.report()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        module(*qkv())


def test_words_of_the_library_lead_to_its_rule_or_to_those_of_near_versions() -> None:
    assert {code for _, codes in sentences() for code in codes} <= REGISTRY.rules.keys()
    said = "Sliding window attention is only supported with max_s_q <= max_s_kv."
    assert likely_rules("cudnn", said, AttentionParams(), H100) == ("CUDNN014",)
    p = AttentionParams(head_dim_qk=192, head_dim_v=128, is_training=True)
    env = Environment.describe(gpu="B200", cudnn="9.13.0")
    found = likely_rules("cudnn", "No execution plans support the graph", p, env)
    assert found
    assert set(found) <= {reason.code for reason in select(p, env.replace(cudnn="9.10.0"))["cudnn"].reasons}
    far = env.replace(cudnn="9.28.0")
    assert likely_rules("cudnn", "No execution plans support the graph", p, far) == ()
