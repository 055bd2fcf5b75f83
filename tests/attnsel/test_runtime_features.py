"""The public calls against the definition of attention: every feature, on every candidate a CPU can run."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnsel import DotProductAttention, NoBackendError, attention
from attnsel.backends.contract import Inputs, Spec
from reference import attention_reference

torch.set_num_threads(1)

BACKENDS = ("sdpa.flash", "sdpa.math", "tiled")
ONLY_TILED = ("softcap", "softmax_type", "return_max_logit")  # what no SDPA kernel can express
LENGTHS_Q, LENGTHS_KV = (9, 4, 0), (9, 6, 3)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """One call. ``asks`` are plain arguments of ``attention``; ``tensors`` names those that are made."""

    name: str
    asks: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # over b 2, h 4, g 4, s_q 9, s_kv 9, d 8, e 8
    dtype: torch.dtype = torch.float64


CROSS, TALL = {"s_q": 5}, {"s_kv": 5}
PADDED = {"b": 3}
CU, MASKS = {"lengths": "cu_seqlens"}, {"lengths": "attention_mask"}


def mask_type(name: str, **asks: Any) -> dict[str, Any]:
    return {"attn_mask_type": name, **asks}


CASES = [
    Case("plain"),
    Case("gqa", sizes={"g": 2}),
    Case("mqa, causal", mask_type("causal"), sizes={"g": 1}),
    Case("scale", {"softmax_scale": 0.7}),
    Case("negative scale", {"softmax_scale": -0.7}),
    Case("head_dim_v larger", sizes={"e": 16}),
    Case("head_dim_v smaller, gqa", mask_type("causal"), sizes={"e": 4, "g": 2}),
    Case("one query", mask_type("causal_bottom_right"), sizes={"s_q": 1}),
    Case("causal", mask_type("causal")),
    Case("causal, fewer queries", mask_type("causal"), sizes=CROSS),
    Case("causal, more queries", mask_type("causal"), sizes=TALL),
    Case("causal_bottom_right", mask_type("causal_bottom_right")),
    Case("causal_bottom_right, fewer queries", mask_type("causal_bottom_right"), sizes=CROSS),
    Case("causal_bottom_right, rows without keys", mask_type("causal_bottom_right"), sizes=TALL),
    Case("window", {"window_size": (2, 1)}),
    Case("window, bottom right by default", {"window_size": (2, 1)}, sizes=CROSS),
    Case("window, top left", {"window_size": (2, 1), "bottom_right_diagonal": False}, sizes=CROSS),
    Case("window, rows without keys", {"window_size": (1, 1), "bottom_right_diagonal": False}, sizes=TALL),
    Case("window, no right bound", {"window_size": (2, -1)}),
    Case("causal window", mask_type("causal", window_size=(3, 0))),
    Case("causal window, gqa", mask_type("causal_bottom_right", window_size=(2, 0)), sizes={"g": 2, **CROSS}),
    Case("padding", mask_type("padding"), CU, PADDED),
    Case("padding, gqa", mask_type("padding"), CU, {**PADDED, "g": 2}),
    Case("padding, cross", mask_type("padding"), {"lengths": "cu_seqlens, cross"}, {**PADDED, "s_kv": 11}),
    Case("padding mask", mask_type("padding"), MASKS, PADDED),
    Case("padding mask, cross", mask_type("padding"), {"lengths": "masks, cross"}, {**PADDED, "s_kv": 11}),
    Case("padding_causal", mask_type("padding_causal"), CU, PADDED),
    Case("padding_causal mask", mask_type("padding_causal"), MASKS, PADDED),
    Case("padding_causal, cross", mask_type("padding_causal"), {"lengths": "cu_seqlens, cross"}, PADDED),
    Case("padding bottom right", mask_type("padding_causal_bottom_right"), CU, PADDED),
    Case(
        "padding bottom right, cross",
        mask_type("padding_causal_bottom_right"),
        {"lengths": "masks, cross"},
        PADDED,
    ),
    Case(
        "padding window", mask_type("padding", window_size=(2, 2)), {"lengths": "cu_seqlens, cross"}, PADDED
    ),
    Case("arbitrary", mask_type("arbitrary"), {"attention_mask": "b h s_q s_kv"}),
    Case("arbitrary, of keys", mask_type("arbitrary"), {"attention_mask": "b 1 1 s_kv"}),
    Case("arbitrary, of two dimensions", mask_type("arbitrary"), {"attention_mask": "s_q s_kv"}, CROSS),
    Case("arbitrary, whole rows", mask_type("arbitrary"), {"attention_mask": "1 h s_q 1"}),
    Case(
        "arbitrary and window", mask_type("arbitrary", window_size=(3, 3)), {"attention_mask": "b 1 s_q s_kv"}
    ),
    Case("bias", {}, {"post_scale_bias": "b h s_q s_kv"}),
    Case("bias with gradient", {}, {"post_scale_bias": "1 h s_q s_kv", "bias_grad": True}),
    Case(
        "bias with gradient, causal",
        mask_type("causal"),
        {"post_scale_bias": "b 1 s_q s_kv", "bias_grad": True},
    ),
    Case("bias over keys, gqa", {}, {"post_scale_bias": "1 1 1 s_kv", "bias_grad": True}, {"g": 2}),
    Case("bias of two dimensions", {}, {"post_scale_bias": "s_q s_kv", "bias_grad": True}),
    Case("pre_scale_bias", {"softmax_scale": 0.3}, {"pre_scale_bias": "1 h s_q s_kv"}),
    Case(
        "pre_scale_bias with gradient",
        mask_type("causal"),
        {"pre_scale_bias": "1 h s_q s_kv", "bias_grad": True},
    ),
    Case("bias and padding", mask_type("padding"), {**CU, "post_scale_bias": "b 1 s_q s_kv"}, PADDED),
    Case("alibi", {"core_attention_bias_type": "alibi"}),
    Case("alibi of six heads", mask_type("causal", core_attention_bias_type="alibi"), sizes={"h": 6, "g": 6}),
    Case("alibi, cross", {"core_attention_bias_type": "alibi"}, sizes=CROSS),
    Case("alibi slopes", mask_type("causal"), {"alibi_slopes": "h"}),
    Case("alibi slopes per sequence", {}, {"alibi_slopes": "b h"}, {"g": 2}),
    Case("alibi and padding", mask_type("padding"), {**CU, "alibi_slopes": "h"}, PADDED),
    Case("softcap", {"softcap": 1.3}),
    Case("softcap, causal window", mask_type("causal", softcap=1.3, window_size=(3, 0)), sizes={"g": 2}),
    Case("softcap and bias", {"softcap": 1.3}, {"post_scale_bias": "1 h s_q s_kv", "bias_grad": True}),
    Case("off-by-one", {"softmax_type": "off-by-one"}),
    Case(
        "off-by-one, rows without keys",
        mask_type("causal_bottom_right", softmax_type="off-by-one"),
        sizes=TALL,
    ),
    Case("learnable", mask_type("causal"), {"softmax_offset": "h"}),
    Case("learnable and padding", mask_type("padding"), {**CU, "softmax_offset": "h"}, {**PADDED, "g": 2}),
    Case("max logit", mask_type("causal", return_max_logit=True)),
    Case(
        "max logit of rows without keys", mask_type("causal_bottom_right", return_max_logit=True), sizes=TALL
    ),
]
PACKED = [
    Case("packed", mask_type("padding"), CU),
    Case("packed, cross", mask_type("padding"), {"lengths": "cu_seqlens, cross"}),
    Case("packed, causal, gqa", mask_type("padding_causal"), CU, {"g": 2}),
    Case("packed, bottom right", mask_type("padding_causal_bottom_right"), {"lengths": "cu_seqlens, cross"}),
    Case("packed, gaps", mask_type("padding_causal"), {"lengths": "cu_seqlens, cross", "gap": 2}),
    Case("packed, window", mask_type("padding", window_size=(2, 1)), CU, {"e": 4}),
    Case("packed, longest given", mask_type("padding", max_seqlen_q=12, max_seqlen_kv=11), CU),
    Case("packed, sinks", mask_type("padding"), {**CU, "softmax_offset": "h"}),
    Case("packed, alibi", mask_type("padding", core_attention_bias_type="alibi"), CU),
    Case("packed, bias", mask_type("padding"), {**CU, "post_scale_bias": "1 h s_q s_kv", "bias_grad": True}),
]
by_name = {case.name: case for case in CASES + PACKED}


class Call:
    """A case as arguments of ``attention`` in one format, and the same as the reference takes it."""

    def __init__(self, case: Case, fmt: str) -> None:
        self.case, self.fmt = case, fmt
        self.size = {"b": 2, "h": 4, "g": 4, "s_q": 9, "s_kv": 9, "d": 8, "e": 8, "1": 1, **case.sizes}
        self.gen = torch.Generator().manual_seed(0)
        self.arguments: dict[str, Any] = {"qkv_format": fmt, **case.asks}
        self.leaves: dict[str, Tensor] = {}
        self.inputs: dict[str, Any] = {}
        self._lengths()
        if fmt == "thd":
            shapes = ("t_q h d", "t_kv g d", "t_kv g e")
        else:
            shapes = ("b h s_q d", "b g s_kv d", "b g s_kv e")
        for name, shape in zip("qkv", shapes, strict=True):
            self.leaves[name] = self.normal(shape).requires_grad_()
        self._others()
        out_shape = (*self.leaves["q"].shape[:-1], self.size["e"])
        self.dout = torch.randn(out_shape, generator=self.gen, dtype=torch.float64)

    def normal(self, shape: str) -> Tensor:
        sizes = [self.size[name] for name in shape.split()]
        return torch.randn(sizes, generator=self.gen, dtype=torch.float64).to(self.case.dtype)

    def _lengths(self) -> None:
        how, gap = self.case.tensors.get("lengths"), self.case.tensors.get("gap", 0)
        if how is None:
            return
        q = LENGTHS_Q
        kv = LENGTHS_KV if "cross" in how else q
        cu_q, cu_kv = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (q, kv))
        if self.fmt == "thd":
            self.size |= {"b": 3, "s_q": max(q), "s_kv": max(kv)}
            self.size |= {"t_q": sum(q) + 3 * gap, "t_kv": sum(kv) + 3 * gap}
            self.arguments |= {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
            if gap:
                steps = gap * torch.arange(4, dtype=torch.int32)
                self.arguments |= {"cu_seqlens_q_padded": cu_q + steps, "cu_seqlens_kv_padded": cu_kv + steps}
            self.inputs = {name: t for name, t in self.arguments.items() if name.startswith("cu_seqlens")}
            return
        self.inputs = {"seqlens_q": torch.tensor(q), "seqlens_kv": torch.tensor(kv)}
        if "cu_seqlens" in how:
            self.arguments |= {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
            return
        masks = [
            (torch.arange(self.size[s]) >= torch.tensor(n)[:, None])[:, None, None]
            for s, n in (("s_q", q), ("s_kv", kv))
        ]
        self.arguments["attention_mask"] = tuple(masks) if "cross" in how else masks[0]

    def _others(self) -> None:
        tensors = self.case.tensors
        if "attention_mask" in tensors:
            mask = self.normal(tensors["attention_mask"]) > 0.3
            self.arguments["attention_mask"] = self.inputs["attn_mask"] = mask
        for kind in ("pre_scale_bias", "post_scale_bias"):
            if kind in tensors:
                bias = self.normal(tensors[kind]).requires_grad_(tensors.get("bias_grad", False))
                self.arguments |= {"core_attention_bias_type": kind, "core_attention_bias": bias}
                self.inputs["bias"] = self.leaves["bias"] = bias
        if "alibi_slopes" in tensors:
            slopes = self.normal(tensors["alibi_slopes"]).float().abs()
            self.arguments |= {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
            self.inputs["alibi_slopes"] = slopes
        elif self.arguments.get("core_attention_bias_type") == "alibi":
            table = {4: [2**-2, 2**-4, 2**-6, 2**-8], 6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]}
            self.inputs["alibi_slopes"] = torch.tensor(table[self.size["h"]])
        if "softmax_offset" in tensors:
            sink = self.normal(tensors["softmax_offset"]).requires_grad_()
            self.arguments |= {"softmax_type": "learnable", "softmax_offset": sink}
            self.inputs["softmax_offset"] = self.leaves["softmax_offset"] = sink

    def to_caller(self, t: Tensor) -> Tensor:
        order = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "bhsd": (0, 1, 2, 3), "thd": (0, 1, 2)}
        return t.permute(order[self.fmt])

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.to_caller(self.leaves[name]) for name in "qkv")
        return q, k, v

    def spec(self) -> Spec:
        asks = self.case.asks
        kind = asks.get("attn_mask_type", "no_mask")
        left, right = asks.get("window_size", (-1, -1))
        anchored = "bottom_right" in kind if "causal" in kind else asks.get("bottom_right_diagonal", True)
        scale = asks.get("softmax_scale", self.size["d"] ** -0.5)
        return Spec(
            packed=self.fmt == "thd",
            softmax_scale=scale,
            window_left=left,
            window_right=0 if "causal" in kind else right,
            bottom_right=anchored,
            softcap=asks.get("softcap", 0.0),
            softmax_type=self.arguments.get("softmax_type", "vanilla"),
        )

    def expected(self) -> dict[str, Tensor]:
        """out in the caller's format, gradients of all leaves, lse and max_logit, in float64."""
        doubles = {
            name: t.detach().double().requires_grad_(t.requires_grad) for name, t in self.leaves.items()
        }
        spec, inputs = self.spec(), {**self.inputs, **doubles}
        if "pre_scale_bias" in self.case.tensors:
            inputs["bias"] = inputs["bias"] * spec.softmax_scale
        out, lse, max_logit = attention_reference(spec, Inputs(**inputs))
        loss = (out * self.dout).sum()
        wanted = {name: t for name, t in doubles.items() if t.requires_grad}
        grads = torch.autograd.grad(loss, list(wanted.values()))
        named = {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}
        return {"out": self.to_caller(out.detach()), "lse": lse.detach(), "max_logit": max_logit, **named}

    def refused(self, backend: str) -> bool:
        """Whether this candidate is not able to run this call on a CPU."""
        if backend == "tiled":
            return False
        if self.fmt == "thd" or any(self.arguments.get(name, "vanilla") != "vanilla" for name in ONLY_TILED):
            return True
        if backend == "sdpa.math":
            return bool(self.arguments.get("return_lse"))
        bias_grad = self.case.tensors.get("bias_grad", False)
        return self.size["d"] != self.size["e"] or bias_grad

    def gradients(self, out: Tensor) -> dict[str, Tensor]:
        wanted = {name: t for name, t in self.leaves.items() if t.requires_grad}
        dout = self.to_caller(self.dout).to(out.dtype).reshape(out.shape)
        grads = torch.autograd.grad(out, list(wanted.values()), dout)
        return {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}


