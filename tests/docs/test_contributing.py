"""The rule of CONTRIBUTING.md, made as its steps say: in a copy of the tree, in the file that it names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attnsel.cli import main
from free_code import with_free_code
from paths import ROOT

TEXT = with_free_code((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
STEPS = TEXT.partition("## A rule in five minutes")[2].partition("\n## ")[0]
SHOWN, RECIPE = (
    re.sub(r"^   ", "", block, flags=re.M) for block in re.findall(r"```\w*\n(.*?)```", STEPS, re.S)[:2]
)
(CODE,) = re.findall(r'^\s*"([A-Z]+\d{3})",$', RECIPE, re.M)
COMMAND = f"pytest tests/rules -k {CODE}"

ASKED = """
from attnsel import AttentionParams, Environment, select
from attnsel.rules import REGISTRY
from attnsel.rules.examples import question
from attnsel.rules.ranges import RANGES
def codes(p, env):
    return [reason.code for reason in select(p, env)["cudnn"].reasons]
rule = REGISTRY.rules[CODE]
(range_of_it,) = [codes_of for codes_of in RANGES if codes_of.has(CODE)]
assert range_of_it.module == rule.module, (range_of_it, rule.module)
p, env = question(rule, rule.fires_on)
assert rule.candidates == ("cudnn",)
assert CODE in codes(p, env)
assert CODE not in codes(*question(rule, rule.passes))
fp8 = p.replace(fp8=True, fp8_meta={"recipe": {"kind": "delayed", "fp8_dpa": True}})
assert fp8.fp8_attention and not rule.concerns(fp8)
assert CODE not in codes(fp8, env)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree with the rule at the end of its file."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("attnsel", "rules", "backends", "tests/rules", "tests/support"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    file = root / re.findall(rf"next {CODE}\s+(rules/\S+)", SHOWN)[0]
    file.write_text(f"{file.read_text(encoding='utf-8')}\n\n{RECIPE}", encoding="utf-8")
    return root


def run(copy: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_code_is_the_next_of_the_range_that_is_shown(capsys):
    command, *rows = [line for line in SHOWN.splitlines() if line.strip() not in ("", "…")]
    assert main(command.removeprefix("$ attnsel ").split()) == 0
    printed = capsys.readouterr().out
    assert "\n".join(rows) in printed
    assert f"next {CODE} " in rows[0]


def test_what_it_says_of_the_top_of_the_file_stands_there(copy):
    (top,) = re.findall(r"here `(rule = [^`]*)`", STEPS)
    (file,) = re.findall(rf"next {CODE}\s+(rules/\S+)", SHOWN)
    assert re.search(rf"^{re.escape(top)}$", (copy / file).read_text(encoding="utf-8"), re.M)


def test_it_speaks_of_what_its_examples_say_and_not_of_fp8(copy):
    run(copy, "-c", ASKED.replace("CODE", repr(CODE)))


def test_its_page_has_what_its_text_says(copy):
    page = " ".join(run(copy, "-m", "attnsel", "rule", CODE).split())
    doc = re.findall(r'"""(.*?)"""', RECIPE, re.S)[0]
    for line in filter(None, map(str.strip, doc.splitlines())):
        assert line in page


def test_the_command_that_tests_it_tests_its_examples(copy):
    assert COMMAND in STEPS
    done = run(copy, "-m", *COMMAND.split(), "-vv", "-p", "no:cacheprovider")
    for test in ("test_it_fires_on_its_example_with_a_whole_reason", "test_it_passes_its_other_example"):
        assert f"{test}[{CODE}] PASSED" in done
