"""Whole ways of a call around kernels that stand in, for tests/attnsel/recorded_calls/runtime_ways.txt.

Each function gives what happened, a line for each event.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attnsel import NoBackendError, override
from attnsel.backends.contract import Grads, Result, Spec
from attnsel.backends.tiled import kernel as tiled
from attnsel.debug import CopyWarning
from attnsel.environment import Environment
from attnsel.params.layout import FORMATS
from attnsel.runtime import (
    dispatch,
    explicit_backward,
    kernels,
    leave_replay,
    lengths,
    recompute,
    refusals,
    selfcheck,
)
from attnsel.runtime.cache import BoundedCache
from attnsel.runtime.call import NO_EXTRAS, Call, Config, config
from attnsel.runtime.replay_file import read_file
from attnsel.settings import current
from attnsel.verdicts.evidence import NO_EVIDENCE

Event = tuple[str, Any]


def numbers(shape: Any, step: float, dtype: torch.dtype = torch.float32) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(step * torch.arange(1, count + 1, dtype=torch.float64)).to(dtype).reshape(shape)


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
        bias, sinks = inputs.bias, inputs.softmax_offset
        made = [
            numbers(t.shape, step, t.dtype) for t, step in zip(inputs[:3], (0.11, 0.13, 0.17), strict=True)
        ]
        return Grads(*made, *(None if t is None else numbers(t.shape, 0.19, t.dtype) for t in (bias, sinks)))

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
    form, made = FORMATS[static.qkv_format], []
    for step, rows, heads, dim in ((0.37, 2, 2, d), (0.5, 3, groups, d), (0.61, 3, groups, e)):
        shape = (rows + 2, heads, dim) if form.packed else (2, rows, heads, dim)
        t = numbers(shape, step)
        made.append(t if form.packed or static.qkv_format == "bshd" else t.permute(*_FROM_BSHD[form.name]))
    return made


_FROM_BSHD = {"sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}


@contextmanager
def alone(**settings: Any) -> Iterator[None]:
    """With nothing remembered, and nothing left behind."""
    forgotten = [(dispatch, name, BoundedCache(limit=9)) for name in ("_bound", "_carrying", "_gradients")]
    with ExitStack() as stack:
        for module, name, empty in (*forgotten, (explicit_backward, "_bound", BoundedCache(limit=9))):
            stack.enter_context(patch.object(module, name, empty))
        stack.enter_context(patch.object(leave_replay, "_left", set()))
        stack.enter_context(patch.object(refusals, "_evidence", NO_EVIDENCE))
        stack.enter_context(patch.object(selfcheck, "REFERENCE", "nobody"))
        stack.enter_context(patch.object(selfcheck, "_passed", BoundedCache(limit=9)))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(7)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", CopyWarning)
        stack.enter_context(override(**settings))
        yield


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for t in result if t is not None]


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
    q, k, v = (t.requires_grad_(n in grad) for t, n in zip(tensors_of(static, **dims), "qkv", strict=True))
    sinks, bias = extras.softmax_offset, extras.core_attention_bias
    learns = [t for t, name in ((q, "q"), (k, "k"), (v, "v"), (bias, "b"), (sinks, "s")) if name in grad]
    for t in learns:
        t.requires_grad_()
    out_of = q.detach()[..., :1].expand(*q.shape[:-1], v.shape[-1])
    dout = out_of.flatten(-2) if static.flatten_heads else out_of
    rows = q.permute(FORMATS[static.qkv_format].to_contract or tuple(range(q.dim()))).shape[:-1]
    lse = numbers(rows if q.dim() == 4 else rows[::-1], 0.9)
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
            "explicit": lambda: explicit_backward.backward(
                static, q, k, v, extras, explicit_backward.MergedResult(dout + 1, lse, dout)
            ),
            "operator": lambda: dispatch.compiled.opaque(
                dispatch.make_call(static, q, k, v, extras, current())
            ),
        }
        saved: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append([*t.shape]) or t, lambda t: t):
            try:
                seen.append(("gives", result := ways[way]()))
            except NoBackendError as error:
                why = [
                    (r.code, re.findall(r"(\w+) is off", r.observed))
                    for r in error.selection[backend].reasons
                ]
                return [*seen, ("refused", why)]
            held, before = len(saved), len(seen)
            again = ways[way]()
        seen[before:] = [(f"{part} again", ()) for part, _ in seen[before:]]
        same = all(map(torch.equal, _tensors(again), _tensors(result)))
        seen.append(("again", "the same" if same else again))
        first = result[0] if isinstance(result, tuple) else result
        if learns and not isinstance(result, Grads):
            grads = torch.autograd.grad(first, learns, dout, allow_unused=True)
            seen += [("saved", saved[:held]), ("learnt", grads)]
    return seen


def settled(
    fails: dict[str, tuple[str, BaseException]], static: Config | None = None, **settings: Any
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
        where = {"replay_dir": folder} if settings.pop("leave", True) else {}
        with alone(selfcheck="0", allow=tuple(stand_ins), **where, **settings):
            with patch.dict(kernels.KERNELS, stand_ins):
                for _ in "12":
                    try:
                        bound = dispatch._first_call(
                            dispatch.make_call(static, *tensors_of(static), NO_EXTRAS, current())
                        )[0]
                        seen.append(("ran", bound.selection.backend))
                    except Exception as error:
                        seen.append(("raised", (type(error), type(error.__cause__))))
            kept = [
                (one.selection.backend, one.settings.policy.allow) for one in dispatch._bound.items.values()
            ]
            seen += [("kept", kept)]
            seen += [("learnt", [(r.candidate, r.message, r.code) for r in refusals.evidence().refusals])]
        seen += [("said", [(w.category, str(w.message).split()[0]) for w in said])]
        for path in sorted(Path(folder).glob("*.json")):
            happened = read_file(path).happened
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
    """The files of a call that nothing ran, and what the numbers beside them are."""
    own = tensors_of(static)
    own = own if q is None else [q, *own[1:]]
    seen: list[Event] = []
    cannot = patch.object(leave_replay.os, "link", side_effect=OSError)
    with (
        tempfile.TemporaryDirectory() as folder,
        alone(replay_dir=f"{folder}/new", **settings),
        nullcontext() if links else cannot,
    ):
        call = Call(static, *own, extras, current(), False)
        asked = dispatch.params_of(call)
        for number in range(times):
            happened = leave_replay.Happened(kind="nothing runs", candidate="tiled" if number == 2 else "")
            leave_replay._write(call, happened, asked, Environment.describe("cpu"))
        with suppress(OSError):
            leave_replay._put(str(min(Path(folder).glob("new/*"))), b"over another")
        for path in sorted(Path(folder).glob("new/*")):
            name = path.name.replace(f"-{os.getpid()}-", "-PID-")
            if path.suffix == ".pt":
                held = torch.load(path, weights_only=True)
                seen.append((name, [(key, t, t.stride()) for key, t in held.items()]))
                continue
            file = read_file(path)
            about = {
                "settings": file.settings,
                "data": file.data.replace(path.stem, ""),
                "seed": file.generator,
            }
            about |= {"left out": file.data_left_out, "longest": (file.max_seqlen_q, file.max_seqlen_kv)}
            about["seed"] = file.generator.initial_seed, len(file.generator.state)
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
    held = {
        name: SimpleNamespace(
            takes=set(takes.split()),
            gives_lse="lse" in takes,
            dropout=dropout,
            explicit_backward=explicit,
            needs=needs,
        )
        for name, (takes, dropout, explicit, needs) in records.items()
    }
    with patch.object(recompute, "CANDIDATES", held):
        return recompute.carries_lse.__wrapped__(static, dtype, env)
