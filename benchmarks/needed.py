"""What ``attnsel prove`` needs, and what it can do without: said before it starts. Standard library only."""

from __future__ import annotations

from importlib.util import find_spec

# What the tests and the benchmarks import: modules, and packages of the same names.
NEEDED = ("torch", "numpy", "pytest", "hypothesis", "rich", "pydantic", "cyclopts", "packaging")
# By module: the package, and what comes of its lack.
WELCOME = {
    "triton": ("triton", "nothing of the triton candidate runs"),
    "cudnn": ("nvidia-cudnn-frontend", "nothing of the cudnn candidate runs"),
}


def missing() -> str:
    """What has to be installed first, with the command that does; empty where nothing has."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if not lacking:
        return ""
    return f"not all that it needs is installed: pip install {' '.join(lacking)}"


def shortcomings() -> list[str]:
    """What this run will not show."""
    return [
        f"{package} is not installed: {outcome}"
        for module, (package, outcome) in WELCOME.items()
        if find_spec(module) is None
    ]
