"""What is seen of torch.compile, and what is not.

A compiled region calls no function of torch's, but operators by their names, which pass a function mode:
what Inductor leaves to aten, such as F.sdpa, also where Inductor put it in the place of lines by hand. What
it makes itself, in Triton or C++, passes nothing, and neither do replays of CUDA graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from attnsel.diagnose.watching.hooks import GRADIENTS, OPERATORS, operator_name
from attnsel.diagnose.watching.libraries import part
from attnsel.diagnose.watching.observe import Call, Observer, Recorder, Seen
from attnsel.diagnose.watching.sdpa import api_of, question, switches
from attnsel.errors import InvalidInput, in_words

_STATE = "compiled"


class Compilations:
    """Dynamo's and Inductor's counters since the session began."""

    def __init__(self) -> None:
        self._before = _counters()

    def lines(self) -> list[str]:
        """What could not be seen, in figures."""
        now = {name: count - self._before.get(name, 0) for name, count in _counters().items()}
        regions = now.get("unique_graphs", 0)
        if regions <= 0:
            return []
        several = "s" if regions > 1 else ""
        lines = [
            f"torch.compile made {regions} region{several}: inside, what Inductor leaves to aten is seen;"
            " kernels that it makes itself (flex_attention, attention by hand that it does not fuse) are not"
        ]
        fused = now.get("fuse_attention", 0)
        if fused:
            lines.append(
                f"Inductor put F.sdpa in the place of {fused} attention pattern{'s' if fused > 1 else ''}"
                " written by hand"
            )
        if now.get("cudagraph_recorded_non_static_inputs", 0) or now.get("cudagraph_skips", 0):
            lines.append("CUDA graphs were asked for: their replays pass no hook")
        return lines


def _counters() -> Mapping[str, int]:
    """torch._dynamo.utils.counters, without importing it: graphs, frames, and what Inductor fused."""
    module = sys.modules.get("torch._dynamo.utils")
    every = getattr(module, "counters", {})
    return {**every.get("stats", {}), **every.get("inductor", {})}


def watch_operator(recorder: Recorder, call: Call) -> None:
    """An attention operator called by its name: by the program, by a library, or by compiled code."""
    operator = OPERATORS[operator_name(call.function)]
    region = _region()
    place = recorder.place()
    key = (operator.name, place.where, region, *map(part, call.args), *map(part, call.kwargs.values()))
    tally = recorder.recall(key)
    with recorder.quiet():  # math is made of other operators
        out = call.run()
    if tally is None:
        seen = Seen(api_of(place, "aten"), operator.name, candidate=operator.candidate, compiled=bool(region))
        try:
            given = _by_name(call)
            q, k, v = (given[name] for name in ("query", "key", "value"))
            mask = given.get("attn_mask", given.get("attn_bias"))
            dropout, causal = float(given.get("dropout_p") or 0.0), bool(given.get("is_causal"))
            params = question(q, k, v, mask, dropout, causal)
            params = params.replace(is_training=True) if region == "training" else params
            seen = seen._replace(params=params, switches=switches(q, k, enable_gqa=True))
        except (InvalidInput, TypeError, ValueError, KeyError, AttributeError) as error:
            seen = seen._replace(unread=in_words(error))
        tally = recorder.file(place, seen, key)
        if region == "training":
            tally.notes["the backward of a compiled region is not counted"] = None
    recorder.follow(tally, out, GRADIENTS)


def _by_name(call: Call) -> dict[str, Any]:
    """An operator's arguments by the names of its schema, which differ from one to the next."""
    overload: Any = getattr(call.function, "default", call.function)
    names = [argument.name for argument in overload._schema.arguments]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def _region() -> str:
    """Whether compiled code is running, and whether for "training" or for "inference"; "" for neither."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith("_aot_autograd/runtime_wrappers.py"):
            return "training" if _in_autograd(frame) else "inference"
        frame = frame.f_back
    return ""


def _in_autograd(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.endswith("_aot_autograd/runtime_wrappers.py"):
        if frame.f_code.co_name == "forward":
            return True
        frame = frame.f_back
    return False


def _begin(recorder: Recorder) -> None:
    recorder.state[_STATE] = Compilations()


def _finish(recorder: Recorder) -> None:
    made: Compilations | None = recorder.state.pop(_STATE, None)
    if made is not None:
        for line in made.lines():
            recorder.cannot_see(line)


_BY_NAME = [name for name in OPERATORS if name.startswith("aten::_scaled_dot_product")]
OBSERVER = Observer(operators=dict.fromkeys(_BY_NAME, watch_operator), begin=_begin, finish=_finish)
