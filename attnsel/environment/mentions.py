"""Which card the writer of a text has, where no program prints it: names of cards in prose.

A name stands in a text for many reasons: the card is the writer's, a list of what is supported has it, the
program works on it elsewhere. What tells these apart are rows of ``data/mentions.csv``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache

from attnsel.base.rows import read_rows
from attnsel.environment.gpus import catalogue, known_gpu, look_up_gpu


@cache
def _said(use: str) -> re.Pattern[str]:
    """The rows of a use as one pattern."""
    rows = read_rows("attnsel.environment", "mentions")
    return re.compile("|".join(row["pattern"] for row in rows if row["use"] == use), re.IGNORECASE)


@cache
def _name() -> re.Pattern[str]:
    uses = ("begins", "series", "variant", "whole", "ends")
    begins, series, variant, whole, ends = (f"(?:{_said(use).pattern})" for use in uses)
    more = rf"(?!x(?!tx?\b)[a-z])[a-z]{{0,3}}(?:[ -]?{variant}(?![a-z])){{0,4}}"
    model = rf"(?P<series>(?:{series}[ -]{{0,2}}){{0,6}})(?P<model>[a-z]{{0,2}}\d{{1,4}}){more}"
    return re.compile(rf"{begins}(?:{model}|(?P<whole>{whole})){ends}", re.IGNORECASE)


@cache
def _models() -> frozenset[str]:
    """Models that have a letter of their own, in small ones: a100, mi300, gb10."""
    return frozenset(model for name in catalogue() for model in _said("lettered").findall(name))


@lru_cache(maxsize=4096)
def known_name(name: str) -> str | None:
    """As much of a name, from its beginning, as is a card's."""
    words = name.split(" ")
    for end in range(len(words), 0, -1):
        with suppress(ValueError):
            if known_gpu(" ".join(words[:end])):
                return " ".join(words[:end])
    return None


def _cards(clause: str, listed: bool) -> Iterator[tuple[int, str]]:
    """Names and where they end; a short one is a card's where something beside it says so ("on a 4090"), or a
    list of cards goes on with it (``listed``)."""
    for found in _name().finditer(clause):
        name, model, behind = found[0].strip(), found["model"], clause[found.end() :]
        if not (found["whole"] or found["series"]):
            known = model.casefold() in _models() or _said("number").fullmatch(name)
            if not known or _said("short").fullmatch(model) or _said("units").match(behind.lstrip()):
                continue
            beside = _said("before").search(clause[: found.start()]) or _said("after").search(behind)
            if not (beside or listed or _said("sure").fullmatch(name)):
                continue
        if card := known_name(_said("plural").sub("", name)):
            yield found.end(), card
    for told in _said("architecture").finditer(clause):
        if card := known_name(f"sm{re.sub('[^0-9]', '', told[0])}"):
            yield told.end(), card


def cards_in(text: str) -> tuple[str, ...]:
    """The cards that a line of prose says its writer has, by name; architectures as sm89."""
    found: dict[str, None] = {}
    for sentence in _said("sentence").split(text):
        compared, theirs, start = _said("compared").search(sentence), False, 0
        alone = len(sentence.strip(" \t-*•:.")) < 8
        for end in (*(one.start() for one in _said("clause").finditer(sentence)), len(sentence)):
            clause, goes_on = sentence[start:end], not _said("verb").search(sentence, start, end)
            theirs = theirs if start and goes_on else bool(_said("theirs").search(clause))
            mine = _said("mine").search(clause)
            for place, name in _cards(clause, alone or (goes_on and bool(found))):
                listed = compared or _said("listed").search(sentence, 0, start + place)
                if not theirs and (mine or not listed):
                    found[name if name.startswith("gfx") else look_up_gpu(name).name] = None
            start = end
    return tuple(found)


def the_card(names: Iterable[str]) -> str | None:
    """What all names of a text come to: the card, of several their architecture; None where they differ."""
    cards: dict[str, tuple[str, str]] = {}  # a board's own name is none that can be looked up
    with suppress(ValueError):  # a CPU among them
        cards = {(card := look_up_gpu(name)).name: (card.target, name) for name in names}
    if len({target for target, _ in cards.values()}) != 1:
        return None
    target = next(iter(cards.values()))[0]
    named = [name for card, (_, name) in cards.items() if card != target]
    return named[0] if len(named) == 1 else target
