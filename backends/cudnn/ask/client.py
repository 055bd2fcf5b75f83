"""Asking libcudnn: starts the worker, gives it time, and takes its death for an answer too."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from attnsel._child import python
from attnsel.backends.cudnn.ask.folder import Untrusted, cache_folder, private
from attnsel.backends.cudnn.ask.libraries import Missing, find_cudnn
from attnsel.backends.cudnn.ask.store import Store, identity, key_of
from attnsel.backends.cudnn.graph import Graph
from attnsel.backends.cudnn.words import in_short
from attnsel.versions import Version

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
class Answer:
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

    def ask(self, graph: Graph, device: dict[str, Any], *, build: bool = False) -> Answer:
        """Whether this graph would run on that device (``device.device_json``). Raises Missing."""
        key = key_of(graph.as_dict(), device, build, self._who)
        with contextlib.suppress(ValidationError):  # nothing is kept, or something else
            return replace(_ANSWER.validate_python(self._store.get(key)), remembered=True)
        versions = self.versions()
        judge: Literal["library", "frontend"] = "frontend" if self._pretend else "library"
        question = {"graph": graph.as_dict(), "device": device, "build": build}
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
        answer = Answer(
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


_ANSWER = TypeAdapter(Answer)


def _are_versions(kept: dict[str, Any]) -> bool:
    try:
        return all(Version.parse(str(kept[name])) for name in ("cudnn", "cudnn_frontend"))
    except (KeyError, ValueError):
        return False


class _Child:
    """The worker's process, its pipes and its folder of logs."""

    def __init__(self, settings: dict[str, Any], timeout: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="attnsel-")
        log = Path(self._folder.name, "cudnn.log")
        log.touch()
        self._log, self._printed = log, Path(self._folder.name, "stderr.log")
        with self._printed.open("w") as stderr:
            self._process = subprocess.Popen(
                python(_WORKER, json.dumps({**settings, "log": str(log)})),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                encoding="utf-8",
                env=_environment(settings, log),
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            first = self._next(timeout)
        except BaseException:  # a signal: the process and the folder go first
            self.stop()
            raise
        if first is None or "ready" not in first:
            died = self.death()
            printed = self.logged()
            self.stop()
            if first is not None:
                raise Missing(first["missing"], first["message"])
            how = f"dies while it loads libcudnn ({died})" if died else f"is not ready within {timeout:g} s"
            raise Missing("worker", f"the process that asks cuDNN {how}: {printed[-300:]}")
        self.ready: dict[str, str] = first["ready"]
        self.notes: list[str] = first["notes"]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _next(self, timeout: float) -> dict[str, Any] | None:
        """The next line; None when it does not come."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            return None
        try:
            said = json.loads(line)
        except json.JSONDecodeError:
            return None  # it died, perhaps in the middle of a line
        return said if isinstance(said, dict) else None

    def ask(self, question: dict[str, Any], timeout: float) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return self._next(timeout)

    def death(self) -> str:
        """What it died of: a signal's name or an exit code; "" while it lives."""
        try:
            code = self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            return ""
        if code >= 0:
            return f"exit code {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"

    def logged(self) -> str:
        """What it and its libraries wrote before the end."""
        texts = []
        for path in (self._log, self._printed):
            with contextlib.suppress(OSError):
                texts.append(path.read_text(errors="replace").strip())
        return "\n".join(filter(None, texts))[-4000:]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._folder.cleanup()


def _environment(settings: dict[str, Any], log: Path) -> dict[str, str]:
    """The child finds the libcudnn that was chosen, and a log to write to."""
    found = {
        **os.environ,
        "TMPDIR": str(log.parent),  # what it leaves there goes with the folder, even if it is killed
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
