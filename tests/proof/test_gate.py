"""The kernels through the real compiler, for GPUs that are not here."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton

import pool
from aot import build
from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.backends.triton import compiler as turing
from attnsel.backends.triton.blocks import ARCHS, DECODE_ROWS, PASSES, Block, Tiles, choose
from attnsel.backends.triton.launch import (
    Buffers,
    Launch,
    backward_launches,
    check,
    decode_launches,
    forward_launch,
    make_call,
    make_parts,
)
from attnsel.backends.triton.tile import EDGES
from attnsel.environment.gpus import ARCHITECTURES
from gate import (
    FEATURES,
    OUTSIDE,
    Configuration,
    KernelReport,
    configurations,
    launch_of,
    matrix_work,
    report_on,
    reports,
    run_gate,
)
from gate_changes import changes
from machine_code import compile_launch, ptxas_log, warnings_in
from paths import ROOT

TABLE = json.loads((ROOT / "benchmarks/results/triton-gate.json").read_text(encoding="utf-8"))

REPRESENTATIVE = [
    Configuration("forward", 75, 64, 64, "fp16"),
    Configuration("forward", 75, 128, 128, "fp16", "window"),
    Configuration("dkdv", 75, 128, 128, "fp16"),
    Configuration("forward", 80, 128, 128, "bf16"),
    Configuration("dkdv", 80, 64, 64, "bf16"),
    Configuration("dq", 86, 128, 128, "bf16"),
    Configuration("forward", 90, 128, 128, "bf16", "full"),
    Configuration("forward", 90, 128, 128, "bf16", "window"),
    Configuration("dq", 90, 64, 64, "bf16", "full"),
    Configuration("dkdv", 90, 128, 128, "bf16"),
    Configuration("forward", 120, 128, 128, "bf16", "full"),
    Configuration("forward", 86, 576, 512, "bf16"),
    Configuration("forward", 80, 64, 64, "bf16", "paged"),
    Configuration("forward", 90, 128, 128, "bf16", "paged-256"),
    Configuration("decode", 75, 128, 128, "fp16", "causal", rows=64),
    Configuration("decode", 80, 128, 128, "bf16", "paged", rows=16),
    Configuration("decode", 90, 576, 512, "bf16", "paged-256", rows=64),
]


reported = cache(report_on)  # several tests look at the same kernel


@pytest.mark.parametrize("configuration", REPRESENTATIVE, ids=str)
def test_compiles_into_tensor_core_code_that_fits_and_spills_nothing(configuration: Configuration) -> None:
    report = reported(configuration)
    assert report.error is None
    assert report.spills == 0
    assert 0 < report.shared_memory <= report.shared_memory_limit
    assert 0 < report.registers <= 255
    wanted = {75: "HMMA.1688", 80: "HMMA.16816", 86: "HMMA.16816", 90: "HGMMA", 120: "HMMA.16816"}
    assert any(name.startswith(wanted[configuration.arch]) for name in report.matrix_instructions)
    assert report.ok


@pytest.mark.skipif(triton.__version__ != TABLE["triton"], reason="the table is of another release")
@pytest.mark.parametrize("configuration", REPRESENTATIVE, ids=str)
def test_no_kernel_is_slower_than_in_the_committed_table(configuration: Configuration) -> None:
    """What is meant is committed with the table: ``python benchmarks/triton_gate.py``."""
    report = json.loads(json.dumps(reported(configuration).as_json()))
    assert [change for change in changes([report], TABLE["kernels"]) if change.worse] == []


@pytest.mark.parametrize("configuration", REPRESENTATIVE, ids=str)
def test_the_hottest_loop_multiplies_at_least_the_tile(configuration: Configuration) -> None:
    report = reported(configuration)
    assert report.loop is not None
    assert report.loop.instructions in report.loops
    assert report.matrix_work is not None
    assert report.matrix_work >= 1


@pytest.mark.parametrize("warps", [4, 8])
def test_products_that_warps_repeat_are_counted(warps: int) -> None:
    """64 keys are four warps' rows of 16: the products of four more are the same."""
    block = Block(32, 64, warps, 2)
    inputs = meta_inputs(False, 64)
    call = make_call(
        Spec(), inputs._replace(attn_mask=None, bias=None, alibi_slopes=None), Tiles(*[block] * 4)
    )
    lse = torch.empty(64, 64, 64, dtype=torch.float32, device="meta")
    buffers = Buffers(inputs.q, lse, lse, inputs.q, inputs.k, inputs.v, None, None)
    (launch,) = backward_launches(call, 80, Result(inputs.q, lse), None, buffers, only="dkdv")
    assert matrix_work(launch, compile_launch(launch, 80)) == warps / 4


