"""Whole ways of a call around kernels that stand in, for tests/attnsel/recorded_calls/runtime_ways.txt.

Each function gives what happened, a line for each event.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attnsel import NoBackendError, debug, override
from attnsel.backends.contract import Grads, Result, Spec
from attnsel.backends.tiled import kernel as tiled
from attnsel.environment import Environment
from attnsel.runtime import (
    bind,
    dispatch,
    kernels,
    leave_replay,
    refusals,
)
from attnsel.runtime import (
    cache as lengths,
)
from attnsel.runtime.cache import BoundedCache
from attnsel.runtime.call import NO_EXTRAS, Call, Config, config
from attnsel.runtime.replay_file import checked
from attnsel.runtime.signature import CallCache
from attnsel.settings import current
from attnsel.verdicts.reasons import NO_EVIDENCE

Event = tuple[str, Any]


def numbers(shape: Any, step: float, dtype: torch.dtype = torch.float32) -> Tensor:
    counted = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return torch.sin(step * counted).to(dtype).reshape(shape)


class StandIn:
    """A kernel that notes what it is given; ``times``: tiled's numbers, the output so many times as large;
    ``fails``: the part that raises, and what."""

    def __init__(
        self, seen: list[Event], parts: str, name: str = "", times: Any = None, **fails: BaseException
    ) -> None:
        self.seen, self.name, self.fails, self.times = seen, name, fails, times
        own = [getattr(self, part) if part in parts else None for part in ("prepare", "bind")]
        self.kernel = kernels.Kernel(self.forward, self.backward, *own)

    def note(self, part: str, *given: Any) -> None:
        self.seen.append((f"{self.name} {part}".strip(), given))
        if part in self.fails:
            raise self.fails[part]

    def prepare(self, spec: Any, inputs: Any) -> None:
        self.note("prepare", inputs.dropout_seed)

    def forward(self, spec: Any, inputs: Any) -> Result:
        self.note("forward", _unusual(spec), inputs)
        if self.times is not None:
            result = tiled.forward(spec, inputs)
            return result._replace(out=result.out * self.times)
        q = inputs.q
        rows = (q.shape[1], q.shape[0]) if spec.packed else q.shape[:3]
        lse, most = numbers(rows, 0.5), numbers((q.shape[1],), 0.7)
        out = numbers((*q.shape[:-1], inputs.v.shape[-1]), 0.3, q.dtype)
        return Result(out, lse, most if spec.return_max_logit else None, (inputs.k, out, 3))

    def backward(self, spec: Any, inputs: Any, result: Result, dout: Tensor, dlse: Any = None) -> Grads:
        self.note("backward", result, dout)
        if self.times is not None:
            return tiled.backward(spec, inputs, result, dout, dlse)
        given = zip(
            (*inputs[:3], inputs.bias, inputs.softmax_offset), (0.11, 0.13, 0.17, 0.19, 0.19), strict=True
        )
        return Grads(*(None if t is None else numbers(t.shape, step, t.dtype) for t, step in given))

    def bind(self, spec: Any, inputs: Any) -> Callable[..., Tensor]:
        self.note("bind", _unusual(spec), inputs)

        def bound(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
            self.note("bound", others)
            return q[..., :1] * 2 + numbers((*q.shape[:-1], v.shape[-1]), 0.3, q.dtype)

        return bound


def _unusual(spec: Spec) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(spec).items() if value != getattr(Spec(), name)}


def tensors_of(static: Config, d: int = 1, e: int = 1, groups: int = 2) -> list[Tensor]:
    """q [2, 2 rows, 2 heads, d], k and v of 3 rows, as the format has them; packed 4 and 5 rows."""
    made = []
    for step, rows, heads, dim in ((0.37, 2, 2, d), (0.5, 3, groups, d), (0.61, 3, groups, e)):
        packed = numbers((rows + 2, heads, dim), step)
        dense = numbers((2, rows, heads, dim), step).transpose(1, 2)
        made.append(packed if static.form.packed else bind.to_caller(static, dense))
    return made


@contextmanager
def alone(**settings: Any) -> Iterator[None]:
    """With nothing remembered, and nothing left behind."""
    caches = [
        (dispatch, "_carrying"),
        (dispatch, "_gradients"),
        (dispatch.selfcheck, "_passed"),
    ]
    others = [
        (dispatch, "_bound", CallCache(limit=9)),
        (leave_replay, "_left", set()),
        (debug, "_announced", set()),
        (refusals, "_evidence", NO_EVIDENCE),
    ]
    empty = [(*cache, BoundedCache(limit=9)) for cache in (*caches, (dispatch, "_merged"))]
    with ExitStack() as stack:
        for held in (*empty, *others, (dispatch.selfcheck, "REFERENCE", "nobody")):
            stack.enter_context(patch.object(*held))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(7)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", debug.CopyWarning)
        stack.enter_context(override(**settings))
        yield


def ran(
    way: str,
    static: Config,
    extras: Any = NO_EXTRAS,
    parts: str = "",
    grad: str = "",
    backend: str = "tiled",
    times: Any = None,
    **dims: int,
) -> Any:
    """What a call gives, twice, and what the kernel is given. ``grad`` names what learns; with ``times`` the
    kernel is compared first."""
    seen: list[Event] = []
    q, k, v = tensors_of(static, **dims)
    named = {"q": q, "k": k, "v": v, "b": extras.core_attention_bias, "s": extras.softmax_offset}
    learns = [t.requires_grad_() for name, t in named.items() if name in grad]
    dout = q.detach()[..., :1].expand(*q.shape[:-1], v.shape[-1])
    dout = dout.flatten(-2) if static.flatten_heads else dout
    rows = bind.to_contract(static, q).shape[:-1]
    lse = numbers(rows[::-1] if static.form.packed else rows, 0.9)
    merged = dispatch.MergedResult(dout + 1, lse, dout)
    stand_in = {backend: StandIn(seen, parts, times=times).kernel}
    with (
        alone(selfcheck="0" if times is None else "all", backend=backend),
        patch.dict(kernels.KERNELS, stand_in),
    ):
        ways: dict[str, Callable[[], Any]] = {
            "attend": lambda: dispatch.attend(static, q, k, v, extras),
            "carrying": lambda: dispatch.attend_with_lse(static, q, k, v, extras),
            "gradients": lambda: dispatch.gradients(static, q, k, v, extras, dout),
            "from known": lambda: dispatch.gradients(static, q, k, v, extras, dout, (dout + 1, lse)),
            "explicit": lambda: dispatch.merged_gradients(static, q, k, v, extras, merged),
            "operator": lambda: dispatch.compiled.opaque(
                dispatch.make_call(static, q, k, v, extras, current())
            ),
        }
        saved: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append([*t.shape]) or t, lambda t: t):
            try:
                seen.append(("gives", result := ways[way]()))
            except NoBackendError as error:
                (why,) = error.selection[backend].reasons
                return [*seen, ("refused", (why.code, re.findall(r"(\w+) is off", why.observed)))]
            held, before = len(saved), len(seen)
            again = ways[way]()
        seen[before:] = [(f"{part} again", ()) for part, _ in seen[before:]]
        seen.append(("again", "the same" if repr(again) == repr(result) else again))
        first = result[0] if isinstance(result, tuple) else result
        if learns and not isinstance(result, Grads):
            grads = torch.autograd.grad(first, learns, dout, allow_unused=True)
            seen += [("saved", saved[:held]), ("learnt", grads)]
    return seen


def settled(
    fails: Any, static: Config | None = None, extras: Any = NO_EXTRAS, leave: bool = True, **settings: Any
) -> Any:
    """Which kernels are tried where some refuse, what is said and learnt, and the files that are left."""
    seen: list[Event] = []
    static = static or config()
    fails = {name.replace("_", "."): one for name, one in fails.items()}
    stand_ins = {
        name: StandIn(seen, "prepare", name, **dict([fails[name]] if name in fails else [])).kernel
        for name in ("sdpa.flash", "sdpa.math", "tiled")
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with alone(selfcheck="0", allow=tuple(stand_ins), replay_dir=folder if leave else None, **settings):
            q, k, v = tensors_of(static)
            call = dispatch.make_call(static, q, k, v, extras, current())
            with patch.dict(kernels.KERNELS, stand_ins):
                for _ in "12":
                    try:
                        seen.append(("ran", dispatch._first_call(call)[0].selection.backend))
                    except Exception as error:
                        seen.append(("raised", (type(error), type(error.__cause__))))
            learnt = [(r.candidate, r.code) for r in refusals.evidence().refusals]
            seen += [
                ("kept", [b.selection.backend for b in dispatch._bound.items.values()]),
                ("learnt", learnt),
            ]
        seen += [("said", [(w.category, *itemgetter(0, -1)(str(w.message).split())) for w in said])]
        for path in sorted(Path(folder).glob("*.json")):
            happened = checked("f", json.loads(path.read_text())).happened
            parts = [part for part in happened.message.split("; ") if "POLICY" not in part]
            about = (happened.replace(message=""), "; ".join(parts))
            seen.append((path.name.replace(f"-{os.getpid()}-", "-PID-"), about))
    return [(part, ()) if part.endswith(("prepare", "forward")) else (part, given) for part, given in seen]


def left(
    static: Config,
    extras: Any = NO_EXTRAS,
    q: Any = None,
    times: int = 1,
    links: bool = True,
    **settings: Any,
) -> Any:
    """The files of a call that nothing ran."""
    seen: list[Event] = []
    q_of_its_own, k, v = tensors_of(static)
    q = q_of_its_own if q is None else q
    cannot = patch.object(leave_replay.os, "link", side_effect=OSError)
    with (
        tempfile.TemporaryDirectory() as folder,
        alone(replay_dir=f"{folder}/new", **settings),
        nullcontext() if links else cannot,
    ):
        call = Call(static, q, k, v, extras, current(), False)
        asked = dispatch.params_of(call)
        for number in range(times):
            happened = leave_replay.Happened(kind="nothing runs", candidate="tiled" if number == 2 else "")
            leave_replay._write(call, happened, asked, Environment.describe("cpu"))
        with suppress(OSError):
            leave_replay._put(str(min(Path(folder).glob("new/*"))), b"over another")
        for path in sorted(Path(folder).glob("new/*")):
            name = path.name.replace(f"-{os.getpid()}-", "-PID-")
            file = checked("f", json.loads(path.read_text()))
            about = {"settings": file.settings, "seed": file.generator.initial_seed}
            about |= {"longest": (file.max_seqlen_q, file.max_seqlen_kv)}
            seen += [(name, about), *((one.name, one) for one in file.tensors)]
    return seen


def planned(gpu: str, name: str, made: Any, asked: Any, answer: Callable[..., Any], **about: Any) -> Any:
    """Whether each of the lengths ``asked`` is one too many, after plans for those ``made``."""

    def of(q: int, kv: int) -> Any:
        return answer(gpu, {"backend": name}, max_seqlen_q=q, max_seqlen_kv=kv, **about)

    with patch.object(lengths, "_planned", BoundedCache(limit=9)):
        for one in made:
            lengths.record_length(of(*one))
        found = [of(*one) for one in asked]
        return [lengths.with_lengths(NO_EVIDENCE, s.params, s.environment).many_lengths for s in found]


def carries(static: Config, dtype: str, env: Environment, **records: Any) -> bool:
    """Whether a backward may start from any forward's log-sum-exp, where these are all candidates."""
    held = {}
    for name, (takes, dropout, explicit, needs) in records.items():
        about = {"takes": set(takes.split()), "gives_lse": "lse" in takes, "dropout": dropout}
        held[name] = SimpleNamespace(**about, explicit_backward=explicit, needs=needs)
    with patch.object(dispatch, "CANDIDATES", held):
        return dispatch.carries_lse_between.__wrapped__(static, dtype, env)


def raised_in(module: str, function: str) -> Any:
    """An error out of a function of that name, in that module."""
    names: dict[str, Any] = {"__name__": module}
    exec(f"def {function}(): raise ValueError", names)
    try:
        names[function]()
    except ValueError as error:
        return error
