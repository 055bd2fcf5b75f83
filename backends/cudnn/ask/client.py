"""Asking libcudnn: starts the worker, gives it time, and takes its death for an answer too."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import sqlite3
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from attnsel.backends.cudnn.ask.libraries import Missing, Untrusted, cache_folder, find_cudnn, private
from attnsel.backends.cudnn.candidate import in_short
from attnsel.backends.cudnn.graph import Graph
from attnsel.base.processes import Child, Unready, python
from attnsel.base.records import to_json
from attnsel.environment.versions import Version

# --------------------------------------------------------------------------------------------------------
# What the library said, kept on disk: one SQLite file, which several processes may use at once.
#
# Losing it costs only asking again. So a file that cannot be read is put aside and begun anew, and a folder
# that cannot be written means that nothing is remembered; both are said in ``notes``.


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
        self.close()
        try:
            os.replace(self._path, aside)
            self._open = self._begin(self._path)
        except (OSError, sqlite3.Error) as error:
            self._forget(error)
        else:
            self.notes.append(f"{self._path} could not be read ({trouble}); it was put aside and begun anew")

    def _forget(self, trouble: Exception) -> None:
        self.close()
        reason = getattr(trouble, "strerror", None) or trouble
        self.notes.append(f"answers are not remembered: {self._path}: {reason}")

    def close(self) -> None:
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


# Deaths that a question causes. Others are not remembered: SIGKILL comes from outside, and libcudnn aborts
# when something of its surroundings is not there.
_OWN_FAULT = frozenset({"SIGSEGV", "SIGFPE", "SIGILL", "SIGBUS"})
_WORKER = """
import json, sys
from attnsel.backends.cudnn.ask.worker import main
main(json.loads(sys.argv[1]))
"""
_TIMEOUT = 120.0  # seconds for one question; a build of a plan took up to 5 on two cores


@dataclass(frozen=True, slots=True)
class GraphAnswer:
    """What was said of one graph. ``supported`` None: no answer in time.

    ``stage`` is where it ended: the frontend's stages up to check_support (and build_plans where a plan was
    asked for), "planner crashed", or "timeout". ``judge`` is "library", or "frontend" where only the
    frontend's own checks could be heard. ``workspace`` is in bytes, None unless a plan was built.
    """

    supported: bool | None
    stage: str
    message: str
    engines: tuple[str, ...]
    workspace: int | None
    judge: Literal["library", "frontend"]
    cudnn: str
    cudnn_frontend: str
    log: str = ""
    remembered: bool = False

    @property
    def crashed(self) -> bool:
        return self.stage == "planner crashed"

    @property
    def words(self) -> str:
        """The refusal in one line."""
        return in_short(self.message or self.stage)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Library:
    """One libcudnn in a child process, asked as often as one likes.

    ``cudnn_lib``: a file or folder of the library, None for the environment's. ``pretend``: a version below
    9.8, for the frontend's own checks. ``frontend``: a folder to import cudnn-frontend from. ``remember``
    False keeps no answers. Use it in a ``with`` block. Raises Missing when the child cannot be set up.
    """

    def __init__(
        self,
        cudnn_lib: str | None = None,
        *,
        pretend: str | None = None,
        frontend: str | None = None,
        cache: Path | None = None,
        remember: bool = True,
        timeout: float = _TIMEOUT,
    ) -> None:
        self._notes: list[str] = []
        self._cache = self._trusted(cache)
        self._timeout = timeout
        self._frontend = frontend
        self._pretend = pretend
        self.path = "" if pretend else find_cudnn(cudnn_lib)
        self._store = Store(self._cache if remember else None)
        self._child: _Child | None = None
        self._who = self._identity()

    def __enter__(self) -> Library:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stop()
        self._store.close()

    @property
    def notes(self) -> list[str]:
        """Sentences about what was not as it should be; answers are right all the same."""
        return list(dict.fromkeys((*self._store.notes, *self._notes)))

    def versions(self) -> dict[str, str]:
        """The versions of libcudnn and the frontend, as loaded. Raises Missing."""
        key = key_of("versions", self._who)
        known = self._store.get(key)
        if known is not None and _are_versions(known):
            return known
        known = dict(self._started().ready)
        self._store.put(key, known)
        return known

    def ask(self, graph: Graph, device: dict[str, Any], *, build: bool = False) -> GraphAnswer:
        """Whether this graph would run on that device (``device.device_json``). Raises Missing."""
        key = key_of(to_json(graph), device, build, self._who)
        with contextlib.suppress(ValidationError):  # nothing is kept, or something else
            return replace(_ANSWER.validate_python(self._store.get(key)), remembered=True)
        versions = self.versions()
        judge: Literal["library", "frontend"] = "frontend" if self._pretend else "library"
        question = {"graph": to_json(graph), "device": device, "build": build}
        child = self._started()
        said = child.ask(question, self._timeout)
        if said is None:
            died, log = child.death(), child.logged()
            self._stop()
            stage, message = ("planner crashed", f"planner crashed ({died})") if died else ("timeout", "")
            message = message or f"no answer within {self._timeout:g} s"
            supported = False if died else None
            said = {"supported": supported, "stage": stage, "message": message, "engines": [], "log": log}
            lasting = died in _OWN_FAULT
        else:
            lasting = True
        answer = GraphAnswer(
            supported=said["supported"],
            stage=said["stage"],
            message=said["message"],
            engines=tuple(said["engines"]),
            workspace=said.get("workspace"),
            judge=judge,
            cudnn=versions["cudnn"],
            cudnn_frontend=versions["cudnn_frontend"],
            log=said["log"],
        )
        if lasting:
            self._store.put(key, answer.as_dict())
        return answer

    def _trusted(self, folder: Path | None) -> Path | None:
        """The cache folder; None, and a note, where what lies in it may be another user's."""
        try:
            folder = folder or cache_folder()
            return private(folder)
        except Untrusted as trouble:
            self._notes.append(f"answers are not remembered: {trouble}")
        except OSError:  # the store, and whoever compiles, say it in their words
            return folder
        return None

    def _identity(self) -> list[Any]:
        """Which libraries would answer, found without loading them."""
        where = [self._frontend] if self._frontend else sys.path
        found = next(iter(importlib.metadata.distributions(name="nvidia-cudnn-frontend", path=where)), None)
        frontend = [] if found is None else [found.version, str(found.locate_file("cudnn"))]
        return [self._pretend or identity(self.path), frontend]

    def _started(self) -> _Child:
        if self._child is None or not self._child.alive:
            self._stop()
            settings = {"cudnn": self.path, "frontend": self._frontend, "pretend": self._pretend}
            self._child = _Child({**settings, "cache": self._cache and str(self._cache)}, self._timeout)
            self._notes += self._child.notes
        return self._child

    def _stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None


