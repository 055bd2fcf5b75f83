"""The observer of attention written by hand.

Operators are read by a dispatch mode for a while only: from the beginning, until nothing new was found in a
few hundred products; again when a softmax runs at a place that is not known yet. Meanwhile calls at
known places are counted by their softmax, which costs next to nothing. In the main thread only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnsel.diagnose.framework_fixes import Fix, replacement, unwritten
from attnsel.diagnose.watching.by_hand_call import TracedProduct
from attnsel.diagnose.watching.by_hand_operators import ByHand
from attnsel.diagnose.watching.by_hand_tried import Tries
from attnsel.diagnose.watching.hooks import OperatorMode, not_readable, operator_name, out_of_reach
from attnsel.diagnose.watching.observe import (
    FORWARD,
    MODE_MAY_RAISE,
    PEAK,
    Observer,
    Place,
    Recorder,
    Seen,
    may_run_again,
    named_behind,
    sample,
)
from attnsel.diagnose.watching.sdpa import api_of
from attnsel.errors import in_words

MOST_PRODUCTS = 400
"""Products that are read without anything new before reading ends."""
MOST_OPERATORS = 100_000
"""The same of all operators: a program may prepare data for long before its model has a product. A second."""
MOST_READINGS = 40
"""How often reading begins; a program that makes new code for ever is not followed for ever."""

SAME = "no library call is known to mean the same"
UNTRIED = "a replacement could not be tried on these numbers, so none is told"

_READ = """
matmul rmatmul bmm mm baddbmm einsum tensordot mul multiply rmul imul div divide true_divide truediv
rtruediv itruediv add radd iadd sub subtract rsub isub tanh masked_fill where softmax exp sum logsumexp cat
concat concatenate stack dropout bernoulli to type type_as float half bfloat16 double clone contiguous
repeat repeat_interleave expand expand_as copy clamp clamp_min clamp_max clip maximum max nan_to_num view
reshape permute transpose flatten unflatten unsqueeze squeeze split chunk unbind select narrow getitem
setitem get as_strided movedim swapaxes t detach multi_head_attention_forward
"""
READ = frozenset(_READ.split())
"""Functions whose operators are read. Under a dispatch mode some others compute otherwise, with other last
bits: losses, norms, decompositions of matrices (``areAnyTensorSubclassLike`` in aten). They run alone; of
what they make of scores it is known that these are no scores any more."""

_PRODUCT_FUNCTIONS = ("linear", "conv1d", "conv2d", "conv3d")
_PRODUCTS = frozenset({"aten::bmm", "aten::mm", "aten::addmm", "aten::baddbmm", "aten::convolution"})
_STATE = "by_hand"


class Reading(OperatorMode):
    """Reads operators while it is entered."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(watcher.recorder)
        self._watcher = watcher

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._watcher.read(func, args, kwargs, out)


