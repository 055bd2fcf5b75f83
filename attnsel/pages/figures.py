"""The published figures behind the order: for each rule that orders, the measurements it decides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.policy import Policy
from attnsel.report.document import Block, Item, Items, Paragraph
from attnsel.report.words import short_length
from attnsel.rules import Placing, Preference
from attnsel.rules.figures import Measurement, every, sources
from attnsel.rules.orders import Call, Order, leads, ordered
from attnsel.selection.inquiry import decided_by, key_of
from attnsel.verdicts.reasons import Page, RankKey

NOISE = 1.05
"""By so much a measurement may say the opposite before a rule has to name it: runs of one kernel differ so."""


class Claim(NamedTuple):
    """One measurement in which a rule puts one kernel before another; ``ratio``: the lower one's time over
    the upper one's, below 1 where the measurement says the opposite."""

    measurement: Measurement
    above: str
    below: str
    ratio: float

    @property
    def against(self) -> bool:
        return self.ratio < 1 / NOISE

    @property
    def kind(self) -> str:
        """What was measured but for its lengths, in words."""
        one = self.measurement.shape
        heads = f"d{one.head_dim_qk}" if one.head_dim_qk else "d not stated"
        heads += f"/{one.head_dim_v}" if one.head_dim_v != one.head_dim_qk else ""
        card = one.gpu or f"sm{one.arch}"
        window = f"window {one.window}" if one.window else ""
        mask = "" if one.mask == "causal" and window else one.mask.replace("_", " ")
        return ", ".join(
            filter(
                None,
                (card, one.direction, one.dtype, heads, mask, window, "deterministic" * one.deterministic),
            )
        )


class Row(NamedTuple):
    """Measurements of one source that differ in their lengths alone, and the range of their ratios."""

    text: str
    pairs: tuple[str, ...]
    lowest: float
    highest: float
    title: str
    address: str


def rows_of(code: str) -> tuple[Row, ...]:
    """The published figures of a rule, those of one kind in one line; the clearest first."""
    groups: dict[tuple[str, str, str, str], list[Claim]] = defaultdict(list)
    for claim in claims().get(code, ()):
        groups[claim.kind, claim.above, claim.below, claim.measurement.source].append(claim)
    found = []
    for (kind, above, below, name), among in groups.items():
        ratios = sorted(claim.ratio for claim in among)
        lengths = sorted({claim.measurement.shape.seqlen_q for claim in among} - {0})
        span = " to ".join(dict.fromkeys(map(short_length, (lengths[0], lengths[-1])))) if lengths else ""
        times = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1])))
        source = sources()[name]
        text = f"{kind}{f', {span}' if span else ''}: {below} takes {times} times as long as {above}"
        pairs = tuple(claim.measurement.name for claim in among)
        found.append(
            Row(text, pairs, ratios[0], ratios[-1], f"{source.title}, {source.date}", source.address)
        )
    return tuple(sorted(found, key=lambda row: -row.highest))


def figure_blocks(page: Page) -> tuple[Block, ...]:
    """The published figures of a rule that orders, a line for each kind with the names of its measurements in
    rules/data/figures.csv; or what it rests on instead. Nothing for a rule of another kind."""
    if not isinstance(page, Placing):
        return ()
    if isinstance(page, Preference) and page.untimed:
        return (Paragraph(f"It rests on no published time, but on {page.untimed}."),)
    lead = "Published figures, from rules/data/figures.csv"
    if isinstance(page, Preference) and page.contested:
        lead += "; they contradict each other"
    items = (
        Item((row.text, f" ({', '.join(row.pairs)})"), below=(Item(row.title),)) for row in rows_of(page.code)
    )
    return (Paragraph(f"{lead}:"), Items(tuple(items)))


def order_for(one: Measurement) -> Order:
    """The order for what was measured, with the newest releases of all packages."""
    call, arch = Call.measured(one.shape), one.shape.arch or None
    return ordered(arch, call.training, tuple(lead for lead in leads() if lead.concerns(call, arch)))


def _claims(one: Measurement) -> Iterator[tuple[str, Claim]]:
    """Every two candidates of a measurement, with the rule by which one of them is first."""
    order, arch = order_for(one), one.shape.arch or None
    times = {figure.kernel: figure.time for figure in one.figures if figure.kernel in CANDIDATES}
    keys = {name: RankKey(name, "eligible", 0, False, False, order=order) for name in times}
    values = {name: key_of(key, arch, Policy()) for name, key in keys.items()}
    for above, below in permutations(times, 2):
        if values[above] < values[below]:
            code = decided_by(keys[above], keys[below], values[above], values[below])
            if code is not None:
                yield code, Claim(one, above, below, times[below] / times[above])


@lru_cache(maxsize=1)
def claims() -> Mapping[str, tuple[Claim, ...]]:
    """By code, what was published of the calls that a rule is about: those it rests on, and those against."""
    found: dict[str, list[Claim]] = defaultdict(list)
    for one in every():
        if one.shape.other or "fp8" in one.shape.dtype or not one.shape.arch:
            continue  # of a bias, of pages, and of what is planned only, the order says nothing by speed
        for code, claim in _claims(one):
            found[code].append(claim)
    return {code: tuple(among) for code, among in found.items()}
