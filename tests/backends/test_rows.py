"""Rows, sequences and pages as kernels are told of them, by the definition of each, row by row."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import int32
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.rows import (
    Side,
    bottom_right_window,
    check_open_right,
    longest_paged,
    longest_rows,
    lse_by_row,
    lse_by_sequence,
    sequences_of,
)

torch.set_num_threads(1)


def pairs(left: int, right: int, s_q: int, s_kv: int, shift: int) -> set[tuple[int, int]]:
    every = itertools.product(range(s_q), range(s_kv))
    sees = lambda d: (left < 0 or d >= -left) and (right < 0 or d <= right)  # noqa: E731
    return {(i, j) for i, j in every if sees(j - i - shift)}


SIZES = list(itertools.product((1, 2, 4, 6), (1, 3, 4, 5)))
BOUNDS = list(itertools.product((-1, 0, 1, 2, 3, 4, 5, 6), repeat=2))


def test_a_window_keeps_its_pairs_when_it_is_told_from_the_bottom_right() -> None:
    for (s_q, s_kv), (left, right), corner in itertools.product(SIZES, BOUNDS, (False, True)):
        spec = Spec(window_left=left, window_right=right, bottom_right=corner)
        inputs = Inputs(torch.zeros(1, 1, s_q, 8), *[torch.zeros(1, 1, s_kv, 8)] * 2)
        shift = s_kv - s_q
        moved = 0 if corner else shift
        none_such = (left >= 0 and left + moved < 0) or (right >= 0 and right - moved < 0)
        if none_such:
            with pytest.raises(ValueError, match=rf"there are {s_q} queries and {s_kv} keys"):
                bottom_right_window("op", spec, inputs)
            continue
        told = bottom_right_window("op", spec, inputs)
        assert pairs(told[0], told[1], s_q, s_kv, shift) == pairs(
            left, right, s_q, s_kv, shift if corner else 0
        )
        assert min(told) >= -1


def test_a_window_that_flash_attention_2_would_change_is_refused() -> None:
    for (s_q, s_kv), (left, right) in itertools.product(SIZES, BOUNDS):
        as_taken = [-1 if bound >= s_kv else bound for bound in (left, right)]  # flash_api.cpp, mha_fwd
        if min(as_taken) < 0 <= max(as_taken):
            as_taken = [s_kv if bound < 0 else bound for bound in as_taken]
        meant = pairs(left, right, s_q, s_kv, s_kv - s_q)
        taken = pairs(as_taken[0], as_taken[1], s_q, s_kv, s_kv - s_q)
        try:
            check_open_right("op", left, right, s_q, s_kv)
        except ValueError:
            assert s_q > s_kv + 1
            assert left >= 0 or right >= 0
            assert right < 0 or s_kv <= right < s_q - 1
        else:
            # A right bound that hides nothing, beside one on the left, is let through and is narrowed.
            assert meant == taken or right >= s_q - 1 > s_kv > left >= 0, (s_q, s_kv, left, right)


LENGTHS_Q, LENGTHS_KV, BEGINS = [4, 0, 3], [2, 5, 1], [1, 6, 8, 12]
CU_Q, CU_KV = ([0, *itertools.accumulate(n)] for n in (LENGTHS_Q, LENGTHS_KV))
PAGED: dict[str, Any] = {"block_table": int32([[0, 1], [2, 0], [1, 2]]), "seqlens_kv": int32(LENGTHS_KV)}
FORMS: list[tuple[bool, dict[str, Any]]] = [
    (False, {"seqlens_q": int32(LENGTHS_Q), "seqlens_kv": int32(LENGTHS_KV)}),
    (False, {"seqlens_q": int32(LENGTHS_Q)}),
    (False, {"seqlens_kv": int32(LENGTHS_KV)}),
    (True, {"cu_seqlens_q": int32(CU_Q), "cu_seqlens_kv": int32(CU_KV)}),
    (
        True,
        {"cu_seqlens_q": int32(CU_Q), "cu_seqlens_kv": int32(CU_KV), "max_seqlen_q": 4, "max_seqlen_kv": 5},
    ),
    (
        True,
        {"cu_seqlens_q": int32(CU_Q), "cu_seqlens_kv": int32(CU_KV), "cu_seqlens_q_padded": int32(BEGINS)},
    ),
    (False, PAGED),
    (False, {**PAGED, "seqlens_q": int32(LENGTHS_Q), "max_seqlen_kv": 6}),
    (True, {**PAGED, "cu_seqlens_q": int32(CU_Q)}),
    (True, {**PAGED, "cu_seqlens_q": int32(CU_Q), "cu_seqlens_q_padded": int32(BEGINS)}),
]


@pytest.mark.parametrize(("is_packed", "about"), FORMS)
def test_sequences_lie_where_they_are_said_to(is_packed: bool, about: dict[str, Any]) -> None:
    s_q, s_kv, spec = 7, 9, Spec(packed=is_packed)
    q, k = (torch.zeros(14, 1, 8),) * 2 if is_packed else (torch.zeros(3, 1, n, 8) for n in (s_q, s_kv))
    if "block_table" in about:
        k = torch.zeros(3, 1, 4, 8)
    inputs = Inputs(q, k, k, **about)
    found = sequences_of(spec, inputs)
    assert found is not None

    def fits(side: Side, of: str, lengths: list[int], most: int) -> list[int]:
        lengths = lengths if is_packed or f"seqlens_{of}" in about else [most] * 3
        begins = about.get(f"cu_seqlens_{of}_padded", about.get(f"cu_seqlens_{of}"))
        first = begins.tolist() if is_packed else [n * most for n in range(3)]
        cu = side.cu_seqlens.tolist()
        step = (len(cu) - 1) // 3  # two where gaps are sequences too
        assert [(cu[n * step], cu[n * step + 1]) for n in range(3)] == [
            (at, at + n) for at, n in zip(first, lengths, strict=False)
        ]
        real = {at + row for at, n in zip(first, lengths, strict=False) for row in range(n)}
        outside = side.outside.tolist() if side.outside is not None else [False] * side.rows
        assert outside == [t not in real for t in range(14 if is_packed else 3 * most)]
        assert side.longest == about.get(f"max_seqlen_{of}", 14 if is_packed else most)
        lse = torch.randn(2, side.rows)
        apart = lse_by_sequence(lse, side)
        assert apart.shape == (len(cu) - 1, 2, side.longest)
        for n, (begin, end) in enumerate(itertools.pairwise(cu)):
            assert torch.equal(apart[n, :, : end - begin], lse[:, begin:end])
            assert apart[n, :, end - begin :].isposinf().all()
        inside = [t for t in range(side.rows) if cu[0] <= t < cu[-1]]
        assert torch.equal(lse_by_row(apart, side)[:, inside], lse[:, inside])
        return cu

    cu = fits(found.q, "q", LENGTHS_Q, s_q)
    if "block_table" not in about:
        fits(found.kv, "kv", LENGTHS_KV, s_kv)
        return
    step = (len(cu) - 1) // 3
    used, table = found.seqused_kv, found.block_table
    assert isinstance(used, Tensor)
    assert isinstance(table, Tensor)
    assert used.tolist() == [n if not gap else 0 for n in LENGTHS_KV for gap in range(step)]
    assert table.tolist() == [row for row in PAGED["block_table"].tolist() for _ in range(step)]
    assert found.kv.cu_seqlens.tolist() == [0, *itertools.accumulate(used.tolist())]
    assert found.kv.longest == longest_paged(inputs) == about.get("max_seqlen_kv", 8)
    assert longest_rows(spec, inputs) == (14 if is_packed else s_q, found.kv.longest)
