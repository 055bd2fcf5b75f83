"""The best kernel for a site, why it did not run, the fix in the program's own words. Imports no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import json_fields, stamped, to_json
from attnsel.decision import Selection, select
from attnsel.diagnose.framework_fixes import Hindrance, fixes, topics, ways_out
from attnsel.diagnose.watching.record import Process, Site
from attnsel.dispatchers import Dispatch, Offer, dispatched_by
from attnsel.environment import Environment
from attnsel.environment.versions import component_name
from attnsel.params import AttentionParams, Tensors, TensorSpec
from attnsel.report.answer import better_way, easily_taken_for, newer_items
from attnsel.report.document import Block, Code, Document, Facts, Item, Items, Paragraph, Section
from attnsel.report.text import to_text
from attnsel.report.words import environment_words, params_words, tensor_words
from attnsel.selection.unlock.search import Unlock
from attnsel.verdicts.requirements import size

# --------------------------------------------------------------------------------------------------------
# A call of F.sdpa as a program could have written it: the same numbers, in the form that fused kernels want.
#
# F.sdpa goes to math for tensors of other ranks than four, masks of three dimensions, a batch or a head that
# broadcasts. None of it is a matter of what is computed. Imports no torch.


ENABLE_GQA = "enable_gqa"


class Rewritten(NamedTuple):
    """The call in four dimensions, with nothing left to broadcast. ``topics``: what was changed, as
    ``attnsel.diagnose.framework_fixes`` names it."""

    params: AttentionParams
    switches: dict[str, str]
    topics: tuple[str, ...]


def rewritten(p: AttentionParams, switches: dict[str, str]) -> Rewritten:
    """The same call in the form that fused kernels take, and what had to be changed for it."""
    topics: list[str] = []
    tensors = p.tensors
    if tensors.rank != 4:
        topics.append("rank")
        tensors = tensors.replace(rank=4)
    if tensors.mask is not None and len(tensors.mask.shape) not in (2, 4):
        topics.append("mask rank")
        tensors = tensors.replace(mask=_of_four_dimensions(tensors.mask))
    expanded = {name: _expanded(getattr(tensors, name), p.batch_size) for name in ("q", "k", "v")}
    if expanded != {name: getattr(tensors, name) for name in expanded}:
        topics.append("batch of one")
        tensors = tensors.replace(**expanded)
    if switches.get(ENABLE_GQA) == "false" and p.gqa:
        topics.append("no enable_gqa")
        switches = {**switches, ENABLE_GQA: "true"}
    return Rewritten(p.replace(tensors=tensors), switches, tuple(topics))


def _of_four_dimensions(mask: TensorSpec) -> TensorSpec:
    """The mask with leading dimensions of one, which broadcast."""
    missing = 4 - len(mask.shape)
    return mask.replace(shape=(1,) * missing + mask.shape, stride=(0,) * missing + mask.stride)


def _expanded(spec: TensorSpec | None, batch: int) -> TensorSpec | None:
    if spec is None or spec.shape[0] == batch:
        return spec
    return spec.replace(shape=(batch, *spec.shape[1:]), stride=(0, *spec.stride[1:]))


def as_attnsel_takes_it(p: AttentionParams) -> AttentionParams:
    """The question of a rewritten call: a mask of numbers is a bias, which its own fields describe."""
    mask = p.tensors.mask
    if mask is not None and len(mask.shape) < 4:
        mask = _of_four_dimensions(mask)
    if mask is not None and mask.dtype != "bool" and p.attn_mask_type != "arbitrary":
        mask = None
    return p.replace(tensors=p.tensors.replace(mask=mask))


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
    made += [str(fix) for fix in fixes(site.api, p, hindrances, site.dropout_name)]
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
        alike = easily_taken_for(best, dispatch.offers)
        return (f"F.scaled_dot_product_attention does not have {best}{alike}",), changes
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
        assumed = selection.environment.assumed  # what is known to be there goes without saying
        needs = [component_name(one) for one in CANDIDATES[chosen.name].needs if one in assumed]
        beside = f", which needs {' and '.join(needs)}" if needs else ""
        beside += ", unproven there and checked by its first call" if chosen.unproven else ""
        way = "attnsel run --sdpa PROGRAM, or attnsel.scaled_dot_product_attention"
        return f"{way}: {chosen.name} runs it{beside}"
    return ""


# ---- What was seen, as text, as Markdown for an issue, and as JSON. Imports no torch -------------------


MOST_SHOWN = 12
"""Sites of one place that are written out; the rest is counted (--json has all)."""


@json_fields("process", ("asked", lambda told: told.asked and told.asked.model_dump(mode="json")), "sites")
class Watched(NamedTuple):
    """Everything that is told. ``asked``: the machine that ``best`` and ``planned`` are about, None for the
    one that the program ran on."""

    process: Process
    sites: tuple[Site, ...]
    asked: Environment | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return stamped("watch", to_json(self))

    def document(self) -> Document:
        """What was seen, place by place."""
        where: list[tuple[str, ...] | Item] = [(headline(self), *environment_words(self.process.environment))]
        if self.asked is not None:
            where.append(("asked about", *environment_words(self.asked)))
        newer = (self.asked or self.process.environment).unread
        where += newer_items(newer)
        blocks: list[Block] = [Facts(tuple(where))]
        for (place, api), sites in _places(merged(self.sites)):
            items = [_site_item(site, self.asked) for site in sites[:MOST_SHOWN]]
            if len(sites) > MOST_SHOWN:
                calls = sum(site.site.calls for site in sites[MOST_SHOWN:])
                items.append(Item(f"and {len(sites) - MOST_SHOWN} other shapes, {_times(calls, 'call')}"))
            blocks.append(Section(f"{place}  ({api})", (Items(tuple(items)),)))
        if not self.sites:
            blocks.append(Paragraph(NOTHING))
        if self.process.unseen:
            unseen = tuple(Item(one, "–") for one in self.process.unseen)
            blocks.append(Section("Not seen", (Items(unseen),)))
        return Document(tuple(blocks))

    def report(self, width: int = 80) -> str:
        """As text."""
        return to_text(self.document(), width)


NOTHING = (
    "No attention was seen. What is looked for: F.scaled_dot_product_attention, aten's attention operators, "
    "nn.MultiheadAttention, flex_attention, flash_attn, TransformerEngine, transformers, diffusers, and a "
    "softmax between two products."
)


def headline(watched: Watched) -> str:
    """Program, rank, and how much was seen."""
    process, sites = watched.process, watched.sites
    rank = f" (rank {process.rank} of {process.world_size})" if process.world_size > 1 else ""
    calls, backward = sum(s.calls for s in sites), sum(s.backward_calls for s in sites)
    seen = f"{_times(calls, 'call')} of attention" + (f", {backward} backward" if backward else "")
    ended = f", exit code {process.exit_code}" if process.exit_code else ""
    return f"{process.program}{rank}: {seen}{ended}"


class Shown(NamedTuple):
    """Sites that differ in the number of keys alone, as one. ``lengths``: all of those numbers."""

    site: Site
    lengths: tuple[int, ...] = ()


def merged(sites: Iterable[Site]) -> list[Shown]:
    """Sites with those put together that only s_kv tells apart, as generation makes them: figures and words
    are those of the longest, counts the sum."""
    groups: dict[tuple[object, ...], list[Site]] = {}
    for number, site in enumerate(sites):
        p = site.params
        growing = p is not None and p.max_seqlen_q < p.max_seqlen_kv and not site.notes
        alike = p.resized(max_seqlen_kv=1, tensors=Tensors(rank=p.tensors.rank)) if p and growing else number
        verdict = (site.switches, site.candidate, site.planned, site.best, site.why, site.fix)
        groups.setdefault((site.where, site.api, site.forward, site.compiled, *verdict, alike), []).append(
            site
        )
    return [_as_one(group) for group in groups.values()]


def _as_one(group: list[Site]) -> Shown:
    if len(group) == 1:
        return Shown(group[0])
    lengths = sorted(site.params.max_seqlen_kv for site in group if site.params is not None)
    longest = next(site for site in group if site.params and site.params.max_seqlen_kv == lengths[-1])
    calls = sum(site.calls for site in group)
    backward = sum(site.backward_calls for site in group)
    return Shown(longest.replace(calls=calls, backward_calls=backward), tuple(lengths))


def _places(shown: Iterable[Shown]) -> list[tuple[tuple[str, str], list[Shown]]]:
    """Sites of one place and library together, those with the most calls first, each place's likewise."""

    def place(one: Shown) -> tuple[str, str]:
        return one.site.where, one.site.api

    groups = [(key, list(group)) for key, group in groupby(sorted(shown, key=place), key=place)]
    groups.sort(key=lambda group: -sum(one.site.calls for one in group[1]))
    return [(key, sorted(group, key=lambda one: -one.site.calls)) for key, group in groups]


