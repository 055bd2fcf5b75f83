"""Whether strided tensors meet in memory, held against every address they have."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from attnsel.params.layout import TensorLayout

SMALL = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=4)


def tensor(shape: tuple[int, ...], stride: tuple[int, ...], size: int = 1, start: int = 0) -> TensorLayout:
    return TensorLayout("q", "bshd"[: len(shape)], shape, stride, size, False, storage=0, start=start)


def addresses(dims: list[tuple[int, int]]) -> list[int]:
    return [
        sum(i * step for i, (_, step) in zip(index, dims, strict=True))
        for index in itertools.product(*(range(n) for n, _ in dims))
    ]


@settings(max_examples=200)
@given(SMALL)
def test_a_tensor_overlaps_itself_iff_two_indices_are_one_element(dims: list[tuple[int, int]]) -> None:
    found = addresses(dims)
    shape, stride = zip(*dims, strict=True)
    assert tensor(shape, stride).overlaps_itself is (len(set(found)) < len(found))


@settings(max_examples=200)
@given(SMALL, SMALL, st.integers(0, 60), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_two_tensors_overlap_iff_they_share_a_byte(
    a: list[tuple[int, int]], b: list[tuple[int, int]], start: int, size_a: int, size_b: int
) -> None:
    bytes_a = {at * size_a + i for at in addresses(a) for i in range(size_a)}
    bytes_b = {start + at * size_b + i for at in addresses(b) for i in range(size_b)}
    (shape_a, stride_a), (shape_b, stride_b) = zip(*a, strict=True), zip(*b, strict=True)
    found = tensor(shape_a, stride_a, size_a).overlaps(tensor(shape_b, stride_b, size_b, start))
    assert found is bool(bytes_a & bytes_b)


def test_a_question_too_hard_has_no_answer_instead_of_a_wrong_one() -> None:
    # Odd steps: no sum of even ones is odd, and no bound says so.
    hard = ((1 << 17,) * 4, (1000003, 999983, 999979, 999961))
    assert tensor(*hard).overlaps_itself in (True, None)
    shape, stride = (4096, 64, 32, 128), (64 * 34 * 128, 34 * 128, 128, 1)
    assert tensor(shape, stride).overlaps_itself is False
    other = tensor((4096, 64, 1, 128), stride, 2, 32 * 128 * 2)
    assert tensor(shape, stride, 2).overlaps(other) is False
