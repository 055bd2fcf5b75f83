"""What the library said, kept on disk: one SQLite file, which several processes may use at once.

Losing it costs only asking again. So a file that cannot be read is put aside and begun anew, and a folder
that cannot be written means that nothing is remembered; both are said in ``notes``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

_TABLE = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)"
_FORMAT = 2  # of what is kept, and of how graphs are built: part of every key


class Store:
    """Answers by key. ``folder`` None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.notes: list[str] = []
        self._path = None if folder is None else folder / "cudnn-answers.sqlite3"
        self._open: sqlite3.Connection | None = None
        if self._path is None:
            return
        try:
            self._open = self._begin(self._path)
        except sqlite3.DatabaseError as error:
            # OperationalError is about the place (read-only, locked); the rest is about the contents.
            if isinstance(error, sqlite3.OperationalError):
                self._forget(error)
            else:
                self._restart(error)
        except OSError as error:
            self._forget(error)

    def _begin(self, path: Path) -> sqlite3.Connection:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=10, isolation_level=None)
        try:
            connection.execute(_TABLE)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _restart(self, trouble: Exception) -> None:
        assert self._path is not None
        aside = self._path.with_suffix(f".unreadable-{os.getpid()}")
        self._close()
        try:
            os.replace(self._path, aside)
            self._open = self._begin(self._path)
        except (OSError, sqlite3.Error) as error:
            self._forget(error)
        else:
            self.notes.append(f"{self._path} could not be read ({trouble}); it was put aside and begun anew")

    def _forget(self, trouble: Exception) -> None:
        self._close()
        reason = getattr(trouble, "strerror", None) or trouble
        self.notes.append(f"answers are not remembered: {self._path}: {reason}")

    def _close(self) -> None:
        if self._open is not None:
            with contextlib.suppress(sqlite3.Error):
                self._open.close()
            self._open = None

    def get(self, key: str) -> dict[str, Any] | None:
        if self._open is None:
            return None
        try:
            row = self._open.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            answer = json.loads(row[0])
            return answer if isinstance(answer, dict) else None
        except json.JSONDecodeError:
            return None  # asked again, and overwritten
        except sqlite3.OperationalError as error:
            self._forget(error)
        except sqlite3.DatabaseError as error:
            self._restart(error)
        return None

    def put(self, key: str, answer: dict[str, Any]) -> None:
        if self._open is None:
            return
        try:
            self._open.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))
        except sqlite3.OperationalError as error:
            self._forget(error)
        except sqlite3.DatabaseError as error:
            self._restart(error)

    def close(self) -> None:
        self._close()


def key_of(*parts: Any) -> str:
    """A digest of JSON values that differs when any of them does."""
    text = json.dumps([_FORMAT, *parts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def identity(path: str) -> list[Any]:
    """What tells one library file from another without loading it; its name where it is no file here."""
    try:
        found = os.stat(path)
    except OSError:
        return [path]
    return [os.path.realpath(path), found.st_size, found.st_mtime_ns]
