"""docs/how-to/add-a-cudnn-rule.md shows what the library and the tree say; asked where the library is."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import pages
from attnsel.backends.cudnn.ask.libraries import Missing, find_cudnn, find_nvrtc
from paths import ROOT

PAGE = "docs/how-to/add-a-cudnn-rule.md"
BLOCKS = pages.blocks(PAGE)
SCRIPT = ROOT / "examples/cudnn_rule.py"
SHOWN = next(block.text for block in BLOCKS if block.text.startswith("cuDNN 9.28.0, cudnn-frontend"))


@pytest.fixture
def example() -> SimpleNamespace:
    """The functions of the example, in a namespace of their own."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_the_rule_on_the_page_is_the_one_in_the_tree():
    (block,) = (block for block in BLOCKS if block.language == "python")
    file = block.skipped.removeprefix("it stands in ")
    assert block.text in (ROOT / file).read_text(encoding="utf-8")


def test_the_table_on_the_page_is_what_the_rules_say(example):
    """Every cell, on the page and by the rules of today, asked with the versions that the page names."""
    from attnsel import AttentionParams, Environment
    from attnsel.cli.library import by_rules

    versions = dict(zip(("cudnn", "cudnn_frontend"), re.findall(r"\d+\.\d+\.\d+", SHOWN), strict=False))
    lines = SHOWN.splitlines()
    archs = re.findall(r"sm\d+", lines[2])
    shown = [re.split(r" {2,}", line.strip()) for line in lines[3:9]]
    assert len(shown) == 6
    for value, *cells in shown:
        for arch, cell in zip(archs, cells, strict=True):
            p = AttentionParams(is_training=True, head_dim_qk=int(value))
            codes = by_rules(p, Environment.describe(arch, **versions)).codes
            assert codes[:1] == ({"✔": (), "? no rule": ("CUDNN235",)}.get(cell) or tuple(cell.split()[1:]))


def test_a_requirement_is_the_bound_that_fits_what_was_seen(example):
    assert example.requirement([64, 128, 136, 192], [136, 192]) == "AtMost(128)"
    assert example.requirement([1, 64, 128], [1]) == "AtLeast(64)"
    assert example.requirement([64, 128, 192], [128]) == "OneOf(64, 192)"
    assert example.requirement(["bf16", "fp16", "fp32"], ["fp32"]) == "OneOf('bf16', 'fp16')"
    assert example.requirement([False, True], [True]) == "OneOf(False)"
    assert example.requirement([1], [1]) == 'FreeText("…")'


def test_the_text_of_a_rule_is_python_and_holds_what_was_seen(example):
    text = example.skeleton("head_dim_qk", [64, 128, 136], {80: {136: "no engine"}}, "9.28.0")
    compile(text, "rule", "exec")
    assert "arch=(80,)," in text
    assert 'requires={"head_dim_qk": AtMost(128)},' in text
    assert 'passes={"head_dim_qk": 128},' in text


class Refusing:
    """Stands for a library that takes nothing beyond a head dimension of 64."""

    def versions(self) -> dict[str, str]:
        return {"cudnn": "9.28.0", "cudnn_frontend": "1.23.0"}

    def ask(self, graph: Any, device: dict[str, Any], *, build: bool = False) -> SimpleNamespace:
        supported = not re.search(r"\b128\b", str(graph.as_dict()))
        return SimpleNamespace(supported=supported, words="" if supported else "no engine", crashed=False)


def test_what_only_the_library_refuses_is_called_missing(example, capsys):
    options = SimpleNamespace(field="head_dim_qk", values="64,128", arch="90", call=[])
    example.sweep(Refusing(), options)
    printed = capsys.readouterr().out
    assert re.search(r"^64 +✔$", printed, re.MULTILINE)
    assert re.search(r"^128 +\? no rule$", printed, re.MULTILINE)
    assert 'requires={"head_dim_qk": AtMost(64)},' in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--field", "nonsense"), "nonsense"),
        (("--without", "CUDNN000"), "there is no rule CUDNN000"),
        (("--cudnn-lib", "/nowhere"), "libcudnn was not asked: "),
    ],
)
def test_what_cannot_be_asked_is_said_in_words(options, said):
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_library_says_what_the_page_shows():
    try:
        find_nvrtc(find_cudnn(None))
    except Missing as missing:
        pytest.skip(str(missing))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--without", "CUDNN235"], capture_output=True, text=True, timeout=300
    )
    if not done.stdout.startswith(SHOWN.splitlines()[0]):
        pytest.skip(f"the page is about other versions: {done.stdout[:40]} {done.stderr[:80]}")
    assert done.stdout == SHOWN
