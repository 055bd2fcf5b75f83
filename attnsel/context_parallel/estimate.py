"""How long an exchange would take: an estimate from data sheets, to rank exchanges, not to promise a time.

The model: a call takes its operations over the share of the peak rate that the candidate's kernels reach
(from its record, with its source), worse where its tiles leave SMs idle; a partial result that is merged is
read and written once in memory; a message takes a latency and its bytes over the link's bandwidth × LINKS. A
ring step takes the longer of computing and sending, of the slowest rank looked at; other messages are waited
for. Within a node ranks share its links, across nodes each has its own network adapter, and only all_gather
can use those of the whole node.

LINKS, LATENCY and LAUNCH are round figures, assumed and not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from attnsel.context_parallel.schedule import Message, Phase, RankStep, StepCall
from attnsel.environment.hardware_specs import Figures
from attnsel.params import ITEMSIZE, AttentionParams
from attnsel.selection.steps import RankLayout, merges_parts

LINKS = 0.8  # of a link's bandwidth
LATENCY = 10e-6  # seconds per message
LAUNCH = 5e-6  # seconds per kernel
TILE = 128  # query rows of one thread block
_FLOAT32 = 4


class Machine(NamedTuple):
    """One GPU and its links, as the estimate takes them. GB/s are per GPU and direction."""

    name: str
    figures: Figures
    sm_count: int | None
    share: float = 1.0  # of the peak that the kernels reach

    @property
    def words(self) -> str:
        f = self.figures
        text = f"{f.tflops:g} TFLOP/s, {f.link_name} {f.link:g} GB/s"
        if f.network is not None:
            text += f" within {f.per_node} GPUs, network {f.network:g} GB/s"
        return f"{text} at {100 * LINKS:.0f} %"

    def as_dict(self) -> dict[str, object]:
        return {"name": self.name, "sm_count": self.sm_count, **self.figures._asdict()}


class Estimate(NamedTuple):
    """Seconds, at a ``share`` of the peak that ``source`` measured. ``computes`` is the slowest rank's
    arithmetic, ``merges`` its partial results, ``waits`` what
    of the messages no computation hides."""

    total: float
    computes: float
    merges: float
    waits: float
    forward: float
    share: float = 1.0
    source: str = ""

    def as_dict(self) -> dict[str, float | str]:
        times = zip(self._fields[:5], self[:5], strict=True)
        rounded = {f"{name}_ms": round(1e3 * value, 6) for name, value in times}
        return {**rounded, "share_of_peak": self.share, "source": self.source}


def estimate(
    p: AttentionParams,
    layout: RankLayout,
    ranks: tuple[tuple[RankStep, ...], ...],
    sent: tuple[Message, ...],
    machine: Machine,
) -> Estimate:
    """One call of the module, forward and, in training, backward. ``ranks``: the steps of those looked at."""
    phases: list[Phase] = ["forward", "backward"] if p.is_training else ["forward"]
    computes = merges = waits = 0.0
    totals = []
    for phase in phases:
        here = [message for message in sent if message.phase == phase]
        hidden = [message for message in here if message.hidden]
        spent = 0.0
        begin = 0  # of a run of steps that are alike
        for i in range(max(map(len, ranks))):
            times = max(steps[i].times for steps in ranks if i < len(steps))
            now = [steps[i].calls for steps in ranks if i < len(steps)]
            compute = _slowest(call_time, now, p, layout, machine, phase)
            merge = 0.0
            if merges_parts(p, layout):
                merge = _slowest(merge_time, now, p, layout, machine, phase)
            send = sum(
                send_time(m, p, layout, machine) for m in hidden if m.first <= begin < m.first + m.times
            )
            computes, merges = computes + times * compute, merges + times * merge
            waits += times * max(0.0, send - compute - merge)
            spent += times * max(compute + merge, send)
            begin += times
        waiting = sum(m.times * send_time(m, p, layout, machine) for m in here if not m.hidden)
        waits += waiting
        totals.append(spent + waiting)
    return Estimate(sum(totals), computes, merges, waits, totals[0])


def _slowest(
    time: Callable[[StepCall, AttentionParams, RankLayout, Machine, Phase], float],
    ranks: list[tuple[StepCall, ...]],
    p: AttentionParams,
    layout: RankLayout,
    machine: Machine,
    phase: Phase,
) -> float:
    """Seconds that the slowest rank takes for its calls of one step."""
    return max(sum(time(call, p, layout, machine, phase) for call in calls) for calls in ranks)


def call_time(
    call: StepCall, p: AttentionParams, layout: RankLayout, machine: Machine, phase: Phase
) -> float:
    """Seconds of one kernel call."""
    d, e = p.head_dim_qk, p.head_dim_v
    heads = p.num_heads // layout.a2a
    per_pair = 2 * (d + e) if phase == "forward" else 2 * (3 * d + 2 * e)
    rate = machine.figures.tflops * 1e12 * machine.share
    if machine.sm_count:
        tiles = p.batch_size * heads * ceil(call.seqlen_q / TILE)
        rate *= tiles / (ceil(tiles / machine.sm_count) * machine.sm_count)
    return LAUNCH + p.batch_size * heads * call.pairs * per_pair / rate


def merge_time(
    call: StepCall, p: AttentionParams, layout: RankLayout, machine: Machine, phase: Phase
) -> float:
    """Seconds to add a part's result to float32 sums: the output, or in the backward dq, dk and dv."""
    heads, groups = p.num_heads // layout.a2a, p.num_gqa_groups // layout.a2a
    elements = heads * call.seqlen_q * p.head_dim_v
    if phase == "backward":
        elements = heads * call.seqlen_q * p.head_dim_qk
        elements += groups * call.seqlen_kv * (p.head_dim_qk + p.head_dim_v)
    moved = p.batch_size * elements * (2 * _FLOAT32 + ITEMSIZE[p.dtype])
    return LAUNCH + moved / (machine.figures.memory * 1e9)


def send_time(message: Message, p: AttentionParams, layout: RankLayout, machine: Machine) -> float:
    """Seconds of one message, or of one round of a collective."""
    f = machine.figures
    bandwidth, peers = f.link, 1
    if message.way == "swap":
        ranks = layout.a2a if layout.a2a > 1 else layout.ring
        peers = ranks - 1
        if ranks > f.per_node and f.network is not None:
            outside = (ranks - f.per_node) / peers  # share of the bytes that leaves the node
            bandwidth = min(f.network / outside, f.link / (1 - outside) if outside < 1 else f.link)
    elif p.cp_size > f.per_node and f.network is not None:
        bandwidth = f.network if message.way == "hop" else min(f.link, f.network * f.per_node)
    return peers * LATENCY + message.bytes / (bandwidth * 1e9 * LINKS)
