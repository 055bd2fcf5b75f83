"""The grid that ``conformance.py --execute`` runs: which features, lengths and tensors it has."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.contract import Result
from attnsel.backends.triton.launch import check
from ptx_interpreter.cases import CASES, DTYPES, Call, wanted_cases
from ptx_interpreter.grid import PAIRS, SWEEP, WIDE_SWEEP, Case
from ptx_interpreter.tensors import empty_is_nan, in_pages, make, upstream

FEATURES = (
    "window", "bottom-right", "softcap", "alibi", "bias", "mask", "dropout", "sinks", "lengths", "packed",
    "groups", "offsets",
)  # fmt: skip


def features_of(case: Case) -> set[str]:
    """Read off what is called, not off its name."""
    spec, inputs = make(case, torch.float32)
    has = {
        "window": spec.window_left > 0,
        "bottom-right": spec.bottom_right,
        "softcap": spec.softcap > 0,
        "alibi": inputs.alibi_slopes is not None,
        "bias": inputs.bias is not None,
        "mask": inputs.attn_mask is not None,
        "dropout": spec.dropout_p > 0,
        "sinks": spec.softmax_type != "vanilla" and inputs.softmax_offset is not None,
        "lengths": inputs.seqlens_q is not None or inputs.cu_seqlens_q_padded is not None,
        "packed": spec.packed,
        "groups": inputs.k.shape[1] > 1 and inputs.q.shape[1] > inputs.k.shape[1],
        "offsets": spec.q_offset != spec.kv_offset,
    }
    return {name for name, there in has.items() if there}


def test_every_two_features_stand_together_in_a_case_of_few() -> None:
    of_pairs = [features_of(case) for case in PAIRS]
    assert all(case in CASES for case in PAIRS)
    assert all(len(features) <= 4 for features in of_pairs)
    for two in itertools.combinations(FEATURES, 2):
        assert any(set(two) <= features for features in of_pairs), two


def test_every_feature_but_groups_stands_alone_in_a_case() -> None:
    alone = [features_of(case) for case in CASES if case.backward]
    for feature in set(FEATURES) - {"groups", "bottom-right"}:
        assert {feature} in alone or {feature, "window"} in alone, feature


def test_both_types_and_all_head_dimensions_are_there() -> None:
    called = wanted_cases((80,))
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256), (576, 512)):
        assert any(case.head_dims == dims for case, _, _ in called)
    for dims in ((64, 64), (128, 128)):
        assert {dtype for case, _, dtype in called if case.head_dims == dims} == {"bf16", "fp16"}
    assert {dtype for _, _, dtype in wanted_cases((75,))} == {"fp16"}


def test_the_lengths_have_every_remainder_a_lane_can_see() -> None:
    """Columns 2t and 2t + 1 of each 8 belong to one instruction, rows by 8."""
    columns = {(s_kv % 128 // 8, s_kv % 2) for _, s_kv in (each["lengths"] for each in SWEEP[2:])}
    assert {(k % 8, parity) for k, parity in columns} == set(itertools.product(range(8), range(2)))
    wide = {(s_kv % 128 // 8, s_kv % 2) for _, s_kv in (each["lengths"] for each in WIDE_SWEEP[2:])}
    assert wide == set(itertools.product(range(16), range(2)))
    rows = {(s_q % 64 // 8, s_q % 2) for s_q, _ in (each["lengths"] for each in SWEEP[2:])}
    assert rows == set(itertools.product(range(8), range(2)))  # they are columns of transposed scores
    assert {s_q % 64 // 8 for s_q, _ in (each["lengths"] for each in SWEEP[2:])} == set(range(8))
    assert all(length % 16 for each in SWEEP for length in each["lengths"])


def test_a_case_is_called_with_each_of_its_lengths_and_bounds() -> None:
    case = Case("x", {"window_left": 3, "softcap": 1.0}, also=({"lengths": (7, 9), "window_left": 5},))
    first, second = case.calls()
    assert (first.lengths, first.spec, first.also) == ((150, 201), {"window_left": 3, "softcap": 1.0}, ())
    assert (second.lengths, second.spec) == ((7, 9), {"window_left": 5, "softcap": 1.0})


@pytest.mark.parametrize("arch", [75, 90])
def test_every_call_of_the_grid_is_one_that_the_kernels_take(arch: int) -> None:
    for case, _, dtype in wanted_cases((arch,)):
        for each in case.calls():
            call = Call.of(each, arch, DTYPES[dtype])
            check(call.spec, call.given)


def test_the_quick_part_reaches_every_architecture_with_few_calls() -> None:
    archs = (75, 80, 86, 89, 90, 120)
    quick = wanted_cases(archs, quick=True)
    assert all(len(case.calls()) <= 3 for case, _, _ in quick)
    per_arch = {
        arch: [case.name for case, of, _ in quick if of == arch] for arch in (75, 80, 86, 89, 90, 120)
    }
    assert all(5 <= len(names) <= 8 for names in per_arch.values())
    assert all(len(set(names)) == len(names) for names in per_arch.values())
    together = set().union(*(features_of(case) for case, _, _ in quick))
    assert together >= set(FEATURES) - {"groups", "offsets"}


def test_rows_that_are_nobodys_hold_nan_and_no_others() -> None:
    (case,) = (case for case in CASES if case.name == "lengths")
    spec, inputs = make(case, torch.float32)
    dout, dlse = upstream(spec, inputs, Result(torch.zeros(inputs.q.shape), torch.zeros(inputs.q.shape[:3])))
    for name, t in (("q", inputs.q), ("kv", inputs.k), ("kv", inputs.v), ("q", dout), ("q", dlse[..., None])):
        lengths = inputs.seqlens_q if name == "q" else inputs.seqlens_kv
        assert lengths is not None
        for number, length in enumerate(lengths.tolist()):
            assert not t[number, :, :length].isnan().any()
            assert t[number, :, length:].isnan().all()
    assert inputs.seqlens_q is not None
    assert inputs.seqlens_q[0] < inputs.q.shape[2]


def test_packed_rows_between_sequences_hold_nan() -> None:
    (case,) = (case for case in CASES if case.name == "packed, apart, everything")
    _, inputs = make(case, torch.float32)
    assert inputs.cu_seqlens_kv is not None
    real = int(inputs.cu_seqlens_kv[-1])
    rows = inputs.k.isnan().all(-1).all(-1)
    assert (~rows).sum() == real
    assert rows.sum() == len(rows) - real > 0


def test_rows_lie_apart_in_memory() -> None:
    _, inputs = make(Case("x"), torch.float16)
    between = inputs.q.as_strided((16,), (1,), storage_offset=64)
    assert inputs.q.stride() == (150 * 2 * 80, 80, 2 * 80, 1)
    assert between.isnan().all()


def test_pages_that_are_nobodys_hold_nan() -> None:
    _, inputs = make(Case("x", lengths=(3, 40)), torch.float32)
    paged = in_pages(inputs, 16)
    assert paged.block_table is not None
    owned = set(paged.block_table[paged.block_table >= 0].tolist())
    assert len(owned) == 6
    for page in range(8):
        assert paged.k[page].isnan().all() == (page not in owned)


def test_memory_is_nan_until_it_is_written() -> None:
    with empty_is_nan():
        assert torch.empty(3).isnan().all()
        assert torch.empty((2, 2), dtype=torch.bfloat16).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
