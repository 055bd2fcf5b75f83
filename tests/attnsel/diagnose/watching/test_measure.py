"""Time and memory, where they are asked for, with an expectation beside them."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from attnsel.diagnose.watching import by_hand_call, measure  # noqa: E402
from attnsel.diagnose.watching.expected import with_expectation  # noqa: E402
from attnsel.diagnose.watching.record import Site  # noqa: E402
from attnsel.diagnose.watching.session import watch  # noqa: E402
from attnsel.diagnose.watching.sites import Seen, Tally  # noqa: E402
from attnsel.environment import Environment  # noqa: E402
from attnsel.params import AttentionParams  # noqa: E402


def steps(count=6):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 64, 16, requires_grad=True) for _ in range(3))
    for _ in range(count):
        F.scaled_dot_product_attention(q, k, v).sum().backward()
        ((q @ k.mT * 0.25).softmax(-1) @ v).sum().backward()
    return q.grad


def test_time_and_memory_of_each_site(monkeypatch):
    """By a clock that moves by 1 s whenever it is read."""
    with watch() as unasked:
        plain = steps()
    assert all(site.seconds is None and site.peak_bytes is None for site in unasked.sites)
    readings = itertools.count()
    for module in (measure, by_hand_call):
        monkeypatch.setattr(module, "perf_counter", lambda: float(next(readings)))
    with watch(time=True, memory=True) as w:
        watched = steps()
    assert torch.equal(plain, watched)
    sdpa, by_hand = w.sites
    assert (sdpa.seconds, sdpa.backward_seconds) == (1.0, 1.0)
    assert by_hand.seconds == 1.0
    assert sdpa.peak_bytes == 2 * 4 * 64 * 16 * 4
    assert by_hand.peak_bytes == 3 * 2 * 4 * 64 * 64 * 4
    expected = w.watched().sites
    assert expected[0].expected_bytes is not None
    assert expected[1].expected_bytes == 2 * 4 * 64 * 16 * 4
    assert expected[0].expected_seconds is None  # a CPU has no figures


def test_of_many_samples_the_median_after_the_warm_up_is_told():
    tally = Tally("a.py:1", Seen("aten", "x"))
    for seconds in (90.0, 80.0, 1.0, 5.0, 2.0, *[2.0] * 200):
        measure.sample(tally, measure.FORWARD, seconds)
    for size in (9, 9, 3, 4):
        measure.sample(tally, measure.PEAK, size)
    assert len(tally.extra[measure.FORWARD]) == measure.MOST_SAMPLES + measure.WARM_UP
    measure.settle([tally])
    assert (tally.extra["seconds"], tally.extra["peak_bytes"]) == (2.0, 3)


def test_a_gpu_with_figures_has_an_expected_time_of_what_was_measured():
    p = AttentionParams(max_seqlen_q=4096, num_heads=16, head_dim_qk=128, is_training=False)
    site = {"where": "a.py:1 f", "api": "aten", "params": p, "forward": "x", "candidate": "sdpa.flash"}
    h100 = Environment.describe("H100")
    assert with_expectation(Site(**site), h100) == Site(**site)
    told = with_expectation(Site(**site, seconds=1e-3), h100)
    assert told.expected_seconds == pytest.approx(p.flops / 989.4e12)
    assert told.expected_bytes is None
