"""The best kernel for a site, why it did not run, the fix in the program's own words. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from attnsel.backends.registry import CANDIDATES
from attnsel.decision import Selection, select
from attnsel.diagnose.framework_fixes import Hindrance, fixes, topics, ways_out
from attnsel.diagnose.watching.asked_better import as_attnsel_takes_it, rewritten
from attnsel.diagnose.watching.record import Site
from attnsel.dispatchers import Dispatch, Offer, dispatched_by
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.report.verdict import better_way
from attnsel.selection.unlock.search import Unlock

MOST_JUDGED = 200
"""Sites that are judged, those with the most calls: a ranking with every reason costs milliseconds each."""

_BY_F_SDPA = "aten::_scaled_dot_product"
_ZEROS = "aten::zeros"  # of a call with no query or no key, for which F.sdpa asks no kernel
_MATH = "sdpa.math"
_WITH_PATIENCE = 3  # reasons and fixes that are told of one site


def judge(sites: Iterable[Site], here: Environment, asked: Environment | None = None) -> tuple[Site, ...]:
    """The sites with ``best``, ``why`` and ``fix``: for ``here``, the machine that they ran on, or for the
    one that is ``asked`` about, for which ``planned`` says what the same program would run there."""
    every = tuple(sites)
    busiest = sorted(every, key=lambda site: -site.calls)[:MOST_JUDGED]
    judged = {id(site): _judge(site, here, asked) for site in busiest}
    return tuple(judged.get(id(site), site) for site in every)


def _judge(site: Site, here: Environment, asked: Environment | None) -> Site:
    p = site.params
    if p is None or site.forward == _ZEROS:
        return site  # nothing to judge by, or nothing to compute
    env = here if asked is None else asked
    switches = dict(word.split("=", 1) for word in site.switches)
    better = rewritten(p, switches)
    selection = select(as_attnsel_takes_it(better.params), env)
    dispatch = _dispatched(site, p, switches, env)
    best, runs = selection.backend or "", site.candidate
    otherwise = _ran_otherwise(site, dispatch if asked is None else _dispatched(site, p, switches, here))
    if asked is not None:
        chosen = dispatch.chosen if dispatch is not None else None
        runs = chosen.candidate if chosen is not None else ""
        name = chosen.candidate or chosen.name if chosen is not None else ""
        site = site.replace(planned=name or (dispatch.error if dispatch is not None else ""))
    site = site.replace(best=best)
    if otherwise:  # what attnsel reads of this call is wrong, and so would be a reason and a fix
        return site.replace(notes=(*site.notes, otherwise))
    if dispatch is None or dispatch.chosen is None or dispatch.chosen.candidate != _MATH:
        better = better._replace(topics=())  # only math takes a call for how it is written
    then = _dispatched(site, better.params, better.switches, env) if better.topics else dispatch
    if best and best != runs:
        why, hindrances = _why_not(site, best, selection, dispatch)
        if dispatch is not None and then is not None and _offer(dispatch, best) is None:
            told, hindrances = _why_math(better.params, dispatch, then)
            why = (*why, *told)
    else:
        way = better_way(selection) if _slow(runs, env) else None
        if way is None:
            return site
        best, hindrances = way.candidate, [way]
        offer = _offer(dispatch, best)
        if offer is not None:
            why = tuple(f"{best}: {text}" for text in _refused(offer))
        else:
            against = [reason.message for reason in selection[best].reasons]
            why = tuple(f"{best}: {text}" for text in against[:_WITH_PATIENCE])
    made = [str(fix) for fix in ways_out(site.api, p, better.topics)]
    if better.topics:
        hindrances = _left(then, best, hindrances)
    made += [str(fix) for fix in fixes(site.api, p, hindrances)]
    fix = "; ".join(dict.fromkeys(made[:_WITH_PATIENCE]))
    return site.replace(why=why, fix=site.fix or fix or _otherwise(site, selection, hindrances))


def _ran_otherwise(site: Site, dispatch: Dispatch | None) -> str:
    """That another kernel ran than F.sdpa's own checks, as attnsel has read them, choose; "" for the same."""
    if dispatch is None:
        return ""
    chosen = dispatch.chosen
    if chosen is not None and chosen.candidate == site.candidate:
        return ""
    read = "an error" if chosen is None else chosen.candidate or chosen.name
    return (
        f"ran otherwise than read: {site.candidate or site.forward} ran, and attnsel reads {read} from the "
        f"checks of torch {dispatch.read}, so no reason is told"
    )


