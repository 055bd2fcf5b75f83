"""Imports go downwards: the contracts in pyproject.toml, on the tree as it is installed.

In a checkout import-linter sees the package's own folder alone; rules/ and backends/ lie beside it.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

if sys.version_info < (3, 11):
    pytest.skip("import-linter needs Python 3.11", allow_module_level=True)

import tomllib

CONFIG = ROOT / "pyproject.toml"
HEAVY = ("torch", "triton", "cudnn", "transformers")
# These modules import some of ours late, with the reason beside it: doors that are seldom used, need torch or
# take long to load.
LATE = {
    "attnsel.diagnose.models.source",
    "attnsel.backends.triton.run",
    "attnsel.cli",
    "attnsel.cli.explain",
    "attnsel.cli.explain_measure",
    "attnsel.cli.form",
    "attnsel.cli.known",
    "attnsel.cli.program",
    "attnsel.cli.question",
    "attnsel.integrations.program",
    "attnsel.integrations.pytest_plugin",
}


def installed(target: Path) -> Path:
    """A folder that holds the package with rules and backends inside, as a wheel installs it."""
    shutil.copytree(ROOT / "attnsel", target / "attnsel")
    for folder in ("rules", "backends"):
        shutil.copytree(ROOT / folder, target / "attnsel" / folder)
    return target


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return installed(tmp_path_factory.mktemp("installed"))


def test_the_product_is_no_longer_than_its_bound():
    """``[tool.attnsel] most-lines`` in pyproject.toml: whoever raises it says what was deleted against it."""
    bound = tomllib.loads(CONFIG.read_text())["tool"]["attnsel"]["most-lines"]
    files = (path for top in ("attnsel", "rules", "backends") for path in (ROOT / top).rglob("*.py"))
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= bound


def child(tree: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)


def lint(tree: Path) -> tuple[bool, str]:
    """Whether the contracts are kept, and what import-linter says."""
    code = (
        "import sys; from importlinter.cli import lint_imports as lint; sys.exit(lint({!r}, no_cache=True))"
    )
    told = child(tree, code.format(str(CONFIG)))
    return told.returncode == 0, told.stdout + told.stderr


def modules(tree: Path) -> set[str]:
    every = (path.relative_to(tree).with_suffix("") for path in (tree / "attnsel").rglob("*.py"))
    return {".".join(path.parts).removesuffix(".__init__") for path in every}


def test_the_contracts_are_kept(tree):
    kept, told = lint(tree)
    assert kept, told
    assert told.count("KEPT") == 4


def test_the_contracts_see_every_module_of_the_three_folders(tree):
    told = child(tree, "import grimp; print(*sorted(grimp.build_graph('attnsel', cache_dir=None).modules))")
    assert set(told.stdout.split()) == modules(tree), told.stderr


PLANTED = [  # a file, the line that is added, and what it leads to
    ("params/attention.py", "from attnsel.rules import REGISTRY", "attnsel.rules"),
    ("report/words.py", "import attnsel.dispatchers", "attnsel.dispatchers"),  # to a neighbour
    ("rules/cudnn/__init__.py", "import attnsel.selection.inquiry", "attnsel.selection"),
    ("backends/sdpa/candidate.py", "import attnsel.runtime.call", "attnsel.runtime"),
    ("rules/common.py", "def late():\n    import attnsel.decision", "attnsel.decision"),
    ("rules/common.py", "import torch", "torch"),
    ("report/words.py", "import rich", "rich"),
]
CIRCLE = ("rules/api.py", "import attnsel.rules.bugs", "")
FOR_A_TYPE = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from attnsel.decision import Selection"


def test_an_import_that_goes_up_is_named(tmp_path):
    tree = installed(tmp_path)
    for file, line, _ in (*PLANTED, ("backends/registry.py", FOR_A_TYPE, ""), CIRCLE):
        path = tree / "attnsel" / file
        path.write_text(path.read_text() + f"\n{line}\n")
    kept, told = lint(tree)
    assert not kept
    assert told.count("BROKEN") == 4
    for file, _, target in (*PLANTED, ("backends/registry.py", FOR_A_TYPE, "attnsel.decision")):
        importer = "attnsel." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert re.search(rf"{re.escape(importer)}\b.* -> {re.escape(target)}", told), (file, told)


def test_own_modules_are_imported_at_the_top(tree):
    """A late import of ours hides a dependency, or spares a start: the few that do stand in LATE."""
    late = set()
    for path in (tree / "attnsel").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(function):
                    names = (
                        ["attnsel" if node.level else node.module] if isinstance(node, ast.ImportFrom) else []
                    )
                    names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                    if any(name.split(".")[0] == "attnsel" for name in names):
                        module = ".".join(path.relative_to(tree).with_suffix("").parts)
                        late.add(module.removesuffix(".__init__"))
    assert late == LATE


def test_what_plans_loads_where_torch_is_not_installed(tree):
    """Not by way of anything that it imports either."""
    contracts = tomllib.loads(CONFIG.read_text())["tool"]["importlinter"]["contracts"]
    planning = next(contract for contract in contracts if contract["id"] == "torch")["source_modules"]
    patterns = [re.escape(name).replace(r"\*\*", ".+").replace(r"\*", "[^.]+") for name in planning]
    names = sorted(name for name in modules(tree) if re.fullmatch("|".join(patterns), name))
    assert len(names) > 100
    code = f"""
import sys, importlib
sys.modules.update(dict.fromkeys({HEAVY!r}))
for name in {names!r}:
    importlib.import_module(name)
"""
    told = child(tree, code)
    assert told.returncode == 0, told.stderr


def test_a_call_that_compiles_nothing_loads_no_compiler(tree):
    """Dynamo and sympy take longer to load than all of ours: they come with what is compiled."""
    pytest.importorskip("torch")
    code = """
import sys, torch, attnsel
q = torch.ones(1, 2, 1, 8)
attnsel.DotProductAttention(1, 8)(q, q, q)
attnsel.scaled_dot_product_attention(q, q, q)
loaded = {"torch._dynamo", "sympy", "torch.fx.experimental.symbolic_shapes"} & sys.modules.keys()
sys.exit(str(loaded) if loaded else 0)
"""
    told = child(tree, code)
    assert told.returncode == 0, told.stderr
