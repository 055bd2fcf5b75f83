"""The plan: for each exchange whether it is open, who runs its steps, what is sent, what it would cost.

The whole question meets the rules of context parallelism. Then each shape of a step is a question of its own,
without ranks, and a candidate must be eligible for all of them: it is the steps that a kernel gets to see.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from attnsel.cp_plan.cost import Estimate, Machine, estimate
from attnsel.cp_plan.work import (
    Call,
    Layout,
    Message,
    Step,
    layouts,
    messages,
    needed_shifts,
    shown_ranks,
    sizes_of,
    steps_of,
)
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.links import figures_of
from attnsel.params import AttentionParams, CpCommType, Tensors
from attnsel.policy import Policy
from attnsel.rules.context_parallel import NO_OFFSETS
from attnsel.select import DEFAULT_POLICY, Selection, select
from attnsel.unlock import Unlock
from attnsel.unlock.change import LENGTHS, Question, changed
from attnsel.verdict import Reason


class StepRefusal(NamedTuple):
    """A candidate that stands for the whole, and why a step of this shape refuses it."""

    candidate: str
    call: Call
    reasons: tuple[Reason, ...]

    def as_dict(self) -> dict[str, Any]:
        reasons = [reason.as_dict() for reason in self.reasons]
        return {"candidate": self.candidate, "step": self.call._asdict(), "reasons": reasons}


@dataclass(frozen=True)
class Exchange:
    """One cp_comm_type. ``layout``, ``ranks`` (rank and its steps) and ``sent`` are there where it is open.

    ``obstacle``: what no rule says, where the ranks cannot be laid out for it.
    """

    comm: CpCommType
    selection: Selection
    candidates: tuple[str, ...]  # those that run every step, best first
    refusals: tuple[StepRefusal, ...]
    layout: Layout | None = None
    ranks: tuple[tuple[int, tuple[Step, ...]], ...] = ()
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
        """What speaks against it: what every candidate was refused for, else every reason once."""
        if self.obstacle is not None:
            return ()
        against = {c.name: list(c.reasons) for c in self.selection.candidates if c.verdict == "refused"}
        for refusal in self.refusals:
            against.setdefault(refusal.candidate, []).extend(refusal.reasons)
        codes = Counter(code for reasons in against.values() for code in {r.code for r in reasons})
        every = {r.code: r for reasons in against.values() for r in reasons}
        shared = [r for code, r in every.items() if codes[code] == len(against)]
        return tuple(shared or every.values())

    def calls(self, rank: int) -> Counter[Call]:
        """How often a rank makes each call."""
        return Counter(call for step in dict(self.ranks)[rank] for call in step.calls)

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
                {"rank": rank, "steps": [{**s._asdict(), "calls": _dicts(s.calls)} for s in steps]}
                for rank, steps in self.ranks
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
        from attnsel.cp_plan.told import render

        return render(self, width)

    def as_dict(self) -> dict[str, Any]:
        return {
            "cp_size": self.params.cp_size,
            "planned_for": {name: getattr(self.params, name) for name in LENGTHS},
            "exchanges": [exchange.as_dict() for exchange in self.exchanges],
            "estimated_on": None if self.machine is None else self.machine.as_dict(),
            "no_estimate": self.no_estimate,
            "ways": [way.as_dict() for way in self.ways],
        }


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
    made = [_exchange(q, comm, env, policy, machine) for comm in get_args(CpCommType)]
    made.sort(key=lambda e: (not e.open, e.estimate.total if e.estimate else 0.0))
    ways = select(q, env, policy=policy).unlocks if q != p else ()
    return Plan(p, q, tuple(made), machine, missing, ways)


def _shared(p: AttentionParams, env: Environment, policy: Policy) -> AttentionParams:
    """``p``, or with the smallest lengths at which some kernel can run it, if only lengths are in the way."""
    selection = select(p, env, policy=policy)
    if selection.ranked:
        return p
    for unlock in selection.unlocks:
        if unlock.effect == "exact" and {field for field, _ in unlock.changes} <= set(LENGTHS):
            return changed(Question(p, env, policy), dict(unlock.changes)).p
    return p


def _exchange(
    p: AttentionParams, comm: CpCommType, env: Environment, policy: Policy, machine: Machine | None
) -> Exchange:
    q = p.derive(cp_comm_type=comm, tensors=Tensors())
    policy = policy.replace(adapt="never")  # a rank hands its tensors on as they are
    whole = select(q, env, policy=policy)
    best: Exchange | None = None
    laid_out = layouts(q, comm)
    if whole.ranked and not laid_out:
        text = f"{q.cp_size} ranks are no product of two numbers above 1 of which one divides the heads"
        return Exchange(comm, whole, (), (), obstacle=text)
    for layout in laid_out:
        standing, refusals = _standing(q, layout, whole, env, policy)
        if not standing:
            best = best or Exchange(comm, whole, (), tuple(refusals))
            continue
        sizes = sizes_of(q, layout, standing[0] not in NO_OFFSETS)
        ranks = tuple((rank, steps_of(sizes, comm, rank)) for rank in shown_ranks(layout.ring))
        ring = layout.ring > 1 and comm != "all_gather"
        sent = messages(q, layout, len(needed_shifts(sizes)) if ring else 1)
        cost = None
        if machine is not None:
            cost = estimate(q, layout, tuple(steps for _, steps in ranks), sent, machine)
        found = Exchange(comm, whole, tuple(standing), tuple(refusals), layout, ranks, sent, cost)
        if best is None or not best.open or _total(found) < _total(best):
            best = found
    return best or Exchange(comm, whole, (), ())


def _total(exchange: Exchange) -> float:
    return exchange.estimate.total if exchange.estimate else 0.0


def _standing(
    p: AttentionParams, layout: Layout, whole: Selection, env: Environment, policy: Policy
) -> tuple[list[str], list[StepRefusal]]:
    """The candidates that the whole and every step accept, best first, and what steps say against others."""
    standing, refusals = [], []
    for candidate in whole.ranked:
        against = None
        for call in calls_of(p, layout, candidate.name not in NO_OFFSETS):
            step = step_question(p, layout, call)
            seen = select(step, env, policy=policy.replace(backend=None))[candidate.name]
            if seen.verdict == "refused":
                against = StepRefusal(candidate.name, call, seen.reasons)
                break
        if against is None:
            standing.append(candidate.name)
        else:
            refusals.append(against)
    return standing, refusals


def calls_of(p: AttentionParams, layout: Layout, offsets: bool) -> tuple[Call, ...]:
    """The different calls that the ranks make, most pairs first."""
    sizes = sizes_of(p, layout, offsets)
    found = {
        call
        for rank in shown_ranks(layout.ring)
        for step in steps_of(sizes, layout.comm, rank)
        for call in step.calls
    }
    return tuple(sorted(found, key=lambda call: (-call.pairs, call)))


def step_question(p: AttentionParams, layout: Layout, call: Call) -> AttentionParams:
    """One call as a question: its lengths and mask, a rank's heads. Sinks are added in the merge."""
    heads = p.num_heads // layout.a2a
    changes: dict[str, Any] = {
        "cp_size": 1,
        "num_heads": heads,
        "num_gqa_groups": p.num_gqa_groups // layout.a2a,
        "max_seqlen_q": call.seqlen_q,
        "max_seqlen_kv": call.seqlen_kv,
    }
    if p.qkv_format == "thd":
        changes["pad_between_seqs"] = True  # a rank's rows of a sequence are chunks, filled or not
    if p.alibi_slopes_shape is not None:
        changes["alibi_slopes_shape"] = (*p.alibi_slopes_shape[:-1], heads)
    if layout.ring > 1:
        changes |= {"softmax_type": "vanilla", "return_lse": True}
    if call.kind in ("full", "diagonal"):
        causal = call.kind == "diagonal"
        plain = "causal" if causal else "no_mask"
        packed = "padding_causal" if causal else "padding"
        changes |= {
            "attn_mask_type": packed if p.padding else plain,
            "window_size": (-1, 0) if causal else (-1, -1),
            "bottom_right_diagonal": not causal,
        }
    elif call.kind == "offset":
        changes["attn_mask_type"] = p.attn_mask_type.replace("_bottom_right", "")
        changes["bottom_right_diagonal"] = not p.causal
    return p.derive(**changes)


def _machine(
    p: AttentionParams, env: Environment, per_node: int | None, link: float | None, network: float | None
) -> tuple[Machine | None, str | None]:
    """The machine for an estimate, or why there is none. Raises InvalidInput."""
    stated = {"--gpus-per-node": per_node, "--link-gbs": link, "--network-gbs": network}
    for name, value in stated.items():
        if value is not None and not value > 0:
            raise InvalidInput(name, value, "must be above 0")
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
