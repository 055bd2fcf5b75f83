"""Paths and links in pages, docstrings and comments lead to something."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from paths import ROOT

FOLDERS = ("attnsel", "rules", "backends", "tests", "examples", "benchmarks", r"\.ci")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*.md"))),
]

# A path from the root: a folder of ours and what follows, not part of an address or of a longer path.
_OURS = "|".join(FOLDERS)
_DOCS = r"docs/(?:(?:tutorials|how-to|reference|explanation)/)?[\w-]+\.md\b"
_PATH = re.compile(rf"(?<![\w./~-])(?:(?:{_OURS})/[\w./*<>…-]*[\w*>/]|{_DOCS})")
_NAME = re.compile(r"(?<![\w./\"'-])attnsel\.[a-z_]\w+(?:\.[a-zA-Z_]\w*)*")
_FILE = re.compile(r"``(\w+\.(?:py|md))``")  # as docstrings name a file beside their own
_IN_BACKTICKS = re.compile(r"`([^`\n]+)`")
_ROOT_FILE = re.compile(r"\b(?:README|CONTRIBUTING|CHANGELOG|LICENSE)\.md\b|(?<![\w/])pyproject\.toml\b")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def exists(path: str) -> bool:
    """Whether a path from the root leads to something. ``<name>`` stands for any name; of files that are
    yet to be made (``gpu-tests-*.json``) the folder is enough."""
    pattern = re.sub(r"<\w+>|…", "*", path.rstrip("/"))
    if "*" in Path(path).name:
        pattern = Path(pattern).parent.as_posix()
    for installed, lies in (("attnsel/rules", "rules"), ("attnsel/backends", "backends")):
        if f"{pattern}/".startswith(f"{installed}/"):
            pattern = lies + pattern.removeprefix(installed)
    return next(iter(ROOT.glob(pattern)), None) is not None


def named(name: str) -> bool:
    """Whether ``attnsel.module.name`` is a module, or a word in the source of one. Nothing is imported."""
    first, *rest = name.split(".")[1:]
    place = ROOT / first if first in ("rules", "backends") else ROOT / "attnsel"
    for part in rest if first in ("rules", "backends") else (first, *rest):
        if (place / part).is_dir():
            place /= part
        elif (place / f"{part}.py").is_file():
            place = place / f"{part}.py"
        else:
            source = place if place.is_file() else place / "__init__.py"
            return re.search(rf"\b{part}\b", source.read_text(encoding="utf-8")) is not None
    return True


def dangling(text: str) -> list[str]:
    """Paths, files and dotted names in a text that lead to nothing."""
    paths = [path for path in dict.fromkeys(_PATH.findall(text)) if not exists(path)]
    files = [file for file in dict.fromkeys(_FILE.findall(text)) if not next(ROOT.glob(f"*/**/{file}"), None)]
    return [*paths, *files, *(name for name in dict.fromkeys(_NAME.findall(text)) if not named(name))]


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a Python file, each with its line."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _tracked(folder: str) -> list[str]:
    """The files of a folder that git knows, from the root; where there is no git, all of them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", folder], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\0")
    names = listed[:-1] or [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / folder).rglob("*"))]
    return [name for name in names if (ROOT / name).is_file()]


def dangling_in(folder: str) -> list[str]:
    return [
        f"{name}:{line}: {path}"
        for name in _tracked(folder)
        if name.endswith(".py")
        for line, text in prose_of(ROOT / name)
        for path in dangling(text)
    ]


@pytest.mark.parametrize("page", [*PAGES, "benchmarks/README.md"])
def test_a_path_on_a_page_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not dangling(text)
    in_backticks = "\n".join(_IN_BACKTICKS.findall(text))
    assert not [name for name in _ROOT_FILE.findall(in_backticks) if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_a_link_on_a_page_leads_somewhere(page):
    wrong = []
    for target, part in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        file = (ROOT / page).parent / target if target else ROOT / page
        if not file.exists():
            wrong.append(target)
        elif part and part not in headings(file):
            wrong.append(f"{target}#{part}")
    assert not wrong


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", line).lower().replace(" ", "-") for line in lines}


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    docs = ROOT / "docs"
    names = [page.relative_to(docs).as_posix() for page in docs.glob("**/*.md") if page.name != "README.md"]
    assert not [name for name in names if f"({name})" not in index]


@pytest.mark.parametrize("folder", ["attnsel", "backends", "rules", "tests", "examples", "benchmarks", ".ci"])
def test_a_path_in_a_docstring_or_a_comment_exists(folder):
    wrong = dangling_in(folder)
    assert not wrong, "\n".join(["these lead to nothing:", *wrong])


# Notes that rules and pages were written from. They lie outside the repository: nobody could look there.
_NOTES = re.compile(
    r"\b(?:te_(?:api|rules|issues|curated)|cudnn_(?:support|issues|deviceless|python_api)|torch_sdpa_rules"
    r"|flash_attn_api|user_pains|(?:house|DESIGN|STYLE)\.md)\b"
)


def test_nothing_refers_to_notes_that_are_not_here():
    names = [*PAGES, *(name for folder in (*FOLDERS[:-1], "docs") for name in _tracked(folder))]
    wrong = [
        f"{name}: {found}"
        for name in names
        if name.endswith((".py", ".md", ".toml")) and name != Path(__file__).relative_to(ROOT).as_posix()
        for found in _NOTES.findall((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert not wrong


@pytest.mark.parametrize("folder", ["attnsel", "rules", "backends"])
def test_code_sends_nobody_to_the_landing_page_for_details(folder):
    """What is promised to stand there is lost when that page is rewritten; pages under docs/ are named."""
    wrong = [
        f"{name}: {text.strip().splitlines()[0]}"
        for name in _tracked(folder)
        if name.endswith(".py")
        for _, text in prose_of(ROOT / name)
        if re.search(r"\b(?:in|see) (?:the )?README\b", " ".join(text.split()))
    ]
    assert not wrong


# ---- the checks find what is wrong -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see attnsel/no_such.py.", ["attnsel/no_such.py"]),
        ("`attnsel/backends/contract.py` and attnsel/backends/no_such.py", ["attnsel/backends/no_such.py"]),
        ("backends/<name>/candidate.py, benchmarks/results/gpu-tests-*.json, rules/cudnn/", []),
        (
            "benchmarks/no_such/gpu-tests-*.json, docs/no_such.md",
            ["benchmarks/no_such/gpu-tests-*.json", "docs/no_such.md"],
        ),
        (
            "``guards.py``, ``no_such.py``, attnsel.runtime, attnsel.no_such",
            ["no_such.py", "attnsel.no_such"],
        ),
        ("attnsel.cli.run, attnsel.backends.contract.Spec, attnsel.rules.no_such", ["attnsel.rules.no_such"]),
        ("github.com/acme/tests/no_such.py, ../tests/no_such.py, docs/theirs/Attention.md", []),
    ],
)
def test_what_is_dangling_is_found(text, found):
    assert dangling(text) == found
