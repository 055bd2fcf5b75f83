"""Planning of context parallelism: what ranks run and send, which exchange is open, what it would cost."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnsel import AttentionParams, Environment, InvalidInput, Policy
from attnsel.context_parallel import plan as cost
from attnsel.context_parallel import schedule
from attnsel.context_parallel.plan import plan
from attnsel.context_parallel.schedule import StepCall, steps_of
from attnsel.environment.gpus import familiar, figures_of
from attnsel.params.attention import MOST_RANKS
from attnsel.report.document import Document
from attnsel.report.text import to_text
from attnsel.selection import steps as geometry
from attnsel.selection.steps import Band, RankLayout, RingSizes, layouts, sizes_of
from tables import each

H100 = Environment.describe(gpu="H100")
LONG = AttentionParams(batch_size=1, num_heads=32, num_gqa_groups=8, max_seqlen_q=65536, cp_size=8)
COMMS = ("p2p", "all_gather", "a2a", "a2a+p2p")
LENGTHS = st.sampled_from([16, 32, 48])


def asked(**fields):
    return LONG.replace(**fields)


# ---- what the ranks run -----------------------------------------------------------------------------


def test_a_causal_ring_runs_a_diagonal_and_half_of_every_other_step():
    ring = plan(LONG, H100)["p2p"]
    for rank, steps in ring.ranks:
        assert [step.keys_of for step in steps] == [(rank - d) % 8 for d in range(8)]
        assert steps[0].calls == (StepCall("diagonal", 8192, 8192, 8192 * 8193 // 2),)
        for step in steps[1:]:
            earlier = StepCall("full", 8192, 4096, 8192 * 4096)
            later = StepCall("full", 4096, 8192, 4096 * 8192)
            assert step.calls == ((earlier,) if step.keys_of < rank else (later,))


@settings(deadline=None)
@given(
    comm=st.sampled_from(COMMS),
    size=st.sampled_from([2, 4]),
    seqlen_q=LENGTHS,
    seqlen_kv=LENGTHS,
    mask=st.sampled_from(["causal", "no_mask", "causal_bottom_right"]),
    left=st.sampled_from([-1, 0, 5, 17]),
    offsets=st.booleans(),
)
def test_all_ranks_together_compute_every_visible_pair_once(
    comm, size, seqlen_q, seqlen_kv, mask, left, offsets
):
    p = AttentionParams(
        num_heads=4,
        max_seqlen_q=seqlen_q,
        max_seqlen_kv=seqlen_kv,
        attn_mask_type=mask,
        window_size=(left, left if mask == "no_mask" else 0),
        cp_size=size,
        cp_comm_type=comm,
    )
    shift = seqlen_kv - seqlen_q if p.bottom_right_diagonal else 0
    right = p.window_size[1]
    visible = sum(
        (left < 0 or j - i - shift >= -left) and (right < 0 or j - i - shift <= right)
        for i in range(seqlen_q)
        for j in range(seqlen_kv)
    )
    for layout in layouts(p.replace(cp_comm_type=comm)):
        sizes = sizes_of(p, layout, offsets)
        ranks = [steps_of(sizes, comm, rank) for rank in range(layout.ring)]
        assert sum(call.pairs for steps in ranks for step in steps for call in step.calls) == visible


# ---- what they send ---------------------------------------------------------------------------------

MIB = 1 << 20


@each(
    ("comm", "forward", "backward"),
    [
        # K and V of a rank: 65536 / 8 rows × 8 heads × 256 × 2 bytes = 32 MiB, their gradients in float32 64
        ("p2p", 7 * 32, 7 * 32 + 8 * 64),
        ("all_gather", 7 * 32, 7 * 32 + 7 * 64),
        # q 64 MiB, k and v 32, out 64; one eighth of each stays
        ("a2a", 7 / 8 * 160, 7 / 8 * 160),
    ],
)
def test_bytes_that_a_rank_sends(comm, forward, backward):
    exchange = plan(LONG, H100)[comm]
    assert exchange.sent_bytes("forward") == forward * MIB
    assert exchange.sent_bytes("backward") == backward * MIB
    inference = plan(asked(is_training=False), H100)[comm]
    assert inference.sent_bytes() == forward * MIB


# ---- which are open, and who runs -------------------------------------------------------------------


def test_what_closes_an_exchange_or_leaves_it_to_fewer_kernels():
    made = plan(asked(num_heads=18, num_gqa_groups=18), H100)
    assert not made["a2a"].open
    assert [r.code for r in made["a2a"].why_not] == ["CP004"]
    assert made["a2a+p2p"].layout == RankLayout("a2a+p2p", 2, 4)
    assert "CP004  With a2a, query heads" in to_text(Document(made.blocks()))
    made = plan(asked(window_size=(4096, 0)), H100)  # around a ring for kernels with offsets alone
    assert set(made["p2p"].candidates) == {"triton", "tiled"}
    assert made["a2a"].backend == "cudnn"
    ring = made["p2p"]
    assert [step.shift for step in ring.ranks[0][1]] == [0, 1, 7], "a window saves messages"
    assert ring.sent_bytes("forward") == 2 * 32 * MIB
    made = plan(LONG, H100, Policy(deny=("cudnn",)))
    assert all("cudnn" not in exchange.candidates for exchange in made.exchanges)
    assert plan(LONG, H100, Policy(backend="tiled")).chosen.candidates == ("tiled",)


# ---- the estimate -----------------------------------------------------------------------------------


def test_figures_are_those_of_the_card_that_a_driver_names():
    assert [gpu.name for gpu in familiar() if figures_of(gpu.name) is None] == ["GB10"]
    for name, link in {
        "NVIDIA H100 80GB HBM3": 450,
        "NVIDIA A100-PCIE-40GB": 32,
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,  # a part of a card has a part of its rates
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "RTX 3090 Ti": None,
        "NVIDIA H100 PCIe": 64,
        "NVIDIA A10": 32,
        None: None,
    }.items():
        figures = figures_of(name)
        assert (figures and figures.link) == link, name


def test_a_call_s_time_is_its_operations_over_the_rate():
    machine = plan(LONG, H100).machine._replace(share=0.6)
    # 32 heads × 8192 rows are 2048 tiles: 15.5 waves of 132 SMs, so 16
    pairs = 8192 * 8193 // 2
    expected = cost.LAUNCH + 32 * pairs * 2 * 256 / (989.4e12 * 0.6 * 2048 / (16 * 132))
    call = StepCall("diagonal", 8192, 8192, pairs)
    assert cost.call_time(call, LONG, RankLayout("p2p", 1, 8), machine, "forward") == pytest.approx(expected)


def test_a_ring_waits_for_what_its_steps_do_not_hide():
    fast = plan(LONG, H100)["p2p"].estimate
    slow = plan(LONG, H100, link=1.0)["p2p"].estimate
    assert slow.computes == fast.computes
    # forward: seven blocks of 32 MiB at 0.8 GB/s; the last step computes and sends nothing
    block = cost.LATENCY + 32 * MIB / 0.8e9
    assert 0 < slow.forward - 7 * block < fast.forward / 4
    assert fast.waits < slow.waits
    assert slow.total == pytest.approx(slow.computes + slow.merges + slow.waits)


def test_merges_are_priced_where_results_are_merged():
    """With whole heads on each rank there is one part; only a sink is merged with it."""
    forward = {"is_training": False, "cp_comm_type": "a2a"}
    alone = plan(asked(**forward), H100)["a2a"].estimate
    sinks = plan(asked(**forward, softmax_type="learnable"), H100)["a2a"].estimate
    assert alone.merges == 0
    # 65536 rows × 4 heads × 128: a sum in float32 is read and written, the part in bf16 read, at 3.35 TB/s
    assert sinks.merges == pytest.approx(cost.LAUNCH + 65536 * 4 * 128 * (2 * 4 + 2) / 3.35e12, rel=1e-3)
    assert sinks.total > alone.total
    assert plan(asked(**forward), H100)["p2p"].estimate.merges > 0


@each(
    ("env", "fields", "why"),
    [
        (Environment.describe(gpu="sm90"), {}, "nothing is known about the arithmetic and links of sm90"),
        (Environment.describe(gpu="T4"), {"dtype": "bf16"}, "rates that are known of T4 are not for bf16"),
        (H100, {"dtype": "fp32"}, "not for fp32"),
        (Environment.describe(gpu="L4"), {"cp_size": 16}, "16 ranks leave the node"),
    ],
)
def test_without_figures_there_is_no_estimate_and_the_report_says_why(env, fields, why):
    made = plan(asked(**fields), env)
    assert made.machine is None
    assert why in made.no_estimate
    assert f"not ranked: {made.no_estimate}"[:40] in to_text(Document(made.blocks()), 200)
    assert all(exchange.estimate is None for exchange in made.exchanges)


def test_what_cannot_be_planned_is_named():
    for field in ("gpus_per_node", "link", "network"):
        with pytest.raises(InvalidInput, match="must be above 0"):
            plan(LONG, H100, **{field: 0})
    with pytest.raises(InvalidInput, match="cp_size = 1"):
        plan(asked(cp_size=1), H100)
    with pytest.raises(InvalidInput, match=f"cp_size = {MOST_RANKS + 1}: .*{MOST_RANKS}"):
        AttentionParams(cp_size=MOST_RANKS + 1)


@contextmanager
def few_steps():
    """As where a ring is so long that alike steps are counted, not listed."""
    schedule.sampled_steps.cache_clear()
    with mock.patch.object(schedule, "EVERY_STEP", 8):
        yield
    schedule.sampled_steps.cache_clear()


@settings(deadline=None, max_examples=30)
@given(
    size=st.integers(17, 40),
    mask=st.sampled_from(["causal", "no_mask"]),
    lengths=st.sampled_from([(1, 1), (2, 2), (1, 3)]),
)
def test_a_long_ring_is_counted_as_step_by_step(size, mask, lengths):
    rows = tuple(2 * size * n for n in lengths)
    band = Band(None, 0 if mask == "causal" and rows[0] == rows[1] else None)
    sizes = RingSizes(rows[0], rows[1], size, band, False)
    with few_steps():
        found = schedule.sampled_steps(sizes, "p2p")
    for rank, runs in found:
        alike = [step for step in runs for _ in range(step.times)]
        assert [step.calls for step in alike] == [step.calls for step in steps_of(sizes, "p2p", rank)]
        shift = 0
        for step in runs:
            assert (step.shift, step.keys_of) == (shift, (rank - shift) % size)
            shift += step.times


@settings(deadline=None)
@given(
    size=st.integers(2, 12),
    rows=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    lo=st.one_of(st.none(), st.integers(-60, 20)),
    hi=st.one_of(st.none(), st.integers(-20, 60)),
    absolute=st.booleans(),
)
def test_of_gathered_keys_only_edges_are_looked_at_one_by_one(size, rows, lo, hi, absolute):
    if lo is not None and hi is not None and hi < lo:
        hi = lo
    sizes = RingSizes(size * rows[0], size * rows[1], size, Band(lo, hi), False, absolute)

    def parts():
        geometry.gathered_parts.cache_clear()
        found = [geometry.gathered_parts(sizes, rank) for rank in range(size)]
        geometry.gathered_parts.cache_clear()
        return [[(part.kind, part.q_rows, part.kv_rows) for part in calls] for calls in found]

    every = parts()
    with mock.patch.object(geometry, "_EVERY_CHUNK", 0):
        assert parts() == every
