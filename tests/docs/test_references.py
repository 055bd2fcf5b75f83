"""Paths and names in pages, docstrings and comments lead to something. Links of pages: the site's builder."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

FOLDERS = ("attnsel", "rules", "backends", "tests", "examples", "benchmarks", r"\.ci")
# What a reader makes, an address on the site, what is installed.
_MADE = ("rules/CUDNN204.md", "rules/CUDNN204/", "tests/test_sample_attention.py", "attnsel/_suite")
# A path from the root: a folder of ours and what follows, not part of an address or of a longer path.
_DOCS = r"docs/(?:(?:tutorials|how-to|reference|explanation|tools|sitegen)/)?[\w-]+\.(?:md|py)\b"
_PATH = re.compile(rf"(?<![\w./~-])(?:(?:{'|'.join(FOLDERS)})/[\w./*<>…-]*[\w*>/]|{_DOCS})")
_NAME = re.compile(r"(?<![\w./\"'-])attnsel\.[a-z_]\w+(?:\.[a-zA-Z_]\w*)*")
_FILE = re.compile(r"``(\w+\.(?:py|md))``")  # as docstrings name a file beside their own
# Notes that rules and pages were written from: they lie outside the repository, where nobody could look.
_NOTES = re.compile(
    r"\b(?:te_(?:api|rules|issues|curated)|cudnn_(?:support|issues|deviceless|python_api)|torch_sdpa_rules"
    r"|flash_attn_api|user_pains|(?:house|DESIGN|STYLE)\.md)\b"
)
_FILES = {path.name for path in ROOT.glob("*/**/*.[pm][yd]")}


def exists(path: str) -> bool:
    """Whether a path from the root leads to something. ``<name>`` stands for any name; of files that are
    yet to be made (``gpu-tests-*.json``) the folder is enough."""
    pattern = re.sub(r"<\w+>|…", "*", path.rstrip("/"))
    if "*" in Path(path).name:
        pattern = Path(pattern).parent.as_posix()
    pattern = re.sub(r"^attnsel/(rules|backends)(?=/|$)", r"\1", pattern)
    return next(iter(ROOT.glob(pattern)), None) is not None


def named(name: str) -> bool:
    """Whether ``attnsel.module.name`` is a module, or a word in the source of one. Nothing is imported."""
    _, *parts = name.split(".")
    place = ROOT if parts[0] in ("rules", "backends") else ROOT / "attnsel"
    for part in parts:
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
    paths = [path for path in dict.fromkeys(_PATH.findall(text)) if not exists(path) and path not in _MADE]
    files = [file for file in dict.fromkeys(_FILE.findall(text)) if file not in _FILES]
    return [*paths, *files, *(name for name in dict.fromkeys(_NAME.findall(text)) if not named(name))]


def prose_of(path: Path) -> Iterator[str]:
    """A page; of a Python file its docstrings and comments."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield source
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_what_a_page_a_docstring_or_a_comment_names_exists():
    command = ["git", "ls-files", "-z", "*.py", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split("\0")[:-1]
    files = [ROOT / name for name in listed] or [p for p in ROOT.rglob("*") if p.suffix in (".py", ".md")]
    wrong = []
    for path in files:
        if path.is_file() and path.name not in ("CHANGELOG.md", Path(__file__).name):
            text = "\n".join(prose_of(path))
            wrong += [f"{path}: {found}" for found in (*dangling(text), *_NOTES.findall(text))]
    assert not wrong, "\n".join(["these lead to nothing:", *wrong])


def test_every_page_is_in_the_index():
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    pages = (path.relative_to(docs).as_posix() for path in docs.glob("**/*.md") if path.name != "README.md")
    assert not [page for page in pages if f"({page})" not in index]
