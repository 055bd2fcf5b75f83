"""The interface for an observer, and the recorder that it tells what it sees.

An observer is a module with an ``OBSERVER``, named in ``OBSERVERS``. It is given control at calls of
functions: of torch's (by identity), of operators (by name), and of libraries' (by module and name).
``around`` handlers run the call themselves, once, through ``call.run()``; ``after`` handlers are told
arguments and result, and are cheap enough for functions that are called often. What goes wrong in a handler
never reaches the program: it is counted, the report says so, and a handler that failed twice is asked no
more. Handlers run with torch functions off: no mode and no tensor of the program's notices what they read.
"""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from statistics import median
from threading import Lock
from time import perf_counter
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.diagnose.watching.record import Api, Materialised, Site
from attnsel.errors import InvalidInput, in_words, printable
from attnsel.params import AttentionParams

_C: Any = torch._C  # whose stubs leave out the state of torch functions

# --------------------------------------------------------------------------------------------------------
# Where in the program a call stands: its file, line and function, outside of torch and of this package.


class Place(NamedTuple):
    """``where``: the innermost line outside torch, and for a library's line also the program's own that led
    there ("transformers/…/modeling_llama.py:251 forward < train.py:31 step"). ``library``: the package that
    the innermost frame outside torch belongs to, "" for the program itself. ``torch_file``: the file of torch
    that the call came through last, relative to it, "" for none ("nn/modules/activation.py").
    """

    where: str
    library: str
    torch_file: str


_TORCH, _LIBRARY, _OWN, _SKIPPED = range(4)

# Files of libraries that pass attention on for all of a library's models: the line of the model says more.
_PASS_ON = (
    *("transformers/integrations/", "diffusers/models/attention_dispatch.py", "accelerate/hooks.py"),
    *("attnsel/functional.py", "attnsel/f_sdpa/"),
)

_MOST = 20_000  # code objects and places that are remembered; programs that make code at run time end here


class _Kind(NamedTuple):
    code: CodeType  # held, so that its id stays its own
    kind: int
    file: str  # relative to the folder that decides
    package: str


class Places:
    """Finds the place of the call that is being made. ``program``: the folder that paths are relative to."""

    def __init__(self, program: str | None = None) -> None:
        self.program = os.path.realpath(program or os.getcwd())
        self._kinds: dict[int, _Kind] = {}
        self._places: dict[tuple[int, ...], Place] = {}

    def here(self, depth: int = 1) -> Place:
        """The place of the caller ``depth`` frames up."""
        frame: FrameType | None = sys._getframe(depth)
        kinds = self._kinds
        torch_file = library = None
        key: tuple[int, ...] = ()
        found: list[tuple[_Kind, int]] = []
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code)) or self._kind(code)
            if kind.kind == _TORCH:
                if library is None and torch_file is None:
                    torch_file = kind
            elif kind.kind != _SKIPPED:
                if library is None:
                    library = kind
                if not kind.file.startswith(_PASS_ON) and (kind.kind == _OWN or not found):
                    line = frame.f_lineno
                    found.append((kind, line))
                    key = (*key, id(code), line)
                    if kind.kind == _OWN:
                        break
            frame = frame.f_back
        key = (*key, id(library and library.code), id(torch_file and torch_file.code))
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= _MOST:
                self._places.clear()
            place = self._places[key] = Place(
                " < ".join(f"{kind.file}:{line} {_function(kind.code)}" for kind, line in found) or "?",
                library.package if library else "",
                torch_file.file if torch_file else "",
            )
        return place

    def _kind(self, code: CodeType) -> _Kind:
        if len(self._kinds) >= _MOST:
            self._kinds.clear()
            self._places.clear()  # they are known by ids of code that may now go
        made = self._kinds[id(code)] = _Kind(code, *self._sorted(code.co_filename))
        return made

    def _sorted(self, name: str) -> tuple[int, str, str]:
        if name.startswith("<"):
            kind = _SKIPPED if name.startswith(("<frozen", "<eval_with_key>")) else _OWN
            return kind, printable(name), ""
        path = os.path.realpath(name)
        if _by_inductor(path):
            return _SKIPPED, "", ""  # what called it says more: a line of the program
        inside = _inside(path, _SITE)
        if inside.startswith("torch/"):
            return _TORCH, inside.removeprefix("torch/"), "torch"
        if _inside(path, (_HERE,)).startswith(("diagnose/watching/", "cli/", "__main__.py")):
            return _SKIPPED, "", "attnsel"
        if _inside(path, (_HERE, _CHECKOUT_RULES, _CHECKOUT_BACKENDS)):
            return _LIBRARY, f"attnsel/{_inside(path, (_HERE,)) or os.path.basename(path)}", "attnsel"
        if inside:
            return _LIBRARY, printable(inside), inside.split("/")[0].removesuffix(".py")
        own = _inside(path, (self.program,))
        if not own and _inside(path, _STANDARD):
            return _SKIPPED, "", ""
        return _OWN, printable(own or os.path.basename(path)), ""


