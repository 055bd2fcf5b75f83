"""The calls that PyTorch's kernels are asked on CUDA where there is no GPU, by torch's schemas and shape
functions, and what each op's CUDA kernel needs of what it is handed, from its sources.

Forward and explicit backward take fake tensors of device cuda. What builds an autograd graph takes meta
tensors: graph nodes ask for the device of their tensors, and a torch that finds no GPU ends the process
there (2.6 to 2.8, and CPU builds) or raises. Shape functions, schemas and derivatives are the same for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.sdpa import ops, varlen
from attnsel.backends.sdpa import run as bound
from attnsel.backends.sdpa.run import KERNELS, SdpaKernel

HALF = (torch.float16, torch.bfloat16)
Sizes = dict[str, Any]  # a number, or the name of another size


@dataclass(frozen=True, eq=False)
class Feature:
    """What a call asks. ``tensors`` gives optional inputs a shape by letters."""

    name: str
    spec: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Form:
    """In which sizes, memory layout and dtype it is asked."""

    name: str
    layout: str = "bshd"
    dtype: torch.dtype = torch.bfloat16
    sizes: Sizes = field(default_factory=dict)


CAUSAL = {"window_right": 0}
BOTTOM = {**CAUSAL, "bottom_right": True}
SQUARE, SWAPPED = {"s_kv": "s_q"}, {"s_q": "s_kv", "s_kv": "s_q"}
LENGTHS = {"seqlens_q": "b", "seqlens_kv": "b"}
WITH_GRADIENT = {"bias_grad": "yes"}

FEATURES = (
    Feature("plain"),
    Feature("causal square", CAUSAL, sizes=SQUARE),
    Feature("causal, fewer queries", CAUSAL),
    Feature("causal, more queries", CAUSAL, sizes=SWAPPED),
    Feature("bottom right", BOTTOM),
    Feature("bottom right, rows without keys", BOTTOM, sizes=SWAPPED),
    Feature("one query", BOTTOM, sizes={"s_q": 1}),
    Feature("one query, top left", CAUSAL, sizes={"s_q": 1}),
    Feature("one key", sizes={"s_kv": 1}),
    Feature("window", {"window_left": 5, "window_right": 3}),
    Feature("window, no right bound", {"window_left": 5}),
    Feature("window of every key", {"window_left": 4096, "window_right": 4096}),
    Feature("causal window", {**BOTTOM, "window_left": 5}),
    Feature("causal window, square", {**CAUSAL, "window_left": 5}, sizes=SQUARE),
    Feature("offsets", {**CAUSAL, "q_offset": 30, "kv_offset": 20}),
    Feature("lengths of keys", tensors={"seqlens_kv": "b"}),
    Feature("lengths of queries", tensors={"seqlens_q": "b"}),
    Feature("causal, lengths", CAUSAL, LENGTHS),
    Feature("bottom right, lengths", BOTTOM, LENGTHS),
    Feature("one length, full", tensors={"seqlens": "b"}, sizes=SQUARE),
    Feature("one length, causal", CAUSAL, {"seqlens": "b"}, SQUARE),
    Feature("mask", tensors={"attn_mask": "b h s_q s_kv"}),
    Feature("mask of keys, causal", CAUSAL, {"attn_mask": "b 1 1 s_kv"}),
    Feature("mask of queries", tensors={"attn_mask": "b 1 s_q 1"}),
    Feature("mask of two dimensions", tensors={"attn_mask": "s_q s_kv"}),
    Feature("bias", tensors={"bias": "b h s_q s_kv"}),
    Feature("bias with gradient", tensors={"bias": "1 h s_q s_kv", **WITH_GRADIENT}),
    Feature("bias of keys with gradient", CAUSAL, {"bias": "1 h 1 s_kv", **WITH_GRADIENT}),
    Feature("bias of rows", tensors={"bias": "b 1 s_q 1"}),
    Feature("bias of two dimensions", tensors={"bias": "s_q s_kv", **WITH_GRADIENT}),
    Feature("bias in float32", tensors={"bias": "1 h s_q s_kv", "bias_dtype": "float32", **WITH_GRADIENT}),
    Feature("bias with strides", tensors={"bias": "s_kv s_q", "bias_strides": "transposed"}),
    Feature("bias, mask, window", {"window_left": 9}, {"bias": "b 1 s_q s_kv", "attn_mask": "1 1 s_q s_kv"}),
    Feature("alibi per sequence, causal", BOTTOM, {"alibi_slopes": "b h"}),
    Feature("alibi and lengths", BOTTOM, {"alibi_slopes": "h", **LENGTHS}),
    Feature("dropout", {"dropout_p": 0.1}),
    Feature("dropout, causal", {**BOTTOM, "dropout_p": 0.1}),
    Feature("dropout and bias", {"dropout_p": 0.1}, {"bias": "1 h s_q s_kv", **WITH_GRADIENT}),
    Feature("mqa, causal", BOTTOM, sizes={"g": 1}),
    Feature("gqa and mask", BOTTOM, {"attn_mask": "b h s_q s_kv"}, {"g": 2}),
    Feature("head_dim_v larger", sizes={"e": "2d"}),
    Feature("head_dim_v smaller, gqa", BOTTOM, sizes={"e": 16, "g": 2}),
    Feature("negative scale", {"softmax_scale": -0.3}),
    Feature("scale of zero", {**BOTTOM, "softmax_scale": 0.0}),
)

FORMS = (
    Form("bshd bf16"),
    Form("sbhd fp16, odd lengths", "sbhd", torch.float16, {"s_q": 21, "s_kv": 27}),
    Form("bhsd fp32, d 40", "bhsd", torch.float32, {"d": 40}),
    Form("bhsd bf16, d 128", "bhsd", sizes={"d": 128, "s_q": 33, "s_kv": 65}),
    Form("bshd bf16, d 256, one sequence", sizes={"d": 256, "b": 1}),
    Form("qkv in one tensor fp16", "qkv", torch.float16, {"d": 72}),
    Form("slices of larger tensors", "sliced"),
    Form("one sequence for all", "expanded"),
    Form("d 20 bf16", sizes={"d": 20}),
    Form("d 20 fp32, odd lengths", dtype=torch.float32, sizes={"d": 20, "s_q": 21, "s_kv": 27}),
    Form("fp64", dtype=torch.float64),
    Form("packed", "thd"),
)


@dataclass(frozen=True)
class Call:
    feature: Feature
    form: Form

    @property
    def size(self) -> dict[str, int]:
        """b, h, g, s_q, s_kv, d, e."""
        base = {"b": 2, "h": 4, "s_q": 24, "s_kv": 40, "d": 64, **self.form.sizes, "1": 1}
        base["2d"] = 2 * base["d"]
        own = {name: base[n] if isinstance(n, str) else n for name, n in self.feature.sizes.items()}
        size = {**base, **own}
        return {"g": size["h"], "e": size["d"], **size}

    @property
    def packed(self) -> bool:
        return self.form.layout == "thd"

    def spec(self, **asked: bool) -> Spec:
        return Spec(**{"packed": self.packed, "softmax_scale": 0.125, **self.feature.spec, **asked})

    def inputs(self, device: str, bias_gradient: bool) -> Inputs:
        """Tensors of shapes alone; only the bias can require a gradient."""
        n, tensors = self.size, self.feature.tensors
        empty = partial(torch.empty, device=device)
        q = self._laid_out(0, device, n["b"], n["h"], n["s_q"], n["d"])
        k = self._laid_out(1, device, n["b"], n["g"], n["s_kv"], n["d"])
        v = self._laid_out(2, device, n["b"], n["g"], n["s_kv"], n["e"])
        made: dict[str, Any] = {}
        for s in ("q", "kv") if self.packed else ():
            made |= {f"cu_seqlens_{s}": empty(n["b"] + 1, dtype=torch.int32), f"max_seqlen_{s}": n[f"s_{s}"]}
        types = {"seqlens": torch.int32, "attn_mask": torch.bool, "alibi_slopes": torch.float32}
        types["bias"] = getattr(torch, tensors.get("bias_dtype", ""), self.form.dtype)
        for name, letters in tensors.items():
            kind = "seqlens" if name.startswith("seqlens") else name
            if kind in types and not (kind == "seqlens" and self.packed):
                t = empty([n[letter] for letter in letters.split()], dtype=types[kind])
                made |= {"seqlens_q": t, "seqlens_kv": t} if name == "seqlens" else {name: t}
        if "bias" in made:
            bias = made["bias"].mT if "bias_strides" in tensors else made["bias"]
            made["bias"] = bias.requires_grad_("bias_grad" in tensors and bias_gradient)
        return Inputs(q, k, v, **made)

    def _laid_out(self, which: int, device: str, b: int, h: int, s: int, d: int) -> Tensor:
        empty = partial(torch.empty, dtype=self.form.dtype, device=device)
        layout = self.form.layout  # by methods: indexing with [] asks for a GPU
        if layout == "bhsd":
            return empty(b, h, s, d)
        if layout == "sbhd":
            return empty(s, b, h, d).permute(1, 2, 0, 3)
        if layout == "qkv":
            return empty(b, s, 3, h, d).select(2, which).transpose(1, 2)
        if layout == "thd":
            return empty(b * s, h, d)
        if layout == "sliced":
            larger = empty(b, s + 5, h + 1, d + 16).narrow(1, 5, s).narrow(2, 1, h).narrow(3, 8, d)
            return larger.transpose(1, 2)
        if layout == "expanded" and which:
            return empty(1, s, h, d).transpose(1, 2).expand(b, h, s, d)
        return empty(b, s, h, d).transpose(1, 2)


class OpCall(NamedTuple):
    """One call of an aten op by the names of its schema; ``results`` in order."""

    op: str
    arguments: dict[str, Any]
    results: tuple[Any, ...]


class Recorder(TorchDispatchMode):
    """The calls of some aten ops made inside, on tensors of ``device``."""

    def __init__(self, ops: set[str], device: str) -> None:
        super().__init__()
        self.ops, self.device, self.seen = ops, device, list[OpCall]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in self.ops and args[0].device.type == self.device:
            named = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
            named |= dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            self.seen.append(OpCall(name, named, tuple(results)))
        return results


# What each kernel is held to: what it must refuse, by which words, and what its op is handed otherwise.


def refuses(kernel: str, call: Call) -> str | None:
    """By which words ``kernel`` must refuse the call on CUDA; None: it must run. Written anew, so that a
    kernel that refuses everything does not pass."""
    n, dtype, spec = call.size, call.form.dtype, call.spec()
    if call.packed:
        return "packed"
    if kernel == "sdpa.math":
        return None
    if dtype not in (HALF if kernel != "sdpa.efficient" else (*HALF, torch.float32)):
        return "dtype"
    if n["d"] * dtype.itemsize % 16 or n["e"] * dtype.itemsize % 16:
        return "head_dim_multiple"
    if kernel == "sdpa.efficient":
        return None if n["g"] == n["h"] else "equal_heads"
    if kernel == "sdpa.cudnn":
        return "kv_single" if n["s_kv"] == 1 or (n["s_q"] == 1 and spec.dropout_p) else None
    if n["d"] != n["e"]:
        return "must equal head_dim_qk"
    return None if said_without_mask(call) else "takes no mask"


def said_without_mask(call: Call) -> bool:
    """Whether full, or causal from the bottom-right corner, is all there is to say: what flash expresses."""
    spec, tensors, s_q, s_kv = call.spec(), call.feature.tensors, call.size["s_q"], call.size["s_kv"]
    i, j = spec.q_offset + torch.arange(s_q)[:, None], spec.kv_offset + torch.arange(s_kv)
    distance = j - i - (s_kv - s_q if spec.bottom_right else 0)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if spec.window_left >= 0:
        seen &= distance >= -spec.window_left
    if spec.window_right >= 0:
        seen &= distance <= spec.window_right
    corner = torch.ones(s_q, s_kv, dtype=torch.bool).tril(s_kv - s_q)
    if "seqlens" in tensors:  # one tensor: what lies behind a length, no row inside it can see
        return spec.window_right == 0 and s_q == s_kv and torch.equal(seen, corner)
    if {"attn_mask", "bias", "alibi_slopes", "seqlens_kv"} & set(tensors):
        return False
    return bool(seen.all()) or (s_q <= s_kv and torch.equal(seen, corner))


def aligned(t: Tensor) -> bool:
    """Whether a kernel may read 16 bytes at any row of ``t``: side by side, from aligned addresses."""
    size = t.element_size()
    steps = [stride for n, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
    return t.stride(-1) == 1 and not any(n * size % 16 for n in (t.storage_offset(), *steps))


def check_rows(op: dict[str, Any], call: Call) -> None:
    """What every fused kernel asks of q, k, v, and in a backward of out and its gradient."""
    q, k, v = op["query"], op["key"], op["value"]
    rows = [q, k, v]
    if "out" in op:
        dout = op.get("grad_out", op.get("grad_out_"))
        assert op["out"].shape == dout.shape == (*q.shape[:-1], v.shape[-1])
        assert op["logsumexp"].dtype == torch.float32
        rows += [op["out"], dout]
    for t in rows:
        assert t.dtype == call.form.dtype
        assert t.shape[-1] * t.element_size() % 16 == 0
        assert aligned(t), (t.shape, t.stride(), t.storage_offset())
    assert q.shape[-1] == k.shape[-1]
    assert op["dropout_p"] == call.spec().dropout_p
    assert op["scale"] > 0.0


def check(kernel: str, op: dict[str, Any], call: Call) -> None:
    """What the CUDA sources of the ops check, and what they assume (attention.cu, sdp_utils.cpp, MHA.cpp)."""
    check_rows(op, call)
    q, k, v, n = op["query"], op["key"], op["value"], call.size
    assert q.shape[:3] == (n["b"], n["h"], n["s_q"])
    assert k.shape[:3] == v.shape[:3] == (n["b"], n["g"], n["s_kv"])
    assert isinstance(op["is_causal"], bool)
    if "out" in op and kernel != "sdpa.efficient":
        assert (op["max_q"], op["max_k"]) == (n["s_q"], n["s_kv"])
        assert op["cum_seq_q"] is None
        assert op["cum_seq_k"] is None
    if kernel == "sdpa.cudnn":  # head_dim above 128 is not for every release and GPU
        assert v.shape[3] <= max(128, n["e"])
    if kernel == "sdpa.flash":
        assert q.shape[3] == v.shape[3] <= 256
    elif (mask := op["attn_bias"]) is not None:
        full = (n["b"], n["h"], n["s_q"], n["s_kv"])
        assert mask.dtype == q.dtype
        assert mask.dim() == 4
        assert all(size in (1, whole) for size, whole in zip(mask.shape, full, strict=True))
        assert mask.shape[3] == n["s_kv"]
        assert mask.stride(3) == 1
        if kernel == "sdpa.efficient":
            assert tuple(mask.shape) == full
            assert aligned(mask), mask.stride()


def varlen_refuses(call: Call) -> str | None:
    """The same for the op with lengths."""
    n, spec, tensors = call.size, call.spec(), set(call.feature.tensors)
    if call.form.dtype not in HALF:
        return "dtype"
    if n["d"] * call.form.dtype.itemsize % 16 or n["e"] * call.form.dtype.itemsize % 16:
        return "head_dim_multiple"
    if n["d"] != n["e"]:
        return "must equal head_dim_qk"
    if tensors & {"attn_mask", "bias", "alibi_slopes"} or spec.q_offset or spec.kv_offset:
        return "no argument"
    lengths = not call.packed and bool(tensors & {"seqlens", "seqlens_q", "seqlens_kv"})
    if (spec.window_left >= 0 or spec.window_right >= 0) and not spec.bottom_right:
        if call.packed or (lengths and "seqlens" not in tensors):
            return "one tensor for the lengths"
        longer = 0 if lengths else n["s_kv"] - n["s_q"]
        if 0 <= spec.window_left < -longer or 0 <= spec.window_right < longer:
            return "from the top left"
    if lengths and n["b"] > 1 and call.form.layout not in ("bshd", "qkv"):
        return "where the one before ends"  # only in these layouts one sequence begins there
    return None


def varlen_check(op: dict[str, Any], call: Call) -> None:
    """What flash_api.cpp checks, and what its kernels assume, of dense [b, s, h, d] or of rows [t, h, d]."""
    check_rows(op, call)
    q, k, v, n = op["query"], op["key"], op["value"], call.size
    assert q.shape[-1] == v.shape[-1] <= 256
    if call.packed or "seqlens" in str(call.feature.tensors):
        tokens = (n["b"] * n["s_q"], n["b"] * n["s_kv"])
        assert (q.shape[:2], k.shape[:2]) == ((tokens[0], n["h"]), (tokens[1], n["g"]))
        sequences = n["b"] * (1 if call.packed else 2)  # padding is sequences too
        for cu in (op["cum_seq_q"], op["cum_seq_k"]):
            assert (cu.dtype, tuple(cu.shape), cu.is_contiguous()) == (torch.int32, (sequences + 1,), True)
        # One row would stand for another problem.
        assert (op["max_q"], op["max_k"]) == (max(2, n["s_q"]), max(2, n["s_kv"]))
    else:
        assert op["cum_seq_q"] is op["cum_seq_k"] is None
        assert q.shape[:3] == (n["b"], n["s_q"], n["h"])
        assert k.shape[:3] == v.shape[:3] == (n["b"], n["s_kv"], n["g"])
        assert (op["max_q"], op["max_k"]) == (n["s_q"], n["s_kv"])
    assert not any(op.get(name) is not None for name in ("seqused_k", "alibi_slopes", "block_table"))


def on_meta() -> Any:
    """Meta tensors are taken for CUDA ones."""
    as_cuda = lambda kernel, device: ops.resolve(kernel, "cuda")  # noqa: E731
    return mock.patch.multiple(bound, resolve=as_cuda)


# Tensor's own method looks for the device before it calls the op, which a CPU build of torch does not have.
_CONTIGUOUS = mock.patch.object(Tensor, "contiguous", lambda t: torch.ops.aten.contiguous.default(t))


@dataclass(frozen=True)
class Family:
    """A kernel of the contract, the ops it calls on CUDA (forward, backward), and what these need.

    ``state``: where among the results of its forward op the random state lies.
    """

    kernel: Any
    ops: tuple[str, ...]
    refuses: Callable[[Call], str | None]
    check: Callable[[dict[str, Any], Call], None]
    state: tuple[int, ...] = ()
    bias_gradient: bool = False
    is_math: bool = False  # no op of its own, no lse; its forward under need_grad builds an autograd graph
    on_meta: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def turns(self, every: bool, refused: bool = False) -> list[Call]:
        """Each feature in every form that runs, or in one of them, another one for the next feature."""
        turns = []
        for turn, feature in enumerate(FEATURES):
            calls = [Call(feature, form) for form in FORMS]
            found = [call for call in calls if (self.refuses(call) is not None) == refused]
            turns += found if every else (found[turn % len(found) :][:1] if found else [])
        return turns

    @contextlib.contextmanager
    def recording(self, device: str, call: Call, backwards: range) -> Iterator[Inputs]:
        """The call's inputs; what is done with them calls one forward op and so many of its backward."""
        shapes = FakeTensorMode() if device == "cuda" else self.on_meta()
        with shapes, Recorder(set(self.ops), device) as recorder, _CONTIGUOUS:
            yield call.inputs(device, self.bias_gradient)
            seen = recorder.seen
            if self.ops and backwards.stop:
                assert [one.op for one in seen] == [*self.ops[:1], *self.ops[1:] * (len(seen) - 1)]
                assert len(seen) - 1 in backwards
            for one in seen:
                self.check(one.arguments, call)
            for backward in seen[1:]:
                self._check_pair(seen[0], backward.arguments)

    def _check_pair(self, forward: OpCall, given: dict[str, Any]) -> None:
        """A backward is given what its own forward gave: lse as it lay in memory, and the random state."""
        states = ("philox_seed", "philox_offset", "rng_state", "unused")  # by the release
        names = ["logsumexp", *(name for name in states if name in given)]
        for name, i in zip(names, (1, *self.state), strict=True):
            a, b = given[name], forward.results[i]
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def family(name: str, op: str = "", **how: Any) -> Family:
    pair = tuple(f"_scaled_dot_product_{op}_attention{way}" for way in ("", "_backward")) if op else ()
    return Family(KERNELS[name], pair, partial(refuses, name), partial(check, name), **how)


FAMILIES = (
    family("sdpa.flash", "flash", state=(6, 7), on_meta=on_meta),
    family("sdpa.efficient", "efficient", state=(2, 3), bias_gradient=True, on_meta=on_meta),
    family("sdpa.cudnn", "cudnn", state=(6, 7), on_meta=on_meta),
    family("sdpa.math", bias_gradient=True, is_math=True),
    Family(
        SdpaKernel("sdpa.varlen", varlen.forward, varlen.backward, varlen.bind),
        ("_flash_attention_forward", "_flash_attention_backward"),
        varlen_refuses,
        varlen_check,
        state=(2, 3),
    ),
)