def split_forward() -> Launch:
    """The forward without a right bound, with a loop of its own for unmasked tiles all the same."""
    launch = launch_of(Configuration("forward", 90, 64, 64, "bf16", "full"))
    return replace(launch, args=launch.args | {"MASKS": EDGES.value, "RIGHT": False, "window_right": -1})


def test_a_serialised_loop_is_seen_twice() -> None:
    """By what ptxas says, and in the machine code, where each product is waited for."""
    made = compile_launch(split_forward(), 90)
    assert len(made.warnings) == 1
    assert "(C7515)" in made.warnings[0]
    assert made.loop is not None
    assert made.loop.waits == made.loop.matrix > 4
    assert made.loop.serialised
    launch = launch_of(Configuration("forward", 90, 64, 64, "bf16", "causal"))
    clean = compile_launch(launch, 90)
    assert clean.warnings == ()
    assert clean.loop is not None
    assert clean.loop.matrix_per_wait is not None
    assert clean.loop.matrix_per_wait >= 4


def test_ptxas_says_the_same_where_triton_has_no_switch_for_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = split_forward()
    ptx = build(launch, 90).asm["ptx"]
    told = warnings_in(ptxas_log(ptx, launch, 90))
    monkeypatch.delattr(triton, "knobs")
    assert warnings_in(ptxas_log(ptx, launch, 90)) == told != ()


@pytest.mark.parametrize(
    ("line", "warnings"),
    [
        (
            "ptxas info    : (C7510) Potential Performance Loss: why",
            ("(C7510) Potential Performance Loss: why",),
        ),
        ("ptxas-blackwell info    : (C7519) why", ("(C7519) why",)),
        (
            "ptxas warning : Value of threads per SM is out of range",
            ("Value of threads per SM is out of range",),
        ),
        ("ptxas info    : Used 228 registers, used 1 barriers", ()),
        ("    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", ()),
    ],
)
def test_warnings_of_ptxas(line: str, warnings: tuple[str, ...]) -> None:
    log = f"ptxas info    : 11 bytes gmem\n{line}\n{line}\n"
    assert warnings_in(log) == warnings


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"error": "RuntimeError: no"}, "RuntimeError: no"),
        ({"spills": 3}, "3 spills"),
        ({"shared_memory": 233000}, "233000 bytes of shared memory, 232448 allowed"),
        ({"matrix_instructions": ()}, "no matrix instruction"),
        ({"warnings": ("(C7515) why",)}, "ptxas: (C7515) why"),
    ],
)
def test_faults_in_words(fields: dict[str, Any], fault: str) -> None:
    report = KernelReport(
        "forward", 90, 64, 64, "bf16", "full", (64, 64), 4, 2, 99, 0, 1024, 232448, ("HGMMA",), 0.5
    )
    assert report.ok
    faulty = dataclasses.replace(report, **fields)
    assert faulty.faults == (fault,)
    assert not faulty.ok


def test_few_spills_outside_of_the_loop_are_no_fault() -> None:
    report = report_on(Configuration("forward", 75, 64, 64, "fp16"))
    assert report.loop is not None
    assert report.loop.local == 0
    spilling = dataclasses.replace(report, spills=OUTSIDE)
    assert spilling.ok
    assert not dataclasses.replace(report, spills=OUTSIDE + 1).ok
    assert not dataclasses.replace(spilling, loop=dataclasses.replace(report.loop, local=1)).ok