def assert_close(actual: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, t in actual.items():
        scale = 1.0 + wanted[name].nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        torch.testing.assert_close(
            t.double(),
            wanted[name],
            rtol=0.0,
            atol=TOLERANCE[dtype] * scale,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def check(call: Call, backend: str | None) -> None:
    if backend is not None and call.refused(backend):
        with pytest.raises(NoBackendError) as caught:
            attention(*call.qkv, **call.arguments, backend=backend)
        selection = caught.value.selection
        assert selection.backend is None
        assert selection[backend].reasons
        assert all(reason.code in str(caught.value) for reason in selection[backend].reasons)
        return
    result = attention(*call.qkv, **call.arguments, backend=backend)
    out = result[0] if isinstance(result, tuple) else result
    actual = {"out": out.detach(), **call.gradients(out)}
    if call.arguments.get("return_lse"):
        actual["lse"] = result[1]
    if call.arguments.get("return_max_logit"):
        actual["max_logit"] = result[-1]
    assert out.dtype == call.case.dtype
    assert_close(actual, call.expected(), call.case.dtype)


def formats(case: Case) -> Iterator[str]:
    return iter(("thd",) if case in PACKED else ("bshd", "sbhd", "bhsd"))


GRID = [pytest.param(case, fmt, id=f"{case.name}-{fmt}") for case in CASES + PACKED for fmt in formats(case)]


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(("case", "fmt"), GRID)
def test_every_candidate_gives_the_definition_or_all_its_reasons(
    case: Case, fmt: str, backend: str | None
) -> None:
    check(Call(case, fmt), backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [
        "causal",
        "gqa",
        "head_dim_v larger",
        "padding_causal, cross",
        "arbitrary",
        "bias with gradient",
        "pre_scale_bias",
        "alibi slopes",
        "causal window, gqa",
        "learnable",
        "softcap",
    ],
)
def test_lower_precision_agrees_within_its_rounding(name: str, backend: str, dtype: torch.dtype) -> None:
    check(Call(replace(by_name[name], dtype=dtype), "bshd"), backend)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("plain", "bshd"),
        ("causal_bottom_right, rows without keys", "sbhd"),
        ("padding_causal, cross", "bhsd"),
        ("gqa", "bhsd"),
        ("learnable", "bshd"),
        ("packed, cross", "thd"),
    ],
)
def test_lse_is_the_natural_log_of_the_softmax_denominator(name: str, fmt: str, backend: str | None) -> None:
    case = by_name[name]
    check(Call(replace(case, asks={**case.asks, "return_lse": True}), fmt), backend)


