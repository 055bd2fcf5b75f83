"""The house: what is in the wheel, who imports whom, and what the tree must not hold."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import attnsel
from attnsel import plugins
from paths import ROOT

# What `attnsel prove` takes along, from the folders where it lies in a checkout.
SUITE = ("tests/gpu", "tests/support", "benchmarks")
FOLDERS = {"attnsel": "attnsel", "rules": "attnsel/rules", "backends": "attnsel/backends"}

# Imports go down: a room imports what stands in an earlier row, or itself; rooms of one row do not know each
# other. A room is a module or package at the top of attnsel.
FLOORS = [
    ("_version", "errors"),
    ("base",),
    ("params",),
    ("environment",),
    ("verdicts",),
    ("backends",),
    ("policy",),
    ("rules", "settings"),
    ("selection",),
    ("dispatchers", "plugins", "report"),
    ("debug", "decision"),
    ("__init__", "pages", "runtime"),
    ("context_parallel", "f_sdpa", "flash_attn", "functional", "diagnose"),
    ("module", "integrations"),
    ("cli",),
    ("__main__",),
]
FLOOR_OF = {room: floor for floor, row in enumerate(FLOORS) for room in row}
# Rooms and parts of rooms that run attention, which takes torch. Everything else does without, and so do the
# parts of theirs that plan or tell.
RUNNING = (
    "backends",
    "runtime",
    "context_parallel",
    "f_sdpa",
    "flash_attn",
    "functional",
    "module",
    "integrations",
)
RUNNING_PARTS = ("diagnose.replay", "diagnose.watching")
PLANNING_PARTS = (
    "backends.registry",
    "context_parallel.plan",
    "context_parallel.report",
    "diagnose.watching.asked_better",
    "diagnose.watching.expected",
    "diagnose.watching.files",
    "diagnose.watching.judge",
    "diagnose.watching.report",
    "runtime.replay_file",
)
HEAVY = {"torch", "triton", "cudnn", "transformers"}
# These modules import some of ours late, with the reason beside it: doors that are seldom used, need torch or
# take long to load.
LATE = (
    "backends.triton.run",
    "cli",
    "cli.explain",
    "cli.replay",
    "cli.rules",
    "cli.run",
    "cli.watch",
    "integrations.program",
)


def sources():
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, package.replace("/", "."), path.relative_to(ROOT / folder)


def room_of(module: str) -> str:
    """``verdicts`` of ``attnsel.verdicts.verdict``; of the package itself ``__init__``."""
    return ([*module.split("."), "__init__"])[1]


def module_of(package: str, relative: Path) -> str:
    return f"{package}.{relative.with_suffix('').as_posix().replace('/', '.')}".removesuffix(".__init__")


MODULES = {module_of(package, relative): path for path, package, relative in sources()}


def imports(path: Path, *, top_level_only: bool, package: str = ""):
    """Modules imported by a file, outside ``if TYPE_CHECKING`` blocks. ``package``: what a dot stands for."""
    tree = ast.parse(path.read_text())
    stack = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            whole = ".".join(filter(None, [above if node.level else "", node.module]))
            for alias in node.names:
                name = f"{whole}.{alias.name}"
                yield name if name in MODULES or whole == "attnsel" else whole
        elif not (top_level_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            stack.extend(ast.iter_child_nodes(node))


def imported(module: str, *, top_level_only: bool = True) -> set[str]:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return set(imports(path, top_level_only=top_level_only, package=package))


def test_imports_go_down():
    """And so no circle among rooms can come back, whoever imports at the top."""
    unknown = {room_of(module) for module in MODULES} - FLOOR_OF.keys()
    assert not unknown, "give it a floor in FLOORS"
    up = [
        f"{module} imports {target}"
        for module in MODULES
        for target in imported(module)
        if target in MODULES
        and room_of(target) != room_of(module)
        and FLOOR_OF[room_of(target)] >= FLOOR_OF[room_of(module)]
    ]
    assert not up


def test_types_go_down_too():
    """What is imported for a type alone says as much of who knows whom."""
    up = []
    for module, path in MODULES.items():
        for block in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)):
                continue
            for node in ast.walk(block):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnsel."):
                    here, there = room_of(module), room_of(node.module or "")
                    if here not in ("__init__", there) and FLOOR_OF[there] >= FLOOR_OF[here]:
                        up.append(f"{module} names {node.module}")
    assert not up


def test_modules_form_no_circle():
    """Within a room neither. A package's face may name what stands in it, and what stands in it does not ask
    the face."""
    graph = {
        module: {t for t in imported(module) if t in MODULES and not module.startswith(f"{t}.")}
        for module in MODULES
    }
    done: set[str] = set()
    while free := {module for module in graph.keys() - done if graph[module] - {module} <= done}:
        done |= free
    assert not graph.keys() - done, "these import each other, or what does"


def test_own_modules_are_imported_at_the_top():
    late = {
        module.removeprefix("attnsel.")
        for module in MODULES.keys() - {"attnsel"}
        for target in imported(module, top_level_only=False) - imported(module)
        if target in MODULES
    }
    assert late == set(LATE)


def test_planning_needs_no_torch():
    """Not by way of anything that it imports either."""
    begin = {f"attnsel.{name}" for name in PLANNING_PARTS}
    for module in MODULES:
        inside = f"{module.removeprefix('attnsel.')}."
        if room_of(module) not in RUNNING and not inside.startswith(tuple(f"{p}." for p in RUNNING_PARTS)):
            begin.add(module)
    wrong, seen, todo = [], set(begin), sorted(begin)
    while todo:
        module = todo.pop()
        for target in imported(module):
            if target.split(".")[0] in HEAVY:
                wrong.append(f"{module} imports {target}")
            parents = ["attnsel", *(target[:at] for at, c in enumerate(target) if c == "." and at > 7)]
            for name in (*parents, target) if target in MODULES else ():
                if name in MODULES and name not in seen:
                    seen.add(name)
                    todo.append(name)
    assert not wrong


def test_public_names_are_there():
    late = attnsel._NEEDS_TORCH if importlib.util.find_spec("torch") is None else {}
    for name in dir(attnsel):
        assert name in late or getattr(attnsel, name) is not None
    for name in plugins.__all__:
        assert getattr(plugins, name) is not None


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
    """A file of more than 600 lines is two subjects, unless it holds kernels: those may be longer."""
    long = [
        f"{p} has {n} lines"
        for p in (ROOT / folder).rglob("*.py")
        if p.relative_to(ROOT).as_posix() != "backends/triton/backward.py"
        and (n := len(p.read_text().splitlines())) > 600
    ]
    assert not long
