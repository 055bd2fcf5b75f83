"""What is known: the libraries of ``data/libraries.csv`` with their messages, which are rows beside it.

What two libraries print is the first one's.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby, islice

from attnsel.base.rows import read_rows
from attnsel.diagnose.logs import parsers
from attnsel.diagnose.logs.message import Facts, Finding, Message, More, Variant, facts_of, messages
from attnsel.diagnose.text_files import shape_of


@dataclass(frozen=True)
class Library:
    """All messages of a library.

    ``name``: the library, as its makers write it. ``looked_for``: what is recognised, for people. ``takes``:
    of one text what "all" its messages say, the "first" that fits (the next where the log decides for none of
    its meanings), or the first "alone". ``candidates``: the kernels that it chooses among, refused where it
    says only that none runs. ``dispatcher``: its own chooser in ``attnsel/dispatchers/``, if any. ``usual``:
    fields that its users leave as they are, where nothing is said. ``ask``: how to make it say more.
    """

    name: str
    looked_for: str
    takes: str
    messages: tuple[Message, ...]
    candidates: tuple[str, ...]
    dispatcher: str
    usual: Facts
    ask: str

    def findings(self, text: str, among: Iterable[Message] | None = None) -> Iterator[Finding]:
        """All that ``text``, one entry of a log, says; ``among``: messages that it can hold, if known."""
        found = filter(None, (one.find(text) for one in (self.messages if among is None else among)))
        if self.takes == "all":
            return found
        return islice(found, 1) if self.takes == "alone" else filter(None, [_first(found)])


def _first(found: Iterator[Finding]) -> Finding | None:
    """The first, and behind it the next (no frame's own) where a log may decide for none of its meanings."""
    one = next(found, None)
    if one is None or not one.variants or one.variants[-1][3:] == Variant("", "")[3:]:
        return one
    return one._replace(instead=_first(later for later in found if later.variants or not later.near))


@cache
def libraries() -> tuple[Library, ...]:
    """Every library whose messages are known."""
    return tuple(
        Library(
            row["library"],
            row["looked_for"],
            row["takes"],
            tuple(
                message
                for part in row["parts"].split(" | ")
                for message in messages(row["file"], part, row["library"], vars(parsers), row["reader"])
            ),
            tuple(row["candidates"].split()),
            row["dispatcher"],
            facts_of(row["usual"]),
            row["ask"],
        )
        for row in read_rows("attnsel.diagnose.logs", "libraries")
    )


@cache
def _going_on() -> dict[str, More]:
    messages = (one for library in libraries() for one in library.messages if one.more)
    return {quick: one.more for one in messages for quick in one.quicks}


def more(line: str) -> More:
    """Which of the lines that follow ``line`` belong to it."""
    return next((how for quick, how in _going_on().items() if quick in line), "")


@cache
def _by_word() -> dict[str, list[tuple[int, str, Library, Message]]]:
    """Quick texts, each under its rarest key (``_keys``), or under none."""
    index = defaultdict(list)
    messages = ((library, message) for library in libraries() for message in library.messages)
    told = [
        (_keys(quick), (place, quick, library, message))
        for place, (library, message) in enumerate(messages)
        for quick in map(shape_of, message.quicks)
    ]
    often = Counter(key for keys, _ in told for key in keys)
    for keys, one in told:
        index[min(keys, key=lambda key: (often[key], -len(key)), default="")].append(one)
    return index


def _keys(quick: str) -> list[str]:
    """What the words of every text that holds ``quick`` give: those that stand whole inside of it, the end of
    the word that it begins with, the beginning of the one that it ends with."""
    inside = re.findall(r"(?<=[^a-zA-Z])[a-zA-Z]+(?=[^a-zA-Z])", quick)
    begins = re.findall(r"^[a-zA-Z]*([a-zA-Z]{4})(?=[^a-zA-Z])", quick)
    ends = re.findall(r"(?<=[^a-zA-Z])([a-zA-Z]{4})[a-zA-Z]*$", quick)
    return [*inside, *(f"…{key}" for key in begins), *(f"{key}…" for key in ends)]


@lru_cache(maxsize=4096)
def likely(shape: str) -> tuple[tuple[Library, tuple[Message, ...]], ...]:
    """The messages that a text of this ``shape`` (``shape_of``) can hold, by library, in their order."""
    index, found = _by_word(), dict[int, tuple[Library, Message]]()
    words = {"", *re.findall("[a-zA-Z]+", shape)}
    words |= {f"…{word[-4:]}" for word in words} | {f"{word[:4]}…" for word in words}
    for word in words & index.keys():
        for place, quick, library, one in index[word]:
            if quick in shape:
                found[place] = library, one
    by_library = groupby((found[place] for place in sorted(found)), key=lambda pair: id(pair[0]))
    return tuple((one[0][0], tuple(m for _, m in one)) for one in (list(same) for _, same in by_library))


@cache
def gate() -> tuple[str, ...]:
    """A few words in lower case, one of which is in every line that any message is about."""
    quicks = sorted({quick.lower() for lib in libraries() for one in lib.messages for quick in one.quicks})
    inside = [re.findall(r"[a-z]{4,}", quick) or [quick] for quick in quicks]
    often = Counter(word for words in inside for word in set(words))
    chosen = Counter(max(words, key=lambda word: (often[word], word)) for words in inside)
    words = list[str]()
    for word, _ in chosen.most_common():
        if not any(shorter in word for shorter in words):
            words.append(word)
    return tuple(words)
