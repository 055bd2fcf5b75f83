"""The search for the cheapest sets of changes, each put to the engine as a question of its own.

Sets are taken in the order of their cost. One that leaves the candidate refused is extended by whatever
answers the reason that has the fewest answers; one that makes it eligible is kept, and nothing that contains
its fields is looked at again. So what is found is minimal, and within the bounds below nothing cheaper of
what the rules propose is missed: tests/attnsel/selection/unlock/test_search.py compares with all sets of two.

Measured on 400 refused questions of tests/net, all candidates of each, new machines met on the way, two cores
with five times their load: 7 ms of CPU at the median, 17 at the 90th percentile, 45 at most. It was 15, 33
and 70 when every new machine had each rule asked, and all sets of software were made before one was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from attnsel.base.records import json_fields
from attnsel.environment import COMPONENTS
from attnsel.environment.gpus import familiar
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput
from attnsel.selection.assumed import edges
from attnsel.selection.unlock.change import (
    EFFECTS,
    Applicability,
    Changes,
    Cost,
    Scenario,
    VersionRange,
    changed,
    cost_of,
    effect_of,
    grouped,
    render_change,
)
from attnsel.selection.unlock.proposals import gpu_distance, may_only_add, nearest_gpus, proposals_for
from attnsel.selection.unlock.software import Install, needs_software, resolve

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams
    from attnsel.policy import Policy
    from attnsel.selection.view import SelectionView
    from attnsel.verdicts.reasons import Candidate

    Ask = Callable[[AttentionParams, Environment, Policy], SelectionView]
    AskAbout = Callable[[str, AttentionParams, Environment, Policy], Candidate]

MOST_CHANGES = 3  # in one set: a longer list is another project
MOST_WAYS = 3  # per candidate: what a report shows
MOST_ASKED = 48  # questions per candidate in the search; 0.1 ms each, and candidates share them


@json_fields(
    "candidate", "change", "effect", "paste", ("changes", lambda u: dict(u.changes)), "rank",
    ("extra_work", lambda u: round(u.cost.work, 6)), "install",
)  # fmt: skip
class Unlock(NamedTuple):
    """A smallest set of changes after which ``candidate`` is eligible, checked by asking the engine again.

    ``changes`` maps fields (``max_seqlen_q``, ``cudnn``, ``gpu``, ``policy.deny``) to their new values, of
    software the least that helps; ``install`` is the whole set that goes with it, None where no software
    changes. ``paste`` has lines for a shell or for Python, and comments on them. ``effect`` is that of the
    dearest change, one of :data:`EFFECTS`. ``rank`` is the place the candidate would take, 1 being first.
    """

    candidate: str
    change: str
    effect: str
    paste: str
    changes: Changes
    rank: int
    cost: Cost
    install: Install | None = None

    def __repr__(self) -> str:
        return f"<Unlock {self.candidate}: {self.change} ({self.effect}, number {self.rank})>"

    def apply(
        self, params: AttentionParams, environment: Environment, policy: Policy
    ) -> tuple[AttentionParams, Environment, Policy]:
        """The question with these changes made; ``select`` of it finds the candidate eligible.

        What is assumed of the environment stays as it is: the changes were checked with just these versions.

        Raises InvalidInput for parameters with which the changes contradict each other: those of the
        selection that this came from never do.
        """
        after = changed(Scenario(params, environment, policy), _whole(self.changes, self.install))
        return after.p, after.env.derive(resolved=True), after.policy


def find_unlocks(selection: SelectionView, ask: Ask, ask_about: AskAbout) -> tuple[Unlock, ...]:
    """The smallest sets of changes that make a refused candidate eligible, cheapest first.

    ``ask_about`` is the engine asked about one candidate, which the search does; each set that is found is
    put to ``ask``, the whole engine, which says at which place the candidate would stand.
    """
    base = Scenario(selection.params, selection.environment, selection.policy)
    judge = cache(lambda name, question: ask_about(name, *question))
    engine = _Engine(
        judge,
        cache(lambda question: [candidate.name for candidate in ask(*question).ranked]),
        cache(lambda name, changes: resolve(base, name, dict(changes), judge)),
    )
    found: list[Unlock] = []
    for candidate in selection.candidates:
        if candidate.verdict != "refused":
            continue
        ways = _search(base, candidate, engine, hardware=False)
        if all(cost.risks for cost, _ in ways):  # no software and no parameter helps
            elsewhere = _search(base, candidate, engine, hardware=True)[:1]
            ways = [way for way in elsewhere if not way[0].risks] + ways
        found += _unlocks(base, candidate.name, ways, engine)
    return tuple(sorted(found, key=lambda u: (*u.cost[:6], u.rank, u.cost.distance, u.candidate)))


class _Engine(NamedTuple):
    """The engine, asked once per candidate and question; ways to several candidates are often the same.

    judge: a candidate's verdict on a question. ranked: who stands in one, best first. resolve: the software
    for a set of changes for a candidate, None where no release fits.
    """

    judge: Callable[[str, Scenario], Candidate]
    ranked: Callable[[Scenario], list[str]]
    resolve: Callable[[str, Changes], Install | None]

    def eligible(self, name: str, question: Scenario) -> bool:
        return self.judge(name, question).verdict == "eligible"


def _search(
    base: Scenario, candidate: Candidate, engine: _Engine, hardware: bool
) -> list[tuple[Cost, Changes]]:
    """The cheapest sets for one candidate, none within another. ``hardware``: a set with another GPU only."""
    found: list[tuple[Cost, Changes]] = []
    tie = count()
    heap: list[tuple[Cost, int, Changes]] = []
    seen: set[Changes] = {()}
    name, asked = candidate.name, 0

    def extend(changes: Changes, question: Scenario, reasons: Any) -> None:
        whole = len(grouped(base, dict(changes))) == MOST_CHANGES
        if whole and may_only_add(question, changes, reasons):
            return
        for move in proposals_for(name, question, base, reasons, hardware):
            grown = _merge(base, changes, move)
            if grown in seen or len(grouped(base, dict(grown))) > MOST_CHANGES or _within(found, grown):
                continue
            seen.add(grown)
            try:
                heappush(heap, (cost_of(base, dict(grown)), next(tie), grown))
            except InvalidInput:  # each fits, both together do not
                continue

    extend((), base, candidate.reasons)
    while heap and len(found) < MOST_WAYS and asked < MOST_ASKED:
        cost, _, changes = heappop(heap)
        if _within(found, changes):
            continue
        question = changed(base, dict(changes))
        answer = engine.judge(name, question)
        asked += 1
        if answer.verdict == "eligible":
            # What no published set of software brings about is no way out.
            if hardware and not cost.gpus:
                continue
            if cost.gpus or not needs_software(base, dict(changes)) or engine.resolve(name, changes):
                found.append((cost, changes))
        else:
            extend(changes, question, answer.reasons)
    return found


def _merge(base: Scenario, changes: Changes, move: Mapping[str, Any]) -> Changes:
    """A set with one more move; what is as it was in the beginning is no change."""
    merged = {**dict(changes), **move}
    return tuple(sorted((f, value) for f, value in merged.items() if value != base.value(f)))


def _within(found: list[tuple[Cost, Changes]], changes: Changes) -> bool:
    """Whether a set changes all that a set which was found changes."""
    fields = {field for field, _ in changes}
    return any(fields.issuperset(field for field, _ in other) for _, other in found)


# ---- telling ----------------------------------------------------------------------------------------


def _unlocks(
    base: Scenario, name: str, ways: list[tuple[Cost, Changes]], engine: _Engine
) -> Iterator[Unlock]:
    """The ways to one candidate in words, each with the place that it would take; two that end at the same
    machine and question are one."""
    seen: set[Scenario] = set()
    for cost, changes in ways:
        archs: frozenset[int] = frozenset()
        if cost.gpus:
            made, archs = _best_card(base, name, dict(changes), engine)
            changes = tuple(sorted(made.items()))
        install = None
        if needs_software(base, dict(changes)):
            install = engine.resolve(name, changes)
            if install is None:
                continue
        after = changed(base, _whole(changes, install))
        if after in seen:
            continue
        seen.add(after)
        made = dict(changes)
        reach = {field: _reach(base, name, made, field, engine) for field in made if field in COMPONENTS}
        said = render_change(base, made, Applicability(reach, archs))
        text = " and ".join(part.text for part in said)
        commands = () if install is None else install.commands
        yield Unlock(
            name,
            change=text + " (no wheel fits: built here)" * (install is not None and install.built_here),
            effect=max((effect_of(field) for field in made), key=EFFECTS.index),
            paste="\n".join((*commands, *(part.paste for part in said if part.paste))),
            changes=changes,
            rank=engine.ranked(after).index(name) + 1,
            cost=cost,
            install=install,
        )


def _whole(changes: Changes, install: Install | None) -> dict[str, Any]:
    """Changes with all the software that comes with them."""
    return {**dict(changes), **dict(install.changes if install is not None else ())}


def _best_card(
    base: Scenario, name: str, made: dict[str, Any], engine: _Engine
) -> tuple[dict[str, Any], frozenset[int]]:
    """All architectures on which the same set works, and the set with the nearest card of them."""
    archs = frozenset(
        gpu.arch
        for gpu in nearest_gpus(base.env)
        if engine.eligible(name, changed(base, {**made, "gpu": gpu.name}))
    )
    newer = frozenset(arch for arch in archs if arch > (base.env.arch or 0)) or archs
    cards = [gpu for gpu in familiar() if gpu.arch in newer]
    card = min(cards, key=lambda gpu: gpu_distance(base.env, gpu))
    return {**made, "gpu": card.name}, newer


def _reach(base: Scenario, name: str, made: dict[str, Any], component: str, engine: _Engine) -> VersionRange:
    """Which newer versions would not do, so that what is pasted does not install one of them."""
    version: Version = made[component]
    current = base.value(component)
    newer = [edge for edge in edges(name, component) if edge > version]
    if current is not None and version < current:
        return VersionRange(below=newer[0] if newer else version.after)
    good = [engine.eligible(name, changed(base, {**made, component: edge})) for edge in newer]
    without: list[str] = []
    for i, edge in enumerate(newer):
        if good[i]:
            continue
        releases = None if i + 1 == len(newer) else _releases(version, edge, newer[i + 1])
        if not any(good[i:]) or releases is None or len(without) + len(releases) > _MOST_LEFT_OUT:
            return VersionRange(edge, tuple(without))
        without += [release for release in releases if release not in without]
    return VersionRange(None, tuple(without))


_MOST_LEFT_OUT = 4  # releases in a line for pip; beyond that it names the first bad one as a bound


def _releases(version: Version, low: Version, high: Version) -> list[str] | None:
    """``9.8``, ``9.10.0``: prefixes that cover all releases from ``low`` to below ``high``, or None."""
    if low.major != high.major or (low.minor != high.minor and low.patch and low[:2] == version[:2]):
        return None
    minors = [f"{low.major}.{minor}" for minor in range(low.minor, high.minor)]
    first = low.patch if low.minor == high.minor else 0
    return minors + [f"{high.major}.{high.minor}.{patch}" for patch in range(first, high.patch)]
