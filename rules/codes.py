"""Which codes lie in which file: the code of a new rule follows from what it is about.

``attnsel rules --ranges`` prints the table with the next free code of each range, and
tests/rules/test_lifecycle.py holds the rules to it. Every range begins above 000: ``<FAMILY>000`` is the rule
that a record's ``takes`` makes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.rows import read_rows
from attnsel.environment import COMPONENTS, Device, Environment
from attnsel.environment.gpus import ARCHITECTURES
from attnsel.environment.versions import Version, Versions
from attnsel.params import AttentionParams
from attnsel.rules.api import REGISTRY, Example, Hint, Rule, removed
from attnsel.verdicts.reasons import Page


class Range(NamedTuple):
    """Codes from ``first`` to ``last``, both among them, for the rules in one file."""

    prefix: str
    first: int
    last: int
    file: str
    about: str

    @property
    def module(self) -> str:
        """The file as a module, which is how a page names it."""
        return f"attnsel.{self.file.removesuffix('.py').replace('/', '.')}"

    def has(self, code: str) -> bool:
        prefix, number = split(code)
        return prefix == self.prefix and self.first <= number <= self.last

    def next_free(self) -> str | None:
        """The code after the last one that is or was in use; None in a full range. Gaps are not filled."""
        known = (split(code) for code in (*REGISTRY.pages, *REGISTRY.removed) if self.has(code))
        number = max((number + 1 for _, number in known), default=self.first)
        return None if number > self.last else f"{self.prefix}{number:03}"


@lru_cache(maxsize=1)
def all_ranges() -> tuple[Range, ...]:
    """The rows of ``data/ranges.csv``; a family that begins with a candidate needs none before it has several
    files."""
    found = [
        Range(row["prefix"], int(row["first"]), int(row["last"]), row["file"], row["about"])
        for row in read_rows("attnsel.rules", "ranges")
    ]
    known = {codes.prefix for codes in found}
    for record in CANDIDATES.values():
        if record.rules and record.family not in known and not record.plugin:
            known.add(record.family)
            file = f"{record.rules[0].removeprefix('attnsel.').replace('.', '/')}.py"
            found.append(Range(record.family, 1, 999, file, record.title))
    return tuple(found)


def range_of(page: Page) -> Range | None:
    """The range that a page's code is of, where the page lies in the range's file."""
    return next(
        (codes for codes in all_ranges() if codes.has(page.code) and codes.module == page.module), None
    )


def split(code: str) -> tuple[str, int]:
    """``("CUDNN", 204)`` of a code."""
    prefix = code.rstrip("0123456789")
    return prefix, int(code[len(prefix) :])


# ---- The examples a rule carries, as questions: what its page shows and its test asks ------------------


_COMMON_FIRST = (90, 80, 100, 75, 89, 86, 120, 103, 121, 70, 87, 110)


def question(rule: Rule | Hint, example: Example) -> tuple[AttentionParams, Environment]:
    """``example`` inside the rule's gates: fields of AttentionParams, ``gpu``, ``device`` and versions.

    Raises InvalidInput for an example that contradicts itself, ValueError for gates that nothing passes.
    """
    given: dict[str, Any] = dict(example)
    machine: dict[str, Any] = {name: given.pop(name) for name in COMPONENTS if name in given}
    gpu = given.pop("gpu", None) or _some_gpu(rule)
    device = given.pop("device", None)
    for component in {versions.component for versions in rule.when} - set(machine):
        machine[component] = _some_version([v for v in rule.when if v.component == component])
    env = Environment.describe(gpu, **machine)
    more = {name: given.pop(name) for name in ("platform", "torch_flash", "missing") if name in given}
    if device is not None:
        kind: Any = "rocm" if device.startswith("gfx") else device
        env = env.replace(device=Device(type=kind, name=device))
    if more:
        env = env.replace(**more)
    return AttentionParams(**given), env


def _some_gpu(rule: Rule | Hint) -> str:
    if rule.arch is not None:
        for arch in (*_COMMON_FIRST, *ARCHITECTURES):
            if arch in rule.arch:
                return f"sm{arch}"
        raise ValueError(f"{rule.code}: no known architecture passes its gate")
    if rule.device is not None and "cuda" not in rule.device:
        return "cpu"
    return "H100"


def _some_version(gates: list[Versions]) -> Version:
    """A version inside all gates: some edge, or some gate's own sample."""
    candidates = sorted({gate.sample() for gate in gates} | {e for gate in gates for e in gate.edges()})
    for version in candidates:
        if all(version in gate for gate in gates):
            return version
    raise ValueError(f"no version lies in all of {[str(gate) for gate in gates]}")


# Those of ``data/removed.csv``: before any rule is written down, as none may take one of them.
for _row in read_rows("attnsel.rules", "removed"):
    removed(_row["code"], release=_row["release"], replaced_by=_row["replaced_by"], why=_row["why"])
