"""The packages flash-attn, flash-attn-3 and flash-attn-4 on CPU tensors: stand-ins where there is no GPU.

``package(generation, version)`` gives their modules, ``installed(generation, version)`` also puts them where
``import``, ``importlib.util.find_spec`` and ``importlib.metadata`` look. The functions of each release, and
their arguments, are flash_signatures.json; the mathematics is emulated_flash_math.py; here is what differs
between releases: windows, layouts, refusals (in other words), and what no kernel writes, which holds NaN. CPU
tensors count as CUDA ones of architecture ``arch``. Nothing of attnsel is used.

Sources: flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of each version (lines: v2.8.3); hopper/
flash_attn_interface.py and flash_api.cpp (v2.8.3, and 0251105a for 3.0.0); flash_attn/cute/interface.py of
the wheels (lines: 4.0.0b36). Not there, and refused where it is asked for: fp8, splits, qv, top-k gathers,
score_mod, mask_mod, block sparsity, flash_attn_combine, scheduler metadata; and caches, packed tensors and
S_dmask, for which tests/proof alone asks (emulated_flash_rest.py).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import pad

from emulated_flash_math import Masked, backward, forward, last_stride_one, paged

RECORD: dict[str, Any] = json.loads((Path(__file__).parent / "flash_signatures.json").read_text())
VERSIONS = {generation: tuple(releases) for generation, releases in RECORD.items()}


def signature(generation: int, version: str, function: str) -> inspect.Signature:
    recorded = RECORD[str(generation)][version]["functions"][function]["parameters"]
    return inspect.Signature([
        inspect.Parameter(
            name,
            getattr(inspect.Parameter, kind.upper()),
            default=inspect.Parameter.empty if default is None else value_of(default),
        )
        for name, default, kind in recorded
    ])  # fmt: skip


def value_of(default: str) -> Any:
    return torch.bfloat16 if default == "torch.bfloat16" else ast.literal_eval(default)


# ---- one call, by the same names in every release -----------------------------------------------------


@dataclasses.dataclass
class Call:
    """q, k, v [b, s, h, d], packed [t, h, d], or k and v in pages; ``left`` and ``right``: None is open."""

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: Any = None
    causal: Any = False
    left: Any = None
    right: Any = None
    softcap: Any = 0.0
    chunk: int = 0
    dropout_p: float = 0.0
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    pages: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.numel() - 1

    @property
    def longest(self) -> tuple[Any, Any]:
        """Rows and keys that a kernel's grid reaches; None for all."""
        rows = self.q.shape[1] if self.cu_seqlens_q is None else self.max_seqlen_q
        if self.cu_seqlens_k is not None:
            return rows, self.max_seqlen_k
        return rows, self.k.shape[1] * (1 if self.pages is None else self.pages.shape[1])

    def rows(self, n: int) -> slice:
        """Of sequence n in its batch entry, or of all packed rows."""
        start, end = 0, self.q.shape[1]
        if self.cu_seqlens_q is not None:
            start, end = (int(t) for t in self.cu_seqlens_q[n : n + 2])
        return slice(start, end if self.seqused_q is None else start + int(self.seqused_q[n]))

    def keys(self, n: int) -> Any:
        """Where the keys of sequence n lie in k."""
        return self.places(n, 0, self.used(n))

    def used(self, n: int) -> int:
        if self.seqused_k is not None:
            return int(self.seqused_k[n])
        if self.cu_seqlens_k is not None:
            return int(self.cu_seqlens_k[n + 1] - self.cu_seqlens_k[n])
        return int(self.longest[1])

    def places(self, n: int, first: int, last: int) -> Any:
        """Positions of a sequence as an index of k."""
        if self.pages is not None:
            flat = paged(self.pages[n], self.k.shape[1], torch.arange(first, last))
            return flat // self.k.shape[1], flat % self.k.shape[1]
        if self.cu_seqlens_k is not None:
            start = int(self.cu_seqlens_k[n])
            return (slice(start + first, start + last),)
        return n, slice(first, last)


RENAMED = {
    "window_size_left": "left", "window_size_right": "right", "is_causal": "causal",
    "attention_chunk": "chunk", "learnable_sink": "sink", "block_table": "pages", "page_table": "pages",
    "sequed_q": "seqused_q", "sequed_k": "seqused_k", "lse": "softmax_lse",
}  # fmt: skip
OF_BACKWARD = ("dout", "out", "softmax_lse", "dq", "dk", "dv", "rng_state", "dlse", "deterministic")


