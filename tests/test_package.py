"""The house: what is in the wheel, who imports whom, and what the tree must not hold."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from attnsel.backends.registry import BUILT_IN
from paths import ROOT

# What `attnsel prove` takes along, from the folders where it lies in a checkout.
SUITE = ("tests/gpu", "tests/support", "benchmarks")
FOLDERS = {"attnsel": "attnsel", "rules": "attnsel/rules", "backends": "attnsel/backends"}

# Imports go one way: a module may import what stands in an earlier row, or in its own. The longest name that
# fits decides: ``adaptations.apply`` stands apart from the rest of its folder.
LAYERS = [
    [
        "_version",
        "_child",
        "_spawned",
        "_lock",
        "_schemas",
        "meanings",
        "te_releases",
        "errors",
        "_scalars",
        "_model",
        "_params_checks",
        "versions",
        "installed",
        "layout",
        "recipes",
        "gpus",
        "gpu_names",
        "_gpu_catalogue",
        "_torch_builds",
        "releases",
        "hardware_specs",
        "context_parallel.exchanges",
    ],
    ["params", "environment", "candidates.record", "_flash_attn_wheels", "_published"],
    ["wheels"],
    ["backends.cudnn.workspace"],
    [f"backends.{name}.candidate" for name in BUILT_IN],
    ["candidates.registry"],
    ["candidates"],
    ["policy", "candidates.capabilities", "candidates.proof", "selection.requirements"],
    ["selection.verdict"],
    ["rules"],
    ["context_parallel.geometry"],
    ["context_parallel.step"],
    ["selection", "adaptations"],
    ["plugins", "plugin_guards"],
    ["dispatchers"],
    ["unlock"],
    ["report"],
    ["selection.select", "settings"],
    ["copy_advice"],
    [
        "dialects",
        "integrations.te_config",
        "watching.record",
        "watching.report",
        "watching.judge",
        "watching.asked_better",
        "watching.expected",
    ],
    ["logs", "ranks", "replay.record"],
    ["debug"],
    [
        "context_parallel.schedule",
        "context_parallel.estimate",
        "context_parallel.plan",
        "context_parallel.report",
    ],
    ["backends"],
    ["runtime", "replay.leave", "adaptations.apply", "adaptations.rows"],
    ["context_parallel"],
    ["_module_checks", "module", "functional"],
    ["replay"],
    ["flash_attn", "f_sdpa", "integrations"],
    ["watching"],
    ["can_i_use", "cli", "__main__"],
]
TORCH_FREE = {name for row in LAYERS[:23] for name in row} | {"can_i_use", "cli", "__main__", "__init__"}
BACKENDS_MAY_IMPORT = {
    "params",
    "layout",
    "gpus",
    "selection.requirements",
    "selection.verdict",
    "_child",
    "_lock",
    "versions",
    "backends",
    "backends.cudnn.workspace",
    "errors",
}
RUNNING = (
    "backends",
    "runtime",
    "adaptations.apply",
    "adaptations.rows",
    "context_parallel",
)  # what may import backends


def sources():
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, package.replace("/", "."), path.relative_to(ROOT / folder)


ROWS = {name: number for number, row in enumerate(LAYERS) for name in row}


def layer_of(module: str) -> str:
    """The longest name in ``LAYERS`` that ``attnsel.x.y.z`` begins with."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in ROWS:
            return name
    return parts[0] if parts else "__init__"