def _by_inductor(path: str) -> bool:
    """Whether torch.compile wrote the file: one of its cache (_inductor/runtime/cache_dir_utils.py)."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder and path.startswith(os.path.realpath(folder) + os.sep):
        return True
    return any(part.startswith("torchinductor_") for part in path.split(os.sep)[:-1])


def _function(code: CodeType) -> str:
    name = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
    return printable("top level" if name == "<module>" else name)


def _inside(path: str, folders: tuple[str, ...]) -> str:
    """``path`` relative to the first of the folders that holds it, with ``/``; "" where none does."""
    for folder in folders:
        if path.startswith(folder + os.sep):
            return path[len(folder) + 1 :].replace(os.sep, "/")
    return ""


def _site_folders() -> tuple[str, ...]:
    names = ("purelib", "platlib")
    folders = [sysconfig.get_paths()[name] for name in names]
    folders += getattr(site, "getsitepackages", list)()
    folders.append(site.getusersitepackages())
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        folders.append(os.path.dirname(os.path.dirname(torch.__file__)))
    return tuple(dict.fromkeys(os.path.realpath(folder) for folder in folders))


_SITE = _site_folders()
_STANDARD = tuple(os.path.realpath(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib"))
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # attnsel/
_CHECKOUT_RULES = os.path.join(os.path.dirname(_HERE), "rules")
_CHECKOUT_BACKENDS = os.path.join(os.path.dirname(_HERE), "backends")


# ---- Calls counted by place, kernel and question, in bounded memory ------------------------------------


MOST_SHAPES = 12
"""Questions kept apart for one place and kernel: generation asks a new one with every token."""
MOST_PLACES = 2_000


class Seen(NamedTuple):
    """What an observer says of a call: the fields of :class:`Site` that are not counted."""

    api: Api
    forward: str
    params: AttentionParams | None = None
    switches: tuple[str, ...] = ()
    unread: str = ""
    candidate: str = ""
    compiled: bool = False
    materialised: tuple[Materialised, ...] = ()
    notes: tuple[str, ...] = ()

    def asking(self, question: Callable[[], dict[str, Any]]) -> Seen:
        """With what ``question`` says of the call, or why it says nothing."""
        try:
            return self._replace(**question())
        except _UNSAID as error:
            return self._replace(unread=in_words(error))


_UNSAID = (InvalidInput, TypeError, ValueError, LookupError, AttributeError, RuntimeError)


@dataclass(slots=True, eq=False)
class Tally:
    """The counts of one site. ``extra``: what an observer of time or memory keeps with it, by its name."""

    where: str
    seen: Seen
    calls: int = 0
    backward: str = ""
    backward_calls: int = 0
    notes: dict[str, None] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  # shortest and longest s_kv, of shapes put together here
    others: int = 0  # calls of other shapes among ``calls``
    extra: dict[str, Any] = field(default_factory=dict)

    def count_backward(self, *_: Any) -> None:
        """A hook for an autograd node: that it ran. Changes no gradient."""
        self.backward_calls += 1

    def site(self) -> Site:
        seen, notes = self.seen, [*self.seen.notes, *self.notes]
        if self.others:
            low, high = self.lengths
            notes.append(f"{self.others} of these calls have other shapes, with s_kv from {low} to {high}")
        return Site(
            where=self.where,
            calls=self.calls,
            backward=self.backward,
            backward_calls=self.backward_calls,
            **{**seen._asdict(), "notes": tuple(dict.fromkeys(notes))},
            **{name: value for name, value in self.extra.items() if name in Site.model_fields},
        )


class Book:
    """All tallies of a session."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Any, ...], dict[Any, Tally]] = {}
        self._lock = Lock()
        self.dropped = 0  # calls at places beyond MOST_PLACES

    def tally(self, where: str, seen: Seen) -> Tally:
        """The tally where calls like this are counted: its own, or the last one of a place with many shapes.

        The caller adds to ``calls``; calls of a shape that has no tally of its own are counted as ``others``.
        """
        with self._lock:
            name = (where, seen.api, seen.forward, seen.compiled)
            if name not in self._groups and len(self._groups) >= MOST_PLACES:
                self.dropped += 1
                name = ("elsewhere", seen.api, seen.forward, seen.compiled)
            group = self._groups.setdefault(name, {})
            asked = seen.params, seen.switches
            tally = group.get(asked)
            if tally is None and len(group) < MOST_SHAPES:
                tally = group[asked] = Tally(name[0], seen)
            if tally is not None:
                return tally
            last = next(reversed(group.values()))
            last.others += 1
            lengths = [p.max_seqlen_kv for p in (last.seen.params, seen.params) if p is not None]
            lengths += last.lengths
            last.lengths[:] = [min(lengths, default=0), max(lengths, default=0)]
            return last

    def tallies(self) -> Iterator[Tally]:
        for group in list(self._groups.values()):
            yield from list(group.values())

    def sites(self) -> tuple[Site, ...]:
        """As records, in the order in which they were first seen."""
        return tuple(tally.site() for tally in self.tallies() if tally.calls)

    def clear(self) -> None:
        with self._lock:
            self._groups.clear()


