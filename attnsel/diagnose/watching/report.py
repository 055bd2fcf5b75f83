"""What was seen, as text, as Markdown for an issue, and as JSON. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

from attnsel.base.schemas import stamped
from attnsel.diagnose.watching.record import Process, Site
from attnsel.environment import Environment
from attnsel.errors import printable
from attnsel.params import Tensors
from attnsel.report.lines import fold, join_items
from attnsel.report.markdown import code, escape, table
from attnsel.report.words import environment_words, params_words, tensor_words
from attnsel.verdicts.requirements import size

MOST_SHOWN = 12
"""Sites of one place that are written out; the rest is counted (--json has all)."""


class Watched(NamedTuple):
    """Everything that is told. ``asked``: the machine that ``best`` and ``planned`` are about, None for the
    one that the program ran on."""

    process: Process
    sites: tuple[Site, ...]
    asked: Environment | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return stamped(
            "watch",
            {
                "process": self.process.model_dump(mode="json"),
                "asked": None if self.asked is None else self.asked.model_dump(mode="json"),
                "sites": [site.model_dump(mode="json") for site in self.sites],
            },
        )

    def report(self, width: int = 80) -> str:
        """As text."""
        lines = join_items([headline(self), *environment_words(self.process.environment)], width)
        if self.asked is not None:
            lines += join_items(["asked about", *environment_words(self.asked)], width)
        for (where, api), sites in _places(merged(self.sites)):
            lines += ["", *fold(f"{where}  ({api})", width, "", "  ")]
            for site in sites[:MOST_SHOWN]:
                lines += _site_lines(site, width, self.asked)
            if len(sites) > MOST_SHOWN:
                calls = sum(site.site.calls for site in sites[MOST_SHOWN:])
                lines += [f"  and {len(sites) - MOST_SHOWN} other shapes, {_times(calls, 'call')}"]
        if not self.sites:
            lines += ["", *fold(NOTHING, width)]
        if self.process.unseen:
            lines += ["", "Not seen:"]
            for one in self.process.unseen:
                lines += fold(printable(one), width, "  – ", "    ")
        return "\n".join(lines)

    def markdown(self) -> str:
        """As Markdown."""
        where = environment_words(self.process.environment if self.asked is None else self.asked)
        parts = [f"**attnsel watch**: {escape(headline(self))}", escape(" · ".join(where))]
        head = ["where", "calls", "backward", "ran", "shape", *(["there"] if self.asked else []), "best"]
        rows = []
        shown = merged(self.sites)
        for site, lengths in shown:
            row = [code(site.where), str(site.calls), str(site.backward_calls), code(_ran(site))]
            row.append(escape(_question(site, lengths)))
            if self.asked is not None:
                row.append(escape(site.planned or "?"))
            rows.append([*row, escape(site.best or "?")])
        parts.append(table(head, rows) if rows else escape(NOTHING))
        told = {
            f"- {code(site.where)}: {'; '.join(map(escape, _told(site)))}": None
            for site, _ in shown
            if _told(site)
        }
        parts.append("\n".join(told))
        if self.process.unseen:
            parts.append("Not seen:\n\n" + "\n".join(f"- {escape(one)}" for one in self.process.unseen))
        return "\n\n".join(part for part in parts if part)


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
    return f"{printable(process.program)}{rank}: {seen}{ended}"


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


def _site_lines(shown: Shown, width: int, asked: Environment | None) -> list[str]:
    site = shown.site
    counts = _times(site.calls, "call")
    if site.backward_calls:
        counts += f", {site.backward_calls} backward"
    lines = join_items([f"  {counts}", _ran(site)], width)
    lines = [lines[0], *(f"    {line}" for line in lines[1:])]
    lines += fold(_question(site, shown.lengths), width, "    ", "    ")
    if site.materialised:
        made = "; ".join(f"{printable(one.what)} {size(one.bytes)}" for one in site.materialised)
        lines += fold(f"made on every call: {made}", width, "    ! ", "      ")
    for text in _measured(site):
        lines += fold(text, width, "    ", "      ")
    if asked is not None and site.planned:
        lines += fold(f"there: {printable(site.planned)}", width, "    ", "      ")
    for text in _told(site):
        lines += fold(text, width, "    ", "      ")
    return lines


def _ran(site: Site) -> str:
    compiled = " (compiled)" if site.compiled else ""
    kernel = f"{site.candidate}: " if site.candidate and site.candidate != site.forward else ""
    return printable(f"{kernel}{site.forward}{compiled}")


def _question(site: Site, lengths: tuple[int, ...]) -> str:
    if site.params is None:
        return printable(f"the call could not be read: {site.unread}" if site.unread else "shape not read")
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
        better = "not a better kernel" if site.best == site.candidate else f"not {site.best}"
        told.append(f"why {better}: {printable('; '.join(site.why))}")
    if site.fix:
        told.append(f"fix: {printable(site.fix)}")
    return told + [printable(note) for note in site.notes]


def _times(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"
