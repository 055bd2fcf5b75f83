"""Calls of the public functions, one per feature and format, and what the definition gives for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec
from reference import attention_reference

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
        if backend in ("tiled", "triton"):
            return False
        if any(self.arguments.get(name, "vanilla") != "vanilla" for name in ONLY_TILED):
            return True
        if self.fmt == "thd":  # unpacked, unless that more than doubles the rows
            longest = (self.arguments.get(f"max_seqlen_{s}", self.size[f"s_{s}"]) for s in ("q", "kv"))
            rows = (self.size["t_q"], self.size["t_kv"])
            if any(3 * s > 2 * t for s, t in zip(longest, rows, strict=True)):
                return True
        if backend == "sdpa.math":
            return bool(self.arguments.get("return_lse"))
        return bool(self.case.tensors.get("bias_grad", False))

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