# ---- what the generations share -----------------------------------------------------------------------


class Release:
    """One release on one architecture. ``functions``: the recorded ones by name."""

    generation: int
    calls: type[Call] = Call
    error: type[Exception] = RuntimeError
    no_keys = -math.inf  # the log-sum-exp of a row without keys
    forward_name, backward_name = "_flash_attn_{}forward", "_flash_attn_{}backward"
    # Of each generation: the half-private functions, scores, and checks of its own.
    _forward: Callable[..., tuple[Any, ...]]
    _backward: Callable[..., Any]
    masked: Callable[[Call, int], Masked]
    check_call: Callable[[Call], None]

    def __init__(self, version: str, arch: int) -> None:
        self.name, self.version, self.arch = version, Version(version), arch
        recorded = RECORD[str(self.generation)][version]["functions"]
        self.signatures = {name: signature(self.generation, version, name) for name in recorded}
        self.functions = {name: self._bound(name) for name in recorded}

    def since(self, version: str) -> bool:
        return self.version >= Version(version)

    def check(self, condition: object, message: str) -> None:
        if not condition:
            raise self.error(message)

    def _bound(self, name: str) -> Callable[..., Any]:
        """A function of exactly the recorded signature: what it has not raises TypeError."""
        signature = self.signatures[name]
        act = self._act(name)

        def function(*arguments: Any, **keywords: Any) -> Any:
            given = signature.bind(*arguments, **keywords)
            given.apply_defaults()
            return act(dict(given.arguments))

        function.__signature__ = signature  # type: ignore[attr-defined]
        function.__name__ = function.__qualname__ = name
        return function

    def _act(self, name: str) -> Callable[[dict[str, Any]], Any]:
        if name in ("flash_attn_func", "flash_attn_varlen_func"):
            return self._public
        if not name.startswith("_"):
            return functools.partial(self._missing, name)
        back = "backward" in name or "bwd" in name
        return functools.partial(self._backward if back else self._forward, name)

    def _missing(self, name: str, given: Any = None) -> NoReturn:
        raise NotImplementedError(f"the emulation has no {name}")

    def call(self, function: str, given: dict[str, Any], *also: str) -> tuple[Call, dict[str, Any]]:
        """What a half-private function is told, and what of ``also`` it is told. Anything else must be at its
        default: a stand-in that overlooked it would find a wrong call right."""
        parameters = self.signatures[function].parameters
        known, others = {}, dict.fromkeys(also)
        for name, value in given.items():
            field = RENAMED.get(name, name)
            if field in self.calls.__dataclass_fields__:
                known[field] = value
            elif field in also:
                others[field] = value
            elif name == "window_size":
                known["left"], known["right"] = value
            elif name == "num_splits":
                self.check(value <= 1, "splits are not emulated")
            elif value is not None and value != parameters[name].default:
                self._missing(name)
        known |= {name: last_stride_one(known[name]) for name in ("q", "k", "v")}
        call = self.calls(**known)
        if self.generation > 2 and call.softmax_scale is None:
            call.softmax_scale = call.q.shape[-1] ** -0.5
        either = type(call.left) is type(call.right) is int
        self.check(self.generation == 4 or either, "window: an int was expected")
        self.check_tensors(call)
        self.check_shapes(call)
        self.check_call(call)
        return call, others

    # ---- both halves ----

    def unwritten(self, call: Call) -> tuple[Tensor, Tensor]:
        """out and lse of what must not be read."""
        out = call.q.new_full((*call.q.shape[:-1], call.v.shape[-1]), math.nan)
        return out, torch.full(self.lse_shape(call), math.nan)

    @torch.no_grad()
    def attend(self, call: Call, out: Tensor, lse: Tensor | None, kept: Any = None) -> None:
        """Fills what a kernel writes. ``kept(n, made)``: called with what was computed of sequence n."""
        most = call.longest[0]
        for n in range(call.batch):
            rows = call.rows(n)
            q = self.queries(call, n, call.q[self.at(call, n, rows)])
            k, v = (t[call.keys(n)] for t in (call.k, call.v))
            made = forward(q, k, v, self.masked(call, n), self.keep(call, n, len(q), len(k)))
            out[self.at(call, n, rows)][:most] = made.out.to(out.dtype)[:most]
            if lse is not None:
                level = made.lse.masked_fill(made.lse == -math.inf, self.no_keys).float()
                lse[self.lse_at(call, n, rows)][:, :most] = level[:, :most]
            if kept is not None:
                kept(n, made)

    @torch.no_grad()
    def differentiate(
        self, call: Call, given: dict[str, Any], unwritten: float
    ) -> tuple[list[Tensor], Tensor]:
        """dq, dk and dv, in the memory that is given for them, and the sinks' gradient. Sequences longer than
        the grid are not written."""
        inputs = {"dq": call.q, "dk": call.k, "dv": call.v}
        made = [torch.empty_like(t) if given[d] is None else given[d] for d, t in inputs.items()]
        for t in made:
            t.fill_(unwritten)
        dsink = torch.zeros(call.q.shape[-2], dtype=torch.float64)
        for n in range(call.batch):
            rows, keys = call.rows(n), call.keys(n)
            at = self.at(call, n, rows)
            q, k, v = call.q[at], call.k[keys], call.v[keys]
            sizes = zip((len(q), len(k)), call.longest, strict=True)
            if any(most is not None and size > most for size, most in sizes):
                continue
            lse, dlse = (
                None if given[name] is None else given[name][self.lse_at(call, n, rows)]
                for name in ("softmax_lse", "dlse")
            )
            how, keep = self.masked(call, n), self.keep(call, n, len(q), len(k))
            grads = backward(given["dout"][at], q, k, v, given["out"][at], lse, how, keep, dlse)
            for t, grad, where in zip(made, grads, (at, keys, keys), strict=False):
                t[where] = grad.to(t.dtype)
            if grads.dsink is not None:
                dsink += grads.dsink
        return made, dsink

    def at(self, call: Call, n: int, rows: slice) -> Any:
        return (n, rows) if call.cu_seqlens_q is None else (rows,)

    def lse_at(self, call: Call, n: int, rows: slice) -> Any:
        return (n, slice(None), rows) if call.cu_seqlens_q is None else (slice(None), rows)

    def lse_shape(self, call: Call) -> tuple[int, ...]:
        shape = call.q.shape
        return (shape[1], shape[0]) if call.cu_seqlens_q is not None else (shape[0], shape[2], shape[1])

    def keep(self, call: Call, n: int, rows: int, keys: int) -> Tensor | None:
        return None

    def queries(self, call: Call, n: int, q: Tensor) -> Tensor:
        """As they are multiplied with the keys; those with a cache (tests/proof) are rotated."""
        return q

    # ---- checks ----

    def check_tensors(self, call: Call, **more: Tensor | None) -> None:
        for name, t in {"q": call.q, "k": call.k, "v": call.v, **more}.items():
            if t is not None:
                self.check(t.dtype in (torch.float16, torch.bfloat16), f"{name}: fp16 and bf16 alone")
                self.check(t.dtype == call.q.dtype, f"{name} must have q's dtype")
                self.check(t.stride(-1) == 1, f"{name} must have a contiguous last dimension")

    def check_shapes(self, call: Call) -> None:
        q, k, v, table, batch, check = call.q, call.k, call.v, call.pages, call.batch, self.check
        check(q.dim() == (4 if call.cu_seqlens_q is None else 3), "q: rank")
        flat = call.cu_seqlens_k is not None and table is None
        check(k.dim() == v.dim() == (3 if flat else 4), "k, v: rank")
        check(k.shape[:-1] == v.shape[:-1] and k.shape[-1] == q.shape[-1], "k, v: shape")
        check(q.shape[-2] % k.shape[-2] == 0, "heads of keys must divide heads of queries")
        check(q.shape[-1] % 8 == v.shape[-1] % 8 == 0, "head dimensions: multiples of 8")
        if table is not None:
            check(table.dtype == torch.int32 and table.stride(-1) == 1, "pages: int32, contiguous")
            check(table.dim() == 2 and len(table) == batch, "pages must have shape (batch, ...)")
        else:
            entries = len(k) if call.cu_seqlens_k is None else call.cu_seqlens_k.numel() - 1
            check(batch == entries, "k's batch must be q's")
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
            t = getattr(call, name)
            if t is not None:
                check(t.dtype == torch.int32 and t.is_contiguous(), f"{name} must be int32 and contiguous")
                check(t.shape == (batch + name.startswith("cu"),), f"{name}: shape")

    def check_gradients(self, call: Call, given: dict[str, Any]) -> None:
        given |= {name: last_stride_one(given[name]) for name in ("out", "dout")}
        lse, check = given["softmax_lse"], self.check
        self.check_tensors(call, **{name: given[name] for name in ("out", "dout", "dq", "dk", "dv")})
        for name in ("out", "dout"):
            check(given[name].shape == (*call.q.shape[:-1], call.v.shape[-1]), f"{name}: shape")
        for name in ("q", "k", "v"):
            made = given["d" + name]
            check(made is None or made.shape == getattr(call, name).shape, f"d{name}: shape")
        # 2 and 3 read lse by its pointer, and do not look at it: a wrong one is for this emulation to tell.
        check(tuple(lse.shape) == self.lse_shape(call) and lse.dtype == torch.float32, "lse: shape or dtype")
        check(lse.is_contiguous(), "lse is read as if contiguous")

    # ---- the public functions ----

    def told(self, function: str, known: dict[str, Any]) -> dict[str, Any]:
        """``known`` as a half-private function's arguments, which gets None for what is not known."""
        left, right = known["window_size"]
        known = known | {"window_size_left": left, "window_size_right": right, "is_causal": known["causal"]}
        known |= {f"sequed_{side}": known.get(f"seqused_{side}") for side in "qk"}
        parameters = self.signatures[function].parameters.values()
        return {p.name: known.get(p.name) for p in parameters if p.name in known or p.default is p.empty}

    def _public(self, given: dict[str, Any]) -> Any:
        q, k, v = (given[name] for name in "qkv")
        if given["softmax_scale"] is None:
            given["softmax_scale"] = q.shape[-1] ** -0.5
        d, step = v.shape[-1], 8 if self.generation == 2 else 1  # flash-attn 2 pads heads to a multiple of 8
        q, k, v = (pad(t, (0, -t.shape[-1] % step)) for t in (q, k, v))
        middle = "varlen_" if self.generation == 2 and "cu_seqlens_q" in given else ""
        out, lse, s_dmask = Attention.apply(self, middle, given, q, k, v, given.get("learnable_sink"))
        always = self.generation == 4 or self.name == "3.0.0b1+early"
        if not given.get("return_attn_probs", always):
            return out[..., :d]
        return out[..., :d], lse, *([s_dmask] if self.generation == 2 else [])


