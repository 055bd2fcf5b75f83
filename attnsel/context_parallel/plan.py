"""The plan: for each exchange whether it is open, who runs its steps, what is sent, what it would cost.

Whether a candidate runs is asked as everywhere (``attnsel.select``); a plan adds what the ranks then do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import stamped, to_json
from attnsel.context_parallel.schedule import Message, Phase, RankStep, StepCall, messages, sampled_steps
from attnsel.decision import DEFAULT_POLICY, Selection, select
from attnsel.environment import Environment
from attnsel.environment.gpus import Figures, figures_of
from attnsel.errors import InvalidInput
from attnsel.params import ITEMSIZE, AttentionParams, Tensors
from attnsel.params.options import EXCHANGES
from attnsel.policy import Policy
from attnsel.report.document import Block, Inline, Item, Items, Paragraph, Ref, Section
from attnsel.selection.inquiry import Inquiry
from attnsel.selection.steps import (
    EVERY_RANK,
    RankLayout,
    StepRefusal,
    layouts,
    merges_parts,
    refused_step,
    shifts,
    sizes_of,
)
from attnsel.selection.unlock import Unlock
from attnsel.selection.unlock.change import LENGTHS, Scenario, changed
from attnsel.verdicts.reasons import Reason
from attnsel.verdicts.requirements import size

# --------------------------------------------------------------------------------------------------------
# How long an exchange would take: an estimate from data sheets, to rank exchanges, not to promise a time.
#
# The model: a call takes its operations over the share of the peak rate that the candidate's kernels reach
# (from its record, with its source), worse where its tiles leave SMs idle; a partial result that is merged
# is read and written once in memory; a message takes a latency and its bytes over the link's bandwidth ×
# LINKS. A ring step takes the longer of computing and sending, of the slowest rank looked at; other
# messages are waited for. Within a node ranks share its links, across nodes each has its own network
# adapter, and only all_gather can use those of the whole node.
#
# LINKS, LATENCY and LAUNCH are round figures, assumed and not measured.


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
            compute, merge = (  # of the slowest rank
                max(sum(time(call, p, layout, machine, phase) for call in calls) for calls in now)
                for time in (call_time, merge_time)
            )
            merge *= merges_parts(p, layout)
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


# ---- A plan in a document ------------------------------------------------------------------------------


def _runs(plan: Plan, chosen: Exchange) -> Iterator[Item]:
    layout = chosen.layout
    assert layout is not None
    n = layout.ring
    if layout.a2a > 1:
        heads = plan.params.num_heads // layout.a2a
        yield Item(f"{layout.a2a} ranks exchange heads for rows: {heads} heads each")
    if n > 1:
        yield Item(f"rank r holds chunks r and {2 * n - 1} − r of {2 * n}")
    each = []
    for rank, steps in chosen.ranks:
        calls = [
            f"{times} × " * (times > 1) + f"{call.kind} {call.seqlen_q}×{call.seqlen_kv}"
            for call, times in chosen.calls(rank).items()
        ]
        idle = sum(step.times for step in steps if not step.calls)
        if idle:
            calls.append(f"{idle} skipped")
        name = f"rank {rank}" if n > 1 else "every rank"
        each.append(Item(f"{name}: {', '.join(calls) or 'nothing'}"))
    if n > EVERY_RANK:
        each.append(Item("the ranks between them likewise"))
    yield Item(f"{chosen.backend} runs every step:", below=(Items(tuple(each)),))
    for refusal in chosen.refusals:
        reason = refusal.reasons[0]
        lead = f"not {refusal.candidate}: a step is {refusal.step}, and "
        yield Item((lead, Ref(reason.code), f"  {reason.message}"))
    for phase in ("forward", "backward"):
        words = [
            f"{m.times} × {size(m.bytes)} of {m.what}" + " while it computes" * m.hidden
            for m in chosen.sent
            if m.phase == phase
        ]
        if words:
            yield Item(f"{phase} a rank sends {size(chosen.sent_bytes(phase))}: {', '.join(words)}")


def _ranked(plan: Plan, exchange: Exchange, place: int) -> Item:
    """An exchange among all: what it would cost, or why it is refused."""
    if not exchange.open:
        reasons: list[Inline] = [(Ref(reason.code), f"  {reason.message}") for reason in exchange.why_not]
        first, *more = reasons or [exchange.obstacle or "no candidate runs every step"]
        return Item(first, "✖", "–", exchange.comm, more=tuple(more))
    words = [exchange.backend or ""]
    layout, cost = exchange.layout, exchange.estimate
    if layout is not None and layout.a2a > 1 and layout.ring > 1:
        words.append(f"a2a over {layout.a2a}, p2p over {layout.ring}")
    words.append(f"a rank sends {size(exchange.sent_bytes())}")
    if cost is not None:
        computes = f"computes {_ms(cost.computes)} at {100 * cost.share:.0f} % of the peak"
        parts = f"{computes}, merges {_ms(cost.merges)}, waits {_ms(cost.waits)}"
        words.insert(0, f"about {_ms(cost.total)} ({parts})")
    elif plan.machine is not None:
        words.insert(0, f"no estimate: nobody has measured {exchange.backend} there")
    return Item(" · ".join(words), "✔", place, exchange.comm)


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


@dataclass(frozen=True)
class Exchange:
    """One cp_comm_type. ``layout``, ``ranks`` (rank and its steps) and ``sent`` are there where it is open.

    ``obstacle``: what no rule says, where the ranks cannot be laid out for it.
    """

    comm: str
    selection: Selection
    candidates: tuple[str, ...]  # those that run every step, best first
    refusals: tuple[StepRefusal, ...]
    layout: RankLayout | None = None
    ranks: tuple[tuple[int, tuple[RankStep, ...]], ...] = ()
    sent: tuple[Message, ...] = ()
    estimate: Estimate | None = None
    obstacle: str | None = None

    @property
    def open(self) -> bool:
        return bool(self.candidates) and self.layout is not None

    @property
    def backend(self) -> str | None:
        return self.candidates[0] if self.open else None

    @property
    def why_not(self) -> tuple[Reason, ...]:
        """Why it is refused: what every candidate was refused for, else every reason once."""
        if self.obstacle is not None:
            return ()
        against = {c.name: list(c.reasons) for c in self.selection.candidates if c.verdict == "refused"}
        for refusal in self.refusals:
            against.setdefault(refusal.candidate, []).extend(refusal.reasons)
        codes = Counter(code for reasons in against.values() for code in {r.code for r in reasons})
        every = {r.code: r for reasons in against.values() for r in reasons}
        shared = [r for code, r in every.items() if codes[code] == len(against)]
        return tuple(shared or every.values())

    def calls(self, rank: int) -> Counter[StepCall]:
        """How often a rank makes each call."""
        count: Counter[StepCall] = Counter()
        for step in dict(self.ranks)[rank]:
            for call in step.calls:
                count[call] += step.times
        return count

    def sent_bytes(self, phase: str | None = None) -> int:
        """By one rank in one call of the module."""
        return sum(m.bytes * m.times for m in self.sent if phase in (None, m.phase))

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"cp_comm_type": self.comm, "open": self.open, "backend": self.backend}
        out["candidates"] = list(self.candidates)
        out["step_refusals"] = to_json(self.refusals)
        if not self.open:
            return {**out, "why_not": to_json(self.why_not), "obstacle": self.obstacle}
        assert self.layout is not None
        return {
            **out,
            "a2a_size": self.layout.a2a,
            "ring_size": self.layout.ring,
            "ranks": [
                {"rank": rank, "steps": [step.as_dict() for step in steps]} for rank, steps in self.ranks
            ],
            "messages": to_json(self.sent),
            "bytes": {phase: self.sent_bytes(phase) for phase in ("forward", "backward")},
            "estimate": None if self.estimate is None else self.estimate.as_dict(),
        }


@dataclass(frozen=True)
class Plan:
    """``params`` is ``asked``, or where its lengths cannot be shared out, the same with the nearest that can.

    ``exchanges``: open ones first, by estimate where there is one; without a ``machine`` ``no_estimate`` says
    why. ``ways``: at the planned lengths, what gets candidates that are refused, re-checked.
    """

    asked: AttentionParams
    params: AttentionParams
    exchanges: tuple[Exchange, ...]
    machine: Machine | None
    no_estimate: str | None = None
    ways: tuple[Unlock, ...] = ()

    def __getitem__(self, comm: str) -> Exchange:
        return {exchange.comm: exchange for exchange in self.exchanges}[comm]

    @property
    def chosen(self) -> Exchange:
        """The one that was asked for."""
        return self[self.params.cp_comm_type]

    def blocks(self) -> tuple[Block, ...]:
        """What each rank runs and sends under the exchange that was asked for; then all exchanges."""
        p, chosen, machine = self.params, self.chosen, self.machine
        said: list[Item] = []
        if p != self.asked:
            asked = f"{self.asked.max_seqlen_q} × {self.asked.max_seqlen_kv}"
            text = f"lengths {asked} cannot be shared out: planned for {p.max_seqlen_q} × {p.max_seqlen_kv}"
            said.append(Item(text, "!"))
        said += _runs(self, chosen) if chosen.open else [Item("no candidate runs it; see below")]
        ways: dict[str, list[str]] = {}
        for way in self.ways:
            if not CANDIDATES[way.candidate].last_resort:
                ways.setdefault(way.candidate, []).append(f"{way.change} [{way.effect}]")
        said += [Item(f"to get {name} there: {'; or '.join(changes)}") for name, changes in ways.items()]
        if machine is None:
            text = f"Exchanges, not ranked: {self.no_estimate}"
        else:
            text = f"Exchanges by estimate, not measured, from data sheets ({machine.name}: {machine.words}):"
        ranked = (_ranked(self, exchange, place) for place, exchange in enumerate(self.exchanges, 1))
        title = f"Context parallel: {p.cp_size} ranks, {chosen.comm}"
        return Section(title, (Items(tuple(said)),)), Paragraph(text), Items(tuple(ranked))

    def as_dict(self) -> dict[str, Any]:
        said = {
            "cp_size": self.params.cp_size,
            "planned_for": {name: getattr(self.params, name) for name in LENGTHS},
            "exchanges": [exchange.as_dict() for exchange in self.exchanges],
            "estimated_on": None if self.machine is None else self.machine.as_dict(),
            "no_estimate": self.no_estimate,
            "ways": to_json(self.ways),
        }
        return stamped("plan", said)


def plan(
    p: AttentionParams,
    env: Environment,
    policy: Policy = DEFAULT_POLICY,
    *,
    gpus_per_node: int | None = None,
    link: float | None = None,
    network: float | None = None,
) -> Plan:
    """Plan ``p`` with its cp_size. The last three are stated figures of the machine, in GPUs and GB/s.

    Raises InvalidInput for a cp_size of 1 and for figures that are not above 0.
    """
    if p.cp_size == 1:
        raise InvalidInput("cp_size", 1, "must be at least 2 to be planned")
    machine, missing = _machine(p, env, gpus_per_node, link, network)
    q = _shared(p, env, policy)
    made = [_exchange(q, comm, env, policy, machine) for comm in EXCHANGES]
    made.sort(key=lambda e: (not e.open, e.estimate is None, _total(e)))
    ways = select(q, env, policy=policy).unlocks if q != p else ()
    return Plan(p, q, tuple(made), machine, missing, ways)


def _shared(p: AttentionParams, env: Environment, policy: Policy) -> AttentionParams:
    """``p``, or with the smallest lengths at which some kernel can run it, if only lengths are in the way."""
    selection = select(p, env, policy=policy)
    if selection.ranked:
        return p
    for unlock in selection.unlocks:
        if unlock.effect == "exact" and {field for field, _ in unlock.changes} <= set(LENGTHS):
            return changed(Scenario(p, env, policy), dict(unlock.changes)).p
    return p


def _exchange(
    p: AttentionParams, comm: str, env: Environment, policy: Policy, machine: Machine | None
) -> Exchange:
    q = p.derive(cp_comm_type=comm, tensors=Tensors())
    answer = select(q, env, policy=policy)
    laid_out = layouts(q)
    refusals: tuple[StepRefusal, ...] = ()
    best: Exchange | None = None
    if not laid_out:
        text = f"{q.cp_size} ranks are no product of two numbers above 1 of which one divides the heads"
        return Exchange(comm, answer, (), (), obstacle=text)
    for layout in laid_out:
        running, against = _standing(q, layout, answer)
        refusals = refusals or against
        if not running:
            continue
        found = _planned(q, layout, answer, running, against, machine)
        if best is None or _total(found) < _total(best):
            best = found
    return best or Exchange(comm, answer, (), refusals)


def _planned(
    p: AttentionParams,
    layout: RankLayout,
    answer: Selection,
    running: tuple[str, ...],
    refusals: tuple[StepRefusal, ...],
    machine: Machine | None,
) -> Exchange:
    """What the ranks do where the first of ``running`` runs every step."""
    sizes = sizes_of(p, layout, CANDIDATES[running[0]].offsets)
    ranks = sampled_steps(sizes, layout.comm)
    in_ring = layout.ring > 1 and not layout.gathers
    sent = messages(p, layout, len(shifts(sizes)) if in_ring else 1)
    cost = None
    known = CANDIDATES[running[0]].efficiency_on(answer.environment.arch)
    if machine is not None and known is not None:
        reached = machine._replace(share=known.share)
        cost = estimate(p, layout, tuple(steps for _, steps in ranks), sent, reached)
        cost = cost._replace(share=known.share, source=known.source)
    return Exchange(layout.comm, answer, running, refusals, layout, ranks, sent, cost)


def _total(exchange: Exchange) -> float:
    return exchange.estimate.total if exchange.estimate else 0.0


def _standing(
    p: AttentionParams, layout: RankLayout, answer: Selection
) -> tuple[tuple[str, ...], tuple[StepRefusal, ...]]:
    """The candidates that run every step of this layout, best first, and what steps say against others."""
    inquiry = Inquiry(p, answer.environment, answer.policy, answer.evidence, steps=False)
    running, refusals = [], []
    for name in (candidate.name for candidate in answer.candidates):
        whole = inquiry.judge(name)
        if whole.verdict == "refused" or not (whole.executable or not answer.environment.detected):
            continue
        against = refused_step(name, CANDIDATES[name].offsets, p, layout, inquiry.judge_step)
        if against is None:
            running.append(name)
        else:
            refusals.append(against)
    return tuple(running), tuple(refusals)


def _machine(
    p: AttentionParams, env: Environment, per_node: int | None, link: float | None, network: float | None
) -> tuple[Machine | None, str | None]:
    """The machine for an estimate, or why there is none. Raises InvalidInput."""
    stated = {"--gpus-per-node": per_node, "--link-gbs": link, "--network-gbs": network}
    for name, value in stated.items():
        if value is not None and not 1e-6 <= value <= 1e9:
            raise InvalidInput(name, value, "must be above 0: from 1e-06 to 1e+09")
    name = env.device.name or env.target
    figures = figures_of(env.device.name)
    if figures is None:
        return None, f"nothing is known about the arithmetic and links of {name}"
    if p.dtype not in ("bf16", "fp16") or p.fp8_attention or (p.dtype == "bf16" and not figures.bf16):
        return None, f"the rates that are known of {name} are not for {p.dtype}"
    if link is not None:
        figures = figures._replace(link=link, link_name="stated link")
    figures = figures._replace(network=network or figures.network, per_node=per_node or figures.per_node)
    if p.cp_size > figures.per_node and figures.network is None:
        return (
            None,
            f"{p.cp_size} ranks leave the node, and the network of {name} is not known: --network-gbs",
        )
    return Machine(name, figures, env.device.sm_count), None
