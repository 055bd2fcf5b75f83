"""A file that is written whole or not at all."""

from __future__ import annotations

import contextlib
import os


def replace_whole(name: str, content: bytes, fresh: str) -> None:
    """Put ``content`` in the place of the file ``name``, whose mode it keeps; ``fresh`` is a name beside it
    for the meantime, which nobody else may use, and nothing is left under it. Raises OSError."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)  # of one that was killed
        with open(fresh, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(fresh, os.stat(name).st_mode & 0o777 if os.path.exists(name) else 0o644)
        os.replace(fresh, name)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
