"""``reference/messages/``: for each library a page or more: its messages, what they mean and what helps.

It is how the search finds what people paste. What is said comes from the rows of
``attnsel/diagnose/logs/data``, how a message looks from ``tests/attnsel/diagnose/logs/messages.txt``, which
has a line of a log for each of them.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from attnsel.diagnose.logs.message import Finding, Message, Variant
from attnsel.diagnose.logs.reader import entries
from attnsel.diagnose.logs.vocabulary import gate, libraries, likely, more, shape_of
from attnsel.report.markdown import code, escape
from attnsel.rules import find_rule
from sitegen.model import File
from sitegen.tables import table

PATH, FOLDER = "reference/messages.md", "reference/messages"
TRAIL = (("Messages", PATH),)
_LINES = Path(__file__).parents[2] / "tests" / "attnsel" / "diagnose" / "logs" / "messages.txt"
_ALSO = Path(__file__).with_name("messages.csv")
_LONGEST = 110  # characters of a heading
_MOST_ON_PAGE = 200  # messages
# What is code in a sentence: what stands in backticks, names with an underscore, flags.
_CODE = re.compile(
    r"`[^`]+`|(?<![\w.])(?:[A-Za-z_]\w*\.)*[A-Za-z]\w*_\w+(?:\([^()]*\)|=(?:\"[^\"]*\"|\w+))?|(?<![\w-])--[a-z][\w-]+"
)
_HIDDEN = re.compile(r"\{\w+\}")  # a word of the message, which a page has none of
_LONGEST_SOURCE = 160
_TOP = """\
# Messages

What programs print and raise about attention, by the library whose message it is: what it means, and what
helps. Search for the words of yours (the key `/`). Of a whole log, or of a message with its traceback,
[`attnsel explain --from-log`](../how-to/logs.md) says more: it reads the GPU, the releases and the call
beside it.

## Asked most

