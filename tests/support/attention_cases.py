"""Calls that every backend of the contract must carry out, and what they are held against.

``CASES`` has one entry per feature and the combinations that matter; ``build`` makes tensors for one, and
``expected`` what the definition (``reference.py``) gives for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnsel.backends.contract import Grads, Inputs, Result, Spec
from reference import attention_reference
from rounding import error as error

LENGTHS_Q, LENGTHS_KV = [11, 0, 17], [13, 9, 20]  # of the packed cases
FLOAT_INPUTS = ("q", "k", "v", "bias", "softmax_offset")
POSITIONS = ("window_left", "window_right", "q_offset", "kv_offset")


@dataclass(frozen=True)
class Case:
    """One feature or combination. ``tensors`` names the optional inputs and, for some, their shape."""

    name: str
    spec: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # over b 2, h 4, g 2, s_q 21, s_kv 27, d 8, e 8


def packed(name: str, spec: dict[str, Any] | None = None, tensors: dict[str, str] | None = None) -> Case:
    return Case(f"packed: {name}", {"packed": True, **(spec or {})}, tensors or {}, {"b": 3})


DROPOUT = {"dropout_p": 0.3}
CAUSAL = {"window_right": 0}
BOTTOM_RIGHT = {"window_right": 0, "bottom_right": True}
KITCHEN_SINK = {**BOTTOM_RIGHT, "window_left": 9, "softcap": 1.5, "softmax_type": "learnable", **DROPOUT}
CASES = [
    Case("plain"),
    Case("mha", sizes={"g": 4}),
    Case("mqa", sizes={"g": 1}),
    Case("head_dim_qk < head_dim_v", sizes={"e": 12}),
    Case("head_dim_qk > head_dim_v", sizes={"e": 3}),
    Case("one query row", BOTTOM_RIGHT, sizes={"s_q": 1}),
    Case("causal", CAUSAL),
    Case("causal, more queries than keys", CAUSAL, sizes={"s_q": 40}),
    Case("causal bottom-right", BOTTOM_RIGHT),
    Case("causal bottom-right, rows that see no key", BOTTOM_RIGHT, sizes={"s_q": 40}),
    Case("sliding window", {"window_left": 5, "window_right": 0}),
    Case("window, two-sided", {"window_left": 3, "window_right": 6}),
    Case("window, left bound only", {"window_left": 4}),
    Case("window, bottom-right", {"window_left": 3, "window_right": 2, "bottom_right": True}),
    Case("offsets", {"window_left": 9, "window_right": 2, "q_offset": 10, "kv_offset": 5}),
    Case("offsets beyond every key", {"window_left": 4, "q_offset": 1000}),
    Case("softcap", {"softcap": 1.2}),
    Case("bias", {}, {"bias": "b h s_q s_kv"}),
    Case("bias broadcast over batch", {}, {"bias": "1 h s_q s_kv"}),
    Case("bias broadcast over heads", {}, {"bias": "b 1 s_q s_kv"}),
    Case("bias broadcast over queries", {}, {"bias": "b 1 1 s_kv"}),
    Case("bias broadcast over keys", {}, {"bias": "1 h s_q 1"}),
    Case("bias of two dimensions", {}, {"bias": "s_q s_kv"}),
    Case("bias and softcap", {"softcap": 1.2}, {"bias": "1 h s_q s_kv"}),
    Case("mask", {}, {"attn_mask": "b h s_q s_kv"}),
    Case("mask of keys", CAUSAL, {"attn_mask": "b 1 1 s_kv"}),
    Case("mask of two dimensions", {}, {"attn_mask": "s_q s_kv"}),
    Case("mask of whole rows", {}, {"attn_mask": "1 h s_q 1"}),
    Case("alibi", CAUSAL, {"alibi_slopes": "h"}),
    Case("alibi per sequence, bottom-right", {"bottom_right": True}, {"alibi_slopes": "b h"}),
    Case("off-by-one", {"softmax_type": "off-by-one"}),
    Case("off-by-one, rows that see no key", {**BOTTOM_RIGHT, "softmax_type": "off-by-one"}, {}, {"s_q": 40}),
    Case("learnable", {"softmax_type": "learnable"}, {"softmax_offset": "h"}),
    Case(
        "learnable, rows that see no key",
        {**BOTTOM_RIGHT, "softmax_type": "learnable"},
        {"softmax_offset": "h"},
        {"s_q": 40},
    ),
    Case("dropout", DROPOUT),
    Case("dropout, offset not a multiple of four", {**DROPOUT, **CAUSAL, "q_offset": 7, "kv_offset": 3}),
    Case("padding", {}, {"seqlens_q": "b", "seqlens_kv": "b"}),
    Case("padding of keys", CAUSAL, {"seqlens_kv": "b"}),
    Case("padding, bottom-right", BOTTOM_RIGHT, {"seqlens_q": "b", "seqlens_kv": "b"}),
    Case("padding and sinks", {"softmax_type": "off-by-one"}, {"seqlens_q": "b", "seqlens_kv": "b"}),
    Case(
        "everything, dense",
        KITCHEN_SINK,
        {
            "seqlens_q": "b",
            "seqlens_kv": "b",
            "bias": "1 h s_q s_kv",
            "attn_mask": "b 1 s_q s_kv",
            "alibi_slopes": "h",
            "softmax_offset": "h",
        },
    ),
    packed("plain"),
    packed("causal bottom-right", BOTTOM_RIGHT),
    packed("padding between sequences", CAUSAL, {"cu_seqlens_padded": ""}),
    packed("dropout", DROPOUT),
    packed("offsets", {"window_left": 6, "window_right": 1, "q_offset": 4, "kv_offset": 2}),
    packed("bias", {}, {"bias": "b h s_q s_kv"}),
    packed("bias and mask, broadcast", {}, {"bias": "1 h 1 s_kv", "attn_mask": "b 1 1 s_kv"}),
    packed(
        "everything",
        KITCHEN_SINK,
        {
            "cu_seqlens_padded": "",
            "bias": "1 h s_q s_kv",
            "attn_mask": "b 1 s_q s_kv",
            "alibi_slopes": "b h",
            "softmax_offset": "h",
        },
    ),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@st.composite
def calls(draw: st.DrawFn) -> Case:
    """Any combination of features the contract allows."""
    is_packed = draw(st.booleans())
    group = draw(st.integers(1, 3))
    sizes = {"g": draw(st.integers(1, 2)), "d": draw(st.integers(1, 9)), "e": draw(st.integers(1, 9))}
    sizes["h"] = group * sizes["g"]
    if is_packed:
        sizes["b"] = len(LENGTHS_Q)
    else:
        sizes |= {"b": draw(st.integers(1, 3)), "s_q": draw(st.integers(0, 35))}
        sizes["s_kv"] = draw(st.integers(0, 35))
    bound, offset = st.integers(-1, 30), st.integers(0, 12)
    spec = {
        "packed": is_packed,
        "window_left": draw(bound),
        "window_right": draw(bound),
        "bottom_right": draw(st.booleans()),
        "softcap": draw(st.sampled_from([0.0, 0.8])),
        "softmax_type": draw(st.sampled_from(["vanilla", "off-by-one", "learnable"])),
        "dropout_p": draw(st.sampled_from([0.0, 0.4])),
        "q_offset": draw(offset),
        "kv_offset": draw(offset),
    }
    pairs = st.tuples(*(st.sampled_from(["1", name]) for name in ("b", "h", "s_q", "s_kv"))).map(" ".join)
    optional = {
        "bias": pairs,
        "attn_mask": pairs,
        "alibi_slopes": st.sampled_from(["h", "b h"]),
        "cu_seqlens_padded" if is_packed else "seqlens_q": st.just("b"),
        "seqlens_kv": st.just("b"),
    }
    if is_packed:
        del optional["seqlens_kv"]
    tensors = {name: draw(shape) for name, shape in optional.items() if draw(st.booleans())}
    if spec["softmax_type"] == "learnable":
        tensors["softmax_offset"] = "h"
    return Case("drawn", spec, tensors, sizes)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: list[int], gap: int = 0) -> Tensor:
    """cu_seqlens; with ``gap`` unused rows before each sequence, where each starts in memory."""
    sums = [0, *itertools.accumulate(length + gap for length in lengths)]
    return int32([gap + total if gap else total for total in sums])


def build(
    case: Case, dtype: torch.dtype = torch.float64, seed: int = 0, scale: int = 1
) -> tuple[Spec, Inputs]:
    """A call with the case's features on normally distributed tensors.

    ``scale`` multiplies lengths, window bounds and offsets: a GPU's tiles are larger than the interpreter's.
    """
    gen = torch.Generator().manual_seed(seed)
    size = {"b": 2, "h": 4, "g": 2, "s_q": 21, "s_kv": 27, "d": 8, "e": 8, "1": 1, **case.sizes}
    size["s_q"], size["s_kv"] = size["s_q"] * scale, size["s_kv"] * scale
    lengths_q, lengths_kv = [n * scale for n in LENGTHS_Q], [n * scale for n in LENGTHS_KV]

    def normal(*names: str) -> Tensor:
        return torch.randn([size[name] for name in names], generator=gen, dtype=torch.float64).to(dtype)

    spec = Spec(softmax_scale=size["d"] ** -0.5, return_max_logit=True, need_lse=True, need_grad=True)
    spec = dataclasses.replace(spec, **case.spec)
    spec = dataclasses.replace(
        spec, **{name: at * scale for name in POSITIONS if (at := getattr(spec, name)) > 0}
    )
    made: dict[str, Tensor] = {}
    if spec.packed:
        gap = 3 if "cu_seqlens_padded" in case.tensors else 0
        size["s_q"], size["s_kv"] = max(lengths_q), max(lengths_kv)
        # Two rows more than the sequences take: packed memory may end in rows of no sequence.
        size["t_q"] = sum(lengths_q) + len(lengths_q) * gap + 2
        size["t_kv"] = sum(lengths_kv) + len(lengths_kv) * gap + 2
        made |= {"q": normal("t_q", "h", "d"), "k": normal("t_kv", "g", "d"), "v": normal("t_kv", "g", "e")}
        made |= {"cu_seqlens_q": starts(lengths_q), "cu_seqlens_kv": starts(lengths_kv)}
        if gap:
            made |= {
                "cu_seqlens_q_padded": starts(lengths_q, gap),
                "cu_seqlens_kv_padded": starts(lengths_kv, gap),
            }
    else:
        made["q"], made["k"] = normal("b", "h", "s_q", "d"), normal("b", "g", "s_kv", "d")
        made["v"] = normal("b", "g", "s_kv", "e")
    for name, shape in case.tensors.items():
        if name in ("bias", "softmax_offset"):
            made[name] = normal(*shape.split())
        elif name == "alibi_slopes":
            made[name] = normal(*shape.split()).float().abs() / 4
        elif name == "attn_mask":
            made[name] = normal(*shape.split()) > 0.3
        elif name == "seqlens_q":
            made[name] = int32([max(0, size["s_q"] - 9 * scale * n) for n in range(size["b"])])
        elif name == "seqlens_kv":
            made[name] = int32([max(0, size["s_kv"] - (8 + 3 * n) * scale) for n in range(size["b"])])
    if spec.dropout_p:
        made["dropout_seed"], made["dropout_offset"] = torch.tensor(1234), torch.tensor(5678)
    return spec, Inputs(**made)


def upstream(result: Result, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random gradients of out and lse, in their dtypes and on their device."""
    gen = torch.Generator().manual_seed(seed)
    assert result.lse is not None
    dout = torch.randn(result.out.shape, generator=gen, dtype=torch.float64).to(result.out)
    return dout, torch.randn(result.lse.shape, generator=gen, dtype=torch.float64).to(result.lse)


