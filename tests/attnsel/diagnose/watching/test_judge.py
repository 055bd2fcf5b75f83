"""What is said to have run is what PyTorch's profiler saw; why it ran is read right, or not told."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402

import attnsel  # noqa: E402
from attnsel.diagnose.watching import judge as judging  # noqa: E402

MATH = "aten::_scaled_dot_product_attention_math"
KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION)
pytestmark = pytest.mark.filterwarnings("ignore:.*")  # PyTorch tells why no kernel is left


def one(*arguments: Any, **named: Any) -> Any:
    """The judged site of one call, and its report."""
    with attnsel.watch() as seen:
        F.scaled_dot_product_attention(*arguments, **named)
    (site,) = seen.watched().sites
    return site, " ".join(seen.report().split())


def qkv(*shape: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape) for _ in range(3))


def test_a_mask_of_numbers_is_read_at_any_rank_in_question_and_fix():
    for shape, read in {
        (8, 8): "11ss",
        (1, 8): "111s",
        (4, 8, 8): "1hss",
        (2, 1, 8, 8): "b1ss",
        (2, 4, 8, 8): "bhss",
        (2, 1, 1, 8): "b1ss",
    }.items():
        site, told = one(*qkv(2, 4, 8, 16), attn_mask=torch.zeros(shape))
        assert site.params.core_attention_bias_shape == read, shape
        assert site.params.tensors.mask.shape == shape
        assert f"attn_mask fp32{list(shape)}" in told
        # A rank of three is the one thing against flash on a CPU.
        assert (site.candidate == "sdpa.math") == (len(shape) == 3)
        assert ("attn_mask=mask[None]" in site.fix) == (len(shape) == 3)


def test_why_math_ran_and_the_fix_that_gives_flash():
    q, k, v = qkv(4, 8, 16)
    site, told = one(q, k, v)  # without a batch
    assert (site.candidate, site.best, site.params.num_heads) == ("sdpa.math", "sdpa.flash", 4)
    assert "given in 3 dimensions" in told
    assert site.why[0].startswith("SDPA017")
    assert "(*(x[None] for x in (q, k, v)))[0]" in site.fix
    assert one(*(x[None] for x in (q, k, v)))[0].candidate == "sdpa.flash"
    site, told = one(torch.randn(2, 8, 16, 16), *qkv(2, 1, 16, 16)[:2])  # a head that broadcasts
    assert (site.candidate, site.best) == ("sdpa.math", "sdpa.flash")
    assert "enable_gqa is not set" in site.why[0]
    assert "enable_gqa=True" in site.fix
    assert "enable_gqa=false" in told


def test_a_kernel_that_was_switched_off_at_the_call_is_the_reason_afterwards_too():
    q, k, v = qkv(1, 2, 8, 8)
    with attnsel.watch() as seen:
        for backends in ([SDPBackend.MATH], [*KERNELS]):
            with sdpa_kernel(backends):
                F.scaled_dot_product_attention(q, k, v)
    told = {site.candidate: site for site in seen.watched().sites}
    assert "enable_flash_sdp=false" in told["sdpa.math"].switches
    assert told["sdpa.math"].why == ("turned off",)
    assert told["sdpa.flash"].why == ()


def test_where_another_kernel_ran_than_is_read_that_is_said_and_no_reason(monkeypatch):
    """As where PyTorch's checks change: here the answer to the call is one to another."""
    asked = judging.dispatched_by

    def wrong(dispatcher: str, p: Any, env: Any, switches: Any = None) -> Any:
        return asked(dispatcher, p.replace(attention_dropout=0.5, is_training=True), env, switches)

    monkeypatch.setattr(judging, "dispatched_by", wrong)
    site, told = one(*qkv(1, 2, 8, 8))
    assert "ran otherwise than read: sdpa.flash ran, and attnsel reads sdpa.math" in told
    assert (site.why, site.fix) == ((), "")


def test_a_tensor_subclass_can_be_made_while_operators_are_read():
    class Marked(torch.Tensor):
        pass

    with attnsel.watch() as seen:
        torch.ones(2).sum()
        assert seen.recorder.state["by_hand"].mode is not None
        assert type(Marked([1.0, 2.0])) is Marked
        assert type(causal_lower_right(4, 8)).__name__ == "CausalBias"
        assert type(torch.Tensor([1.0])) is torch.Tensor
    with torch.inference_mode(), attnsel.watch():
        torch.ones(2, 2).sum()
        torch.nn.functional.linear(
            torch.ones(1, 2, 2), torch.ones(2, 2)
        )  # composite: the mode is entered again
        assert type(causal_lower_right(4, 8)).__name__ == "CausalBias"
    assert "__new__" not in vars(torch.Tensor)
    assert type(Marked(2, 3)) is Marked


def test_an_operator_called_by_its_name_was_no_choice():
    q, k, v = qkv(1, 2, 8, 8)
    with attnsel.watch() as seen:
        torch.ops.aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, True)
    (site,) = seen.watched().sites
    assert (site.api, site.forward, site.params.attn_mask_type) == ("aten", MATH, "causal")
    assert site.why == (f"{MATH} is called by name",)
