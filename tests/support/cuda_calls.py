"""Calls of kernels on CUDA with no GPU: what is asked, on tensors that are shapes only, and what torch's own
shape functions and schemas make of it.

``CALLS`` is every feature in every form (sizes, layout, dtype). A family of ops brings ``Family``; ``check_*``
hold its kernel to the contract and to what its CUDA kernels need of the tensors they are handed. Forward and
explicit backward take fake tensors of device cuda. What builds an autograd graph takes meta tensors: graph
nodes ask for the device of their tensors, and a torch that finds no GPU ends the process there. Shape
functions, schemas and derivatives are the same ones for both.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attnsel.backends.contract import Inputs, Result, Spec

ALIGNMENT = 16  # bytes: the fused kernels read 128 bits at once
STATE = ("philox_seed", "philox_offset", "rng_state", "unused")  # arguments, by the release
Sizes = dict[str, Any]  # a number, or the name of another size


@dataclass(frozen=True, eq=False)
class Feature:
    """What a call asks. ``tensors`` gives optional inputs a shape by letters; lengths and slopes have theirs."""

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

FEATURES = (
    Feature("plain"),
    Feature("square", sizes=SQUARE),
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
    Feature("lengths", tensors=LENGTHS),
    Feature("causal, lengths", CAUSAL, LENGTHS),
    Feature("bottom right, lengths", BOTTOM, LENGTHS),
    Feature("one length, full", tensors={"seqlens": "b"}, sizes=SQUARE),
    Feature("one length, causal", CAUSAL, {"seqlens": "b"}, SQUARE),
    Feature("mask", tensors={"attn_mask": "b h s_q s_kv"}),
    Feature("mask of keys", tensors={"attn_mask": "b 1 1 s_kv"}),
    Feature("mask of keys, causal", CAUSAL, {"attn_mask": "b 1 1 s_kv"}),
    Feature("mask of queries", tensors={"attn_mask": "b 1 s_q 1"}),
    Feature("mask of two dimensions", tensors={"attn_mask": "s_q s_kv"}),
    Feature("bias", tensors={"bias": "b h s_q s_kv"}),
    Feature("bias with gradient", tensors={"bias": "1 h s_q s_kv", "bias_grad": "yes"}),
    Feature("bias of keys with gradient", CAUSAL, {"bias": "1 h 1 s_kv", "bias_grad": "yes"}),
    Feature("bias of rows", tensors={"bias": "b 1 s_q 1"}),
    Feature("bias of two dimensions", tensors={"bias": "s_q s_kv", "bias_grad": "yes"}),
    Feature("bias in float32", tensors={"bias": "1 h s_q s_kv", "bias_dtype": "float32", "bias_grad": "yes"}),
    Feature("bias with strides", tensors={"bias": "s_kv s_q", "bias_strides": "transposed"}),
    Feature(
        "bias, mask and window", {"window_left": 9}, {"bias": "b 1 s_q s_kv", "attn_mask": "1 1 s_q s_kv"}
    ),
    Feature("alibi", tensors={"alibi_slopes": "h"}),
    Feature("alibi per sequence, causal", BOTTOM, {"alibi_slopes": "b h"}),
    Feature("alibi and lengths", BOTTOM, {"alibi_slopes": "h", **LENGTHS}),
    Feature("dropout", {"dropout_p": 0.1}),
    Feature("dropout, causal", {**BOTTOM, "dropout_p": 0.1}),
    Feature("dropout and bias", {"dropout_p": 0.1}, {"bias": "1 h s_q s_kv", "bias_grad": "yes"}),
    Feature("gqa", sizes={"g": 2}),
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
    def name(self) -> str:
        return f"{self.feature.name}; {self.form.name}"

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

    def inputs(self, device: str) -> Inputs:
        """Tensors of shapes alone; only the bias can require a gradient."""
        n = self.size
        q = self._laid_out(0, device, n["b"], n["h"], n["s_q"], n["d"])
        k = self._laid_out(1, device, n["b"], n["g"], n["s_kv"], n["d"])
        v = self._laid_out(2, device, n["b"], n["g"], n["s_kv"], n["e"])
        return Inputs(q, k, v, **self._others(device))

    def _laid_out(self, which: int, device: str, b: int, h: int, s: int, d: int) -> Tensor:
        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=self.form.dtype, device=device)

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

    def _others(self, device: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        tensors = self.feature.tensors
        if self.packed:
            for s in ("q", "kv"):
                cu_seqlens = torch.empty(self.size["b"] + 1, dtype=torch.int32, device=device)
                made |= {f"cu_seqlens_{s}": cu_seqlens, f"max_seqlen_{s}": self.size[f"s_{s}"]}
        for name, letters in tensors.items():
            if name in ("bias_grad", "bias_dtype", "bias_strides"):
                continue
            shape = [self.size[letter] for letter in letters.split()]
            if name.startswith("seqlens"):
                t = torch.empty(shape, dtype=torch.int32, device=device)
                made |= {"seqlens_q": t, "seqlens_kv": t} if name == "seqlens" else {name: t}
            elif name == "attn_mask":
                made[name] = torch.empty(shape, dtype=torch.bool, device=device)
            elif name == "alibi_slopes":
                made[name] = torch.empty(shape, dtype=torch.float32, device=device)
            else:
                dtype = getattr(torch, tensors.get("bias_dtype", ""), self.form.dtype)
                bias = torch.empty(shape, dtype=dtype, device=device)
                bias = bias.mT if "bias_strides" in tensors else bias
                made[name] = bias.requires_grad_("bias_grad" in tensors)
        return made

    def hides_by_tensors(self) -> bool:
        """Whether something beside the corner and the window decides what is added to a score."""
        return bool({"attn_mask", "bias", "alibi_slopes", "seqlens_kv"} & set(self.feature.tensors))

    def visible(self) -> Tensor:
        """Bool [s_q, s_kv] by the contract's definition, lengths left out."""
        spec, n = self.spec(), self.size
        i = spec.q_offset + torch.arange(n["s_q"])[:, None]
        j = spec.kv_offset + torch.arange(n["s_kv"])
        distance = j - i - (n["s_kv"] - n["s_q"] if spec.bottom_right else 0)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if spec.window_left >= 0:
            seen &= distance >= -spec.window_left
        if spec.window_right >= 0:
            seen &= distance <= spec.window_right
        return seen