@pytest.mark.parametrize("kernel", ["forward", "dq"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_calls_without_a_bound_are_not_serialised_on_hopper(kernel: str, head_dim: int) -> None:
    """With the bound that nothing reaches, and the numbers of a launch are the same: see test_loops.py."""
    launch = launch_of(Configuration(kernel, 90, head_dim, head_dim, "bf16", "full"))
    assert launch.args["RIGHT"]
    assert launch.args["window_right"] == 1 << 30
    report = reported(Configuration(kernel, 90, head_dim, head_dim, "bf16", "full"))
    assert report.warnings == ()
    assert report.loop is not None
    assert report.loop.matrix_per_wait is not None
    assert report.loop.matrix_per_wait > 2


def test_the_merge_multiplies_no_matrices() -> None:
    report = report_on(Configuration("merge", 80, 128, 128, "bf16"))
    assert (report.error, report.spills, report.matrix_instructions) == (None, 0, ())
    assert report.ok


@pytest.mark.parametrize("kernel", ["forward", "decode", "merge", "rows", "dkdv", "dq", "dbias"])
def test_every_feature_at_once_spills_nothing(kernel: str) -> None:
    assert report_on(Configuration(kernel, 80, 64, 64, "bf16", "all")).ok


def test_reports_of_several_processes_come_in_order() -> None:
    seen: list[tuple[int, int]] = []
    wanted = [Configuration("rows", arch, 64, 64, "bf16") for arch in (80, 90)]
    wanted.insert(1, dataclasses.replace(wanted[0], feature="none"))
    made = reports(wanted, lambda done, total, _: seen.append((done, total)), jobs=2)
    assert [(r.arch, r.ok) for r in made] == [(80, True), (80, False), (90, True)]
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_worker_that_dies_costs_its_own_result() -> None:
    made = dict(pool.apply(os._exit, [3], jobs=1))
    assert "exit code 3" in str(made[0])


def test_turings_hook_is_out_again_afterwards() -> None:
    before = triton.knobs.runtime.add_stages_inspection_hook
    with turing.tensor_cores():
        assert triton.knobs.runtime.add_stages_inspection_hook is not before
        with turing.tensor_cores():  # a second compile inside, from a callback
            pass
    assert triton.knobs.runtime.add_stages_inspection_hook is before


def test_what_the_compiler_refuses_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr("machine_code.compile_launch", refuse)
    seen: list[tuple[int, int]] = []
    chosen = {"head_dims": [(64, 64)], "dtypes": ["fp16"], "features": ["full"]}
    made = run_gate([80], progress=lambda done, total, _: seen.append((done, total)), **chosen)
    assert [report.error for report in made] == ["RuntimeError: PassManager::run failed"] * 3
    assert not any(report.ok for report in made)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_report_has_the_documented_fields() -> None:
    report = KernelReport(
        "forward", 80, 64, 64, "fp16", "causal", (64, 64), 4, 2, 99, 0, 1024, 166912, ("HMMA.16816.F32",), 0.5
    )
    fields = json.loads(json.dumps(report.as_json()))
    wanted = "kernel arch head_dim_qk head_dim_v dtype block warps stages registers spills shared_memory "
    wanted += "shared_memory_limit matrix_instructions seconds warnings loop loops rows faults ok"
    assert set(wanted.split()) <= fields.keys()


def test_launches_carry_exactly_the_arguments_of_their_kernels() -> None:
    for kernel in ("forward", "decode", "merge", "rows", "dkdv", "dq", "dbias"):
        launch = launch_of(Configuration(kernel, 90, 64, 64, "bf16", "all"))
        assert list(launch.args) == launch.kernel.arg_names


def test_table_has_a_tile_for_everything_the_rules_allow() -> None:
    for arch in {*ARCHS, *(arch for arch in ARCHITECTURES if arch >= 75)}:  # TRITON002 refuses older ones
        for d, e in [(8, 8), (64, 64), (80, 96), (128, 128), (192, 128), (256, 256)]:
            for name in PASSES:
                if arch < 80 and name == "dkdv" and d > 128:
                    with pytest.raises(ValueError, match="at most 128"):
                        choose(name, arch, d, e, 2)
                else:
                    choose(name, arch, d, e, 2)


@pytest.mark.parametrize(
    ("name", "arch", "d", "itemsize", "message"),
    [
        ("forward", 70, 64, 2, "sm75"),
        ("dq", 90, 257, 2, "stop at head_dim 256"),
        ("forward", 90, 577, 2, "the forward at 576"),
        ("forward", 90, 576, 4, "in float32"),
    ],
)
def test_outside_the_table_is_refused(name: str, arch: int, d: int, itemsize: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(name, arch, d, 64, itemsize)


def test_turing_is_compiled_for_float16_only() -> None:
    assert {c.dtype for c in configurations([75])} == {"fp16"}


def test_features_that_score_pairs_otherwise_are_compiled_at_64_and_128() -> None:
    made = {(c.kernel, c.head_dim_qk, c.dtype, c.feature) for c in configurations([90])}
    extra = {row for row in made if row[3] not in FEATURES}
    assert extra == {
        (kernel, d, "bf16", feature)
        for kernel in ("forward", "dkdv", "dq")
        for d in (64, 128)
        for feature in ("packed", "window", "dropout", "bias")
    }
    assert {c.dtype for c in configurations([75]) if c.feature == "packed"} == {"fp16"}


def test_pages_and_decode_are_compiled_without_a_backward() -> None:
    made = configurations([80], head_dims=[(128, 128), (576, 512)], dtypes=["bf16"])
    paged = {(c.kernel, c.feature) for c in made if "paged" in c.feature}
    assert paged == {(k, f) for k in ("forward", "decode") for f in ("paged", "paged-256")}
    assert {c.rows for c in made if c.kernel == "decode"} == set(DECODE_ROWS)
    assert [c.feature for c in made if c.kernel == "merge"] == ["causal"] * 2


@pytest.mark.parametrize("arch", ARCHS)
def test_decode_takes_the_rows_there_are(arch: int) -> None:
    for width in (64, 128):
        rows = [choose("decode", arch, width, width, 2, rows=n).m for n in (1, 16, 17, 33, 999)]
        assert rows == [16, 16, 32, 64, 64]
    assert choose("decode", arch, 576, 512, 2, rows=128).m == (64 if arch == 90 else 32)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_whole_table(arch: int) -> None:
    assert [report for report in run_gate([arch]) if not report.ok] == []


def meta_inputs(packed: bool, size: int) -> Inputs:
    """Every optional tensor at once, every dimension of ``size`` but the head dimension, no memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    qkv = empty(size, size, 64) if packed else empty(size, size, size, 64)
    cu, lengths = empty(size + 1, dtype=torch.int32), empty(size, dtype=torch.int32)
    places = {f"cu_seqlens_{name}": cu for name in ("q", "kv", "q_padded", "kv_padded")}
    scalar = empty(dtype=torch.int64)
    return Inputs(
        qkv,
        qkv,
        qkv,
        attn_mask=empty(size, size, size, size, dtype=torch.bool),
        bias=empty(size, size, size, size),
        alibi_slopes=empty(size, size, dtype=torch.float32),
        softmax_offset=empty(size, dtype=torch.float32),
        **(places if packed else {"seqlens_q": lengths, "seqlens_kv": lengths}),
        dropout_seed=scalar,
        dropout_offset=scalar,
        max_seqlen_q=size,
        max_seqlen_kv=size,
    )


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_sizes_of_one_and_packed_calls_compile(packed: bool) -> None:
    """Triton turns an argument of 1 into a constant: other types meet in the kernel then."""
    inputs = meta_inputs(packed, 1)
    spec = Spec(packed=packed, window_left=3, window_right=0, softmax_type="learnable", dropout_p=0.1)
    spec = replace(spec, return_max_logit=True)
    call = make_call(spec, inputs)
    q = inputs.q
    lse = torch.empty((1, 1) if packed else (1, 1, 1), dtype=torch.float32, device="meta")
    partial = torch.empty(1, 1, 1, dtype=torch.float32, device="meta")
    buffers = Buffers(q, lse, lse, q, q, q, inputs.bias, partial)
    launches = [forward_launch(call, 80, q, lse, partial, call.block("forward", 80))]
    launches += backward_launches(call, 80, Result(q, lse), lse, buffers)
    assert [launch.name for launch in launches] == ["forward", "rows", "dkdv", "dq", "dbias"]
    block = call.block("decode", 80)
    launches += decode_launches(call, q, lse, partial, make_parts(call, 1, block), block)
    launches += decode_launches(call, q, lse, partial, make_parts(call, 2, block), block)
    assert [launch.name for launch in launches[5:]] == ["decode", "decode", "merge"]
    for launch in launches:
        assert compile_launch(launch, 80).fits, launch.name


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_one_page_for_one_sequence_compiles(packed: bool, page_size: int) -> None:
    inputs = meta_inputs(packed, 1)
    pool = torch.empty(1, 1, page_size, 64, dtype=torch.float16, device="meta")
    one = torch.empty(1, dtype=torch.int32, device="meta")
    inputs = inputs._replace(
        k=pool, v=pool, cu_seqlens_kv=None, cu_seqlens_kv_padded=None, seqlens_kv=one, block_table=one[None]
    )
    spec = Spec(packed=packed, window_right=0, bottom_right=True, dropout_p=0.1)
    check(spec, inputs)
    call, q = make_call(spec, inputs), inputs.q
    lse = torch.empty((1, 1) if packed else (1, 1, 1), dtype=torch.float32, device="meta")
    launches = [forward_launch(call, 80, q, lse, None, call.block("forward", 80))]
    block = call.block("decode", 80)
    launches += decode_launches(call, q, lse, None, make_parts(call, 2, block), block)
    for launch in launches:
        assert compile_launch(launch, 80).fits, launch.name
