"""What another machine changes: the same questions asked in several environments, and why answers differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from operator import or_
from typing import Any, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.rows import read_rows
from attnsel.decision import Selection
from attnsel.diagnose.models import document
from attnsel.diagnose.models.page import layer_maps
from attnsel.diagnose.models.plan import ModelPlan
from attnsel.environment import Environment
from attnsel.report.answer import warnings
from attnsel.report.document import (
    Block,
    Code,
    Document,
    Facts,
    Inline,
    Item,
    Items,
    Paragraph,
    Ref,
    Strong,
    joined,
)
from attnsel.report.html import Page
from attnsel.report.words import environment_words
from attnsel.rules import REGISTRY

_MOST = 12
"""Changes that are shown; ``--json`` has all."""


class Answered(NamedTuple):
    """A question in words, one for each thing in which questions differ, and its answer in one environment.

    ``layers``: of a model, how many ask it.
    """

    words: tuple[str, ...]
    selection: Selection
    layers: int = 0


class Outcome(NamedTuple):
    """What runs, what is changed on every call for it, and which known bugs it has in this call."""

    kernel: str | None
    adaptations: tuple[str, ...] = ()
    known_bugs: tuple[str, ...] = ()


class Why(NamedTuple):
    """``code``: of a rule; "" for what only another library's chooser says."""

    code: str
    text: str


class Change(NamedTuple):
    """Questions that are answered otherwise, for one and the same reason, in some ``environments``.

    ``kept_away_before``: what kept the kernel that runs now from running before; ``keeps_away_now``: what
    keeps the former from running now. ``layers``: of a model, how many of them there are.
    """

    environments: tuple[str, ...]
    before: Outcome
    now: Outcome
    kept_away_before: tuple[Why, ...]
    keeps_away_now: tuple[Why, ...]
    questions: tuple[tuple[str, ...], ...]
    layers: int


class Side(NamedTuple):
    name: str
    environment: Environment


class Share(NamedTuple):
    """How many questions an environment answers otherwise."""

    name: str
    questions: int


class Comparison(NamedTuple):
    """``reference``: the environment whose answers stand for "before": of two the first, of more the one that
    agrees most with the others. ``changed``: answers by environment that are not the reference's. ``odd``:
    of more than two, the one that alone differs in most questions, and in how many."""

    environments: tuple[Side, ...]
    reference: str
    questions: int
    changed: tuple[Share, ...]
    odd: Share | None
    changes: tuple[Change, ...]

    def page(self, answers: Sequence[Sequence[Answered]], plans: Sequence[ModelPlan]) -> Page:
        """``answers``: as they were compared; those alike everywhere are a row, with what runs in each
        environment and what keeps the reference's away. ``plans``: of a model, in each of them."""
        names = [side.name for side in self.environments]
        reference = names.index(self.reference)
        alike: dict[tuple[object, ...], list[int]] = {}
        for question, asked in enumerate(zip(*answers, strict=True)):
            wanted = outcome_of(asked[reference].selection)
            here = [(one.selection, outcome_of(one.selection)) for one in asked]
            key = tuple((what, keeps_away(one, wanted) if what != wanted else ()) for one, what in here)
            alike.setdefault(key, []).append(question)
        rows = [
            ([" · ".join(words) for words in merged_words(_words(answers[0], questions))], key)
            for key, questions in sorted(alike.items(), key=lambda one: len(set(one[0])) == 1)
        ]
        maps = [(name, plan, list(layer_maps(plan))) for name, plan in zip(names, plans, strict=False)]
        told = {"found": self, "rows": rows, "reference": reference, "plans": maps, "model": document}
        told |= {"verdict": verdict(self), "facts": [*map(environment_facts, self.environments)]}
        return Page("compare", told | {"change_item": change_item, "outcome_words": outcome_words})


_Cause = tuple[Outcome, Outcome, tuple[Why, ...], tuple[Why, ...]]


