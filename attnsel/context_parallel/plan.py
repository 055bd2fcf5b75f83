"""The plan: for each exchange whether it is open, who runs its steps, what is sent, what it would cost.

Whether a candidate runs is asked as everywhere (``attnsel.select``); a plan adds what the ranks then do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from attnsel.backends.registry import CANDIDATES
from attnsel.base.schemas import stamped
from attnsel.context_parallel.estimate import Estimate, Machine, estimate
from attnsel.context_parallel.report import render
from attnsel.context_parallel.schedule import Message, RankStep, StepCall, messages, sampled_steps
from attnsel.decision import DEFAULT_POLICY, Selection, select
from attnsel.environment import Environment
from attnsel.environment.hardware_specs import figures_of
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams, Tensors
from attnsel.params.exchanges import EXCHANGES
from attnsel.policy import Policy
from attnsel.selection.inquiry import Inquiry
from attnsel.selection.step_geometry import shifts
from attnsel.selection.steps import RankLayout, StepRefusal, layouts, refused_step, sizes_of
from attnsel.selection.unlock import Unlock
from attnsel.selection.unlock.change import LENGTHS, Scenario, changed
from attnsel.verdicts.verdict import Reason


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
        out["step_refusals"] = [refusal.as_dict() for refusal in self.refusals]
        if not self.open:
            why = [reason.as_dict() for reason in self.why_not]
            return {**out, "why_not": why, "obstacle": self.obstacle}
        assert self.layout is not None
        return {
            **out,
            "a2a_size": self.layout.a2a,
            "ring_size": self.layout.ring,
            "ranks": [
                {"rank": rank, "steps": [step.as_dict() for step in steps]} for rank, steps in self.ranks
            ],
            "messages": _dicts(self.sent),
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
        for exchange in self.exchanges:
            if exchange.comm == comm:
                return exchange
        raise KeyError(comm)

    @property
    def chosen(self) -> Exchange:
        """The one that was asked for."""
        return self[self.params.cp_comm_type]

    def report(self, width: int = 80) -> str:
        return render(self, width)

    def as_dict(self) -> dict[str, Any]:
        said = {
            "cp_size": self.params.cp_size,
            "planned_for": {name: getattr(self.params, name) for name in LENGTHS},
            "exchanges": [exchange.as_dict() for exchange in self.exchanges],
            "estimated_on": None if self.machine is None else self.machine.as_dict(),
            "no_estimate": self.no_estimate,
            "ways": [way.as_dict() for way in self.ways],
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


def _dicts(items: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [item._asdict() for item in items]
