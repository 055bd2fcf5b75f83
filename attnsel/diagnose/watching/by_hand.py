"""The observer of attention written by hand.

Operators are read by a dispatch mode for a while only: from the beginning, until nothing new was found in a
few hundred products; again when a softmax runs at a place that is not known yet. Meanwhile calls at
known places are counted by their softmax, which costs next to nothing. In the main thread only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)

from attnsel.diagnose.framework_fixes import replacement, unwritten
from attnsel.diagnose.watching.by_hand_call import Found, TracedProduct
from attnsel.diagnose.watching.by_hand_operators import ByHand
from attnsel.diagnose.watching.hooks import OperatorMode, operator_name
from attnsel.diagnose.watching.observe import FORWARD, PEAK, Observer, Place, Recorder, Seen, sample
from attnsel.diagnose.watching.sdpa import api_of, watch_sdpa
from attnsel.errors import in_words

MOST_PRODUCTS = 400
"""Products that are read without anything new before reading ends."""
MOST_OPERATORS = 100_000
"""The same of all operators: a program may prepare data for long before its model has a product. A second."""
MOST_READINGS = 40
"""How often reading begins; a program that makes new code for ever is not followed for ever."""

_PRODUCTS = frozenset({"aten::bmm", "aten::mm", "aten::addmm", "aten::baddbmm", "aten::convolution"})
_STATE = "by_hand"


class Reading(OperatorMode):
    """Reads operators while it is entered."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher
        self._entered = 0
        self._makes = False

    def __enter__(self) -> Reading:
        self._entered += 1  # once more inside of a composite operator
        if "__new__" not in vars(Tensor):
            Tensor.__new__ = self._new  # type: ignore[method-assign, assignment]
            self._makes = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered -= 1
        if self._makes and not self._entered:
            self._makes = False
            del Tensor.__new__
        super().__exit__(*error)

    def _new(self, kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """``Tensor.__new__``, which makes no subclass (torch.nn.attention.bias.CausalBias, say) under a
        dispatch mode: the tensor that is to become one has been in Python already."""
        if kind is Tensor or _get_current_dispatch_mode() is not self:
            return super(Tensor, kind).__new__(kind, *args, **kwargs)
        with _pop_mode_temporarily():
            return super(Tensor, kind).__new__(kind, *args, **kwargs)

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._watcher.read(func, args, kwargs, out)


class Watcher:
    """What a session knows of attention by hand."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.thread = threading.get_ident()
        self.reader = ByHand(self._found, self._softmax)
        self.mode: Reading | None = None
        self.in_inference = False  # whether it was entered inside of torch.inference_mode
        self.readings = 0
        self.products = self.operators = 0  # since anything new
        self.others: set[str] = set()  # where softmax is no attention
        self.by_exp = False
        self.unfollowed: tuple[Any, Any] = (None, None)  # the key and the result of a softmax not known yet

    # ---- when to read

    def begin(self) -> None:
        """Read from now on, if that is possible here."""
        self.products = self.operators = 0
        if self.mode is not None or threading.get_ident() != self.thread or self.readings >= MOST_READINGS:
            return
        if _get_current_dispatch_mode() is not None:
            return  # the program's own: it would take ours for its own when it ends
        self.readings += 1
        self.mode = Reading(self)
        self.mode.__enter__()
        self.in_inference = torch.is_inference_mode_enabled()
        if self.in_inference:
            self.recorder.soon(self._stay)

    def _stay(self) -> None:
        """Leaving inference_mode puts back what was dispatched to before it: a mode that was entered inside
        is on the stack still and sees nothing. The next one needs it entered again."""
        mode = self.mode
        if mode is None or not self.in_inference or threading.get_ident() != self.thread:
            return
        if not _dispatches_to_modes() and _get_current_dispatch_mode() is mode:
            mode.__exit__(None, None, None)
            mode.__enter__()
            self.in_inference = torch.is_inference_mode_enabled()
        self.recorder.soon(self._stay)

    def end(self) -> bool:
        """Read no more; whether that was possible here: a mode of the program may stand above ours.

        What was entered outside of inference_mode is not left inside: leaving that would have torch dispatch
        to a mode that there is not.
        """
        mode = self.mode
        if mode is None:
            return True
        if threading.get_ident() != self.thread or _get_current_dispatch_mode() is not mode:
            return False
        if torch.is_inference_mode_enabled() and not self.in_inference:
            return False
        self.mode = None
        mode.__exit__(None, None, None)
        self.reader.forget()
        self.unfollowed = (None, None)
        return True

    def pause(self) -> Callable[[], None]:
        """Read nothing until what is returned is called."""
        mode = self.mode
        if mode is None or not self.end():
            return lambda: None

        def resume() -> None:
            if self.mode is None and _get_current_dispatch_mode() is None:
                self.mode = mode
                mode.__enter__()

        return resume

    def _soon(self) -> None:
        if not self.end():
            self.recorder.soon(self._soon)

    # ---- what is read

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self.recorder.is_quiet or not isinstance(func, torch._ops.OpOverload):
            return
        try:
            self.reader.read(func, args, kwargs, out)
        except Exception as error:
            self.reader.forget()
            self.recorder.cannot_see(f"operators were not read on: {func}: {in_words(error)}")
        self.operators += 1
        product = operator_name(func) in _PRODUCTS
        self.products += product
        if self.operators == MOST_OPERATORS or (product and self.products == MOST_PRODUCTS):
            self.recorder.soon(self._soon)

    def _softmax(self, call: TracedProduct, attention: bool) -> bool:
        """A softmax of scores, or its like; whether to follow it."""
        if _called_by(watch_sdpa):
            return False
        place = self.recorder.place()
        call.place, call.known_as = place, self.key(place, call.shape)
        call.counted = call.known_as in self.recorder.known
        if not attention:
            self.others.add(place.where)
        return attention

    def key(self, place: Place, shape: Iterable[int]) -> tuple[Any, ...]:
        return _STATE, place.where, tuple(shape), torch.is_grad_enabled()

    def _found(self, call: TracedProduct, found: Found) -> None:
        self.by_exp = self.by_exp or "aten::exp" in found.operators
        if call.counted or call.place is None:
            self._time(call, found)
            return
        self.products = self.operators = 0
        api = api_of(call.place, "by hand")
        seen = Seen(
            api,
            ", ".join(found.operators),
            params=found.params,
            unread=found.unread,
            materialised=found.materialised,
            notes=found.notes,
        )
        tally = self.recorder.file(call.place, seen, call.known_as)
        fix = unwritten(api)
        if fix is None and found.params is not None:
            cast = any("cast from" in note for note in found.notes)
            fix = replacement(found.params, scale=found.scale, folded=found.folded, cast=cast)
        if self.unfollowed[0] == call.known_as:
            self.recorder.follow(tally, self.unfollowed[1])
        self.unfollowed = (None, None)
        self._time(call, found)
        tally.extra["fix"] = "" if fix is None else str(fix)

    def _time(self, call: TracedProduct, found: Found) -> None:
        """From the first product to the last, on a CPU. There operators are read, which adds some 0.1 ms."""
        tally = self.recorder.known.get(call.known_as)
        if tally is None or torch.cuda.is_initialized():
            return
        if self.recorder.time:
            sample(tally, FORWARD, found.seconds)
            tally.notes["time was taken while operators were read, which adds some"] = None
        if self.recorder.memory:
            sample(tally, PEAK, sum(one.bytes for one in found.materialised))


def _dispatches_to_modes() -> bool:
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Python))


def _called_by(function: Callable[..., Any]) -> bool:
    code = function.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


# ---- the observer -----------------------------------------------------------------------------------


def _begin(recorder: Recorder) -> None:
    recorder.state[_STATE] = Watcher(recorder)
    recorder.soon(recorder.state[_STATE].begin)
    recorder.before_backward.append(recorder.state[_STATE].pause)


def _finish(recorder: Recorder) -> None:
    watcher: Watcher | None = recorder.state.pop(_STATE, None)
    if watcher is not None and not watcher.end():
        recorder.cannot_see("a dispatch mode of the program stands above the one that reads operators")


def told_of_softmax(
    recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    """Counts a softmax of attention that is known; has operators read where it is not."""
    watcher: Watcher | None = recorder.state.get(_STATE)
    if watcher is None or not isinstance(out, Tensor) or out.dim() < 2:
        return
    place = recorder.place()
    if place.where in watcher.others:
        return
    key = watcher.key(place, out.shape)
    tally = recorder.recall(key)
    if tally is not None:
        recorder.follow(tally, out)
    else:
        watcher.begin()
        watcher.unfollowed = (key, out)


def told_of_exp(
    recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    watcher: Watcher | None = recorder.state.get(_STATE)
    if watcher is not None and watcher.by_exp and isinstance(out, Tensor):
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