# ---- Time and memory of calls, where they are asked for: medians of what each site's calls took --------
# Time: CUDA events on a GPU, which wait for nothing; the clock on a CPU. Memory: the allocator's peak on a
# GPU, which is reset for each call, so that the program's own reading of it changes; on a CPU what the call
# is known to have written: its result and what was materialised. The first calls of a site are left out:
# kernels are loaded then, and the operators inside are read.


WARM_UP = 2
MOST_SAMPLES = 100

FORWARD, BACKWARD, PEAK = "_forward", "_backward", "_peak"
"""Where a tally keeps its samples."""


class Meter:
    """Measures what runs while it is entered."""

    def __init__(self, *, time: bool, memory: bool) -> None:
        self._gpu = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
        self._time, self._memory = time, memory
        self._begun: Any = None
        self._before = 0
        self.took: Any = None  # seconds, or two events
        self.peak: int | None = None

    def __enter__(self) -> Meter:
        if self._memory and self._gpu:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        if self._time:
            self._begun = _now(self._gpu)
        return self

    def __exit__(self, *_: object) -> None:
        if self._time:
            self.took = _between(self._begun, _now(self._gpu))
        if self._memory and self._gpu:
            self.peak = torch.cuda.max_memory_allocated() - self._before

    def file(self, tally: Tally, out: Any) -> None:
        """Keep it with the tally where the call was counted."""
        if self.took is not None:
            sample(tally, FORWARD, self.took)
        if self._memory:
            written = out[0] if isinstance(out, (tuple, list)) and out else out
            peak = self.peak
            if peak is None and isinstance(written, Tensor):
                peak = written.numel() * written.element_size()
                peak += sum(one.bytes for one in tally.seen.materialised)
                tally.notes["memory is what the call is known to have written: there is no GPU"] = None
            if peak is not None:
                sample(tally, PEAK, peak)


def _now(gpu: bool) -> Any:
    if not gpu:
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begun: Any, ended: Any) -> Any:
    return ended - begun if isinstance(begun, float) else (begun, ended)


def sample(tally: Tally, name: str, value: Any) -> None:
    kept = tally.extra.get(name)
    if kept is None:
        kept = tally.extra[name] = deque(maxlen=MOST_SAMPLES + WARM_UP)
    if len(kept) < MOST_SAMPLES + WARM_UP:  # the first ones: they cost no more than a list
        kept.append(value)


def time_backward(tally: Tally, node: Any) -> None:
    """From the moment when an autograd node is run until it is done."""
    begun: list[Any] = []

    def before(_: Any) -> None:
        begun.append(_now(torch.cuda.is_initialized()))

    def after(*_: Any) -> None:
        if begun:
            sample(tally, BACKWARD, _between(begun.pop(), _now(torch.cuda.is_initialized())))

    node.register_prehook(before)
    node.register_hook(after)


def record_medians(tallies: Iterable[Tally]) -> None:
    """Medians of what was sampled, as the fields of a Site."""
    for tally in tallies:
        for name, reported in (
            (FORWARD, "seconds"), (BACKWARD, "backward_seconds"), (PEAK, "peak_bytes")
        ):  # fmt: skip
            values = list(tally.extra.get(name, ()))
            if values:
                values = [_number(value) for value in (values[WARM_UP:] or values)]
                tally.extra[reported] = int(median(values)) if reported == "peak_bytes" else median(values)


