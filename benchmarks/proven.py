"""What records of ``gpu.py`` prove: features of a candidate on an architecture, each by tests that passed.

A row of a record names the candidate whose kernel its test ran, and the features that would be at fault if it
failed. What is proven is what tests with it passed, less what failures are held against:

- A failed test is held against those of its features that did not pass without the others; if each did,
  against its head dimension, and where it has none against all of them.
- One whose features contain all of another failed test says nothing more.
- One without features is held against the whole candidate.

A test that failed and passed when it ran again, in a process of its own, counts as passed; one that was
skipped counts for nothing, and one that was not finished as failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from attnsel.verdicts.record import Proven

WHOLE = ["tests/gpu"]
HEAD_DIM = 64  # of the grid of features
_WIDTH = "head_dim "
Known = Callable[[str], bool]


def counts(record: dict[str, Any], known: Known) -> bool:
    """Whether a record can prove anything: of all tests of the suite, on a GPU, of a version in the history.

    The version is a commit without changes, or the digest of the sources (sources.py) that ``known`` finds in
    the history: of an installed package, or of a checkout that lay there without its history.
    """
    if record.get("benchmark") != "gpu" or record["device"]["type"] != "cuda":
        return False
    tests = record["tests"]
    if tests["selected"] != WHOLE or not tests["collected"]:
        return False
    if record.get("commit") and not record.get("modified"):
        return True
    return bool(record.get("sources")) and known(record["sources"])


def proven_by(records: Iterable[dict[str, Any]], known: Known) -> dict[tuple[str, str], Proven]:
    """By candidate and target, what these records prove together: cards of one architecture count as one."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        if counts(record, known):
            for row in record["tests"]["rows"]:
                if row["candidate"]:
                    at = (row["candidate"], f"sm{record['device']['arch']}")
                    rows.setdefault(at, []).append(row)
    found = {at: _proven(at[1], of_it) for at, of_it in rows.items()}
    return {at: each for at, each in found.items() if each is not None}


def _proven(target: str, rows: list[dict[str, Any]]) -> Proven | None:
    passed = [row for row in rows if row["outcome"] == "passed"]
    failed = {frozenset(row["features"]) for row in rows if row["outcome"] in ("failed", "unfinished")}
    if frozenset() in failed:
        return None
    blamed = _blamed(failed, {frozenset(row["features"]) for row in passed})
    shown = {word for row in passed for word in (*row["features"], *row["also"])} - blamed
    narrowest = min((_width(word) for word in blamed if _width(word)), default=10**9)
    width = max((w for word in shown if HEAD_DIM <= (w := _width(word)) < narrowest), default=HEAD_DIM)
    features = frozenset(word for word in shown if not _width(word))
    return Proven(target, features, width) if features and narrowest > HEAD_DIM else None


def _blamed(failed: set[frozenset[str]], passed: set[frozenset[str]]) -> set[str]:
    """The words that failures are held against."""
    found: set[str] = set()
    for test in failed:
        if any(other < test for other in failed):
            continue
        innocent = frozenset[str]().union(*(other for other in passed if other < test))
        guilty = test - innocent or {word for word in test if _width(word)} or test
        found |= guilty
    return found


def _width(word: str) -> int:
    """256 for "head_dim 256"; 0 for a feature."""
    return int(word.removeprefix(_WIDTH)) if word.startswith(_WIDTH) else 0


def as_source(proven: Proven) -> str:
    """The line for ``proven`` in a candidate's record."""
    words = " ".join(sorted(proven.features))
    return f'Proven("{proven.target}", frozenset("{words}".split()), {proven.head_dim})'
