"""What runs elsewhere is what is written here: workflows, hooks and forms against CONTRIBUTING.md, .ci/."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

yaml = pytest.importorskip("yaml")

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
GATE = (ROOT / ".ci/run").read_text(encoding="utf-8")


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


JOBS = [(path.name, name, job) for path in WORKFLOWS for name, job in read(path)["jobs"].items()]
STEPS = [(f"{file}: {name}", step) for file, name, job in JOBS for step in job["steps"]]
RUN = [(where, step["run"]) for where, step in STEPS if "run" in step]


def extras():
    return dict(
        re.findall(
            r"^(\w+) = (\[.*?\])$", PROJECT.partition("[project.optional-dependencies]")[2], re.M | re.S
        )
    )


@pytest.mark.parametrize(("where", "command"), RUN)
def test_a_workflow_runs_what_a_person_runs(where, command):
    words = command.split()
    if command.startswith("pip install -e"):
        named = re.fullmatch(r"pip install -e '\.\[(\w+)\]'", command)
        assert named, f"{where}: {command}"
        assert named[1] in extras()
    elif words[0].startswith(".ci/"):
        assert os.access(ROOT / words[0], os.X_OK)
        assert words[0] in CONTRIBUTING, f"{words[0]} is on no page"
    else:
        said = command if "readme_commands" not in command else ".ci/readme_commands.py"
        assert said in CONTRIBUTING or said in GATE, (
            f"{where}: {command} stands on no page and not in the gate"
        )


def test_the_gate_and_the_workflows_run_the_same():
    every = "\n".join(command for _, command in RUN)
    for command in (
        "ruff check . && ruff format --check .",
        ".ci/types",
        ".ci/planner",
        "python docs/make_site.py",
    ):
        assert command in every
        assert command in GATE
    assert {"readme_commands.py 1", "readme_commands.py 2"} <= set(
        re.findall(r"readme_commands.py \d", every)
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_and_no_more(path):
    told = read(path)
    assert told["permissions"] == {"contents": "read"}
    assert "group" in told["concurrency"]
    for name, job in told["jobs"].items():
        assert job["timeout-minutes"] <= 90, name
        more = job.get("permissions", {})
        assert more in ({}, {"id-token": "write"}), name
        if more:
            assert "refs/tags/v" in job["if"], "only a tag publishes"
            assert job["environment"]


def test_actions_are_pinned_and_keep_no_credentials():
    for where, step in STEPS:
        uses = step.get("uses", "")
        if uses:
            assert re.fullmatch(
                r"(?:actions|pypa)/[\w-]+@(?:v\d+|release/v\d+)|[\w/-]+@[0-9a-f]{40}", uses
            ), where
        if uses.startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False, where


def matrix_of(wanted):
    (found,) = [job["strategy"]["matrix"] for _, name, job in JOBS if name == wanted]
    return found


def test_every_python_and_system_that_is_claimed_is_tested():
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    matrix = matrix_of("planner")
    assert matrix["python"] == claimed
    assert re.search(r'requires-python = ">=([\d.]+)"', PROJECT)[1] == claimed[0]
    for system, word in (("macos", "MacOS"), ("windows", "Windows"), ("ubuntu", "Linux")):
        assert re.search(rf'"Operating System :: .*{word}"', PROJECT)
        pythons = [row["python"] for row in matrix["include"] if row["os"].startswith(system)]
        assert pythons == [claimed[0], claimed[-1]] or f"{system}-latest" in matrix["os"]


# ---- scripts ------------------------------------------------------------------------------------------

SCRIPTS = sorted(path for path in (ROOT / ".ci").iterdir() if path.is_file() and path.suffix != ".py")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_bash_that_stops_at_an_error(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).stderr == b""


def test_the_planners_tests_exist():
    names = re.search(r"planner='([^']*)'", (ROOT / ".ci/planner").read_text(encoding="utf-8"))[1].split()
    assert len(names) > 5
    assert not [name for name in names if not (ROOT / "tests" / name).exists()]


# ---- hooks --------------------------------------------------------------------------------------------


def test_hooks_are_the_tools_that_the_gate_runs():
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"], "another repository would bring other versions"
    (local,) = hooks
    entries = {hook["id"]: hook for hook in local["hooks"]}
    assert entries["ruff"]["entry"].startswith("ruff check")
    assert entries["ruff-format"]["entry"].startswith("ruff format")
    assert entries["types"]["entry"] == ".ci/types"
    assert all(hook["language"] == "system" for hook in entries.values())


def test_dev_has_what_the_gate_runs_pinned():
    found = extras()
    assert {"test", "lint", "docs", "cover"} <= set(
        re.findall(r"\w+", re.search(r"attnsel\[([^]]*)\]", found["dev"])[1])
    )
    for tool in ("ruff", "mypy"):
        assert re.search(rf'"{tool}==[\d.]+"', found["lint"]), tool


@pytest.mark.parametrize("tool", ["ruff", "mypy"])
def test_what_is_installed_here_is_what_is_pinned(tool):
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    told = subprocess.run([sys.executable, "-m", tool, "--version"], capture_output=True, text=True).stdout
    assert re.search(rf'"{tool}==([\d.]+)"', PROJECT)[1] in told


# ---- forms --------------------------------------------------------------------------------------------


def test_there_is_a_form_for_each_kind_of_issue():
    assert {path.stem for path in FORMS} == {"wrong-answer", "crash", "slow", "missing-rule", "question"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_the_command_and_the_machine(path):
    fields = {field["id"]: field for field in read(path)["body"]}
    assert "command" in fields
    if path.stem == "missing-rule":  # it is about a library, not about a machine
        return
    assert "attnsel doctor --json" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"]["required"] is (path.stem != "question")


def test_commands_and_variables_that_forms_name_exist():
    from attnsel.cli import COMMANDS
    from attnsel.settings import VARIABLES

    text = "\n".join(
        path.read_text(encoding="utf-8") for path in (*FORMS, GITHUB / "pull_request_template.md")
    )
    assert set(re.findall(r"`attnsel ([a-z-]+)", text)) <= set(COMMANDS)
    assert set(re.findall(r"ATTNSEL_[A-Z_]+", text)) <= set(VARIABLES)


# ---- their own checkers -------------------------------------------------------------------------------


def checked(schema: str, *paths: Path) -> None:
    pytest.importorskip("check_jsonschema")
    run = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, paths)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_are_what_github_reads():
    checked("github-workflows", *WORKFLOWS)
    checked("github-issue-forms", *FORMS)
    checked("github-issue-config", GITHUB / "ISSUE_TEMPLATE" / "config.yml")
    checked("dependabot", GITHUB / "dependabot.yml")


@pytest.mark.skipif(shutil.which("zizmor") is None, reason="zizmor is not installed")
def test_zizmor_finds_nothing():
    done = subprocess.run(
        ["zizmor", "--offline", "--no-progress", str(GITHUB)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
