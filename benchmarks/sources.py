"""A digest of attnsel's sources: by it a record from an installed package names its version, without git.

It is made of the names that git gives to files' contents, so that of any commit it can be had from the tree
alone, and of an installed package from its files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from measure import git

import attnsel

FOLDERS = ("attnsel", "backends", "rules")  # as they lie in the repository
_SUFFIXES = (".py", ".c")


def digest() -> str:
    """Of the attnsel that is imported here, from a checkout or installed."""
    package = Path(attnsel.__file__).parent
    lie_inside = (package / "backends").is_dir()  # installed; in a checkout they lie beside it
    named = {}
    for folder in FOLDERS:
        root = package if folder == "attnsel" else (package if lie_inside else package.parent) / folder
        for path in root.rglob("*"):
            inner = path.relative_to(root)
            if folder == "attnsel" and inner.parts[0] in ("backends", "rules", "_suite"):
                continue
            if path.suffix in _SUFFIXES:
                named[f"{folder}/{inner.as_posix()}"] = _blob(path.read_bytes())
    return _of(named.items())


def digest_of(commit: str) -> str | None:
    """The same of a commit of this checkout's history; None where git cannot tell."""
    listed = git("ls-tree", "-r", commit, *FOLDERS)
    if not listed:
        return None
    rows = (line.split(None, 3) for line in listed.splitlines())
    return _of((path, blob) for _, _, blob, path in rows if path.endswith(_SUFFIXES))


def in_history(wanted: str) -> bool:
    """Whether some commit before this one has the sources of that digest."""
    commits = git("log", "--format=%H", "--", *FOLDERS) or ""
    return any(digest_of(commit) == wanted for commit in commits.split())


def _blob(content: bytes) -> str:
    """What git calls a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _of(named: Iterable[tuple[str, str]]) -> str:
    lines = (f"{path} {blob}\n" for path, blob in sorted(named))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