class Watcher:
    """What a session knows of attention by hand."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.thread = threading.get_ident()
        self.found: list[TracedProduct] = []  # by the function that runs
        self.reader = ByHand(lambda call: self.found.append(call), self._softmax)
        self.tries = Tries()
        self.readings = 0
        self.products = self.operators = 0  # since anything new
        self.others: set[str] = set()  # where softmax is no attention
        self.by_exp = False
        self.unfollowed: tuple[Any, Any] = (None, None)  # the key and the node of a softmax not known yet

    # ---- when to read

    @property
    def reads(self) -> bool:
        return bool(self.recorder.readers)

    def begin(self) -> None:
        """Read from now on."""
        self.products = self.operators = 0
        if not self.reads and threading.get_ident() == self.thread and self.readings < MOST_READINGS:
            self.readings += 1
            self.recorder.readers.append(self.run)

    def end(self) -> None:
        """Read no more."""
        self.recorder.readers.clear()
        self.reader.forget()
        self.unfollowed = (None, None)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of torch's, whose operators are read. Where it raises it runs again alone, if it only
        makes something: some functions cannot be called under a dispatch mode (``Tensor.as_subclass``)."""
        if torch.compiler.is_dynamo_compiling() or threading.get_ident() != self.thread or out_of_reach():
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name.strip("_") not in READ or _views_a_weight(args):
            out = function(*args, **kwargs)
            self.products += name in _PRODUCT_FUNCTIONS
            self.operators += 1
            self.recorder.safely(self.reader.passed_by, name, args, out)
            return self._read_to(out)
        if _writes(function, kwargs) or not may_run_again():
            with Reading(self):
                out = function(*args, **kwargs)
            return self._read_to(out)
        with suppress(*MODE_MAY_RAISE):
            with Reading(self):
                out = function(*args, **kwargs)
            return self._read_to(out)
        return function(*args, **kwargs)

    def _read_to(self, out: Any) -> Any:
        """After a function's operators: nothing runs now, and what was found can be tried."""
        found, self.found = self.found, []
        for call in found:
            self.recorder.safely(self._file, call)
            call.numbers = None  # copies
        if self.operators >= MOST_OPERATORS or self.products >= MOST_PRODUCTS:
            self.end()
        return out

    # ---- what is read

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if not isinstance(func, torch._ops.OpOverload):
            return
        try:
            self.reader.read(func, args, kwargs, out)
        except Exception as error:
            self.reader.forget()
            self.recorder.cannot_see(f"operators were not read on: {func}: {in_words(error)}")
        self.operators += 1
        self.products += operator_name(func) in _PRODUCTS

    def _softmax(self, call: TracedProduct, attention: bool) -> bool:
        """A softmax of scores, or its like; whether to follow it."""
        place = self.recorder.place()
        call.place, call.known_as = place, self.key(place, call.shape)
        call.counted = call.known_as in self.recorder.known
        if not attention:
            self.others.add(place.where)
        return attention

    def key(self, place: Place, shape: Iterable[int]) -> tuple[Any, ...]:
        return _STATE, place.where, tuple(shape), torch.is_grad_enabled()

    def _file(self, call: TracedProduct) -> None:
        self.by_exp = self.by_exp or "aten::exp" in call.operators
        if call.counted or call.place is None:
            self._time(call)
            return
        self.products = self.operators = 0
        seen = Seen(
            api_of(call.place, "by hand"),
            ", ".join(call.operators),
            params=call.params,
            unread=call.unread,
            materialised=tuple(call.made),
            notes=call.notes,
        )
        seen, fix = self._advised(seen, call)
        tally = self.recorder.file(call.place, seen, call.known_as)
        key, node = self.unfollowed
        if key == call.known_as and node is not None:
            tally.backward = named_behind(node, frozenset())[1]
            node.register_hook(tally.count_backward)
        self.unfollowed = (None, None)
        self._time(call)
        tally.extra["fix"] = "" if fix is None else str(fix)

    def _advised(self, seen: Seen, call: TracedProduct) -> tuple[Seen, Fix | None]:
        """With what to put in the place of these lines, if it was tried and gives the same; else why not."""
        if call.params is None:
            return seen, None
        if call.between:
            text = f"between scores and output stands {', '.join(call.between)}: {SAME}"
            return seen._replace(params=None, unread=text, notes=()), None
        fix = replacement(
            call.params,
            scale=call.factor,
            temperature=call.tempering,
            folded=call.folded,
            cast=call.cast,
            same=call.masks.visibility.same,
            factors=(call.query.factor, call.key.factor),
        )
        if fix is None:
            return seen._replace(notes=(*seen.notes, f"F.sdpa cannot say this, and {SAME}")), None
        differs = self.tries.differs(call.place.where, fix.code, call.numbers, folded=call.folded)
        if differs:
            text = f"the call that it was read as was tried, and gives other numbers {differs}: {SAME}"
            return seen._replace(params=None, unread=text, notes=()), None
        theirs = unwritten(seen.api, call.params)
        if theirs is not None or differs is not None:
            return seen, theirs or fix
        return seen._replace(notes=(*seen.notes, UNTRIED)), None

    def _time(self, call: TracedProduct) -> None:
        """From the first product to the last, on a CPU. There operators are read, which adds some 0.1 ms."""
        tally = self.recorder.known.get(call.known_as)
        if tally is None or torch.cuda.is_initialized():
            return
        if self.recorder.time:
            sample(tally, FORWARD, call.seconds)
            tally.notes["time was taken while operators were read, which adds some"] = None
        if self.recorder.memory:
            sample(tally, PEAK, sum(one.bytes for one in call.made))


def _views_a_weight(args: tuple[Any, ...]) -> bool:
    """Whether, in inference mode, what is given requires a gradient: its views do, but not under a mode."""
    given = (one for one in args if isinstance(one, Tensor))
    return torch.is_inference_mode_enabled() and any(one.requires_grad for one in given)


def _writes(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it may change what it is given, so that it must not run twice."""
    name = getattr(function, "__name__", "_")
    return (name.endswith("_") and name != "__get__") or "out" in kwargs


# ---- the observer -----------------------------------------------------------------------------------


def _begin(recorder: Recorder) -> None:
    recorder.state[_STATE] = Watcher(recorder)
    recorder.state[_STATE].begin()


def _finish(recorder: Recorder) -> None:
    watcher: Watcher | None = recorder.state.pop(_STATE, None)
    if watcher is not None:
        watcher.end()


def told_of_softmax(
    recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    """Counts a softmax of attention that is known; has operators read where it is not."""
    watcher: Watcher | None = recorder.state.get(_STATE)
    if watcher is None or not isinstance(out, Tensor):
        return
    place = recorder.place()
    if out.is_nested:
        recorder.cannot_see(f"{place.where}: a softmax of a nested tensor, which may be attention by hand")
    if not_readable(out) or out.dim() < 2:
        return
    if place.where in watcher.others:
        return
    key = watcher.key(place, out.shape)
    tally = recorder.recall(key)
    if tally is not None:
        recorder.follow(tally, out)
    else:
        watcher.begin()
        watcher.unfollowed = key, out.grad_fn  # not the tensor, which would live longer


def told_of_exp(
    recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    watcher: Watcher | None = recorder.state.get(_STATE)
    if watcher is not None and watcher.by_exp and isinstance(out, Tensor) and not not_readable(out):
        tally = recorder.recall(watcher.key(recorder.place(), out.shape))
        if tally is not None:
            recorder.follow(tally, out)


OBSERVER = Observer(
    after={
        **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), told_of_softmax),
        **dict.fromkeys((torch.exp, Tensor.exp, Tensor.exp_), told_of_exp),
    },
    begin=_begin,
    finish=_finish,
)
