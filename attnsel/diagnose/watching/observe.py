"""The interface for an observer, and the recorder that it tells what it sees.

An observer is a module with an ``OBSERVER``, named in ``OBSERVERS``. It is given control at calls of
functions: of torch's (by identity), of operators (by name), and of libraries' (by module and name).
``around`` handlers run the call themselves, once, through ``call.run()``; ``after`` handlers are told
arguments and result, and are cheap enough for functions that are called often. What goes wrong in a handler
never reaches the program.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from attnsel.diagnose.watching.measure import Meter, time_backward
from attnsel.diagnose.watching.places import Place, Places
from attnsel.diagnose.watching.sites import Book, Seen, Tally
from attnsel.errors import in_words

OBSERVERS: tuple[str, ...] = ("sdpa", "by_hand", "modules", "libraries", "compiled")
"""Modules of this folder. A later one may take over a function from an earlier one."""


class Call:
    """One call of a watched function, which is run exactly once whatever the observer does."""

    __slots__ = ("args", "error", "function", "kwargs", "meter", "out", "ran")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.ran = False
        self.out: Any = None
        self.error: BaseException | None = None
        self.meter: Meter | None = None

    def run(self) -> Any:
        """The call's result. Raises what the function raises."""
        if not self.ran:
            self.ran = True
            try:
                with self.meter or nullcontext():
                    self.out = self.function(*self.args, **self.kwargs)
            except BaseException as error:
                self.error = error
                raise
        return self.out

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument that may be given by place or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


Around = Callable[["Recorder", Call], None]
After = Callable[["Recorder", Callable[..., Any], tuple[Any, ...], dict[str, Any], Any], None]


class Patch(NamedTuple):
    """A function of a library that is replaced while watching: now, or when its module is imported.

    ``name`` may be dotted, for a method ("Attention.forward")."""

    module: str
    name: str
    around: Around


class Observer(NamedTuple):
    """What one module watches. ``begin`` and ``finish``: called with the recorder when a session begins and
    ends (to make what it needs, to file what is still open)."""

    around: Mapping[Any, Around] = {}
    after: Mapping[Any, After] = {}
    operators: Mapping[str, Around] = {}  # by name with namespace: "flash_attn::_flash_attn_forward"
    patches: tuple[Patch, ...] = ()
    begin: Callable[[Recorder], None] | None = None
    finish: Callable[[Recorder], None] | None = None


def load() -> list[Observer]:
    """The observers there are."""
    return [importlib.import_module(f"attnsel.diagnose.watching.{name}").OBSERVER for name in OBSERVERS]


class _Mine(threading.local):
    quiet = 0
    tally: Tally | None = None  # where the call that is running was counted


