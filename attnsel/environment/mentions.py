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
from attnsel.environment.gpus import catalogue, look_up_gpu

_SENTENCE = re.compile(r"[;!?。；！？\n]|(?<!e\.g)(?<!i\.e)\.(?=\s|$)")
_VERB = re.compile(
    r"(?i)\b(?!(?:rtx|gtx|nvidia|tesla|geforce|quadro|gpus?|super|laptop|and)\b)[a-z]{3,}\b|[\u4e00-\u9fff]"
)
_CLAUSE = re.compile(r"[,，、](?!\d)|\b(?:but|while|whereas|however|though|yet)\b|但|而")


@cache
def _said(use: str) -> re.Pattern[str]:
    """The rows of a use as one pattern."""
    rows = read_rows("attnsel.environment", "mentions")
    return re.compile("|".join(row["pattern"] for row in rows if row["use"] == use), re.IGNORECASE)


@cache
def _name() -> re.Pattern[str]:
    series, variant, whole = (_said(use).pattern for use in ("series", "variant", "whole"))
    more = rf"(?!x(?!tx?\b)[a-z])[a-z]{{0,3}}(?:[ -]?(?:{variant})(?![a-z])){{0,4}}"
    model = rf"(?P<model>[a-z]{{0,2}}\d{{1,4}})(?P<more>{more})"
    named = rf"(?P<series>(?:(?:{series})[ -]{{0,2}}){{0,6}}){model}|(?P<whole>{whole})"
    begins = r"(?:(?<![\w/\\.@#:=+-])|(?<=\d[x×*])|(?<=[=:\u3000-\u9fff]))"
    return re.compile(
        rf"{begins}(?:{named})(?:(?=[x×*]\d)|(?=[\u3000-\u9fff])|(?![\w/\\=-]|\.\d))", re.IGNORECASE
    )


@cache
def _models() -> frozenset[str]:
    """Models that have a letter of their own, in small ones: a100, mi300, gb10."""
    own = re.compile(r"(?:(?<![a-z])|(?<=rtx)|(?<=quadro))(?!rx)[a-z]{1,2}\d+")
    return frozenset(model for name in catalogue() for model in own.findall(name))


@lru_cache(maxsize=4096)
def known_name(name: str) -> str | None:
    """As much of a name, from its beginning, as is a card's."""
    words = name.split(" ")
    for end in range(len(words), 0, -1):
        for written in (" ".join(words[:end]), " ".join(words[:end]).removesuffix("s")):
            with suppress(ValueError):
                return look_up_gpu(written).name and written
    return None


_NUMBER = r"[1-5]0[5-9]0|16[56]0"  # of a GeForce
_SURE = r"[a-z]{1,2}\d{3,4}|gb10|mi\d+"


def _cards(clause: str, listed: bool) -> Iterator[tuple[int, str]]:
    """Names and where they stand; a short one is a card's where something beside it says so ("on a 4090"), or
    a list of cards goes on with it (``listed``)."""
    for found in _name().finditer(clause):
        model, more, behind = (found["model"] or "").casefold(), found["more"] or "", clause[found.end() :]
        if not (found["whole"] or found["series"]):
            more = re.sub(r"^s$|\W", "", more.casefold())
            named = model in _models() or re.fullmatch(_NUMBER, model) or more in ("xt", "xtx")
            if not named or _said("units").match(behind.lstrip()):
                continue
            beside = _said("before").search(clause[: found.start()]) or _said("after").search(behind)
            short = re.fullmatch(r"(?!t4|l4)[a-z]{1,2}\d", model)
            if short or not (beside or listed or more or re.fullmatch(_SURE, model)):
                continue
        if name := known_name(re.sub(r"\b([AHPTV]\d{1,3})s\b", r"\1", found[0].strip())):
            yield found.start(), name
    for said in _said("architecture").finditer(clause):
        if name := known_name(f"sm{re.sub('[^0-9]', '', said[0])}"):
            yield said.end(), name


def cards_in(text: str) -> tuple[str, ...]:
    """The cards that a line of prose says its writer has, by name; architectures as sm89."""
    found: dict[str, None] = {}
    for sentence in _SENTENCE.split(text):
        compared, theirs, start = _said("compared").search(sentence), False, 0
        for end in (*(one.start() for one in _CLAUSE.finditer(sentence)), len(sentence)):
            clause = sentence[start:end]
            goes_on = not _VERB.search(clause)
            if start == 0 or not goes_on:
                theirs = bool(_said("theirs").search(clause))
            mine = _said("mine").search(clause)
            alone = len(sentence.strip(" \t-*•:.")) < 8
            for place, name in _cards(clause, alone or (goes_on and bool(found))):
                listed = compared or _said("listed").search(sentence, 0, start + place)
                if not theirs and (mine or not listed):
                    found[look_up_gpu(name).name] = None
            start = end
    return tuple(found)


def the_card(names: Iterable[str]) -> str | None:
    """What all names of a text come to: the card, of several their architecture; None where they differ."""
    cards: dict[str, str] = {}
    with suppress(ValueError):  # a CPU among them
        cards = {(card := look_up_gpu(name)).name: card.target for name in names}
    if len({*cards.values()}) != 1:
        return None
    target = next(iter(cards.values()))
    named = [name for name in cards if name != target]
    return named[0] if len(named) == 1 else target