def compared(sides: Sequence[Side], answers: Sequence[Sequence[Answered]]) -> Comparison:
    """``answers``: of each side to the same questions, in the same order."""
    names = tuple(name for name, _ in sides)
    outcomes = [[outcome_of(one.selection) for one in asked] for asked in answers]
    count = len(answers[0])
    places = range(len(sides))
    alike = [sum(_agree(outcomes[i], outcomes[j]) for j in places) for i in places]
    reference = 0 if len(sides) == 2 else alike.index(max(alike))
    found: dict[tuple[int, _Cause], list[int]] = {}
    for side in places:
        for question in range(count):
            before, now = outcomes[reference][question], outcomes[side][question]
            if before != now:
                then, here = answers[reference][question].selection, answers[side][question].selection
                reasons = keeps_away(then, now), keeps_away(here, before)
                cause = (*_told(before, now), *reasons)
                found.setdefault((side, cause), []).append(question)
    merged: dict[tuple[_Cause, tuple[int, ...]], list[str]] = {}
    for (side, cause), questions in found.items():
        merged.setdefault((cause, tuple(questions)), []).append(names[side])
    changes = [
        Change(tuple(where), *cause, _words(answers[0], questions), _layers(answers[0], questions))
        for (cause, questions), where in merged.items()
    ]
    return Comparison(
        environments=tuple(sides),
        reference=names[reference],
        questions=count,
        changed=tuple(
            Share(names[side], count - _agree(outcomes[reference], outcomes[side]))
            for side in places
            if side != reference
        ),
        odd=_odd_one(names, outcomes) if len(sides) > 2 else None,
        changes=tuple(sorted(changes, key=lambda change: -len(change.questions))),
    )


def _told(before: Outcome, now: Outcome) -> tuple[Outcome, Outcome]:
    """Two outcomes as they are told: between two kernels, what is changed for each is no matter."""
    if before.kernel == now.kernel:
        return before, now
    return before._replace(adaptations=()), now._replace(adaptations=())


def outcome_of(selection: Selection) -> Outcome:
    """What is compared of an answer: attnsel's, or another chooser's where that was asked."""
    dispatched, chosen = selection.dispatched, selection.chosen
    if dispatched is not None:
        bugs = tuple(bug.code or bug.text for bug in dispatched.known_bugs)
        return Outcome(None if dispatched.chosen is None else dispatched.chosen.name, (), bugs)
    if chosen is None:
        return Outcome(None)
    made = tuple(each.name for each in chosen.adaptations if each.avoids)
    return Outcome(chosen.name, made, tuple(bug.code for bug in selection.known_bugs))


def keeps_away(selection: Selection, wanted: Outcome) -> tuple[Why, ...]:
    """What keeps ``wanted`` from being this answer; where the same kernel runs, what is changed for it here
    and what is wrong with it."""
    here = outcome_of(selection)
    if selection.dispatched is not None:
        return tuple(_of_dispatch(selection, wanted))
    if wanted.kernel is None:
        return ()
    if wanted.kernel not in CANDIDATES:  # of a plug-in that is not here, or a slip in a baseline
        return (Why("", f"there is no {wanted.kernel} here"),)
    if wanted.kernel != here.kernel:
        return tuple(map(_why, selection.keeps_away(wanted.kernel)))
    made = () if selection.chosen is None else selection.chosen.adaptations
    codes = [reason.code for each in made for reason in each.avoids]
    return tuple(map(_why, dict.fromkeys((*codes, *here.known_bugs))))


def _why(code: str) -> Why:
    page = REGISTRY.pages.get(code)
    return Why(code, "" if page is None else page.title)


def _of_dispatch(selection: Selection, wanted: Outcome) -> Iterator[Why]:
    dispatched = selection.dispatched
    if dispatched is None or wanted.kernel is None:
        return
    if dispatched.chosen is not None and dispatched.chosen.name == wanted.kernel:
        yield from (Why(bug.code, bug.text) for bug in dispatched.known_bugs)
        return
    offer = next((one for one in dispatched.offers if one.name == wanted.kernel), None)
    if offer is None:
        yield Why("", f"{dispatched.dispatcher} {dispatched.release} has no {wanted.kernel}")
    elif offer.taken:
        yield Why("", f"{dispatched.dispatcher} {dispatched.release} tries it later")
    else:
        yield from (Why(refusal.code, refusal.text) for refusal in offer.refusals)


def _agree(one: Sequence[Outcome], other: Sequence[Outcome]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))


def _odd_one(names: Sequence[str], outcomes: Sequence[Sequence[Outcome]]) -> Share | None:
    """The one that alone differs where all the others agree, in most questions; None where two do."""
    alone: dict[int, int] = {}
    for answers in zip(*outcomes, strict=True):
        singles = [side for side, answer in enumerate(answers) if answers.count(answer) == 1]
        if len(singles) == 1 and len(set(answers)) == 2:
            alone[singles[0]] = alone.get(singles[0], 0) + 1
    if not alone:
        return None
    most = max(alone, key=lambda side: alone[side])
    return Share(names[most], alone[most]) if list(alone.values()).count(alone[most]) == 1 else None


def _words(asked: Sequence[Answered], questions: Iterable[int]) -> tuple[tuple[str, ...], ...]:
    return tuple(asked[question].words for question in questions)


def _layers(asked: Sequence[Answered], questions: Iterable[int]) -> int:
    return sum({asked[question].words[0]: asked[question].layers for question in questions}.values())


