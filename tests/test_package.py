"""What people install: the wheel, the source distribution and a checkout hold the tree, nothing beside it."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import attnsel
from paths import ROOT

FOLDERS = {"attnsel": "attnsel", "rules": "attnsel/rules", "backends": "attnsel/backends"}
INSTALLED = (".py", ".typed", ".c", ".csv", ".bash", ".zsh", ".fish", ".html", ".css", ".js")
# Imports what attnsel prove starts; the folder that holds the package is its first word.
SUITE_STANDS_ALONE = """
import sys, pathlib, importlib
root = pathlib.Path(sys.argv[1]).resolve()
suite = root / "attnsel/_suite"
sys.path[:0] = [str(root), *(str(suite / folder) for folder in ("tests/gpu", "tests/support", "benchmarks"))]
files = sorted(suite.rglob("*.py"))
for path in files:
    if path.stem != "conftest":
        found = pathlib.Path(importlib.import_module(path.stem).__file__)
        assert found == path, f"{path.stem} is {found}"
print(len(files))
"""


def test_a_public_name_is_where_type_checkers_see_it():
    tree = ast.parse((ROOT / "attnsel" / "__init__.py").read_text(encoding="utf-8"))
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "." in (node.module or "")
    ]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == {**attnsel._HOME, "__version__": "attnsel._version"}
    assert set(attnsel.__all__) == {*seen, "settings"}
    assert all(getattr(attnsel, name) is not None for name in attnsel.__all__)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout: setuptools leaves build/ and an egg-info beside the sources."""
    copy = tmp_path_factory.mktemp("tree") / "attnsel"
    left_out = shutil.ignore_patterns(".git", "build", "*.egg-info", "__pycache__", ".*_cache", ".venv")
    shutil.copytree(ROOT, copy, ignore=left_out)
    return copy


@pytest.fixture(scope="module")
def dist(tree, tmp_path_factory):
    """The source distribution, and the wheel that is built out of it."""
    out = tmp_path_factory.mktemp("dist")
    run = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    subprocess.run(run, check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def wheel(dist):
    return next(dist.glob("*.whl"))


def test_the_wheel_holds_the_tree(wheel, tree):
    every = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    held = {name for name in every if not name.startswith("attnsel/_suite/")}
    expected = {
        f"{package}/{file.relative_to(tree / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for file in (tree / folder).rglob("*")
        if file.suffix in INSTALLED
    }
    assert held == expected
    suite = {name.removeprefix("attnsel/_suite/") for name in every - held}
    gpu_tests = {path.relative_to(tree).as_posix() for path in (tree / "tests/gpu").glob("*.py")}
    assert gpu_tests < suite
    assert not [name for name in suite if "proof" in name]
    assert wheel.stat().st_size < 2_450_000  # 1.1 MB of it are what logs say


def test_what_prove_starts_needs_nothing_that_is_not_in_the_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    run = [sys.executable, "-c", SUITE_STANDS_ALONE, str(tmp_path)]
    told = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert int(told.stdout) > 20


def test_the_source_distribution_is_the_checkout(dist, tree):
    """Whoever packages attnsel can build it from this, and test it."""
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    every = {path.relative_to(tree).as_posix() for path in tree.rglob("*.py")}
    missing = {name for name in every - held if not name.startswith("build/")}
    assert not missing
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", ".ci/run"} <= held


def test_an_editable_install_is_the_checkout(tree, tmp_path):
    venv.create(tmp_path, with_pip=False)
    scheme = sysconfig.get_default_scheme()
    here = {"base": str(tmp_path), "platbase": str(tmp_path)}
    site = Path(sysconfig.get_path("purelib", scheme, vars=here))
    # What this environment has, without the attnsel that is installed here.
    (site / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    python = Path(sysconfig.get_path("scripts", scheme, vars=here)) / Path(sys.executable).name
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    pip = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(tree)]
    subprocess.run(pip, check=True, capture_output=True, env=clean)
    code = "import attnsel as a, attnsel.rules as r, attnsel.backends as b"
    code += "; print(*(module.__file__ for module in (a, r, b)))"
    run = [str(python), "-c", code]
    told = subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True, env=clean).stdout
    assert told.split() == [str(tree / folder / "__init__.py") for folder in FOLDERS]


def test_a_checkout_finds_its_own_rules_and_backends_from_its_root():
    """Run from the root, the checkout's attnsel/ hides an installed one: all folders must be its own."""
    code = "import attnsel.rules as r, attnsel.backends as b; print(r.__file__, b.__file__)"
    run = [sys.executable, "-S", "-c", f"import sys; sys.path[1:1] = {sys.path!r}; {code}"]
    told = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert str(ROOT / "rules") in told
    assert str(ROOT / "backends") in told
