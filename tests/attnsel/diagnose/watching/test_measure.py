"""Time and memory, where they are asked for, with an expectation beside them; recorded_calls/watching.txt has
what is kept of them, also on a GPU."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from attnsel.diagnose.watching import by_hand_call  # noqa: E402
from attnsel.diagnose.watching import observe as measure  # noqa: E402
from attnsel.diagnose.watching.session import watch  # noqa: E402


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
