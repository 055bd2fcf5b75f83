"""Which rows the self-check compares and how far off they may be (runtime/reference.py)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnsel.backends.contract import Spec
from attnsel.runtime import reference, selfcheck
from attnsel.runtime.reference import SequenceSpan

torch.set_num_threads(1)


def rows_by_hand(spec: Spec, s: SequenceSpan) -> list[int]:
    """Eight rows at the start, in the middle and at the end, and eight around each row at which the diagonal
    or a bound of the band (j - i - shift = 0, -left, right) meets the first key or the end of the keys."""
    shift = s.len_kv - s.len_q if spec.bottom_right else 0
    places = [0, s.len_q // 2 - 4, s.len_q - 8]
    bounds = {-spec.window_left} if spec.window_left >= 0 else set()
    bounds |= {spec.window_right} if spec.window_right >= 0 else set()
    for bound, j in itertools.product(bounds | {0} if bounds else (), (0, s.len_kv)):
        if 0 < j - bound - shift < s.len_q:
            places.append(j - bound - shift - 4)
    return sorted({row for first in places for row in range(max(first, 0), min(max(first, 0) + 8, s.len_q))})


@pytest.mark.parametrize("bottom_right", [False, True])
def test_rows_lie_where_a_mask_begins_and_ends(bottom_right: bool) -> None:
    wrong = []
    for left, right, len_q, len_kv in itertools.product(
        (-1, 0, 9, 50), (-1, 0, 7), (5, 61, 100), (0, 33, 80)
    ):
        spec = Spec(window_left=left, window_right=right, bottom_right=bottom_right)
        span = SequenceSpan(1, 0, len_q, 0, len_kv)
        runs = reference._runs(spec, span)
        if [row for run in runs for row in run] != rows_by_hand(spec, span) or max(map(len, runs)) > 8:
            wrong.append((left, right, len_q, len_kv, runs))
    assert wrong == []


def test_how_far_off_a_row_may_be() -> None:
    """Twice what a unit in the inputs moves it, a unit of its own size, and 1/32 of the largest row's."""
    gen = torch.Generator().manual_seed(1)
    wide: dict[str, Any] = {"generator": gen, "dtype": torch.float64}
    exact = torch.randn(6, 5, **wide) * torch.tensor([1, 3, 9, 1, 2, 4.0])[:, None]
    changed = [exact + 0.01 * torch.randn(6, 5, **wide) for _ in range(3)]
    every, unit = torch.ones(6, dtype=torch.bool), 2.0**-8

    def worst(actual: Tensor, judged: Tensor = every) -> tuple[float, float, float]:
        found = reference._worst_row(actual, exact, changed, judged, unit, own=0.0)
        assert found is not None
        return found

    sizes = exact.norm(dim=-1)
    for row, size in enumerate(sizes.tolist()):
        moved = max(float((one - exact)[row].norm()) for one in changed)
        allowed = 2.0 * moved + unit * (size + float(sizes.max()) / 32.0)
        for off in (0.98, 1.02):
            actual = exact.clone()
            actual[row, 2] += off * allowed
            assert worst(actual) == pytest.approx((off, off * allowed / size, allowed / size))
            assert worst(actual, every & (torch.arange(6) != row))[0] == 0.0
    actual[3, 1] = math.nan
    assert worst(actual)[0] == math.inf
    exact[3, 1] = -math.inf
    actual = exact.clone()
    actual[3, 1] = 1.0
    assert worst(actual)[0] == 0.0, "what is not finite is not judged"
    assert reference._worst_row(exact, exact, changed, ~every, unit, own=0.0) is None


def test_one_check_stands_for_lengths_of_a_kind() -> None:
    """The same power of two, and a multiple of 128, of 16, or neither."""

    def kind(n: int) -> tuple[int, bool, bool]:
        return next(k for k in range(99) if n < 2**k), n % 128 == 0, n % 16 == 0

    lengths = (0, 1, 2, 3, 4, 15, 16, 17, 24, 31, 32, 33, 64, 112, 127, 128, 129, 144, 255, 256, 384, 400)
    for a, b in itertools.product(lengths, lengths):
        assert (selfcheck._length(a) == selfcheck._length(b)) == (kind(a) == kind(b)), (a, b)