def imports(path: Path, *, top_level_only: bool):
    """Modules imported by a file, outside ``if TYPE_CHECKING`` blocks."""
    tree = ast.parse(path.read_text())
    stack = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                yield f"{node.module}.{alias.name}" if node.module == "attnsel" else node.module
        elif not (top_level_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            stack.extend(ast.iter_child_nodes(node))


def test_imports_go_one_way():
    wrong = []
    for path, package, relative in sources():
        module = f"{package}.{relative.with_suffix('').as_posix().replace('/', '.')}".removesuffix(
            ".__init__"
        )
        here = layer_of(module)
        if here == "__init__" or relative.as_posix() == "__init__.py":
            continue
        assert here in ROWS, f"{module}: give it a place in LAYERS"
        for target in imports(path, top_level_only=True):
            if not target.startswith("attnsel."):
                continue
            there = layer_of(target)
            if there in ROWS and ROWS[there] > ROWS[here]:
                wrong.append(f"{module} imports {target}")
            if here == "backends" and there not in BACKENDS_MAY_IMPORT and not there.endswith(".candidate"):
                wrong.append(f"{module} imports {target}")
            if there == "backends" and here not in RUNNING:
                wrong.append(f"{module} imports {target}: only what runs may")
    assert not wrong


def test_own_modules_are_imported_at_the_top():
    """A late import hides a circle. What remains opens a door that is seldom used, or that needs torch."""
    late = {
        f"{path.relative_to(ROOT)}: {target}"
        for path, _, _ in sources()
        for target in set(imports(path, top_level_only=False)) - set(imports(path, top_level_only=True))
        if target.startswith("attnsel.") and layer_of(target) != "__init__"
    }
    assert not {one for one in late if not one.startswith(tuple(LAZY))}, sorted(late)


# The folders whose late imports are doors: commands are imported when they are called, and what needs torch
# or a library when it is asked for.
LAZY = ("attnsel/cli/", "attnsel/__init__.py", "attnsel/context_parallel/__init__.py")


def test_planning_needs_no_torch():
    wrong = []
    for path, package, relative in sources():
        module = f"{package}.{relative.with_suffix('').as_posix().replace('/', '.')}"
        if layer_of(module) in TORCH_FREE:
            heavy = {t.split(".")[0] for t in imports(path, top_level_only=True)} & {
                "torch",
                "triton",
                "cudnn",
            }
            wrong += [f"{module} imports {name}" for name in heavy]
    assert not wrong


def test_sub_packages_are_all_declared():
    text = (ROOT / "pyproject.toml").read_text()
    missing = [
        name
        for path, package, relative in sources()
        if path.name == "__init__.py"
        and f'"{(name := ".".join((package, *relative.parts[:-1])))}"' not in text
    ]
    assert not missing


def suite() -> set[str]:
    """tests/gpu, gpu_session.py, and every file of ours that these import, each by the other."""
    needed = [*sorted((ROOT / "tests/gpu").glob("*.py")), ROOT / "benchmarks/gpu_session.py"]
    needed += [
        ROOT / f"benchmarks/{name}.py" for name in ("kernel_speed", "needed", "record_tests")
    ]  # by name
    for path in needed:
        for target in imports(path, top_level_only=False):
            for folder in SUITE:
                found = ROOT / folder / f"{target.split('.')[0]}.py"
                if found.is_file() and found not in needed:
                    needed.append(found)
    return {path.relative_to(ROOT).as_posix() for path in needed}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("wheel")
    copy = tmp_path_factory.mktemp("tree") / "attnsel"
    # From a copy: setuptools leaves build/ and an egg-info beside the sources.
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "build", "*.egg-info", "__pycache__"))
    run = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(copy)]
    subprocess.run(run, check=True, capture_output=True)
    return next(out.glob("*.whl")), copy


def test_a_checkout_finds_its_own_rules_and_backends_from_its_root():
    """Run from the root, the checkout's attnsel/ hides an installed one: all folders must be its own."""
    code = "import attnsel.rules as r, attnsel.backends as b; print(r.__file__, b.__file__)"
    run = [sys.executable, "-S", "-c", f"import sys; sys.path[1:1] = {sys.path!r}; {code}"]
    told = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert str(ROOT / "rules") in told
    assert str(ROOT / "backends") in told


def test_the_wheel_holds_the_tree(wheel):
    path, copy = wheel
    every = {name for name in zipfile.ZipFile(path).namelist() if ".dist-info/" not in name}
    held = {name for name in every if not name.startswith("attnsel/_suite/")}
    assert {name.removeprefix("attnsel/_suite/") for name in every - held} == suite()
    expected = {
        f"{package}/{file.relative_to(copy / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for file in (copy / folder).rglob("*")
        if file.suffix in (".py", ".typed", ".c", ".cpp", ".h", ".cuh")
    }
    assert held == expected


def test_the_wheel_stays_small(wheel):
    path, _ = wheel
    assert path.stat().st_size < 1_400_000


def test_nothing_imports_the_bare_top_level_names():
    wrong = [
        str(path)
        for path, _, _ in sources()
        for target in imports(path, top_level_only=False)
        if target.split(".")[0] in ("rules", "backends")
    ]
    assert not wrong


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_files_stay_readable(folder):
    """A file of more than 450 lines is two subjects, unless it holds kernels: those may be longer."""
    long = [
        f"{p} has {n} lines"
        for p in (ROOT / folder).rglob("*.py")
        if p.relative_to(ROOT).as_posix() != "backends/triton/backward.py"
        and (n := len(p.read_text().splitlines())) > 450
    ]
    assert not long