class Recorder:
    """What a session has seen so far. One for all threads.

    ``time``, ``memory``: whether the user asked for them. ``state``: what observers keep between calls, by
    their own name.
    """

    def __init__(self, places: Places, *, time: bool = False, memory: bool = False) -> None:
        self.places, self.time, self.memory = places, time, memory
        self.book = Book()
        self.known: dict[Any, Tally] = {}
        self.unseen: dict[str, None] = {}
        self.state: dict[str, Any] = {}
        self.waiting: list[Callable[[], None]] = []
        self.before_backward: list[Callable[[], Callable[[], None]]] = []  # leave a mode; enters it again
        self._mine = _Mine()

    # ---- for observers

    def place(self) -> Place:
        """Where the program is now."""
        return self.places.here(2)

    def recall(self, key: Any) -> Tally | None:
        """The tally of calls that are alike in all that decides which kernel runs; counts one call there."""
        tally = self.known.get(key)
        if tally is not None:
            tally.calls += 1
            self._mine.tally = tally
        return tally

    def file(self, place: Place, seen: Seen, key: Any = None) -> Tally:
        """Count a call. With a ``key`` it is found by ``recall`` from now on."""
        tally = self._mine.tally = self.book.tally(place.where, seen)
        tally.calls += 1
        if key is not None and (tally.seen.params, tally.seen.switches) == (
            seen.params,
            seen.switches,
        ):
            if len(self.known) >= MOST_KEYS:
                self.known.clear()
            self.known[key] = tally
        return tally

    def follow(self, tally: Tally, out: Any, gradients: frozenset[str] = frozenset()) -> None:
        """Count the backward of ``out`` (a tensor, or a tuple that begins with one) under ``tally``.

        The autograd node is the first behind ``out``, through views, that is named in ``gradients``; where
        there is none, the one that made ``out``. A hook on it counts when it runs.
        """
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        node = getattr(first, "grad_fn", None)
        if node is None:
            return
        node, name = _behind(node, gradients)
        tally.backward = name
        node.register_hook(tally.count_backward)
        if self.time and name in gradients:
            time_backward(tally, node)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing inside is watched: the observer of the call around it says what ran."""
        self._mine.quiet += 1
        try:
            yield
        finally:
            self._mine.quiet -= 1

    def soon(self, callback: Callable[[], None]) -> None:
        """Call it at the next function of torch's that the program calls: modes can be entered and left
        there, and not while an operator runs."""
        self.waiting.append(callback)

    @contextmanager
    def backward_runs(self) -> Iterator[None]:
        """A backward pass runs inside. Under a dispatch mode autograd takes other formulas for some gradients
        (torch's TensorSubclassLikeUtils.h), with other last bits: nobody may have one entered there."""
        with self.alone():
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no dispatch mode of an observer is entered: what torch does otherwise under one, it does
        as without a watch."""
        paused = [pause() for pause in self.before_backward]
        try:
            yield
        finally:
            for resume in reversed(paused):
                self._safely(resume)

    def cannot_see(self, what: str) -> None:
        """A line for ``Process.unseen``."""
        if len(self.unseen) < 50:
            self.unseen[what] = None

    # ---- for hooks

    @property
    def is_quiet(self) -> bool:
        return self._mine.quiet > 0

    def watched(self, handler: Around, call: Call) -> Any:
        """``call`` as ``handler`` sees it: its result or its exception, whatever the handler does."""
        if self.time or self.memory:
            call.meter = Meter(time=self.time, memory=self.memory)
            self._mine.tally = None
        try:
            handler(self, call)
        except Exception as error:
            if error is call.error:
                raise
            self._failed(handler, error)
        if call.meter is not None and call.ran and call.error is None and self._mine.tally is not None:
            call.meter.file(self._mine.tally, call.out)
        return call.run() if call.error is None else call.out

    def told(
        self,
        handler: After,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        """``handler`` is told of a call that is over."""
        try:
            handler(self, function, args, kwargs, out)
        except Exception as error:
            self._failed(handler, error)

    def run_waiting(self) -> None:
        waiting = self.waiting[:]
        self.waiting.clear()  # the same list: modes hold it
        for callback in waiting:
            self._safely(callback)

    def _safely(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:
            self._failed(callback, error)

    def _failed(self, handler: Any, error: Exception) -> None:
        name = getattr(handler, "__qualname__", str(handler))
        self.cannot_see(f"an observer failed and its call was not read: {name}: {in_words(error)}")


MOST_KEYS = 16_384


def _name(node: Any) -> str:
    """A node's name. Of an autograd.Function the node is its ``ctx``, where a program may keep a ``name``."""
    return str(type(node).name(node))


def _behind(first: Any, gradients: frozenset[str], depth: int = 8) -> tuple[Any, str]:
    """The first node with one of these names, going back along first inputs, and its name; else the first."""
    node = first
    for _ in range(depth if gradients else 0):
        if node is None:
            break
        name = _name(node)
        if name in gradients:
            return node, name
        following = node.next_functions
        node = following[0][0] if following else None
    return first, _name(first)
