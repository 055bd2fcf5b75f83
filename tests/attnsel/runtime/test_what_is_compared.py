"""What the self-check compares: which rows, how far off they may be, and which calls one check stands for.

Each is written a second time here, as the docstrings of ``reference`` and ``selfcheck`` say it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.pages import wrong_page
from attnsel.params import TensorSpec
from attnsel.runtime import reference, selfcheck
from attnsel.runtime.reference import RowBlock, SequenceSpan
from tables import each

torch.set_num_threads(1)


def rows_by_hand(spec: Spec, s: SequenceSpan) -> list[int]:
    """Eight rows at the start, in the middle, at the end, and around each row at which a bound of the band
    meets the first or the key after the last: j - i - shift = -left, or right, at j = 0 and j = len_kv."""
    shift = s.len_kv - s.len_q if spec.bottom_right else 0
    places = [0, s.len_q // 2 - 4, s.len_q - 8]
    bounds = []
    if spec.window_left >= 0:
        bounds.append(-spec.window_left)
    if spec.window_right >= 0:
        bounds.append(spec.window_right)
    if bounds and (spec.window_right == 0 or bounds != [1]):
        bounds.append(0)
    for bound, j in itertools.product(bounds, (0, s.len_kv)):
        i = j - bound - shift
        if 0 < i < s.len_q:
            places.append(i - 4)
    return sorted({row for first in places for row in range(max(first, 0), min(max(first, 0) + 8, s.len_q))})


@pytest.mark.parametrize("bottom_right", [False, True])
def test_rows_lie_where_a_mask_begins_and_ends(bottom_right: bool) -> None:
    wrong = []
    for left, right, len_q, len_kv in itertools.product(
        (-1, 0, 9, 50), (-1, 0, 7), (5, 61, 100), (0, 33, 80)
    ):
        if (left, right) == (-1, 1):
            continue
        spec = Spec(window_left=left, window_right=right, bottom_right=bottom_right)
        span = SequenceSpan(1, 0, len_q, 0, len_kv)
        runs = reference._runs(spec, span)
        found = [row for run in runs for row in run]
        if found != rows_by_hand(spec, span) or any(len(run) > 8 for run in runs):
            wrong.append((left, right, len_q, len_kv, runs))
    assert wrong == []


def cu(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_sequences_are_the_first_the_last_and_the_one_of_fewest_keys() -> None:
    q, k = torch.zeros(40, 2, 4), torch.zeros(60, 1, 4)
    lengths_q, lengths_kv = [5, 0, 6, 4, 3], [9, 1, 2, 0, 8]
    starts_q, starts_kv = [0, 7, 8, 20, 30, 40], [1, 12, 14, 20, 24, 60]
    packed = {
        "cu_seqlens_q": cu(0, *itertools.accumulate(lengths_q)),
        "cu_seqlens_kv": cu(0, *itertools.accumulate(lengths_kv)),
        "cu_seqlens_q_padded": cu(*starts_q),
        "cu_seqlens_kv_padded": cu(*starts_kv),
    }
    gaps = Inputs(q, k, k, **packed)
    spans = reference.sequences_of(Spec(packed=True), gaps)
    assert spans == list(map(SequenceSpan, range(5), starts_q[:-1], lengths_q, starts_kv[:-1], lengths_kv))
    chosen = {block.sequence.number for block in reference.choose_rows(Spec(packed=True), gaps)}
    assert chosen == {0, 2, 4}, "the one without queries is none, the one without keys says least"
    assert {b.sequence.number for b in reference.choose_rows(Spec(packed=True, dropout_p=0.1), gaps)} == {0}
    side_by_side = gaps._replace(cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None)
    assert [(s.start_q, s.start_kv) for s in reference.sequences_of(Spec(packed=True), side_by_side)] == list(
        zip(packed["cu_seqlens_q"].tolist(), packed["cu_seqlens_kv"].tolist(), strict=True)
    )[:-1]
    pool = torch.arange(6 * 1 * 4 * 2.0).view(6, 1, 4, 2)
    paged = Inputs(
        q,
        pool,
        pool,
        cu_seqlens_q=cu(0, 3, 7),
        seqlens_kv=cu(6, 9),
        block_table=cu(5, 1, 0, 2, 0, 4).view(2, 3),
    )
    assert reference.sequences_of(Spec(packed=True), paged) == [
        SequenceSpan(0, 0, 3, 0, 6),
        SequenceSpan(1, 3, 4, 0, 9),
    ]
    for span in reference.sequences_of(Spec(packed=True), paged):
        of_pages = [int(paged.block_table[span.number, j // 4]) * 4 + j % 4 for j in range(span.len_kv)]
        keys = reference.keys_of(pool, Spec(), paged, span)
        assert torch.equal(keys[0, 0], pool.view(24, 2)[of_pages])
    dense = Inputs(torch.zeros(2, 1, 9, 4), pool, pool, seqlens_kv=cu(7, 3))
    assert [s[2:] for s in reference.sequences_of(Spec(), dense)] == [(9, 0, 7), (9, 0, 3)]
    assert [s[2:] for s in reference.sequences_of(Spec(), dense._replace(seqlens_kv=None))] == [(9, 0, 4)] * 2


def allowed_by_hand(exact: Tensor, changed: list[Tensor], unit: float, row: int) -> float:
    size = exact.norm(dim=-1)
    moved = max(float((one - exact)[row].norm()) for one in changed)
    return 2.0 * moved + unit * (float(size[row]) + float(size.max()) / 32.0)


def test_how_far_off_a_row_may_be() -> None:
    gen = torch.Generator().manual_seed(1)
    exact = (
        torch.randn(6, 5, generator=gen, dtype=torch.float64) * torch.tensor([1, 3, 9, 1, 2, 4.0])[:, None]
    )
    changed = [exact + 0.01 * torch.randn(6, 5, generator=gen, dtype=torch.float64) for _ in range(3)]
    judged, unit = torch.ones(6, dtype=torch.bool), 2.0**-8
    for row in range(6):
        allowed = allowed_by_hand(exact, changed, unit, row)
        for off, bad in ((0.98, False), (1.02, True)):
            actual = exact.clone()
            actual[row, 2] += off * allowed
            ratio, error, share = reference._worst_row(actual, exact, changed, judged, unit, own=0.0) or (
                0,
                0,
                0,
            )
            assert (ratio > 1.0) is bad
            assert ratio == pytest.approx(off)
            assert error == pytest.approx(off * allowed / float(exact[row].norm()))
            assert share == pytest.approx(allowed / float(exact[row].norm()))
            apart = judged.clone()
            apart[row] = False
            assert reference._worst_row(actual, exact, changed, apart, unit, own=0.0)[0] == 0.0
    actual = exact.clone()
    actual[3, 1] = math.nan
    assert reference._worst_row(actual, exact, changed, judged, unit, own=0.0)[0] == math.inf
    nowhere = exact.clone()
    nowhere[3, 1] = -math.inf
    assert reference._worst_row(actual, nowhere, changed, judged, unit, own=0.0)[0] == 0.0, "not judged"
    assert reference._worst_row(exact, exact, changed, ~judged, unit, own=0.0) is None
    one = torch.full((1, 1), 2.0**-6, dtype=torch.float64)
    assert reference._worst_row(one, one * 0, [one * 0], judged[:1], unit, own=1.0)[0] == pytest.approx(
        4 / (1 + 1 / 32)
    )


def test_what_differs_says_where_the_worst_first() -> None:
    pieces = [RowBlock(SequenceSpan(n, 0, 50, 0, 9), range(a, a + 2)) for n, a in ((0, 0), (0, 42), (3, 17))]

    def numbers(step: float) -> dict[str, list[Tensor]]:
        return {
            "out": [torch.ones(1, 2, 2, 4, dtype=torch.float64) + (step if n == 1 else 0) for n in range(3)],
            "lse": [torch.ones(1, 2, 2, dtype=torch.float64) for n in range(3)],
            "dk": [
                torch.ones(1, 1, 9, 4, dtype=torch.float64) + (2 * step if n == 1 else 0) for n in range(2)
            ],
            "dbias": [torch.ones(1, 2, 2, 3, dtype=torch.float64)],
        }

    exact = numbers(0.0)
    found = reference.differences(numbers(1.0), exact, [exact], 2.0**-7, pieces, biased=False)
    assert [(d.name, d.where) for d in found[:2]] == [
        ("dk", "sequence 3, keys"),
        ("out", "sequence 0, rows from 42 on"),
    ]
    assert [d.ratio for d in found[2:]] == [0.0] * (len(found) - 2)
    assert len(found) == 3 + 3 + 2 + 1
    exact["lse"][1].fill_(-math.inf)
    hidden = reference.differences(numbers(1.0), exact, [exact], 2.0**-7, pieces, biased=True)
    assert [d.where for d in hidden if d.ratio > 1.0] == ["sequence 3, keys"], "rows that a bias hides"


def test_one_check_stands_for_lengths_of_a_kind() -> None:
    def kind(n: int) -> Any:
        return next(k for k in range(99) if n < 2**k), n % 128 == 0, n % 16 == 0

    lengths = (
        0,
        1,
        2,
        3,
        4,
        15,
        16,
        17,
        24,
        31,
        32,
        33,
        64,
        112,
        127,
        128,
        129,
        144,
        255,
        256,
        384,
        400,
        511,
        512,
    )
    for a, b in itertools.product(lengths, lengths):
        assert (selfcheck._length(a) == selfcheck._length(b)) == (kind(a) == kind(b)), (a, b)
    plain: dict[str, Any] = {"shape": (2, 3, 4, 16), "stride": (192, 64, 16, 1), "dtype": "bf16"}
    same = [plain, {**plain, "shape": (2, 5, 4, 16), "stride": (320, 64, 16, 1)}]
    assert len({selfcheck._strides(TensorSpec(**one)) for one in same}) == 1
    other: list[dict[str, Any]] = [
        plain,
        {**plain, "stride": (192, 16, 48, 1)},
        {**plain, "stride": (0, 64, 16, 1)},
        {**plain, "stride": (192, 72, 16, 1)},
        {**plain, "stride": (384, 128, 32, 2)},
        {**plain, "alignment": 8},
        {**plain, "requires_grad": True},
    ]
    assert len({selfcheck._strides(TensorSpec(**one)) for one in other}) == len(other)


def test_numbers_that_prove_nothing_get_a_stand_in() -> None:
    base = torch.randn(2 * 8 * 3 * 4 + 3)[3:].view(2, 8, 3, 4)
    zeros, alike, spoilt = torch.zeros_like(base), base[:, :1].expand(2, 8, 3, 4), base.clone()
    spoilt[1, 7, 2, 3] = math.inf
    one_row, one_zero = base[:, :1].clone(), torch.zeros(2, 1, 3, 4)
    for t, kept in (
        (base, True),
        (zeros, False),
        (alike, False),
        (spoilt, False),
        (one_row, True),
        (one_zero, False),
    ):
        made = selfcheck._random_where_alike((base, t, base), 1)
        assert made[0] is made[2] is base
        assert (made[1] is t) is kept
        assert made[1].stride() == t.stride()
        assert made[1].data_ptr() % 64 == t.data_ptr() % 64
        assert made[1].isfinite().all()
        assert kept or made[1].float().std() > 0.5
    leaf = zeros.requires_grad_()
    first, second, third = selfcheck._random_where_alike((leaf, leaf, leaf), 1)
    assert first.requires_grad
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


@each("tensors, sound", [
    ({}, True), ({"bias": torch.tensor([0.0, -math.inf])}, True), ({"bias": torch.tensor([0.0, math.nan])}, False),
    ({"softmax_offset": torch.tensor([math.nan])}, False), ({"alibi_slopes": torch.tensor([1.0, math.nan])}, False),
])  # fmt: skip
def test_what_has_no_stand_in_must_be_numbers(tensors: dict[str, Tensor], sound: bool) -> None:
    q = torch.ones(1, 1, 1, 1)
    assert selfcheck._comparable(Inputs(q, q, q, **tensors)) is sound


def test_a_wrong_page_is_the_first_that_is_read() -> None:
    table = torch.tensor([[0, 9, 9], [2, 3, -1]])
    asked: dict[str, Any] = {"page_size": 4, "pages": 3}
    assert [wrong_page(table, cu(*lengths), **asked) for lengths in ((4, 4), (5, 4), (4, 5), (0, 12))] == [
        None, (0, 1, 9), (1, 1, 3), (1, 1, 3)
    ]  # fmt: skip


def test_a_unit_is_that_of_the_device_and_type() -> None:
    here = {torch.bfloat16: -7, torch.float16: -10, torch.float32: -18, torch.float64: -40}
    assert {t: math.log2(reference.unit_of(torch.ones(1, dtype=t))) for t in here} == here
    assert reference.unit_of(torch.ones(1, device="meta")) == 2.0**-10
    assert reference.unit_of(torch.ones(1, device="meta").half()) == 2.0**-10
    assert dataclasses.replace(Spec(), packed=True).packed