"""


class Shown(NamedTuple):
    """A message, how it is shown, and a line of a log that has it. page, anchor: where it stands."""

    message: Message
    text: str
    line: str
    page: str
    anchor: str


def files() -> Iterator[File]:
    """The list of libraries, and the pages of each."""
    found = by_library()
    rows = []
    for name, messages in found.items():
        asked = next(one.looked_for for one in libraries() if one.name == name)
        pages = {page: list(shown) for page, shown in groupby(messages, key=lambda one: one.page)}
        links = (f"[{name if n == 1 else n}](messages/{page}.md)" for n, page in enumerate(pages, 1))
        rows.append((", ".join(links), escape(asked), str(len(messages))))
        for page, shown in pages.items():
            yield File(f"{FOLDER}/{page}.md", _page(name, shown), trail=TRAIL)
    asked_most = "\n".join(_asked_most(found))
    libraries_ = table(("library", "among its messages", "messages"), rows)
    text = f"{_TOP}{asked_most}\n\n## Libraries\n\n{libraries_}\n"
    yield File(PATH, text, title="Messages")


def by_library() -> dict[str, list[Shown]]:
    """The messages of each library that are told here, in the order in which they are looked for."""
    lines = _lines()
    found: dict[str, list[Shown]] = defaultdict(list)
    for library in libraries():
        if library.name in (
            "seen",
            "the machine",
            "attention",
            "an optional package",
            "the build",
        ):  # no message of a library
            continue
        taken = {one.anchor for one in found[library.name]}
        for message in library.messages:
            if id(message) not in lines or not _says_something(message.says):
                continue
            finding, line = lines[id(message)]
            text = _cut(finding.text)
            anchor = base = _slug(text)[:60].strip("-") or "message"
            number = 2
            while anchor in taken:
                anchor, number = f"{base}-{number}", number + 1
            taken.add(anchor)
            full = len(found[library.name]) // _MOST_ON_PAGE
            page = _slug(library.name) + (f"-{full + 1}" if full else "")
            found[library.name].append(Shown(message, text, line, page, anchor))
    return {name: shown for name, shown in found.items() if shown}


def _says_something(says: Finding) -> bool:
    """Whether anybody would look it up: an error, or what refuses a kernel, even where it gives no reason."""
    told = bool(says.known or says.fix or says.codes or says.variants)
    return says.kind in ("error", "refusal") or (told and says.kind in ("chosen", "note"))


def _lines() -> dict[int, tuple[Finding, str]]:
    """By message, its finding in the first line that has it, and that line."""
    typed = groupby(_LINES.read_text(encoding="utf-8").splitlines(), key=lambda line: line.startswith("> "))
    logs = ([line[2:] for line in group] for is_text, group in typed if is_text)
    found: dict[int, tuple[Finding, str]] = {}
    for log in logs:
        for entry in entries(log, gate(), more):
            for _, messages in likely(shape_of(entry.text)):
                for message in messages:
                    if id(message) not in found and (finding := message.find(entry.text)):
                        found[id(message)] = finding, entry.text
    return found


def _page(name: str, messages: list[Shown]) -> str:
    parts = [f"# Messages of {name}"]
    if ask := next((one.ask for one in libraries() if one.name == name and one.ask), ""):
        parts.append(f"To make it say more: {_sentence(ask)}")
    also = _also()
    for shown in messages:
        parts += [f"## {escape(shown.text)} {{ #{shown.anchor} }}", *_about(shown.message.says)]
        if shown.line.strip() != shown.text:
            fence = "```" if "```" not in shown.line else "~~~~"
            parts.append(f"In a log:\n\n{fence}text\n{shown.line.strip()[:600]}\n{fence}")
        if words := also.get((name, shown.anchor)):
            parts.append(f"Also looked for as: {', '.join(map(escape, words))}.")
        if shown.message.says.source:
            parts.append(f"*Written in {escape(_cut(shown.message.says.source, _LONGEST_SOURCE))}*")
    return "\n\n".join(parts) + "\n"


def _about(says: Finding) -> Iterator[str]:
    if says.candidates:
        yield f"About {', '.join(map(code, says.candidates))}."
    if says.variants:
        yield "What it means depends on the rest of the log:"
        yield "\n".join(dict.fromkeys(f"- {_meaning(one)}" for one in says.variants))
        return
    if says.known or says.codes:
        yield " ".join(["**Why:**", *([_sentence(says.known)] if says.known else []), *_rules(says.codes)])
    if says.fix:
        yield f"**What helps:** {_sentence(says.fix)}"
    if not (says.known or says.codes or says.fix):
        yield (
            "It gives no reason by itself: that stands in the lines around it, which "
            "[`attnsel explain --from-log`](../../how-to/logs.md) reads together."
        )
    if says.link:
        owner, _, number = says.link.partition("#")
        yield f"Told in {escape(owner)} #{number}." if number else f"Told in {escape(says.link)}."


def _meaning(one: Variant) -> str:
    words = []
    if one.archs:
        words.append(f"sm{one.archs[0]} to sm{one.archs[1]}" if one.archs[0] else f"up to sm{one.archs[1]}")
    if one.seen:
        words.append(f"with {' or '.join(one.seen)} in it")
    words += one.at
    where = f"**{escape(', '.join(words))}**: " if words else "**Else**: "
    said = [_sentence(one.known)] if one.known else []
    said += _rules(one.codes)
    said += [f"What helps: {_sentence(one.fix)}"] if one.fix else []
    return where + " ".join(said)


def _rules(codes: tuple[str, ...]) -> list[str]:
    """Codes as links, each with the title of its rule."""
    return [
        f"[{one}](../../rules/{one}.md): {escape(page.title)}."
        for one in codes
        if (page := find_rule(one)) is not None
    ]


def _sentence(text: str) -> str:
    """With a full stop; words that come from the message are left out."""
    done, last = [], 0
    text = _HIDDEN.sub("…", text)
    for found in _CODE.finditer(text):
        done += [_plain(text[last : found.start()]), code(found[0].strip("`"))]
        last = found.end()
    said = "".join([*done, _plain(text[last:])])
    return said if said.endswith((".", "…")) else f"{said}."


def _plain(part: str) -> str:
    """Words between code, with the blanks at their ends, which ``escape`` takes away."""
    inside = escape(part)
    return f"{' ' * part.startswith(' ')}{inside}{' ' * part.endswith(' ')}" if inside else part


def _also() -> Mapping[tuple[str, str], list[str]]:
    """Words by which people look for a message that does not have them."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in _rows():
        if row["words"]:
            found[row["library"], row["anchor"]].append(row["words"])
    return found


def _rows() -> list[dict[str, str]]:
    with _ALSO.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def _asked_most(found: Mapping[str, list[Shown]]) -> Iterator[str]:
    """The messages that messages.csv lists, as links. Raises ValueError where one is gone."""
    places = {(name, one.anchor): one for name, shown in found.items() for one in shown}
    listed = dict.fromkeys((row["library"], row["anchor"]) for row in _rows())
    for library, anchor in listed:
        if (library, anchor) not in places:
            raise ValueError(f"docs/sitegen/messages.csv: no message of {library} stands at #{anchor}")
        shown = places[library, anchor]
        yield f"- [{escape(shown.text)}](messages/{shown.page}.md#{anchor}) ({library})"


def _cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 1].rsplit(" ", 1)[0] + " …"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