def test_lse_and_max_logit_come_in_this_order() -> None:
    call = Call(Case("", {"return_lse": True, "return_max_logit": True}), "bshd")
    out, lse, max_logit = attention(*call.qkv, **call.arguments)
    assert (out.shape, lse.shape, max_logit.shape) == ((2, 9, 4, 8), (2, 4, 9), (4,))
    assert not lse.requires_grad
    assert not max_logit.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_keys_give_exact_zeros(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, s, 2, 8, dtype=dtype, requires_grad=True) for s in (6, 4, 4))
    out = attention(q, k, v, attn_mask_type="causal_bottom_right", backend=backend)
    out.sum().backward()
    assert (out[:, :2] == 0).all()
    assert q.grad is not None
    assert (q.grad[:, :2] == 0).all()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize(
    "sizes",
    [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2)],
    ids=["no sequence", "no query", "no key"],
)
@pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
def test_empty_tensors_give_empty_or_zero_results(sizes: tuple[int, ...]) -> None:
    b, s_q, s_kv, h = sizes
    q = torch.randn(b, s_q, h, 8, requires_grad=True)
    k, v = torch.randn(2, b, s_kv, h, 8, requires_grad=True).unbind(0)
    out = attention(q, k, v)
    assert out.shape == q.shape
    assert (out == 0).all()
    out.sum().backward()
    assert q.grad is not None
    assert (q.grad == 0).all()


