"""Under torch.compile: what Inductor leaves to aten is seen, and regions are compiled once."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from attnsel.diagnose.watching.session import watch  # noqa: E402


def by_sdpa(q, k, v):
    return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)


def by_hand(q, k, v):
    return (q @ k.mT * 0.25).softmax(-1) @ v


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def run(function, backend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 64, 16) for _ in range(3))
    compiled = torch.compile(function, backend=backend)
    return [compiled(q, k, v) for _ in range(3)]


def test_a_compiled_region_is_compiled_once_and_seen_through_aten():
    with watch() as w:
        run(by_sdpa, "aot_eager")
    assert torch._dynamo.utils.counters["frames"]["ok"] == 1
    (site,) = w.sites
    assert site.compiled
    assert site.forward == "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert site.params.attn_mask_type == "causal"
    assert site.calls == 3
    assert "test_compiled.py" in site.where
    assert any("1 region" in line for line in w.recorder.unseen)
    with watch() as w:
        by_hand(*(torch.randn(2, 4, 64, 16) for _ in range(3)))
    assert not w.recorder.unseen, "without a compilation there is nothing to say"


def test_training_says_that_its_backward_is_not_counted():
    compiled = torch.compile(by_sdpa, backend="aot_eager")
    q, k, v = (torch.randn(2, 4, 64, 16, requires_grad=True) for _ in range(3))
    with watch() as w:
        for _ in range(2):
            compiled(q, k, v).sum().backward()
    (site,) = w.sites
    assert (site.calls, site.backward_calls, site.params.is_training) == (2, 0, True)
    assert any("backward of a compiled region" in note for note in site.notes)
