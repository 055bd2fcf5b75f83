"""The gate runs what README says, the tree of tests hides nothing, and README stays a landing page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from paths import ROOT

EXTRACTOR = ".ci/readme_commands.py"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def extracted(root, number) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / EXTRACTOR), str(number)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")


@pytest.fixture
def copy(tmp_path):
    """README and .ci alone, to be changed."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    return tmp_path


def test_the_two_commands_are_found_as_they_stand():
    first, second = (extracted(ROOT, number) for number in (1, 2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert f"```sh skip: .ci/run pastes it\n{first.stdout}```" in README
    assert f"```sh skip: .ci/run pastes it\n{second.stdout}```" in README
    assert "examples/first_call.py" in first.stdout
    assert "pytest" in second.stdout


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace("## Set up", "## Setting up"), 'there is no heading "## Set up"'),
        (lambda text: text.replace("\n## Ask", "\n```sh\nls\n```\n\n## Ask", 1), "3 sh blocks, not 2"),
        (lambda text: text.replace("```sh skip: .ci/run pastes it", "```text", 1), "1 sh blocks, not 2"),
        (lambda text: text.replace("pytest -n auto", "nose"), "command 2 holds no 'pytest'"),
    ],
)
def test_anything_but_two_commands_is_an_error(copy, change, told):
    (copy / "README.md").write_text(change(README), encoding="utf-8")
    done = extracted(copy, 2)
    assert done.returncode == 1
    assert told in done.stderr
    assert not done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_gate_pastes_the_commands_of_readme(copy):
    changed = README.replace("python examples/first_call.py", "python examples/first_call.py # one")
    changed = changed.replace("--dist loadfile", "--dist loadgroup")
    (copy / "README.md").write_text(changed, encoding="utf-8")
    shown = subprocess.run(
        ["bash", str(copy / ".ci/run"), "--dry-run"], capture_output=True, text=True, encoding="utf-8"
    )
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert "tree$ pip install -e '.[tested]' && python examples/first_call.py # one" in lines
    suite = "tree$ pip install -e '.[test]' && pytest -n auto --dist loadgroup -m \"not slow\""
    assert lines.count(suite) == 1, "the whole suite runs once"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_gate_builds_the_site_as_contributing_says_and_without_torch():
    shown = subprocess.run(
        ["bash", str(ROOT / ".ci/run"), "--dry-run"], capture_output=True, text=True, encoding="utf-8"
    ).stdout
    command = "python docs/make_site.py --without playground --output ../site"
    before, built, _ = shown.partition(f"tree$ {command}\n")
    assert built
    assert "[lint,docs," in before, "so that the tests of the site run before it"
    assert 'find_spec("torch") is None' in before.replace("\\", "")
    assert "\npython docs/make_site.py" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_gate_names_tests_that_exist():
    text = "".join((ROOT / ".ci" / name).read_text(encoding="utf-8") for name in ("run", "planner"))
    named = re.findall(r"(?<![\w/])(?:tests/)?((?:\w+/)*test_\w+\.py)\b", text)
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / "tests" / name).is_file()]


def test_readme_is_a_landing_page():
    assert len(README.splitlines()) <= 150


def test_no_folder_on_pytests_path_hides_the_package(pytestconfig):
    folders = [ROOT / folder for folder in pytestconfig.getini("pythonpath")]
    shared = (ROOT / "tests" / name for name in ("support", "proof", "fuzz", "net"))
    assert folders == [*shared, ROOT / "docs", ROOT / "docs/tools"]
    assert not [folder for folder in folders if (folder / "attnsel").exists()]


def test_tests_mirror_the_tree():
    wrong = [
        path
        for folder in ("attnsel", "backends", "rules")
        for path in (ROOT / "tests" / folder).rglob("*")
        if path.is_dir()
        and any(path.glob("*.py"))  # not the data of tests
        and not (ROOT / path.relative_to(ROOT / "tests")).is_dir()
    ]
    assert not wrong
