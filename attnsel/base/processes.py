"""Python processes that attnsel starts: they import the attnsel that runs here, and nothing else from the
folder they happen to be started in."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

_ROOT = str(Path(__file__).resolve().parents[2])
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


def answering() -> Callable[[Mapping[str, Any]], None]:
    """In a child: what writes its answers, a JSON line each.

    Libraries and compilers print where they like: answers get a descriptor of their own, and what is printed
    goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(said: Mapping[str, Any]) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    return tell


class Child:
    """A process that answers a JSON line with a JSON line; its death and its silence are answers too.

    The first line it writes says that it is ready, or why not. Its temporary files lie in ``folder``, which
    goes with it. Raises Unready when that line does not come in time.
    """

    def __init__(self, command: list[str], environ: Mapping[str, str], folder: Path, timeout: float) -> None:
        self._folder = folder
        self._printed = folder / "stderr.log"
        with self._printed.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                encoding="utf-8",
                env={**environ, "TMPDIR": str(folder)},  # what it leaves there goes with the folder
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            first = self._next(timeout)
        except BaseException:  # a signal: the process and the folder go first
            self.stop()
            raise
        if first is None:
            died, printed = self.death(), self.logged()
            self.stop()
            raise Unready(died, printed)
        self.first: dict[str, Any] = first

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

    def ask(self, question: Mapping[str, Any], timeout: float) -> dict[str, Any] | None:
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

    def logged(self, *others: Path) -> str:
        """What it wrote before the end, to the ``others`` too."""
        texts = []
        for path in (*others, self._printed):
            with contextlib.suppress(OSError):
                texts.append(path.read_text(errors="replace").strip())
        return "\n".join(filter(None, texts))[-4000:]

    def stop(self) -> None:
        """End it, and remove its folder."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Unready(Exception):
    """The process died, of ``died`` ("" if it lives and says nothing), before it was ready."""

    def __init__(self, died: str, printed: str) -> None:
        super().__init__(died or "nothing said in time")
        self.died, self.printed = died, printed


# ---- What processes that multiprocessing spawns do before they import the program's main module --------
# Only what is unpickled with multiprocessing's preparation data runs before that.


_stdlib_preparation: Any = None  # from when it was first replaced
_first: dict[str, str] = {}  # a line of code by the module that wants it run


def first_in_children(module: str, code: str) -> None:
    """From now on spawned processes begin with ``code``; a second one of the same ``module`` replaces it."""
    global _stdlib_preparation
    from multiprocessing import spawn  # late: most processes start no others

    _stdlib_preparation = _stdlib_preparation or spawn.get_preparation_data
    _first[module] = code
    spawn.get_preparation_data = _preparation


def no_longer_in_children(module: str) -> None:
    """Undo ``first_in_children``."""
    from multiprocessing import spawn

    _first.pop(module, None)
    if not _first and spawn.get_preparation_data is _preparation:
        spawn.get_preparation_data = _stdlib_preparation


def _preparation(name: str) -> dict[str, Any]:
    return {**_stdlib_preparation(name), "attnsel": _InChild()}


class _InChild:
    """Unpickling it runs the code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("\n".join([f"import sys; sys.path.append({_ROOT!r})", *_first.values()]),)


# ---- A lock that a forked child finds open, whichever thread of its parent held it ---------------------


_every: WeakSet[ForkSafeLock] = WeakSet()


class ForkSafeLock:
    """``with lock:``; the same thread may enter again."""

    def __init__(self) -> None:
        self._held = threading.RLock()
        _every.add(self)

    def renew(self) -> None:
        self._held = threading.RLock()

    def __enter__(self) -> None:
        self._held.acquire()

    def __exit__(self, *error: Any) -> None:
        self._held.release()


def _renew_all() -> None:
    for lock in list(_every):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