def by_hand(site: Site) -> bool:
    """Whether the program, or its library, wrote attention out: several operators ran, none is attention."""
    return site.api == "by hand" or "softmax" in site.forward


def _dispatched(
    site: Site, p: AttentionParams, switches: dict[str, str], env: Environment
) -> Dispatch | None:
    """What F.sdpa says of the call, where it was F.sdpa that chose: in a compiled region it did so while the
    region was made."""
    by_f_sdpa = site.forward.startswith(_BY_F_SDPA)
    if not by_f_sdpa or (site.api == "aten" and not site.compiled):
        return None
    return dispatched_by("torch", p, env, switches)


def _slow(candidate: str, env: Environment) -> bool:
    """Whether it is worth looking for a better way at all: on a GPU, or where scores are stored."""
    return env.device.type != "cpu" or (candidate in CANDIDATES and CANDIDATES[candidate].last_resort)


def _why_not(
    site: Site, best: str, selection: Selection, dispatch: Dispatch | None
) -> tuple[tuple[str, ...], list[Hindrance]]:
    """Why ``best`` did not run, in words, and what can be asked for a fix."""
    chosen = selection.chosen
    changes: list[Hindrance] = list(chosen.adaptations) if chosen is not None else []
    if by_hand(site):
        return ("written out: no kernel was asked for it",), changes
    if dispatch is None:
        return (f"{site.forward} is called by name",), changes
    offer = _offer(dispatch, best)
    if offer is None:
        return (f"F.scaled_dot_product_attention does not have {best}",), changes
    if offer.refusals:
        return _refused(offer), list(offer.refusals)
    if dispatch.chosen is None:
        return (dispatch.error,), changes
    before = dispatch.chosen.name
    return (f"F.scaled_dot_product_attention tries {before} before it",), changes


def _offer(dispatch: Dispatch | None, candidate: str) -> Offer | None:
    offers = dispatch.offers if dispatch is not None else ()
    return next((offer for offer in offers if offer.candidate == candidate), None)


def _refused(offer: Offer) -> tuple[str, ...]:
    """What F.sdpa has against a kernel, with the rules that say the same."""
    told = offer.refusals[:_WITH_PATIENCE]
    return tuple(f"{one.code}  {one.text}" if one.code else one.text for one in told)


def _why_math(
    p: AttentionParams, dispatch: Dispatch, then: Dispatch
) -> tuple[tuple[str, ...], list[Hindrance]]:
    """Of a call that goes to math: F.sdpa's first reason against each of its fused kernels, and what to ask a
    fix of for the first that can be had. ``then``: the answer to the rewritten call."""
    if dispatch.chosen is None or dispatch.chosen.candidate != _MATH:
        return (), []
    reasons: dict[str, list[str]] = {}
    for offer in dispatch.offers:
        if offer.candidate != _MATH and offer.refusals:
            reasons.setdefault(_refused(offer)[0], []).append(offer.candidate)
    told = tuple(f"{', '.join(names)}: {text}" for text, names in reasons.items())
    if then.chosen is not None and then.chosen.candidate != _MATH:
        return told, []
    for offer in then.offers:
        if offer.candidate != _MATH and all(topics(p, one) for one in offer.refusals):
            return told, list(offer.refusals)
    return told, []


def _left(then: Dispatch | None, best: str, hindrances: list[Hindrance]) -> list[Hindrance]:
    """What still stands in the way of ``best`` where the call is rewritten."""
    offer = _offer(then, best)
    if offer is None:
        return hindrances
    return [*(one for one in hindrances if isinstance(one, Unlock)), *offer.refusals]


def _otherwise(site: Site, selection: Selection, hindrances: list[Hindrance]) -> str:
    """The way out where the program's own library has none: attnsel in place of F.sdpa."""
    for one in hindrances:
        if isinstance(one, Unlock):
            return one.change
    chosen = selection.chosen
    if site.forward.startswith(_BY_F_SDPA) and chosen is not None and not chosen.plan_only:
        best = selection.backend
        return f"attnsel run --sdpa PROGRAM, or attnsel.scaled_dot_product_attention: {best} runs it"
    return ""