def onto(device: torch.device | str, inputs: Inputs) -> Inputs:
    """The same call on another device; what was one tensor stays one."""
    there = {id(t): t.to(device) for t in inputs if isinstance(t, Tensor)}
    return Inputs(*[there.get(id(t), t) for t in inputs])


def carried_out(
    forward: Callable[..., Result],
    backward: Callable[..., Grads],
    spec: Spec,
    inputs: Inputs,
    dlse: bool = True,
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """A kernel's forward and backward by name, and the dout and dlse that went in."""
    if inputs.bias is not None:
        inputs = inputs._replace(bias=inputs.bias.detach().requires_grad_())
    result = forward(spec, inputs)
    dout, into_lse = upstream(result)
    grads = backward(spec, inputs, result, dout, into_lse if dlse else None)
    named = {"out": result.out, "lse": result.lse, "max_logit": result.max_logit}
    named |= {f"d{name}": grad for name, grad in grads._asdict().items()}
    return {k: t for k, t in named.items() if t is not None}, dout, into_lse if dlse else None


def expected(
    spec: Spec, inputs: Inputs, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """The same names from the reference, its gradients by autograd."""
    leaves = {
        name: t.detach().to(dtype).requires_grad_()
        for name in FLOAT_INPUTS
        if (t := getattr(inputs, name)) is not None
    }
    out, lse, max_logit = attention_reference(spec, inputs._replace(**leaves), dtype)
    loss = (out * dout.to(dtype)).sum()
    if dlse is not None:
        # A row with nothing in its softmax has an LSE of -inf, which has no gradient.
        loss = loss + (torch.where(lse == -math.inf, 0.0, lse) * dlse.to(dtype)).sum()
    grads: Iterable[Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:  # without a batch entry nothing depends on anything
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {"out": out.detach(), "lse": lse.detach(), "max_logit": max_logit}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        named[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return named


def assert_matches(actual: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert actual.keys() == wanted.keys()
    wrong = {name: error(actual[name], wanted[name]) for name in wanted}
    assert {name: e for name, e in wrong.items() if not e <= tolerance} == {}


def assert_errs_little_more(
    actual: dict[str, Tensor],
    wanted: dict[str, Tensor],
    plain: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    ulps: int = 2,
    scale: float = 0.0,
) -> None:
    """At most twice (gradients: thrice) the error of the same computation in plain PyTorch, and some ulps.

    An ulp is that of the largest value, or of ``scale`` where that is larger.
    """
    assert actual.keys() == wanted.keys()
    for name in wanted:
        factor = 3 if name.startswith("d") else 2
        finite = wanted[name][wanted[name].isfinite()]
        unit = torch.finfo(dtype).eps * max(scale, finite.abs().max().item() if finite.numel() else 0.0)
        allowed = factor * error(plain[name], wanted[name]) + ulps * unit
        assert error(actual[name], wanted[name]) <= allowed, name


def poison(t: Tensor, lengths: list[int]) -> Tensor:
    """NaN in the rows of ``[b, h, s, ...]`` past each length."""
    t = t.clone()
    for n, length in enumerate(lengths):
        t[n, :, length:] = math.nan
    return t


def spoilt(spec: Spec, inputs: Inputs, t: Tensor, side: str) -> Tensor:
    """``t``, which lies as q (side "q") or as k and v ("kv"), with NaN in every row of no sequence."""
    rows = torch.arange(t.shape[0 if spec.packed else 2])
    if spec.packed:
        cu = getattr(inputs, f"cu_seqlens_{side}")
        padded = getattr(inputs, f"cu_seqlens_{side}_padded")
        begin = (cu if padded is None else padded)[: len(cu) - 1, None]
        real = ((rows >= begin) & (rows < begin + cu.diff()[:, None])).any(0)
        return torch.where(real[:, None, None], t, math.nan)
    lengths = getattr(inputs, f"seqlens_{side}")
    if lengths is None:
        return t
    outside = (rows >= lengths[:, None])[:, None, :, None].expand(t.shape)
    return t.clone(memory_format=torch.preserve_format).masked_fill_(outside, math.nan)


def with_garbage(spec: Spec, inputs: Inputs) -> Inputs:
    """The same call with NaN in the rows of q, k and v that belong to no sequence."""
    q, k, v = (spoilt(spec, inputs, t, s) for t, s in zip(inputs[:3], ("q", "kv", "kv"), strict=True))
    return inputs._replace(q=q, k=k, v=v)


def merge(parts: list[Result]) -> Result:
    """The whole row's out and lse from those of parts of its keys."""
    lses = torch.stack([part.lse for part in parts])
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0.0))
    return Result(sum(w[..., None] * part.out for w, part in zip(weights, parts, strict=True)), lse)


class Observed(TorchDispatchMode):
    """The largest result any operation had, and how often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        # An expanded view has many elements and no memory of its own.
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return result


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "as made": lambda t: t,
    "sequence before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "head_dim outermost": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second element": lambda t: torch.stack([t, t + 1], dim=-1).flatten(-2)[..., ::2],
    "at an odd offset": lambda t: torch.cat([t.new_ones(1), t.flatten()])[1:].view(t.shape),
}
