"""What pyproject.toml cannot say: the packages, and which tests travel along for `attnsel prove`."""

import ast
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# rules/ and backends/ stand at the top of the tree and import as attnsel.rules and attnsel.backends.
FOLDERS = {"attnsel": "attnsel", "attnsel.rules": "rules", "attnsel.backends": "backends"}
PACKAGES = [
    name
    for package, folder in FOLDERS.items()
    for name in (package, *(f"{package}.{inner}" for inner in find_packages(str(ROOT / folder))))
]
# What `attnsel prove` starts, and where the modules lie that these import.
STARTED = (
    "tests/gpu/*.py",
    "benchmarks/gpu_session.py",
    "benchmarks/kernel_speed.py",
    "benchmarks/needed.py",
    "benchmarks/record_tests.py",
)
BESIDE = ("tests/gpu", "tests/support", "benchmarks")


def suite() -> list[Path]:
    """The GPU tests, the kernel benchmark, and every file of ours that these import, each by the other."""
    needed = [path for pattern in STARTED for path in sorted(ROOT.glob(pattern))]
    for path in needed:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in filter(None, modules):
                beside = (ROOT / folder / f"{module.split('.')[0]}.py" for folder in BESIDE)
                needed += [found for found in beside if found.is_file() and found not in needed]
    return [path.relative_to(ROOT) for path in needed]


class BuildWithSuite(build_py):
    """The wheel's files, and the suite in attnsel/_suite; an editable install finds it in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for path in suite():
                target = Path(self.build_lib, "attnsel", "_suite", path)
                self.mkpath(str(target.parent))
                self.copy_file(str(ROOT / path), str(target))


if __name__ == "__main__":
    setup(packages=PACKAGES, package_dir=FOLDERS, cmdclass={"build_py": BuildWithSuite})