# The module


MODULE_CASES = [case for case in CASES + PACKED if "max_seqlen_q" not in case.asks]


@pytest.mark.parametrize(
    ("case", "fmt"),
    [
        pytest.param(case, fmt, id=f"{case.name}-{fmt}")
        for case in MODULE_CASES
        for fmt in formats(case)
        if fmt != "bhsd"
    ],
)
def test_module_gives_the_definition_with_heads_side_by_side(case: Case, fmt: str) -> None:
    call = Call(case, fmt)
    arguments = dict(call.arguments)
    built = {
        name: arguments.pop(name)
        for name in (
            "qkv_format",
            "attn_mask_type",
            "window_size",
            "softcap",
            "softmax_scale",
            "softmax_type",
            "return_max_logit",
            "bottom_right_diagonal",
        )
        if name in arguments
    }
    built.setdefault("attn_mask_type", "no_mask")
    size = call.size
    module = DotProductAttention(size["h"], (size["d"], size["e"]), size["g"], **built)
    sink = arguments.pop("softmax_offset", None)
    if sink is not None:
        module.softmax_offset = torch.nn.Parameter(sink.detach().reshape(1, -1, 1, 1))
    result = module(*call.qkv, **arguments)
    out = result[0] if isinstance(result, tuple) else result
    wanted = call.expected()
    assert module.last_selection is not None
    assert module.last_selection.backend in BACKENDS
    actual = {"out": out.detach()}
    if sink is not None:
        (dsink,) = torch.autograd.grad(
            out, [module.softmax_offset], call.to_caller(call.dout).reshape(out.shape), retain_graph=True
        )
        actual["dsoftmax_offset"] = dsink.flatten()
        del call.leaves["softmax_offset"]
    actual |= call.gradients(out)
    wanted["out"] = wanted["out"].flatten(-2)
    assert_close(actual, wanted, case.dtype)