def _site_item(shown: Shown, asked: Environment | None) -> Item:
    site = shown.site
    backward = f", {site.backward_calls} backward" if site.backward_calls else ""
    below: list[Block] = [Paragraph(_question(site, shown.lengths))]
    if site.materialised:
        made = "; ".join(f"{one.what} {size(one.bytes)}" for one in site.materialised)
        below.append(Item(f"made on every call: {made}", "!"))
    below += map(Item, _measured(site))
    if asked is not None and site.planned:
        below.append(Item(f"there: {site.planned}"))
    below += map(Item, _told(site))
    compiled = " (compiled)" if site.compiled else ""
    kernel = f"{site.candidate}: " if site.candidate and site.candidate != site.forward else ""
    ran = Code(f"{kernel}{site.forward}{compiled}")
    return Item((f"{_times(site.calls, 'call')}{backward} · ", ran), below=tuple(below))


def _question(site: Site, lengths: tuple[int, ...]) -> str:
    if site.params is None:
        return f"the call could not be read: {site.unread}" if site.unread else "shape not read"
    p = site.params
    words = [*params_words(p), *tensor_words(p)]
    words[1] = p.qkv_format
    if p.tensors.rank != 4:
        words.append(f"given in {p.tensors.rank} dimensions")
    if p.tensors.mask is not None:
        words.append(f"attn_mask {p.tensors.mask.dtype}{list(p.tensors.mask.shape)}")
    words += site.switches
    if lengths:
        words.append(f"(and {len(lengths) - 1} other lengths of keys, from {lengths[0]})")
    return " ".join(words)