_ANSWER = TypeAdapter(GraphAnswer)


def _are_versions(kept: dict[str, Any]) -> bool:
    try:
        return all(Version.parse(str(kept[name])) for name in ("cudnn", "cudnn_frontend"))
    except (KeyError, ValueError):
        return False


class _Child(Child):
    """The worker's process, and the log of its libraries."""

    def __init__(self, settings: dict[str, Any], timeout: float) -> None:
        folder = Path(tempfile.mkdtemp(prefix="attnsel-"))
        self._log = folder / "cudnn.log"
        self._log.touch()
        command = python(_WORKER, json.dumps({**settings, "log": str(self._log)}))
        try:
            super().__init__(command, _environment(settings, self._log), folder, timeout)
        except Unready as unready:
            how = (
                f"dies while it loads libcudnn ({unready.died})"
                if unready.died
                else f"is not ready within {timeout:g} s"
            )
            text = f"the process that asks cuDNN {how}: {unready.printed[-300:]}"
            raise Missing("worker", text) from None
        if "ready" not in self.first:
            self.stop()
            raise Missing(self.first["missing"], self.first["message"])
        self.ready: dict[str, str] = self.first["ready"]
        self.notes: list[str] = self.first["notes"]

    def logged(self, *others: Path) -> str:
        return super().logged(self._log, *others)


def _environment(settings: dict[str, Any], log: Path) -> dict[str, str]:
    """The child finds the libcudnn that was chosen, and a log to write to."""
    found = {
        **os.environ,
        "CUDNN_LOGDEST_DBG": str(log),
        "CUDNN_LOGERR_DBG": "1",
        "CUDNN_LOGLEVEL_DBG": "1",
    }
    if os.path.isabs(settings["cudnn"]):
        others = os.environ.get("LD_LIBRARY_PATH")
        folder = os.path.dirname(settings["cudnn"])
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (folder, others)))
    if settings["pretend"]:
        major, minor, patch = (int(part) for part in settings["pretend"].split("."))
        base = 10_000 if major >= 9 else 1_000
        found["ATTNSEL_CUDNN_VERSION"] = str(base * major + 100 * minor + patch)
    return found