# Memory layouts


def shifted(t: Tensor, by: int) -> Tensor:
    """The same numbers, ``by`` elements into their storage."""
    return torch.cat([t.new_zeros(by), t.flatten()])[by:].view(t.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t.contiguous(),
    "second and third dimension swapped": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "first two dimensions swapped": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "head_dim outermost": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second element": lambda t: torch.stack([t, t + 1], dim=-1).flatten(-2)[..., ::2],
    "every second row": lambda t: torch.stack([t, t + 1], dim=2).flatten(1, 2)[:, ::2],
    "a slice of wider rows": lambda t: torch.cat([t + 1, t, t + 2], dim=-1)[
        ..., t.shape[-1] : 2 * t.shape[-1]
    ],
    "a slice of more heads": lambda t: torch.cat([t + 1, t, t + 2], dim=2)[:, :, t.shape[2] : 2 * t.shape[2]],
    "one element in": lambda t: shifted(t, 1),
    "eight elements in": lambda t: shifted(t, 8),
}
EXPANDED = {"batch": 0, "second dimension": 1, "third dimension": 2}


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    layouts=st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3),
    expanded=st.none() | st.sampled_from(sorted(EXPANDED)),
    fmt=st.sampled_from(["bshd", "sbhd", "bhsd"]),
    mask=st.sampled_from(["no_mask", "causal"]),
    backend=st.sampled_from([None, *BACKENDS]),
    dtype=st.sampled_from([torch.float64, torch.bfloat16]),
    d=st.sampled_from([1, 3, 8]),
    g=st.sampled_from([1, 4]),
)
def test_any_strides_give_the_same_numbers(
    layouts: tuple[str, ...],
    expanded: str | None,
    fmt: str,
    mask: str,
    backend: str | None,
    dtype: torch.dtype,
    d: int,
    g: int,
) -> None:
    call = Call(Case("", mask_type(mask), sizes={"d": d, "e": d, "g": g}, dtype=dtype), fmt)
    for name in "qkv":
        t = call.leaves[name].detach()
        if expanded is not None:
            # Expansion happens in the caller's order, so the leaf takes it in the kernel's.
            axis = EXPANDED[expanded]
            t = call.to_caller(t).narrow(axis, 0, 1).expand_as(call.to_caller(t))
            t = back(t, fmt)
        call.leaves[name] = t.contiguous().requires_grad_()
    strided = []
    for name, layout in zip("qkv", layouts, strict=True):
        t = call.to_caller(call.leaves[name])
        if expanded is not None:
            axis = EXPANDED[expanded]
            strided.append(t.narrow(axis, 0, 1).expand_as(t))
        else:
            strided.append(LAYOUTS[layout](t))
    out = attention(*strided, **call.arguments, backend=backend)
    wanted = call.expected()
    actual = {"out": out.detach()}
    if expanded is None:  # else a gradient is a sum over the expanded dimension
        actual |= call.gradients(out)
    assert_close(actual, wanted, dtype)


