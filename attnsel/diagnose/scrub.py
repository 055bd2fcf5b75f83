"""Secrets, paths, hosts and addresses taken out of a text, so that a report can be pasted anywhere.

What is shown of a log is only what a message matched, and that goes through here. In doubt something is
taken out: a report without a word is less harm than one with a password. What attention is about stays:
versions, sizes, times, names of kernels and of classes.

What is taken out is a table, ``data/scrubbed.csv``, and what the makers of tokens put before them another,
``data/secrets.csv``, read off a detector of secrets that is kept up to date (its rows say which). The
detector itself would be a dependency with hundreds of expressions for whole repositories, and knows no paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from attnsel.base.rows import read_rows

Put = str | Callable[[re.Match[str]], str]

# A part of a name that somebody chose: a word, words in capitals or with one each, a size, a number.
_CHOSEN = re.compile(
    r"(?:[A-Z]{0,3}[a-z]+[A-Z]?|[A-Z]+|(?:[A-Z]{0,5}[a-z]{2,})+[A-Z]{0,3}|[a-z]*)"
    r"(?:\d{1,6}(?:[a-z]{1,8}\d{0,5}){0,4})?(?:TRUE|FALSE)?"
)
_CODE = re.compile(r"[\w\-]+\.(?:py|pyx|cpp|cc|cu|cuh|h|hpp|c|rs)")
_LONG_WORD = re.compile(r"[^\s]{300,}")  # patterns are quadratic in the length of a word
_LAST_WORD = re.compile(r"\S{0,300}\Z")
_LONGEST = 4000


@lru_cache(maxsize=4096)  # a message that is printed at every step is one text
def scrub(text: str) -> str:
    """``text`` without what is nobody else's business, and cut where it is long beyond reason."""
    text = _LONG_WORD.sub("<long>", text)
    if len(text) > _LONGEST:
        text = _LAST_WORD.sub("", text[:_LONGEST])  # no half of a secret
    for pattern, put in _patterns():
        text = pattern.sub(put, text)
    return text


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[re.Pattern[str], Put], ...]:
    """The rows of the two tables."""
    functions = {"PATH": _of_path, "VERSION": _kept_if_versioned, "CHOSEN": _kept_if_chosen}
    parts = {"MAKERS": _of_makers()}
    found: list[tuple[re.Pattern[str], Put]] = []
    for row in read_rows("attnsel.diagnose", "scrubbed"):
        pattern = re.sub("<([A-Z]+)>", lambda name: parts[name[1]], row["pattern"])
        if row["put"] == "part":
            parts[row["what"]] = pattern
        else:
            found.append((re.compile(pattern, re.DOTALL), functions.get(row["put"], row["put"])))
    return tuple(found)


def _of_makers() -> str:
    """Tokens by what their makers put before them; a name in small letters alone is none."""
    ways = [
        rf"{re.escape(row['prefix'])}(?=[\w\-.]*[A-Z0-9])[A-Za-z0-9_\-.+/=]{{{row['least']},}}"
        for row in read_rows("attnsel.diagnose", "secrets")
    ]
    return rf"(?<![A-Za-z0-9])(?:{'|'.join(ways)})"


def _of_path(match: re.Match[str]) -> str:
    """The last part stays where it is a file of code: it says which library speaks."""
    name = re.split(r"[\\/]", match[0].rstrip("\\/"))[-1]
    return f"<path>/{name}" if _CODE.fullmatch(name) else "<path>"


def _kept_if_versioned(match: re.Match[str]) -> str:
    return match[0] if match[1] else "<address>"


def _kept_if_chosen(match: re.Match[str]) -> str:
    """A long run of letters and figures: a symbol of C++ or a name that somebody chose, else a secret."""
    parts = [part for part in re.split(r"[_\-/+=]", match[0]) if part]
    chosen = len(parts) > 2 and all(len(part) <= 24 and _CHOSEN.fullmatch(part) for part in parts)
    return match[0] if chosen or match[0].startswith("_Z") else "<secret>"
