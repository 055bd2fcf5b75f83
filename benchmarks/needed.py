"""What ``gpu.py`` needs, and what it can do without: said before it starts. Standard library only."""

from __future__ import annotations

import sys
from importlib.util import find_spec

# What the tests and the benchmarks import: modules, and packages of the same names.
NEEDED = ("pytest", "hypothesis", "rich", "pydantic", "cyclopts", "packaging")
# By module: the package, and what comes of its lack.
WELCOME = {
    "triton": ("triton", "nothing of the triton candidate runs"),
    "cudnn": ("nvidia-cudnn-frontend", "nothing of the cudnn candidate runs"),
}


def stop_where_something_is_missing() -> None:
    """Ends the program with code 2 and the command that installs it."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        print(f"gpu.py: not all that it needs is installed: pip install {' '.join(lacking)}", file=sys.stderr)
        sys.exit(2)


def shortcomings(commit: str | None) -> list[str]:
    """What this run will not show, said before it starts."""
    found = [
        f"{package} is not installed: {outcome}"
        for module, (package, outcome) in WELCOME.items()
        if find_spec(module) is None
    ]
    if commit is None:
        found.append("this is no git checkout: without --commit the results prove nothing")
    return found
