"""The answer in a sentence, and in a line for a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.backends.registry import CANDIDATES
from attnsel.errors import printable
from attnsel.report.words import on_gpu, params_words
from attnsel.selection.f_sdpa import BY_F_SDPA, f_sdpa_order

if TYPE_CHECKING:
    from attnsel.selection.unlock import Unlock
    from attnsel.selection.view import SelectionView
    from attnsel.verdicts.verdict import Candidate


def verdict(selection: SelectionView) -> str:
    """What runs, and the one thing that keeps a better candidate from running."""
    better = better_way(selection)
    chosen = selection.chosen
    if chosen is None:
        text = "Nothing runs this call"
        if selection.policy.backend is not None:
            codes = ", ".join(dict.fromkeys(r.code for r in selection[selection.policy.backend].reasons))
            text = f"{selection.policy.backend} cannot run this call ({codes}), and no other is allowed"
        nearest = better or next(iter(selection.unlocks), None)
        return f"{text}." if nearest is None else f"{text}. To get {nearest.candidate}: {nearest.change}."
    elsewhere = chosen.plan_only == BY_F_SDPA
    text = _f_sdpa_runs(selection, chosen) if elsewhere else f"{chosen.name} {verb(chosen)}"
    if CANDIDATES[chosen.name].last_resort and on_gpu(selection.environment):
        text += " slowly"
    if chosen.adaptations:
        changes = ", ".join(made.text for made in chosen.adaptations)
        text += f" if the caller {changes}" if elsewhere else f" and {changes} on every call"
    if not chosen.eligible:
        text += ": nobody has checked"
    if better is None:
        return f"{text}."
    return f"{text}. To run {better.candidate} instead: {better.change}."


def _f_sdpa_runs(selection: SelectionView, chosen: Candidate) -> str:
    """What F.sdpa runs; where a kernel that is known to be wrong comes first in its own order, that too."""
    for name in f_sdpa_order(selection.environment):
        if name == chosen.name:
            break
        codes = [reason.code for reason in selection[name].reasons]
        if codes and all(code.startswith("BUG") for code in codes):
            return (
                f"F.sdpa by itself runs {name} ({', '.join(codes)}); under sdpa_kernel it runs {chosen.name}"
            )
    return f"F.sdpa {'runs' if chosen.eligible else 'may run'} {chosen.name}"


def verb(candidate: Candidate) -> str:
    if candidate.plan_only == BY_F_SDPA:
        return "F.sdpa runs it" if candidate.eligible else "F.sdpa may run it"
    if candidate.plan_only:
        return "would run"
    return "runs" if candidate.eligible else "may run"


def better_way(selection: SelectionView) -> Unlock | None:
    """The cheapest change by which another candidate would be first; another GPU only where nothing else is
    fast."""
    chosen = selection.chosen
    out = {"risk"} if chosen is None or CANDIDATES[chosen.name].last_resort else {"risk", "hardware"}
    return next((u for u in selection.unlocks if u.rank == 1 and u.effect not in out), None)


def planned_only(selection: SelectionView) -> list[str]:
    """Why what stands here is not run by attnsel; an old PyTorch is named once."""
    whys = dict.fromkeys(c.plan_only for c in selection.ranked if c.plan_only)
    return [BY_F_SDPA] if BY_F_SDPA in whys else list(whys)


def one_line(selection: SelectionView) -> str:
    """Chosen, runner-up, what blocked the better ones, how to fix: for ATTNSEL_DEBUG=1."""
    ranked = [c for c in selection.ranked if c.executable or not selection.environment.detected]
    parts = [f"{selection.backend or 'nothing'} runs"]
    if ranked and ranked[0].adaptations:
        parts[0] += f" ({'; '.join(a.text for a in ranked[0].adaptations)})"
    if len(ranked) > 1:
        parts.append(f"next {ranked[1].name}")
    blocked = [
        f"{c.name} ({', '.join(dict.fromkeys(r.code for r in c.reasons))})"
        for c in selection.candidates
        if c.verdict == "refused" and not CANDIDATES[c.name].last_resort
    ]
    if blocked:
        parts.append("refused: " + ", ".join(blocked))
    better = better_way(selection)
    if better is not None:
        parts.append(f"to get {better.candidate}: {better.change}")
    question = " ".join(params_words(selection.params))
    return printable(f"{'; '.join(parts)} [{question}]")
