"""What pyproject.toml cannot say: packages, version, and which tests travel along for `attnsel prove`."""

import ast
import re
import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

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


def version() -> str:
    """The release that is checked out, by its tag (v1.2.3). Elsewhere, in a clone without tags and in a
    source distribution it is what attnsel/_version.py says."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"]
        try:
            tags = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError):  # no git here, or another user's clone
            tags = []
        releases = [tag[1:] for tag in tags if re.fullmatch(r"v[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?", tag)]
        if releases:
            return max(releases, key=lambda one: [int(number) for number in re.findall("[0-9]+", one)])
    return (ROOT / "attnsel" / "_version.py").read_text(encoding="utf-8").split('"')[1]


def write_version(folder: Path) -> None:
    """The version into a copy of the package, whose file may be a hard link to the checkout's."""
    path = folder / "attnsel" / "_version.py"
    path.unlink(missing_ok=True)
    path.write_text(f'__version__ = "{version()}"\n', encoding="utf-8")


class SourcesWithVersion(sdist):
    """The source distribution, which has no tag to look at."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_version(Path(base_dir))


class BuildWithSuite(build_py):
    """The wheel's files, and the suite in attnsel/_suite; an editable install finds it in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_version(Path(self.build_lib))
            for path in suite():
                target = Path(self.build_lib, "attnsel", "_suite", path)
                self.mkpath(str(target.parent))
                self.copy_file(str(ROOT / path), str(target))


if __name__ == "__main__":
    setup(
        version=version(),
        packages=PACKAGES,
        package_dir=FOLDERS,
        cmdclass={"build_py": BuildWithSuite, "sdist": SourcesWithVersion},
    )
