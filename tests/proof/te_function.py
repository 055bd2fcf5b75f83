"""TransformerEngine's own ``get_attention_backend``, run here: its Python with its heavy imports stubbed, its
query of cuDNN compiled from its C++ with what it asks of CUDA stated.

    TRANSFORMER_ENGINE_FOR_TESTS=DIR  # a checkout of NVIDIA/TransformerEngine, or several, parted by ":"

Nothing of TransformerEngine is in this repository. It takes g++.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import os
import re
import subprocess
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from packaging.version import Version as Written

from attnsel import AttentionParams, Environment
from attnsel.environment.versions import Version

VARIABLE = "TRANSFORMER_ENGINE_FOR_TESTS"
_UTILS = "transformer_engine/pytorch/attention/dot_product_attention/utils.py"
_QUERY = "transformer_engine/common/fused_attn/fused_attn.cpp"
_RAGGED = "transformer_engine/common/fused_attn/utils.cu"
_HEADER = "transformer_engine/common/include/transformer_engine/fused_attn.h"
_PRELUDE = r"""
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <string>
static int g_arch = 0; static size_t g_cudnn = 0;
extern "C" void te_state(int arch, size_t cudnn) { g_arch = arch; g_cudnn = cudnn; }
static size_t cudnnGetVersion() { return g_cudnn; }
namespace transformer_engine {
namespace cuda { static int current_device() { return 0; } static int sm_arch(int) { return g_arch; } }
enum class DType { kInt32, kInt64 };
template <typename T> static T getenv(const char* name, T value) {
  const char* text = std::getenv(name); return text ? static_cast<T>(std::atoi(text)) : value; }
}
using namespace transformer_engine;
#define NVTE_CHECK(...)
#define NVTE_ERROR(...) std::abort()
enum NVTEDType { kNVTEFloat16 = 4, kNVTEBFloat16 = 5, kNVTEFloat8E4M3 = 6, kNVTEFloat8E5M2 = 7, kOther = 1 };
"""
_DTYPES = {"fp16": 4, "bf16": 5, "fp8_e4m3": 6, "fp8_e5m2": 7}


def checkouts() -> list[Path]:
    return [Path(part) for part in os.environ.get(VARIABLE, "").split(":") if part]


def _function(text: str, start: str) -> str:
    """From ``start`` to the first brace at the beginning of a line."""
    begin = text.index(start)
    return text[begin : text.index("\n}", begin) + 3]


def _compiled(root: Path, folder: Path) -> ctypes.CDLL:
    source, header = (root / _QUERY).read_text(), (root / _HEADER).read_text()
    enums = "\n".join(re.findall(r"enum NVTE_\w+ \{.*?\};", header, re.DOTALL))
    ragged = _function((root / _RAGGED).read_text(), "DType get_ragged_offset_dtype(")
    names = [
        "NVTE_QKV_Layout_Group nvte_get_qkv_layout_group(",
        "NVTE_QKV_Format nvte_get_qkv_format(",
        "NVTE_QKV_Format nvte_get_q_format(",
        "NVTE_QKV_Format nvte_get_kv_format(",
    ]
    parts = [_function(source, name) for name in names]
    query = _function(source, "NVTE_Fused_Attn_Backend nvte_get_fused_attn_backend(")
    ragged = f"namespace transformer_engine {{ namespace fused_attn {{ {ragged} }} }}"
    text = "\n".join([_PRELUDE, enums, ragged, *parts, 'extern "C" {', query, "}"])
    library = folder / f"query-{hashlib.sha256(text.encode()).hexdigest()[:12]}.so"
    if not library.exists():
        file = library.with_suffix(".cpp")
        file.write_text(text)
        subprocess.run(["g++", "-shared", "-fPIC", "-w", "-O1", str(file), "-o", str(library)], check=True)
    found = ctypes.CDLL(str(library))
    found.arguments = query[: query.index("{")].count(",") + 1  # type: ignore[attr-defined]
    return found


class _Any:
    """A class that nothing is an instance of."""


def _stubs() -> dict[str, types.ModuleType]:
    made: dict[str, types.ModuleType] = {}

    class Stub(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (_Any,), {}) if name[:1].isupper() else (lambda *a, **k: None)

    names = ["transformer_engine_torch", "transformer_engine", "transformer_engine.common"]
    names += ["transformer_engine.common.recipe", "transformer_engine.pytorch"]
    for name in names:
        made[name] = Stub(name)
    made["transformer_engine"].__version__ = "0"  # type: ignore[attr-defined]
    return made


class TransformerEngine:
    """One checkout."""

    def __init__(self, root: Path, folder: Path) -> None:
        written = (root / "build_tools/VERSION.txt").read_text().strip()
        self.version = Version.parse(re.sub(r"\.dev.*", "", written))
        self.library = _compiled(root, folder)
        self.arch, self.cudnn = 90, Version(9, 1)
        text = (root / _UTILS).read_text()
        stubs = _stubs()
        for name in set(re.findall(r"^(?:from|import) (transformer_engine[\w.]*)", text, re.MULTILINE)):
            stubs.setdefault(name, type(stubs["transformer_engine"])(name))
        enums = {
            "QKVLayout": _Named(),
            "AttnBiasType": _Named(),
            "AttnMaskType": _Named(),
            "SoftmaxType": _Named(),
            "FusedAttnBackend": _Backend,
            "TE_DType": _Named(),
        }
        stubs["transformer_engine_torch"].get_fused_attn_backend = self._query  # type: ignore[attr-defined]
        self.module = types.ModuleType("te_utils_under_test")
        sys.modules["te_utils_under_test"] = self.module
        with mock.patch.dict(sys.modules, stubs):
            exec(compile(text, _UTILS, "exec"), self.module.__dict__)
        self.module.__dict__.update(enums)
        held: Any = self.module
        held.get_device_compute_capability = lambda: divmod(self.arch, 10)
        held.get_cudnn_version = lambda: tuple(self.cudnn[:3])
        held.get_fp8_te_dtype = lambda recipe, fprop_tensor=True: "fp8_e4m3"
        held.is_in_onnx_export_mode = lambda: False
        held.tex = stubs["transformer_engine_torch"]

    def _query(
        self, training: bool, q_type: Any, kv_type: Any, layout: str, bias: str, mask: str, *rest: Any
    ) -> int:
        header = [int(training), _DTYPES.get(_dtype(q_type), 1), _DTYPES.get(_dtype(kv_type), 1)]
        values: list[Any] = [*header, _LAYOUTS[layout], _BIASES.index(bias), _MASKS.index(mask)]
        rest = list(rest)
        if isinstance(rest[0], str):
            values.append(_SOFTMAX.index(rest.pop(0)))  # type: ignore[attr-defined]
        dropout, *numbers = rest
        call = [ctypes.c_int(value) for value in values] + [ctypes.c_float(dropout)]
        call += [ctypes.c_bool(n) if isinstance(n, bool) else ctypes.c_int64(n) for n in numbers]
        assert len(call) == self.library.arguments, (len(call), self.library.arguments)
        number = self.cudnn.major * 10_000 + self.cudnn.minor * 100 + self.cudnn.patch
        if self.cudnn.major < 9:
            number = self.cudnn.major * 1_000 + self.cudnn.minor * 100 + self.cudnn.patch
        self.library.te_state(self.arch, ctypes.c_size_t(number))
        return int(self.library.nvte_get_fused_attn_backend(*call))

    def choice(
        self, p: AttentionParams, env: Environment, window: tuple[int, int], switches: dict[str, str]
    ) -> tuple[str, tuple[bool, bool, bool]]:
        """What it selects, and which of FlashAttention, FusedAttention and the unfused one survive."""
        self.arch, self.cudnn = env.arch or 0, env.cudnn or Version(0)
        self._installed(env)
        known = {field.name for field in fields(self.module.AttentionParams)}
        asked = {name: value for name, value in _fields(p, window).items() if name in known}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
        with mock.patch.dict(os.environ, {**clean, **switches}, clear=True):
            found = self.module.get_attention_backend(self.module.AttentionParams(**asked))
        use_flash, version, use_fused, _, use_unfused, every = found
        if use_flash:
            name = f"FlashAttention {Written(str(version)).major}"
        else:
            name = "FusedAttention" if use_fused else "UnfusedDotProductAttention" if use_unfused else "none"
        return name, tuple(bool(one) for one in every[:3])  # type: ignore[return-value]

    def _installed(self, env: Environment) -> None:
        utils = self.module.FlashAttentionUtils
        two, three, four = env.flash_attn, env.flash_attn_3, env.flash_attn_4
        lowest = utils.version_required_blackwell if self.arch >= 100 else Written("2.1.1")
        version = Written("0" if two is None else str(two))
        exclusive = hasattr(utils, "is_version_supported")
        below = version < utils.max_version if exclusive else version <= utils.max_version
        utils.is_installed = two is not None and lowest <= version and below
        utils.version = version
        utils.version_required = Written("2.1.1")
        for name, least in (
            ("v2_3_plus", "2.3"),
            ("v2_4_plus", "2.4"),
            ("v2_4_1_plus", "2.4.1"),
            ("v2_5_plus", "2.5"),
        ):
            setattr(utils, name, version >= Written(least))
        utils.v3_is_installed, utils.fa3_version = three is not None, Written(str(three or 0))
        utils.v4_is_installed, utils.fa4_version = four is not None, Written(str(four or 0))
        utils.v4_validate_head_dims = _validate
        utils.warning_printed = utils.v3_warning_printed = utils.v4_warning_printed = True


def _validate(d: int, dv: int, capability: int, alignment: int) -> None:
    """flash_attn/cute/interface.py, _validate_head_dims of 4.0.0b24, in other words."""
    even = d % alignment == 0 and dv % alignment == 0
    small = 8 <= d <= 128 and 8 <= dv <= 128
    pairs = (d, dv) in ((192, 128), (64, 512), (512, 512), (256, 256))
    if capability == 9:
        assert all((8 <= d <= 256, 8 <= dv <= 256, even))
    elif capability in (10, 11):
        assert all((even, small or pairs))


class _Backend(enum.IntEnum):
    F16_max512_seqlen = 0
    F16_arbitrary_seqlen = 1
    FP8 = 2
    No_Backend = -1


class _Named(dict):
    """A mapping of every name to itself."""

    def __missing__(self, key: Any) -> Any:
        return key


def _dtype(value: Any) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8_e4m3"}
    return names.get(value, str(value))


_TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
}
_BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
_MASKS = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
)
_SOFTMAX = ("vanilla", "off-by-one", "learnable")
_LAYOUTS = {
    name: number
    for number, name in enumerate(
        (
            "sb3hd",
            "sbh3d",
            "sbhd_sb2hd",
            "sbhd_sbh2d",
            "sbhd_sbhd_sbhd",
            "bs3hd",
            "bsh3d",
            "bshd_bs2hd",
            "bshd_bsh2d",
            "bshd_bshd_bshd",
            "t3hd",
            "th3d",
            "thd_t2hd",
            "thd_th2d",
            "thd_thd_thd",
            "sbhd_bshd_bshd",
            "bshd_sbhd_sbhd",
            "thd_bshd_bshd",
            "thd_sbhd_sbhd",
            "paged_kv_bshd_bshd_bshd",
            "paged_kv_bshd_sbhd_sbhd",
            "paged_kv_sbhd_bshd_bshd",
            "paged_kv_sbhd_sbhd_sbhd",
            "paged_kv_thd_bshd_bshd",
            "paged_kv_thd_sbhd_sbhd",
            "bhsd_bhsd_bhsd",
        )
    )
}


class _Kind(enum.Enum):
    delayed = "delayed"
    float8_current_scaling = "current"
    mxfp8 = "mxfp8"
    float8_block_scaling = "block"
    nvfp4 = "nvfp4"


def _recipe(p: AttentionParams) -> Any:
    recipe = p.recipe
    if recipe is None:
        return None
    made = types.SimpleNamespace(
        fp8_dpa=recipe.fp8_dpa or recipe.fp8_mha, fp8_mha=recipe.fp8_mha, fp8_format=recipe.fp8_format
    )
    for kind in _Kind:
        setattr(made, kind.name, lambda kind=kind: recipe.kind == kind.value)  # type: ignore[attr-defined]
    return made


def _fields(p: AttentionParams, window: tuple[int, int]) -> dict[str, Any]:
    cached = p.kv_cache != "none"
    cache = (
        types.SimpleNamespace(is_paged=p.kv_cache == "paged", page_size=p.page_size or 0) if cached else None
    )
    return {
        "qkv_type": torch.Tensor,
        "qkv_dtype": _TORCH[p.dtype],
        "qkv_layout": p.qkv_layout,
        "batch_size": p.batch_size,
        "num_heads": p.num_heads,
        "num_gqa_groups": p.num_gqa_groups,
        "max_seqlen_q": p.max_seqlen_q,
        "max_seqlen_kv": p.max_seqlen_kv,
        "head_dim_qk": p.head_dim_qk,
        "head_dim_v": p.head_dim_v,
        "attn_mask_type": p.attn_mask_type,
        "window_size": window,
        "bottom_right_diagonal": p.bottom_right_diagonal,
        "alibi_slopes_shape": p.alibi_slopes_shape,
        "core_attention_bias_type": p.core_attention_bias_type,
        "core_attention_bias_shape": p.core_attention_bias_shape if p.has_bias else None,
        "core_attention_bias_requires_grad": p.core_attention_bias_requires_grad,
        "pad_between_seqs": p.pad_between_seqs,
        "attention_dropout": p.attention_dropout,
        "context_parallel": p.cp_size > 1,
        "cp_comm_type": p.cp_comm_type,
        "cp_size": p.cp_size,
        "deterministic": p.deterministic,
        "is_training": p.is_training,
        "fp8": p.fp8,
        "fp8_meta": {"recipe": _recipe(p)} if p.fp8 else None,
        "inference_params": cache,
        "softmax_type": p.softmax_type,
        "return_max_logit": p.return_max_logit,
        "cuda_graph": p.cuda_graph,
    }