def back(t: Tensor, fmt: str) -> Tensor:
    """The caller's order brought to [b, h, s, d]."""
    return t.permute({"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}[fmt])


@pytest.mark.parametrize("packing", ["bs3hd", "bsh3d", "sb3hd"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_of_one_packed_tensor_need_no_copy_by_the_caller(packing: str, backend: str) -> None:
    b, s, h, d = 2, 7, 3, 8
    shape = {"bs3hd": (b, s, 3, h, d), "bsh3d": (b, s, h, 3, d), "sb3hd": (s, b, 3, h, d)}[packing]
    packed = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    q, k, v = packed.unbind(packing.index("3"))
    fmt = packing.replace("3", "")
    apart = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = attention(q, k, v, qkv_format=fmt, attn_mask_type="causal", backend=backend)
    wanted = attention(*apart, qkv_format=fmt, attn_mask_type="causal", backend="tiled")
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    out.square().sum().backward()
    wanted.square().sum().backward()
    assert packed.grad is not None
    grads = [t.grad for t in apart]
    torch.testing.assert_close(packed.grad, torch.stack(grads, dim=packing.index("3")), rtol=0, atol=1e-12)


def test_result_of_a_head_dim_of_one_is_finite() -> None:
    q, k, v = torch.randn(3, 2, 5, 2, 1).unbind(0)
    wanted = torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1), -1) @ v.transpose(1, 2)
    out = attention(q, k, v)
    assert math.isfinite(out.sum().item())
    torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd"])
def test_repeated_kv_heads_give_their_gradients_back(fmt: str) -> None:
    """No CPU kernel needs kv heads repeated; sdpa.efficient on a GPU does. Carried out here by hand."""
    from attnsel.runtime.bind import bind, bind_gradients
    from attnsel.runtime.call import NO_EXTRAS, config
    from attnsel.runtime.run import explain
    from attnsel.settings import current
    from attnsel.verdict import Adaptation

    call = Call(Case("", mask_type("causal"), sizes={"g": 2}), fmt)
    static = config(qkv_format=fmt, attn_mask_type="causal")
    selection = explain(static, *call.qkv)
    flash = selection["sdpa.flash"]._replace(adaptations=(Adaptation("expand_gqa", "", 0),))
    adapted = dataclasses.replace(selection, candidates=(flash,), backend="sdpa.flash")
    wanted = call.expected()
    out = bind(adapted, static, *call.qkv, NO_EXTRAS, True, current()).run(*call.qkv, NO_EXTRAS)
    assert_close({"out": out.detach(), **call.gradients(out)}, wanted, torch.float64)
    with torch.no_grad():
        grads = bind_gradients(adapted, static, current())(*call.qkv, NO_EXTRAS, call.to_caller(call.dout))
    named = {f"d{name}": back(grad, fmt) for name, grad in zip("qkv", grads[:3], strict=True)}
    assert_close(named, wanted, torch.float64)
