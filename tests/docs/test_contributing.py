"""The rule of CONTRIBUTING.md, made as its steps say: in a copy of the tree, in the file that it names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from attnsel.cli import main
from free_code import with_free_code
from paths import ROOT

TEXT = with_free_code((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
STEPS = TEXT.partition("## A rule in five minutes")[2].partition("\n## ")[0]
SHOWN, RECIPE = (
    re.sub(r"^   ", "", block, flags=re.M) for block in re.findall(r"```\w*\n(.*?)```", STEPS, re.S)[:2]
)
(CODE,) = re.findall(r'^\s*"([A-Z]+\d{3})",$', RECIPE, re.M)
(FILE,) = re.findall(rf"next {CODE}\s+(rules/\S+)", SHOWN)
COMMAND = f"pytest tests/rules -k {CODE}"


def test_its_code_is_the_next_of_the_range_that_is_shown(capsys):
    command, *rows = [line for line in SHOWN.splitlines() if line.strip() not in ("", "…")]
    assert main(command.removeprefix("$ attnsel ").split()) == 0
    assert "\n".join(rows) in capsys.readouterr().out
    (top,) = re.findall(r"here `(rule = [^`]*)`", STEPS)
    assert re.search(rf"^{re.escape(top)}$", (ROOT / FILE).read_text(encoding="utf-8"), re.M)


def test_the_command_that_tests_it_tests_its_examples_and_its_page_has_its_text(tmp_path):
    for folder in ("attnsel", "rules", "backends", "tests/rules", "tests/support"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / FILE
    file.write_text(f"{file.read_text(encoding='utf-8')}\n\n{RECIPE}", encoding="utf-8")

    def run(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONUTF8": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return " ".join(done.stdout.split())

    assert COMMAND in STEPS
    assert f"[{CODE}] PASSED" in run(*COMMAND.split(), "-vv", "-p", "no:cacheprovider")
    page = run("attnsel", "rule", CODE)
    for line in re.findall(r'"""(.*?)"""', RECIPE, re.S)[0].splitlines():
        assert line.strip() in page