# ---- the questions that are asked where nobody brings any ----------------------------------------------


def standard_questions() -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """What most models ask: the rows of ``data/questions.csv``, every combination of them."""
    kinds: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for row in read_rows("attnsel.diagnose", "questions"):
        kinds.setdefault(row["about"], []).append((row["words"], json.loads(row["fields"])))
    for parts in product(*kinds.values()):
        asked: dict[str, Any] = {
            "num_heads": 32,
            "num_gqa_groups": 8,
            "max_seqlen_q": 4096,
            "max_seqlen_kv": 4096,
        }
        asked = reduce(or_, (fields for _, fields in parts), asked)
        if asked["max_seqlen_q"] == 1 and "causal" in asked["attn_mask_type"]:
            asked["attn_mask_type"] += "_bottom_right"
        yield tuple(words for words, _ in parts), asked


# ---- the answer as a document --------------------------------------------------------------------------


def compare_document(found: Comparison) -> Document:
    blocks: list[Block] = [Paragraph(Strong(verdict(found))), *map(environment_facts, found.environments)]
    shown = found.changes[:_MOST]
    items = [change_item(change, found) for change in shown]
    if len(found.changes) > _MOST:
        items.append(Item(f"and {len(found.changes) - _MOST} more: --json has them all"))
    told = {why.code: why.text for one in shown for why in (*one.kept_away_before, *one.keeps_away_now)}
    rules = tuple(Item(label=Ref(code), text=text) for code, text in sorted(told.items()) if code)
    blocks += [Items(tuple(items))] if items else []
    blocks += [Items(rules), Paragraph("More of a rule: attnsel rule CODE.")] if rules else []
    return Document(tuple(blocks))


def environment_facts(side: Side) -> Facts:
    device, *words = environment_words(side.environment)
    first = device if device.startswith(side.name) else f"{side.name}: {device}"
    return Facts(((first, *words), *warnings(side.environment)))


def verdict(found: Comparison) -> str:
    """How many answers change, and which environment is the odd one out."""
    changed = [(name, count) for name, count in found.changed if count]
    many = f"{found.questions} answers"
    if not changed:
        names = ", ".join(name for name, _ in found.environments)
        return f"{'The answer is' if found.questions == 1 else f'All {many} are'} the same: {names}."
    if len(found.environments) == 2:
        ((other, count),) = changed
        what = f"{count} of {many}" if found.questions > 1 else "The answer"
        return f"{what} {'change' if count > 1 else 'changes'} from {found.reference} to {other}."
    parts = ", ".join(f"{name} in {number}" for name, number in changed)
    text = f"Other than {found.reference}: {parts} of {many}."
    if found.odd is None:
        return text
    return f"{found.odd.name} is the odd one out: alone in {found.odd.questions} of {many}. {text}"


def change_item(change: Change, found: Comparison) -> Item:
    where = f"{', '.join(change.environments)}: " if len(found.environments) > 2 else ""
    count = f"{len(change.questions)} questions" if len(change.questions) > 1 else "1 question"
    if change.layers:
        count += f", {change.layers} layers" if change.layers > 1 else ", 1 layer"
    head: Inline = (where, *outcome_words(change.before), " → ", *outcome_words(change.now), f": {count}")
    same = change.before.kernel == change.now.kernel
    told: list[Inline] = []
    for when, kernel, reasons in (
        ("before", change.now.kernel, change.kept_away_before),
        ("now", change.before.kernel, change.keeps_away_now),
    ):
        if reasons:
            said = joined(Ref(why.code) if why.code else why.text for why in reasons)
            told.append((f"{when}: " if same else f"against {kernel} {when}: ", said))
    below: list[Block] = [Item(" · ".join(words)) for words in merged_words(change.questions)]
    below += [Item(joined(told, "; "))] if told else []
    return Item(head, below=tuple(below))


def outcome_words(outcome: Outcome) -> tuple[Inline, ...]:
    if outcome.kernel is None:
        return ("nothing",)
    more = [*outcome.adaptations, *outcome.known_bugs]
    return (Code(outcome.kernel), f" ({', '.join(more)})" if more else "")


def merged_words(questions: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """The questions in few lines that say all of them and no other: ``d64, d128 · training`` are two."""
    if questions and not questions[0]:
        yield ()
        return
    tails: dict[str, list[tuple[str, ...]]] = {}
    for first, *rest in questions:
        tails.setdefault(first, []).append(tuple(rest))
    heads: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for first, ends in tails.items():
        heads.setdefault(tuple(ends), []).append(first)
    for ends_alike, firsts in heads.items():
        for end in merged_words(ends_alike):
            yield (", ".join(firsts), *end)