class Attention(torch.autograd.Function):
    """A public function: the half-private ones by the names that this release has for their arguments."""

    @staticmethod
    def forward(
        ctx: Any, release: Release, middle: str, known: Any, q: Tensor, k: Tensor, v: Tensor, sink: Any
    ) -> Any:
        ctx.release, ctx.middle, ctx.known = release, middle, known
        ctx.set_materialize_grads(False)
        name = release.forward_name.format(middle)
        softmax = {"return_softmax": known.get("return_attn_probs", False) and known.get("dropout_p", 0) > 0}
        tensors = {"q": q, "k": k, "v": v, "learnable_sink": sink}
        made = release.functions[name](**release.told(name, {**known, **softmax, **tensors}))
        # Eight results before 2.7, then four; five of FlashAttention 4.
        out, lse, state = made[0], made[-3 if release.generation == 2 else 1], None
        s_dmask = None
        if release.generation == 2:
            s_dmask, state = made[-2:]
        ctx.save_for_backward(q, k, v, out, lse, sink, state)
        return out, lse, s_dmask

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
        """A gradient of lse is used by FlashAttention 4 alone, and where it was asked for lse."""
        release, known = ctx.release, ctx.known
        assert not known.get("attention_chunk"), "no backward of attention_chunk"
        q, k, v, out, lse, sink, state = ctx.saved_tensors
        grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
        dlse = dlse if known.get("return_lse") else None
        names = ("q", "k", "v", "dq", "dk", "dv", "out", "dout", "lse", "dlse", "rng_state", "learnable_sink")
        dout = torch.zeros_like(out) if dout is None else dout
        tensors = dict(zip(names, (q, k, v, *grads, out, dout, lse, dlse, state, sink), strict=True))
        tensors["softmax_lse"] = lse
        name = release.backward_name.format(ctx.middle)
        made = release.functions[name](**release.told(name, {**known, **tensors}))
        dsink = made[3] if release.generation == 4 and len(made) == 4 else None  # 4.0.0b20 has none
        return None, None, None, *grads, dsink


