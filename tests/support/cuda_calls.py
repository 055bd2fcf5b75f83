"""The calls that kernels are asked on CUDA where there is no GPU: every feature in every form (sizes, layout,
dtype), on tensors that are shapes only. ``cuda_families`` says what is checked of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec

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
            if name.startswith("seqlens") and self.packed:
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
