"""A plan as text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from attnsel.backends.registry import CANDIDATES
from attnsel.selection.step_geometry import EVERY_RANK
from attnsel.verdicts.requirements import size

if TYPE_CHECKING:
    from attnsel.context_parallel.plan import Exchange, Plan


def render(plan: Plan, width: int) -> str:
    """What each rank runs and sends under the exchange that was asked for; then all exchanges."""
    p, chosen = plan.params, plan.chosen
    lines = ["", *_fold(f"Context parallel: {p.cp_size} ranks, {chosen.comm}", width, "  ")]
    if p != plan.asked:
        asked = f"{plan.asked.max_seqlen_q} × {plan.asked.max_seqlen_kv}"
        text = f"lengths {asked} cannot be shared out: planned for {p.max_seqlen_q} × {p.max_seqlen_kv}"
        lines += _fold(text, width, "  ! ")
    if chosen.open:
        lines += _runs(plan, chosen, width)
    else:
        lines += _fold("no candidate runs it; see below", width, "    ")
    ways: dict[str, list[str]] = {}
    for way in plan.ways:
        if not CANDIDATES[way.candidate].last_resort:
            ways.setdefault(way.candidate, []).append(f"{way.change} [{way.effect}]")
    for name, changes in ways.items():
        lines += _fold(f"to get {name} there: {'; or '.join(changes)}", width, "    ", "      ")
    lines += _table(plan, width)
    return "\n".join(line.rstrip() for line in lines)


def _runs(plan: Plan, chosen: Exchange, width: int) -> list[str]:
    layout = chosen.layout
    assert layout is not None
    n, lines = layout.ring, []
    if layout.a2a > 1:
        heads = plan.params.num_heads // layout.a2a
        lines += _fold(f"{layout.a2a} ranks exchange heads for rows: {heads} heads each", width, "    ")
    if n > 1:
        text = f"rank r holds chunks r and {2 * n - 1} − r of {2 * n}"
        lines += _fold(text, width, "    ")
    lines += _fold(f"{chosen.backend} runs every step:", width, "    ")
    for rank, steps in chosen.ranks:
        calls = [
            f"{times} × {call.kind} {call.seqlen_q}×{call.seqlen_kv}"
            if times > 1
            else f"{call.kind} {call.seqlen_q}×{call.seqlen_kv}"
            for call, times in chosen.calls(rank).items()
        ]
        idle = sum(step.times for step in steps if not step.calls)
        if idle:
            calls.append(f"{idle} skipped")
        name = f"rank {rank}" if n > 1 else "every rank"
        lines += _fold(", ".join(calls) or "nothing", width, f"      {name}: ")
    if n > EVERY_RANK:
        lines += _fold("the ranks between them likewise", width, "      ")
    for refusal in chosen.refusals:
        reason = refusal.reasons[0]
        text = f"not {refusal.candidate}: a step is {refusal.step}, and "
        lines += _fold(f"{text}{reason.code}  {reason.message}", width, "    ", "      ")
    for phase in ("forward", "backward"):
        sent = [m for m in chosen.sent if m.phase == phase]
        words = [
            f"{m.times} × {size(m.bytes)} of {m.what}" + (" while it computes" if m.hidden else "")
            for m in sent
        ]
        if sent:
            text = f"{phase} a rank sends {size(chosen.sent_bytes(phase))}: {', '.join(words)}"
            lines += _fold(text, width, "    ", "      ")
    return lines


def _table(plan: Plan, width: int) -> list[str]:
    machine = plan.machine
    if machine is None:
        text = f"Exchanges, not ranked: {plan.no_estimate}"
    else:
        text = f"Exchanges by estimate, not measured, from data sheets ({machine.name}: {machine.words}):"
    lines = ["", *_fold(text, width, "  ")]
    place = 0
    for exchange in plan.exchanges:
        if exchange.open:
            place += 1
            lines += _fold(_open(plan, exchange), width, f"  {place:>3} ✔ {exchange.comm:<11}", " " * 20)
            continue
        texts = [f"{reason.code}  {reason.message}" for reason in exchange.why_not]
        for number, text in enumerate(texts or [exchange.obstacle or "no candidate runs every step"]):
            lead = f"    – ✖ {exchange.comm:<11}" if not number else " " * 19
            lines += _fold(text, width, lead, " " * 20)
    return lines


def _open(plan: Plan, exchange: Exchange) -> str:
    words = [exchange.backend or ""]
    layout = exchange.layout
    if layout is not None and layout.a2a > 1 and layout.ring > 1:
        words.append(f"a2a over {layout.a2a}, p2p over {layout.ring}")
    words.append(f"a rank sends {size(exchange.sent_bytes())}")
    cost = exchange.estimate
    if cost is not None:
        computes = f"computes {_ms(cost.computes)} at {100 * cost.share:.0f} % of the peak"
        parts = f"{computes}, merges {_ms(cost.merges)}, waits {_ms(cost.waits)}"
        words.insert(0, f"about {_ms(cost.total)} ({parts})")
    elif plan.machine is not None:
        words.insert(0, f"no estimate: nobody has measured {exchange.backend} there")
    return " · ".join(words)


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _fold(text: str, width: int, lead: str, indent: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=lead,
        subsequent_indent=" " * len(lead) if indent is None else indent,
        break_on_hyphens=False,
    )