# ---- FlashAttention 2 ---------------------------------------------------------------------------------


class Two(Release):
    generation = 2
    no_keys = math.inf
    state: Tensor | None = None  # of the dropout of the call that runs

    def _forward(self, name: str, given: dict[str, Any]) -> tuple[Any, ...]:
        call, more = self.call(name, given, "return_softmax", "zero_tensors")
        rows, keys = call.longest
        self.check(rows > 0 or keys == 0, "CUDA error: invalid configuration argument")
        out, lse = self.unwritten(call)
        self.state = torch.randint(0, 2**31, (2,)) if call.dropout_p else torch.full((2,), -1)
        s_dmask = self.s_dmask(call, more["return_softmax"])
        if keys == 0 or more["zero_tensors"]:
            out.zero_()
            lse.fill_(math.inf if keys == 0 else -math.inf)
        if keys != 0:  # else no kernel runs (flash_api.cpp:737)
            self.attend(call, out, lse)
        before = () if self.since("2.7") else (call.q, call.k, call.v, out)
        return out, *before, lse, s_dmask, self.state

    def _backward(self, name: str, given: dict[str, Any]) -> Any:
        call, more = self.call(name, given, *OF_BACKWARD, "zero_tensors")
        self.check_gradients(call, more)
        self.check(call.longest[1] > 0, "CUDA error: invalid configuration argument")
        self.state = more["rng_state"]
        if call.dropout_p:
            wanted = self.state is not None and self.state.dtype == torch.int64 and self.state.shape == (2,)
            self.check(wanted, "dropout's backward without the forward's rng_state")
        zeros = more["zero_tensors"] or call.longest[0] == 0
        made, _ = self.differentiate(call, more, 0.0 if zeros else math.nan)
        softmax_d = torch.full_like(more["softmax_lse"], math.nan)  # nothing to rely on
        return softmax_d if self.since("2.7") else (*made, softmax_d)

    def s_dmask(self, call: Call, wanted: bool) -> Tensor | None:
        if wanted:
            self._missing("S_dmask")
        return call.q.new_empty(0) if self.since("2.7") else None

    def swapped(self, call: Call) -> bool:
        """One query a sequence and fewer heads of keys: cu_seqlens_q is not read (flash_api.cpp:592)."""
        one = (
            call.longest[0] == 1 and call.q.shape[-2] > call.k.shape[-2] and call.left < 0 and call.right < 0
        )
        return self.since("2.5.9") and one and not call.dropout_p and call.alibi_slopes is None

    def at(self, call: Call, n: int, rows: slice) -> Any:
        if call.cu_seqlens_q is not None and self.swapped(call):
            return (slice(n, n + 1),)
        return super().at(call, n, rows)

    def lse_at(self, call: Call, n: int, rows: slice) -> Any:
        if call.cu_seqlens_q is None:
            return (n,)
        if not self.since("2.6"):
            return n, slice(None), slice(0, rows.stop - rows.start)
        return slice(None), self.at(call, n, rows)[0]

    def lse_shape(self, call: Call) -> tuple[int, ...]:
        if call.cu_seqlens_q is not None and not self.since("2.6"):
            return call.batch, call.q.shape[-2], call.max_seqlen_q
        return super().lse_shape(call)

    def masked(self, call: Call, n: int) -> Masked:
        """Windows as ``mha_fwd`` and ``set_params_fprop`` leave them (flash_api.cpp:141, 399)."""
        keys = call.longest[1]
        left, right = call.left, call.right
        if self.since("2.4"):
            left, right = (-1 if side >= keys else side for side in (left, right))
        right = 0 if call.causal else right
        causal_kernel = left < 0 and right == 0
        if right < 0 <= left:
            right = keys
        slopes = call.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[n]
        return Masked(
            call.softmax_scale, None if left < 0 else left, None if right < 0 else right, call.softcap,
            slopes=slopes, slopes_by_column=causal_kernel,
        )  # fmt: skip

    def keep(self, call: Call, n: int, rows: int, keys: int) -> Tensor | None:
        """Bytes up to floor(255 (1 - p)) are kept (flash_api.cpp:129), and scaled."""
        if not call.dropout_p or self.state is None:
            return None
        seed = (int(self.state[0]) * 1_000_003 + int(self.state[1]) * 997 + n) % 2**63
        shape = (call.q.shape[-2], rows, keys)
        drawn = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))
        return (drawn <= math.floor((1 - call.dropout_p) * 255)).double() / (1 - call.dropout_p)

    def check_call(self, call: Call) -> None:
        newer, slopes = self.since("2.7"), call.alibi_slopes
        self.check(self.arch >= 80 if newer else self.arch // 10 == 8 or self.arch == 90, "Ampere or newer")
        # From 2.7 operators of torch: their schema's types.
        self.check(all(type(most) is int for most in call.longest), "max_seqlen: an int was expected")
        self.check(call.softmax_scale is not None, "softmax_scale: a float was expected")
        self.check(call.batch > 0, "the batch must not be empty")
        self.check(call.k.shape == call.v.shape, "k and v must have one shape")
        self.check(call.q.shape[-1] <= 256, "the head dimension is at most 256")
        self.check(0 <= call.dropout_p < 1, "dropout_p must be less than 1")
        self.check(not (call.softcap > 0 and call.dropout_p), "softcap with dropout")
        if call.cu_seqlens_q is not None and self.swapped(call):
            self.check(len(call.q) == call.batch, "shape is invalid for input of this size")
        if call.pages is not None:
            self.check(call.k.shape[1] % 256 == 0, "a page must have a multiple of 256 rows")
        if slopes is not None:
            shapes = ((call.q.shape[-2],), (call.batch, call.q.shape[-2]))
            self.check(slopes.dtype == torch.float32 and slopes.stride(-1) == 1, "alibi_slopes: fp32")
            self.check(tuple(slopes.shape) in shapes, "alibi_slopes: shape")


# ---- FlashAttention 3 (the folder hopper/) ------------------------------------------------------------


class Three(Release):
    generation = 3
    forward_name, backward_name = "_flash_attn_forward", "_flash_attn_backward"

    def _forward(self, name: str, given: dict[str, Any]) -> tuple[Any, ...]:
        call, _ = self.call(name, given)
        d, e = call.q.shape[-1], call.v.shape[-1]
        if d != e:  # flash_api.cpp:747
            fits = (128 < d <= 192 and 96 < e <= 128) or (d <= 64 and e <= 512)
            self.check(fits and self.arch // 10 == 9, "this head dimension of v is not supported with q's")
        out, lse = self.unwritten(call)
        if call.k.numel() == 0:  # not the kernels' -inf (flash_api.cpp:1142)
            out.zero_()
            lse.fill_(math.inf)
        else:
            self.attend(call, out, lse)
        return out, lse, None, None

    def _backward(self, name: str, given: dict[str, Any]) -> Any:
        call, more = self.call(name, given, *OF_BACKWARD)
        self.check_gradients(call, more)
        wide = max(call.q.shape[-1], call.v.shape[-1]) > 192
        self.check(not (self.since("3.0.0") and more["deterministic"] and wide), "deterministic above 192")
        made, _ = self.differentiate(call, more, math.nan)
        softmax_d = torch.full_like(more["softmax_lse"], math.nan)  # nothing to rely on
        return softmax_d if self.since("3.0.0") else (*made, softmax_d)

    def masked(self, call: Call, n: int) -> Masked:
        """Bounds as flash_api.cpp:761 leaves them: an open side is as long as a sequence can be."""
        rows, keys = call.longest
        left = -1 if call.left >= keys - 1 else call.left
        right = -1 if call.right >= rows - 1 else call.right
        right = 0 if call.causal else right
        sides = [None if side < 0 else side for side in (left, right)]
        return Masked(call.softmax_scale, *sides, softcap=call.softcap, chunk=call.chunk)

    def check_call(self, call: Call) -> None:
        self.check(self.arch >= 80, "Ampere or newer")
        self.check(call.pages is None or call.cu_seqlens_k is None, "pages with cu_seqlens_k")
        self.check(None not in call.longest, "cu_seqlens without max_seqlen")
        self.check(call.q.shape[-1] <= 256 and call.v.shape[-1] <= 512, "the head dimension is at most 256")
        early = self.name == "3.0.0b1+early"
        self.check(not early or call.k.shape == call.v.shape, "v must have the head dimension of k")


# ---- FlashAttention 4 (flash_attn.cute) ---------------------------------------------------------------


class Four(Release):
    generation = 4
    error = AssertionError
    forward_name, backward_name = "_flash_attn_fwd", "_flash_attn_bwd"
    later = property(lambda self: self.since("4.0.0b36"))

    def _forward(self, name: str, given: dict[str, Any]) -> tuple[Any, ...]:
        call, more = self.call(name, given, "return_lse")
        self.check(self.arch // 10 in (8, 9, 10, 11, 12), "this architecture is not supported")
        trained = (call.q, call.k, call.v, *([call.sink] if self.later else []))
        sink, (out, lse) = call.sink, self.unwritten(call)
        if not (more["return_lse"] or any(t is not None and t.requires_grad for t in trained)):
            lse = None

        def spoilt(n: int, made: Any) -> None:
            if sink is not None and lse is not None and not self.later:  # -inf + inf (softmax.py:212)
                at = self.lse_at(call, n, call.rows(n))
                lse[at] = lse[at].masked_fill(made.hidden.all(1), math.nan)

        if call.k.numel() and call.q.numel():
            self.attend(call, out, lse, spoilt)
        else:
            out.zero_()
            if lse is not None:
                lse.fill_(-math.inf)
                if sink is not None and self.later:
                    lse.copy_(sink.detach()[:, None])
        return (out, lse, *[None] * (3 if self.later else 2))

    def _backward(self, name: str, given: dict[str, Any]) -> tuple[Any, ...]:
        call, more = self.call(name, given, *OF_BACKWARD)
        families = (9, 10, 11, 12) if call.sink is None else (9, 10, 11)
        self.check(self.arch // 10 in families, "backward: this architecture is not supported")
        self.check(call.softcap is not None, "softcap: None is taken for a cap here")
        self.check_gradients(call, more)
        dlse, lse = more["dlse"], more["softmax_lse"]
        self.check(dlse is None or (dlse.shape == lse.shape and dlse.dtype == torch.float32), "dlse")
        self.check(self.arch // 10 != 12 or more["deterministic"] is False, "deterministic backward on SM120")
        packed = call.cu_seqlens_q is not None or call.cu_seqlens_k is not None
        self.check(self.later or not call.softcap or not packed, "softcap's backward with cu_seqlens")
        wide = self.arch // 10 in (10, 11) and call.q.shape[-1] == call.v.shape[-1] == 256
        more_than_plain = call.softcap or dlse is not None or call.sink is not None
        self.check(
            not wide or not more_than_plain, "head dimension 256 with softcap, sinks, or lse's gradient"
        )
        empty = call.q.numel() == 0 or call.k.numel() == 0
        made, dsink = self.differentiate(call, more, 0.0 if empty else math.nan)
        return tuple(made) if call.sink is None else (*made, dsink.to(call.sink.dtype))

    def masked(self, call: Call, n: int) -> Masked:
        """``_resolve_causal_local_window`` (interface.py:438; 4.0.0b20 :275): None is open, -1 may not be."""
        left, right = call.left, call.right
        both = left is not None and right is not None
        if self.later and both and left < 0 and right < 0:
            left = right = None
        right = 0 if call.causal else right
        if not self.later and left is not None and right is not None and left + right < 0:
            left, right = None, 0 if call.causal else None
        return Masked(call.softmax_scale, left, right, call.softcap or 0.0, sink=call.sink)

    def check_call(self, call: Call) -> None:
        d, e, sink, family = call.q.shape[-1], call.v.shape[-1], call.sink, self.arch // 10
        self.check(call.pages is None or call.cu_seqlens_k is None, "page_table with cu_seqlens_k")
        if sink is not None:
            dtypes = (torch.float16, torch.bfloat16, torch.float32) if self.later else (torch.bfloat16,)
            self.check(sink.shape == (call.q.shape[-2],) and sink.dtype in dtypes, "learnable_sink")
        if family == 9:
            self.check(8 <= d <= 256 and 8 <= e <= 256, "head dimensions on SM90: 8 to 256")
        elif family in (10, 11):
            fits = (8 <= d <= 128 and 8 <= e <= 128) or (d, e) in ((192, 128), (256, 256))
            self.check(fits, "head dimensions on SM100/SM110: 8 to 128, (192, 128), (256, 256)")


# ---- modules, and where they are looked for -----------------------------------------------------------

RELEASES: dict[int, type[Release]] = {2: Two, 3: Three, 4: Four}
DISTRIBUTIONS = {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}
FUNCTIONS, PUBLIC = "every function", "what the package's own __init__ gives"
TWO = {"flash_attn": PUBLIC, "flash_attn.flash_attn_interface": FUNCTIONS, "flash_attn_2_cuda": ""}
FOUR = {"flash_attn": "", "flash_attn.cute": PUBLIC, "flash_attn.cute.interface": FUNCTIONS}
THREE = {
    # hopper/setup.py of v2.7.4.post1 :516 and :609; of v2.8.3 :542 and :636
    "3.0.0b1+early": {"flash_attn_interface": FUNCTIONS, "flash_attn_3_cuda": ""},
    "3.0.0b1": {"flash_attn_3": "", "flash_attn_3._C": "", "flash_attn_interface": FUNCTIONS},
    "3.0.0": {
        "flash_attn_3": "", "flash_attn_3._C": "", "flash_attn_interface": FUNCTIONS, "flash_attn_config": "",
        "flash_attn_3.flash_attn_interface": FUNCTIONS,
    },
}  # fmt: skip


def distribution(generation: int, version: str) -> str:
    # PACKAGE_NAME in v2.7.4.post1 hopper/setup.py:36
    return "flash-attn" if version == "3.0.0b1+early" else DISTRIBUTIONS[generation]


def package(generation: int, version: str, arch: int = 90) -> dict[str, ModuleType]:
    """Its modules by name, parents first. ``version`` is one of ``VERSIONS[str(generation)]``."""
    release = RELEASES[generation](version, arch)
    layout = {2: TWO, 3: THREE.get(version, {}), 4: FOUR}[generation]
    public = [name for name in release.functions if name.startswith("flash_attn_")]
    if generation == 4:
        public = ["flash_attn_func", "flash_attn_varlen_func"]
    modules: dict[str, ModuleType] = {}
    for name, holds in layout.items():
        parents = any(other.startswith(name + ".") for other in layout)
        module = modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, origin="emulated", is_package=parents)
        module.__file__ = f"/emulated/{name.replace('.', '/')}.py"
        if parents:
            module.__path__ = []
        for function in {FUNCTIONS: list(release.functions), PUBLIC: public}.get(holds, []):
            setattr(module, function, release.functions[function])
            if holds == FUNCTIONS:
                release.functions[function].__module__ = name
        parent, _, child = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], child, module)
    if generation == 4:  # it asks for a distribution "fa4", which there is not (flash_attn/cute/__init__.py)
        modules["flash_attn.cute"].__version__ = "0.0.0"  # type: ignore[attr-defined]
    elif generation == 2 or version == "3.0.0":  # the earlier hopper/__init__.py is not installed
        modules[next(iter(layout))].__version__ = version  # type: ignore[attr-defined]
    return modules


class Found(importlib.metadata.Distribution):
    """A distribution, and on ``sys.meta_path`` the finder that importlib.metadata asks for it."""

    def __init__(self, name: str, version: str, tops: list[str]) -> None:
        self.wanted = name
        self.texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": "\n".join(tops),
        }

    def read_text(self, filename: str) -> str | None:
        return self.texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path("/emulated") / path

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[Found]:
        name = getattr(context, "name", None)
        if name is None or name.lower().replace("_", "-").replace(".", "-") == self.wanted:
            yield self


@contextlib.contextmanager
def installed(generation: int, version: str, arch: int = 90) -> Iterator[dict[str, ModuleType]]:
    """The package is there; before and after, what was there before. FlashAttention 2 and 4 share a folder:
    the second of them joins the first's module."""
    modules = package(generation, version, arch)
    tops = sorted({name.partition(".")[0] for name in modules})
    before = {name: m for name, m in sys.modules.items() if name.partition(".")[0] in tops}
    there, joins = before.get("flash_attn"), generation == 4 and "flash_attn" in before
    cute = getattr(there, "cute", None)
    if joins:
        modules["flash_attn"] = there
    elif generation == 2 and cute is not None:
        modules["flash_attn"].cute = cute  # type: ignore[attr-defined]
    for name in before:
        if not joins and not (cute is not None and name.startswith("flash_attn.cute")):
            del sys.modules[name]
    # Without what tells two sources of one version apart here ("3.0.0b1+early").
    found = Found(distribution(generation, version), version.split("+")[0], tops)
    with contextlib.ExitStack() as stack:
        if joins:
            stack.enter_context(patch.object(there, "cute", modules["flash_attn.cute"], create=True))
        sys.modules.update(modules)
        sys.meta_path.insert(0, found)
        try:
            yield modules
        finally:
            sys.meta_path.remove(found)
            for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
                del sys.modules[name]
            sys.modules.update(before)
