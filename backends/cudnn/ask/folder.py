"""The folder where answers and compiled stand-ins are kept, and whether what lies in it can be trusted.

A library found there is loaded into a process, so it must be nobody else's: the folder belongs to this user,
mode 0700, and none of the folders above it lets another user put one in its place (as OpenSSH asks of
``~/.ssh``, and as ``sticky`` /tmp ensures). Where that does not hold, a temporary folder serves, nothing is
remembered, and a note says how to mend it. Windows keeps a user's folders apart by itself.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(Exception):
    """A folder that is not used; the message says why, and how to mend it."""


def cache_folder() -> Path:
    """XDG_CACHE_HOME/attnsel, ~/.cache/attnsel without it. Raises Untrusted where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "attnsel")
    try:
        return Path.home() / ".cache" / "attnsel"
    except RuntimeError:  # no HOME, and a user id that no list of users has
        raise Untrusted("there is no home folder: set HOME, or XDG_CACHE_HOME") from None


def private(folder: Path) -> Path:
    """``folder``, made where it is not there, and only this user's. Raises Untrusted, or OSError."""
    try:
        folder.mkdir(mode=_PRIVATE, parents=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
    if hasattr(os, "geteuid"):
        _check(folder, os.geteuid())
        folder.chmod(_PRIVATE)  # as another umask, or an earlier attnsel, did not leave it
    return folder


def _check(folder: Path, me: int) -> None:
    for place in _up(folder.absolute()):
        found = place.lstat()
        own = place == folder.absolute()
        owners = {me} if own else {me, 0}
        if found.st_uid not in owners:
            raise Untrusted(f"{place} belongs to user {found.st_uid}, and you are {me}: {_MEND}")
        shared = not stat.S_ISLNK(found.st_mode) and found.st_mode & _OTHERS_WRITE
        if shared and (own or not found.st_mode & stat.S_ISVTX):
            mode = stat.S_IMODE(found.st_mode)
            raise Untrusted(
                f"other users can write to {place} (mode {mode:04o}): "
                + (f"see what lies in it, then rm -r it or chmod 700 {place}" if own else _MEND)
            )


_MEND = "set XDG_CACHE_HOME to a folder that only you can write to"


def _up(folder: Path) -> Iterator[Path]:
    """A folder and those above it: as it was named, and as links lead to it."""
    yield from dict.fromkeys((folder, *folder.parents, *folder.resolve().parents, folder.resolve()))
