"""What is said to have run is what PyTorch's profiler saw; why it ran is read right, or not told."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import attnsel  # noqa: E402
from attnsel.diagnose.watching import judge as judging  # noqa: E402

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
