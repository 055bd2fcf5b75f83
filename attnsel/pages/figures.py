"""The published figures behind the order: for each rule that orders, the measurements that it decides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import permutations
from typing import Any, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.rows import read_rows
from attnsel.environment.gpus import ARCHITECTURES
from attnsel.policy import Policy
from attnsel.report.document import Block, Item, Items, Paragraph
from attnsel.report.words import shape_words, short_length
from attnsel.rules.figures import Measurement, measured, size
from attnsel.rules.orders import LEADS, Call, lengths, ordered
from attnsel.selection.inquiry import decided_by, key_of
from attnsel.verdicts.reasons import Page, RankKey


class Claim(NamedTuple):
    """One measurement in which a rule puts one kernel before another; ``ratio``: the lower one's time over
    the upper one's, below 1 where the measurement says the opposite."""

    measurement: Measurement
    above: str
    below: str
    ratio: float


def call_of(one: Measurement) -> Call:
    """What was measured, as a call: of a head dimension that is not stated, the usual one."""
    row = one.shape
    head_dim = max(size(row, "head_dim_qk"), size(row, "head_dim_v")) or 128
    asked = lengths(size(row, "seqlen_q"), size(row, "seqlen_kv"))
    training, causal = row["direction"] != "fwd", row["mask"] == "causal"
    return Call(training, bool(row["deterministic"]), bool(row["window"]), causal, head_dim, *asked)


def claims_of(one: Measurement, among: tuple[Any, ...] | None = None) -> Iterator[tuple[str, Claim]]:
    """Every two candidates of a measurement, with the rule by which one of them is first where all packages
    are the newest. ``among``: with these of the rules of data/orders.csv alone."""
    call, arch, times = call_of(one), int(one.shape["arch"]), one.times
    rows = tuple(lead for lead in (LEADS if among is None else among) if lead.concerns(call, arch))
    order = ordered(arch, call.training, rows)
    keys = {n: RankKey(n, "eligible", 0, False, False, order=order) for n in times if n in CANDIDATES}
    values = {name: key_of(key, arch, Policy()) for name, key in keys.items()}
    for above, below in permutations(keys, 2):
        if values[above] < values[below]:
            code = decided_by(keys[above], keys[below], values[above], values[below])
            yield code or "", Claim(one, above, below, times[below] / times[above])


@lru_cache(maxsize=1)
def claims() -> Mapping[str, tuple[Claim, ...]]:
    """By code, what was published of the calls that a rule is about. Of a bias, of pages and of FP8, which is
    planned only, the order says nothing by speed."""
    found: dict[str, list[Claim]] = defaultdict(list)
    for one in (one for arch in ARCHITECTURES for one in measured(arch)):
        if not one.shape["other"] and "fp8" not in one.shape["dtype"]:
            for code, claim in claims_of(one):
                found[code].append(claim)
    return {code: tuple(among) for code, among in found.items()}


def figures_of(code: str) -> list[dict[str, Any]]:
    """The published figures of a rule; those of one source that differ in their lengths alone are one."""
    groups: dict[tuple[str, str, str, str], list[Claim]] = defaultdict(list)
    for claim in claims().get(code, ()):
        shape = claim.measurement.shape
        groups[shape_words(shape), claim.above, claim.below, shape["source"]].append(claim)
    found: list[dict[str, Any]] = []
    for (kind, above, below, _), among in groups.items():
        ratios = sorted(round(claim.ratio, 2) for claim in among)
        stated = sorted({size(claim.measurement.shape, "seqlen_q") for claim in among} - {0})
        span = " to ".join(dict.fromkeys(map(short_length, (stated or [0])[:: max(1, len(stated) - 1)])))
        times = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1])))
        source = among[0].measurement.source
        kind += f", {span}" if stated else ""
        text = f"{kind}: {below} takes {times} times as long as {above}"
        pairs = [claim.measurement.name for claim in among]
        told = {"text": text, "pairs": pairs, "lowest": ratios[0], "highest": ratios[-1]}
        found.append({**told, "title": source["title"], "date": source["date"], "source": source["source"]})
    return sorted(found, key=lambda one: -float(one["highest"]))


def resting() -> Mapping[str, Mapping[str, str]]:
    """By code, what preferences rest on beside times: data/resting.csv."""
    return {row["code"]: row for row in read_rows("attnsel.rules", "resting")}


def figure_blocks(page: Page) -> tuple[Block, ...]:
    """The published figures of a rule that orders, with the names of their measurements in data/figures.csv;
    and what it rests on instead."""
    found, known = figures_of(page.code), resting().get(page.code, {})
    blocks: list[Block] = [Paragraph(f"It rests on {known['untimed']}.")] if known.get("untimed") else []
    if found:
        both = " They contradict each other." if known.get("contested") else ""
        items = (
            Item(
                (one["text"], f" ({', '.join(one['pairs'])})"),
                below=(Item(f"{one['title']}, {one['date']}"),),
            )
            for one in found
        )
        blocks += [Paragraph(f"Published figures (rules/data/figures.csv).{both}"), Items(tuple(items))]
    against = [row for row in read_rows("attnsel.rules", "against") if row["code"] == page.code]
    whys = {row["why"]: [r["pair"] for r in against if r["why"] == row["why"]] for row in against}
    blocks += [Paragraph(f"Against it: {', '.join(pairs)}: {why}.") for why, pairs in whys.items()]
    return tuple(blocks)