CALLS = [Call(feature, form) for feature, form in itertools.product(FEATURES, FORMS)]


@dataclass(frozen=True)
class OpCall:
    """One call of an aten op by the names of its schema; ``results`` in order."""

    op: str
    arguments: dict[str, Any]
    results: tuple[Any, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


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


@dataclass(frozen=True)
class Family:
    """A kernel of the contract, the ops it calls on CUDA, and what their CUDA kernels need.

    ``state``: where among the results of its forward op the random state lies. ``refuses`` says by which words a call must be refused, None where it must run: written anew here, so that
    a kernel that refuses everything does not pass. ``check`` raises AssertionError for a call of an op.
    """

    kernel: Any  # name, forward, backward, and bind where it has one
    ops: tuple[str, ...]  # forward, backward; empty where the kernel has no op of its own
    refuses: Callable[[Call], str | None]
    check: Callable[[OpCall, Call], None]
    state: tuple[int, ...] = ()
    bias_gradient: bool = False
    gives_lse: bool = True
    saves_graph: bool = False  # its forward under need_grad builds an autograd graph
    # Lets meta tensors be taken for CUDA ones.
    on_meta: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def inputs(self, call: Call, device: str) -> Inputs:
        """The call's inputs; without a gradient of the bias where this kernel gives none."""
        inputs = call.inputs(device)
        if inputs.bias is not None and not self.bias_gradient:
            inputs = inputs._replace(bias=inputs.bias.detach())
        return inputs

    @contextlib.contextmanager
    def recording(self, device: str) -> Iterator[Recorder]:
        recorder = Recorder(set(self.ops), device)
        shapes: AbstractContextManager[Any] = FakeTensorMode() if device == "cuda" else self.on_meta()
        with shapes, recorder, _CONTIGUOUS:
            yield recorder

    def check_seen(self, seen: list[OpCall], call: Call, backwards: range) -> None:
        """One forward and as many backwards, each with tensors its kernel can read."""
        if not self.ops:
            return
        assert [one.op for one in seen] == [*self.ops[:1], *self.ops[1:] * (len(seen) - 1)]
        assert len(seen) - 1 in backwards
        for one in seen:
            self.check(one, call)
        for backward in seen[1:]:
            self._check_pair(seen[0], backward)

    def _check_pair(self, forward: OpCall, backward: OpCall) -> None:
        """A backward is given what its own forward gave: lse as it lay in memory, and the random state."""
        given, lse = backward["logsumexp"], forward.results[1]
        assert (given.shape, given.stride(), given.dtype) == (lse.shape, lse.stride(), lse.dtype)
        states = [backward[name] for name in STATE if name in backward.arguments]
        assert len(states) == len(self.state)
        for state, i in zip(states, self.state, strict=True):
            assert (state.shape, state.dtype) == (forward.results[i].shape, forward.results[i].dtype)


# Tensor's own method looks for the device before it calls the op, which a CPU build of torch does not have.
_CONTIGUOUS = mock.patch.object(Tensor, "contiguous", lambda t: torch.ops.aten.contiguous.default(t))


def aligned(t: Tensor) -> bool:
    """Whether a kernel may read 16 bytes at any row of ``t``: side by side, from aligned addresses."""
    size = t.element_size()
    steps = [stride for n, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
    return t.stride(-1) == 1 and not any(n * size % ALIGNMENT for n in (t.storage_offset(), *steps))


def check_forward(family: Family, call: Call, *, need_lse: bool, need_grad: bool) -> None:
    """The contract's forward: the op is called once and the result has its shapes and dtypes."""
    device = "meta" if family.saves_graph and need_grad else "cuda"
    spec = call.spec(need_lse=need_lse, need_grad=need_grad)
    with family.recording(device) as recorder, torch.no_grad():
        inputs = family.inputs(call, device)
        result = family.kernel.forward(spec, inputs)
        family.check_seen(recorder.seen, call, range(1))
        _check_result(spec, inputs, result, lse=family.gives_lse and (need_lse or need_grad))


def check_backward(family: Family, call: Call, *, dlse: bool, dout: str = "as out") -> None:
    """The contract's backward of its own forward."""
    device = "meta" if family.saves_graph else "cuda"
    spec = call.spec(need_grad=True)
    with family.recording(device) as recorder, torch.no_grad():
        inputs = family.inputs(call, device)
        result = family.kernel.forward(spec, inputs)
        grads = family.kernel.backward(
            spec,
            inputs,
            result,
            _laid(result.out, dout),
            torch.empty_like(result.lse) if dlse else None,
        )
        family.check_seen(recorder.seen, call, range(1, 2 + dlse))
    of = [*inputs[:3]] + ([inputs.bias] if inputs.bias is not None and inputs.bias.requires_grad else [])
    for grad, one in zip([g for g in grads if g is not None], of, strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (one.shape, one.dtype, one.device)


def check_bound(family: Family, call: Call) -> None:
    """The differentiable call, its gradients by torch's own formula."""
    with family.recording("meta") as recorder:
        inputs = family.inputs(call, "meta")
        leaves = [t.requires_grad_() for t in inputs[:3]]
        if inputs.bias is not None and inputs.bias.requires_grad:
            leaves.append(inputs.bias)
        others = {n: t for n, t in zip(inputs._fields[3:], inputs[3:], strict=True) if t is not None}
        out = family.kernel.bind(call.spec(need_grad=True), inputs)(*inputs[:3], **others)
        grads = torch.autograd.grad(out, leaves, torch.empty_like(out))
        family.check_seen(recorder.seen, call, range(1, 2))
    assert (out.shape, out.dtype) == ((*inputs.q.shape[:-1], inputs.v.shape[-1]), inputs.q.dtype)
    for grad, leaf in zip(grads, leaves, strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)


def check_bound_forward(family: Family, call: Call) -> None:
    """The same call without gradients, as inference makes it."""
    with family.recording("cuda") as recorder, torch.no_grad():
        inputs = family.inputs(call, "cuda")
        others = {n: t for n, t in zip(inputs._fields[3:], inputs[3:], strict=True) if t is not None}
        out = family.kernel.bind(call.spec(), inputs)(*inputs[:3], **others)
        family.check_seen(recorder.seen, call, range(1))
        assert (out.shape, out.dtype) == ((*inputs.q.shape[:-1], inputs.v.shape[-1]), inputs.q.dtype)


def _check_result(spec: Spec, inputs: Inputs, result: Result, lse: bool) -> None:
    out = result.out
    assert tuple(out.shape) == (*inputs.q.shape[:-1], inputs.v.shape[-1])
    assert (out.dtype, out.device) == (inputs.q.dtype, inputs.q.device)
    assert not out.requires_grad
    assert (result.lse is not None) == lse
    if lse:
        rows = tuple(inputs.q.shape[:-1])
        assert tuple(result.lse.shape) == (rows[::-1] if spec.packed else rows)
        assert (result.lse.dtype, result.lse.device) == (torch.float32, inputs.q.device)
    assert result.max_logit is None


def _laid(out: Tensor, how: str) -> Tensor:
    """A gradient of ``out`` as some caller's autograd may leave it in memory."""
    *rows, e = out.shape
    if how == "expanded":
        return out.new_empty(()).expand(out.shape)
    if how == "columns":
        return out.new_empty(*rows[:-1], e, rows[-1]).mT
    if how == "unaligned":
        return out.new_empty(*rows, e + 1).narrow(-1, 1, e)
    return torch.empty_like(out)
