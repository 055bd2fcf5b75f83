"""A new candidate is one folder, its rules and one line of the registry: all else serves it as it stands.

A copy of the tree gets one, and processes that import the copy explain it and choose it. That one runs, is
compared and gives way is held for plug-ins (tests/attnsel/plugins).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from paths import ROOT
from plugin_packages import Answer, answers, python

SUPPORT = ROOT / "tests" / "support"
FILES = {
    "backends/direct/__init__.py": '"""Attention in two matrix products."""\n',
    "backends/direct/kernel.py": (ROOT / "examples/plugin/sample_attention/kernel.py").read_text(),
    "backends/direct/candidate.py": '''"""What ``direct`` is."""

from attnsel.verdicts.record import CandidateRecord

CANDIDATES = (
    CandidateRecord(
        name="direct",
        title="attention in two matrix products",
        family="DIRECT",
        kernel="attnsel.backends.direct.kernel",
        takes=("fp32", "cpu", "training", "causal", "top_left", "gqa", "head_dim_v", "lse", "strides"),
        rules=("attnsel.rules.direct",),
        adaptations=("pad_head_dim_qk",),
        place="before sdpa.flash",
    ),
)
''',
    "rules/direct.py": '''"""DIRECT0xx: what attention in two matrix products cannot do."""

from attnsel.rules.api import rule
from attnsel.verdicts.requirements import Multiple


@rule("DIRECT001", "direct", requires={"head_dim_qk": Multiple(8)}, fires_on={"head_dim_qk": 100})
def whole_vectors(p, env):
    """The head dimension must be a multiple of 8

    Why: rows are loaded 32 bytes at a time.
    Fix: pad the heads.
    Source: attnsel/backends/direct/kernel.py.
    """
    return True
''',
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy, as a checkout: with the new folder, the new rules and the line."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("attnsel", "backends", "rules"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for path, text in FILES.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)
    registry = root / "backends" / "registry.py"
    text, lines = re.subn(r"(?m)^(BUILT_IN = \(.*)\)$", r'\1, "direct")', registry.read_text())
    assert lines == 1
    registry.write_text(text)
    return root


CPU = "explain --json --gpu cpu --dtype fp32"
JUDGED: dict[str, tuple[str, list[str], list[str]]] = {  # verdict, codes, adaptations
    "": ("eligible", [], []),
    "--cp-size 2": ("eligible", [], []),
    "--head-dim-qk 100": ("eligible", [], ["pad_head_dim_qk"]),
    "--head-dim-qk 100 --adapt never": ("refused", ["DIRECT001"], []),
    "--softcap 30": ("refused", ["DIRECT000"], []),
    "--cp-size 2 --window-size 8 0": ("refused", ["DIRECT000", "CP006"], []),
}
CHOSEN = {"": "sdpa.flash", "--backend direct": "direct", "--deny sdpa.flash": "direct"}  # it is unproven
ASKED = [*(f"{CPU} {words}" for words in (*JUDGED, *CHOSEN)), "rules --candidate direct --json"]


@pytest.fixture(scope="module")
def told(tree: Path) -> dict[str, Answer]:
    return answers(ASKED, tree, SUPPORT, first=f"import sys; sys.path.insert(0, {str(tree)!r})\n")


def test_every_command_judges_and_ranks_it(told: dict[str, Answer]) -> None:
    for words, wanted in JUDGED.items():
        seen = next(c for c in told[f"{CPU} {words}"].json()["candidates"] if c["name"] == "direct")
        codes = [reason["code"] for reason in seen["reasons"]]
        adaptations = [change["name"] for change in seen["adaptations"]]
        assert (seen["verdict"], codes, adaptations) == wanted, words
        assert seen["unproven"]
    assert {words: told[f"{CPU} {words}"].json()["backend"] for words in CHOSEN} == CHOSEN
    codes = {page["code"] for page in told["rules --candidate direct --json"].json()}
    assert {"DIRECT000", "DIRECT001", "INSTALL001", "CP006"} <= codes


def test_its_rules_pass_the_tests_of_every_rule(tree: Path) -> None:
    asked = [str(ROOT / "tests/rules/test_every_rule.py"), "-k", "DIRECT", "-p", "no:cacheprovider"]
    first = f"import sys, pytest; sys.path.insert(0, {str(tree)!r})"  # before the working folder
    done = python(f"{first}; sys.exit(pytest.main({asked}))", tree, SUPPORT)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "passed" in done.stdout
