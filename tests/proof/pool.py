"""Compile in worker processes: the compiler keeps a core busy, and the Turing hook is process-wide.

A compiler that ends its process (LLVM aborts on what it does not expect) costs one report, not the run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Argument = TypeVar("Argument")
Value = TypeVar("Value")


def apply(
    function: Callable[[Any], Any], wanted: list[Any], jobs: int
) -> Generator[tuple[int, Any], None, None]:
    """``(place in wanted, function(wanted[place]))`` as they are done, ``jobs`` at a time.

    The value is a RuntimeError where the process ended. Leaving early, an interrupt included, ends the rest.
    """
    waiting = deque(enumerate(wanted))
    workers: dict[Any, _Worker] = {}  # by the end of the pipe to it
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                worker = _Worker(function)
                workers[worker.pipe] = worker
                worker.give(*waiting.popleft())
            for pipe in wait(list(workers)):
                worker = workers[pipe]
                place, value = worker.place, worker.take()
                if waiting and not isinstance(value, RuntimeError):
                    worker.give(*waiting.popleft())
                else:
                    del workers[worker.pipe]
                    worker.close()
                yield place, value
    finally:
        for worker in workers.values():
            worker.close()


def collect(
    function: Callable[[Argument], Value],
    wanted: list[Argument],
    jobs: int,
    ended: Callable[[Argument, RuntimeError], Value],
    done: Callable[[int, Value], None],
) -> list[Value]:
    """The values in the order of ``wanted``; ``ended`` gives one where the process ended.

    ``done(how many, value)`` is called as each is there. With one job, this process computes them.
    """
    made: dict[int, Value] = {}
    jobs = min(jobs, len(wanted))
    coming: Iterable[tuple[int, Any]] = enumerate(map(function, wanted))
    with contextlib.ExitStack() as stack:
        if jobs > 1:
            coming = stack.enter_context(contextlib.closing(apply(function, wanted, jobs)))
        for place, value in coming:
            made[place] = ended(wanted[place], value) if isinstance(value, RuntimeError) else value
            done(len(made), made[place])
    return [made[place] for place in range(len(wanted))]


def words_of(error: Exception) -> str:
    """What a compiler's error says, for a report: the first 500 characters."""
    return f"{type(error).__name__}: {error}".strip()[:500]


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """What is started here inherits that SIGINT is blocked. Windows has no such mask."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """A process that computes one value after the other, and what it is at."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        # Not forked: a child would inherit the locks of torch's threads.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(function, theirs), daemon=True)
        # An interrupt from the keyboard reaches every process of the terminal: only the parent is to see it.
        with _without_interrupts():
            self.process.start()
        theirs.close()
        self.place = -1

    def give(self, place: int, argument: Any) -> None:
        self.place = place
        self.pipe.send(argument)

    def take(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return RuntimeError(f"the compiling process ended with exit code {self.process.exitcode}")

    def close(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _work(function: Callable[[Any], Any], pipe: Connection) -> None:
    # A failing pass prints its whole module; what matters is in the error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while True:
        try:
            argument = pipe.recv()
        except EOFError:
            return
        pipe.send(function(argument))
