"""Python processes that attnsel starts: they import the attnsel that runs here, and nothing else from the
folder they happen to be started in."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])
_SAFE_PATH = sys.version_info >= (3, 11)


def python(code: str, *arguments: str) -> list[str]:
    """The command of a child that runs ``code``; its ``sys.argv[1:]`` is ``arguments``.

    The current folder is not on its path: a json.py that lies there, or a checkout of torch, is not run.
    The folder of this attnsel comes last, for one that runs from a checkout that is not installed.
    """
    start = f"import sys; sys.path.append({_ROOT!r})\n"
    if _SAFE_PATH:
        return [sys.executable, "-P", "-c", start + code, *arguments]
    return [sys.executable, "-c", "import sys; sys.path.pop(0)\n" + start + code, *arguments]