def _measured(site: Site) -> list[str]:
    parts = []
    if site.seconds is not None:
        text = f"forward {_seconds(site.seconds)}"
        if site.expected_seconds is not None:
            text += f" (expected {_seconds(site.expected_seconds)})"
        if site.backward_seconds is not None:
            text += f", backward {_seconds(site.backward_seconds)}"
        parts.append(text)
    if site.peak_bytes is not None:
        text = f"allocates {size(site.peak_bytes)}"
        if site.expected_bytes is not None:
            text += f" (expected {size(site.expected_bytes)})"
        parts.append(text)
    return parts


def _told(site: Site) -> list[str]:
    """The best kernel where another ran, why, the fix, and notes."""
    told = []
    if site.why:
        better = (
            "not a better kernel" if site.best == (site.planned or site.candidate) else f"not {site.best}"
        )
        told.append(f"why {better}: {'; '.join(site.why)}")
    if site.fix:
        told.append(f"fix: {site.fix}")
    return [*told, *site.notes]


def _times(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


# --------------------------------------------------------------------------------------------------------
# One file of JSON lines for each process: its line, then one for each site. `attnsel compare` reads them.


def file_of(folder: str | Path, watched: Watched) -> Path:
    """Where the process's file lies: rank, machine and process id tell those of one job apart."""
    process = watched.process
    host = re.sub(r"[^A-Za-z0-9.-]", "-", process.host)[:60] or "host"
    return Path(folder) / f"watch-rank{process.rank}-{host}-{process.pid}.jsonl"


def write(folder: str | Path, watched: Watched) -> Path:
    """Write the file whole: a reader finds the old one or the new one, never a half. Raises OSError."""
    path = file_of(folder, watched)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [stamped("watch-process", to_json(watched.process))]
    lines += [stamped("watch-site", to_json(site)) for site in watched.sites]
    part = path.with_suffix(f".part{os.getpid()}")
    try:
        part.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