def _number(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    begun, ended = value
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3


OBSERVERS: tuple[str, ...] = ("sdpa", "by_hand", "libraries")
"""Modules of this folder. A later one may take over a function from an earlier one."""


class WatchedCall:
    """One call of a watched function, which is run exactly once whatever the observer does."""

    __slots__ = ("args", "error", "function", "kwargs", "meter", "out", "ran", "state")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.ran = False
        self.out: Any = None
        self.error: BaseException | None = None
        self.meter: Meter | None = None
        self.state = _C._get_torch_function_state()  # which the program's function finds as it was

    def run(self, mode: Any = None) -> Any:
        """The call's result, inside of ``mode``. Raises what the function raises. Only of a function that
        changes nothing: where it raises inside of a mode it runs again alone (see :func:`may_run_again`)."""
        if not self.ran:
            self.ran = True
            try:
                if mode is not None and may_run_again():
                    with suppress(*MODE_MAY_RAISE):
                        self.out = self._run(mode)
                        return self.out
                    mode = None
                self.out = self._run(mode or nullcontext())
            except BaseException as error:
                self.error = error
                raise
        return self.out

    def _run(self, mode: Any) -> Any:
        outside = _C._get_torch_function_state()
        try:
            with self.meter or nullcontext(), mode:
                _C._set_torch_function_state(self.state)
                return self.function(*self.args, **self.kwargs)
        finally:
            _C._set_torch_function_state(outside)

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument that may be given by place or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


MODE_MAY_RAISE = (RuntimeError, TypeError, NotImplementedError, RecursionError)
"""What a function raises that cannot run under a dispatch mode, as ``Tensor.as_subclass`` cannot."""


def may_run_again() -> bool:
    """Whether a function that raised under a mode may run again alone. Not where hooks are told of what
    autograd saves: a checkpoint ends its second run by an exception from there."""
    if torch.compiler.is_dynamo_compiling():
        return False
    hooks = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is not None and hooks(True) is None


Around = Callable[["Recorder", WatchedCall], None]
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
        self.readers: list[
            Callable[..., Any]
        ] = []  # at most one, that runs functions of torch and reads them
        self._failures: dict[Any, int] = {}
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
        node = first.grad_fn if isinstance(first, Tensor) else None
        if node is None:
            return
        node, name = named_behind(node, gradients)
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

    def cannot_see(self, what: str) -> None:
        """A line for ``Process.unseen``."""
        if len(self.unseen) < 50:
            self.unseen[what] = None

    # ---- for hooks

    @property
    def is_quiet(self) -> bool:
        return self._mine.quiet > 0

    def watched(self, handler: Around, call: WatchedCall) -> Any:
        """``call`` as ``handler`` sees it: its result or its exception, whatever the handler does."""
        if not self._failures or self._failures.get(handler, 0) < MOST_FAILURES:
            if self.time or self.memory:
                call.meter = Meter(time=self.time, memory=self.memory)
                self._mine.tally = None
            _C._set_torch_function_state(_NO_FUNCTIONS)
            try:
                handler(self, call)
                if call.meter is not None and call.ran and self._mine.tally is not None:
                    call.meter.file(self._mine.tally, call.out)
            except Exception as error:
                if error is not call.error:
                    self._failed(handler, error)
            finally:
                _C._set_torch_function_state(call.state)
        if call.error is not None:
            raised, call.error = call.error, None  # no circle: its frames hold the call, and that tensors
            try:
                raise raised
            finally:
                del raised
        return call.run()

    def told(
        self,
        handler: After,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        """``handler`` is told of a call that is over."""
        self.safely(handler, self, function, args, kwargs, out)

    def safely(self, callback: Callable[..., Any], *args: Any) -> Any:
        """What ``callback`` gives; None where it fails, which is counted, or failed twice before."""
        if self._failures and self._failures.get(_known(callback), 0) >= MOST_FAILURES:
            return None
        state = _C._get_torch_function_state()
        _C._set_torch_function_state(_NO_FUNCTIONS)
        try:
            return callback(*args)
        except Exception as error:
            self._failed(callback, error)
        finally:
            _C._set_torch_function_state(state)

    def _failed(self, handler: Any, error: Exception) -> None:
        handler = _known(handler)
        self._failures[handler] = self._failures.get(handler, 0) + 1
        name = getattr(handler, "__qualname__", str(handler))
        last = "; it is not asked any more" if self._failures[handler] == MOST_FAILURES else ""
        self.cannot_see(f"an observer failed and its call was not read: {name}: {in_words(error)}{last}")


def _known(handler: Any) -> Any:
    """A method of one object is the method of all."""
    return getattr(handler, "__func__", handler)


MOST_FAILURES = 2
_NO_FUNCTIONS = _C._TorchFunctionState.ALL_DISABLED
MOST_KEYS = 16_384


def _name(node: Any) -> str:
    """A node's name. Of an autograd.Function the node is its ``ctx``, where a program may keep a ``name``."""
    return str(type(node).name(node))


def named_behind(first: Any, gradients: frozenset[str], depth: int = 8) -> tuple[Any, str]:
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
