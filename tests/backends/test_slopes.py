"""ALiBi's own slopes: their numbers, and what is remembered of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from attnsel.backends import checks as slopes
from attnsel.backends.checks import default_slopes, is_default
from tables import each

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    slopes._place.cache_clear()
    yield
    slopes._place.cache_clear()


@each("heads", [1, 8, 12, 33])
def test_the_papers_sequence(heads: int) -> None:
    """Section 3 of "Train Short, Test Long": 2^(-8 i / n) for a power of two, else every other one more."""
    power = 1 << (heads.bit_length() - 1)
    wanted = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    wanted += [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * (heads - power), 2)]
    made = default_slopes(heads, CPU)
    assert made.dtype == torch.float32
    assert made.tolist() == torch.tensor(wanted, dtype=torch.float32).tolist()


def test_what_is_made_while_a_graph_is_captured_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is the graph's; kernels that compute the slopes themselves know them all the same."""
    monkeypatch.setattr(slopes, "capturing", lambda device: True)
    captured = default_slopes(4, CPU)
    assert is_default(captured)
    monkeypatch.undo()
    kept = default_slopes(4, CPU)
    assert kept is not captured
    assert kept.tolist() == captured.tolist()
    monkeypatch.setattr(slopes, "capturing", lambda device: True)
    assert default_slopes(4, CPU) is kept
    assert is_default(kept)
    assert not is_default(kept.clone())


def test_those_without_memory_are_not_kept_and_nothing_is_copied_from_the_host() -> None:
    """A capture allows no copy from pageable memory: no operator takes a tensor of the CPU's to another."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.device("meta"):
        made = slopes._computed(12, torch.device("meta"))
    assert (made.device.type, made.shape) == ("meta", (12,))
    with torch._subclasses.FakeTensorMode():
        default_slopes(4, CPU)
    assert type(default_slopes(4, CPU)) is torch.Tensor
