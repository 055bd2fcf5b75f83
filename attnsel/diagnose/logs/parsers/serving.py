"""What vLLM and SGLang say of the attention backend that they chose, and of those that they did not."""

from __future__ import annotations

import re
from typing import Any

from attnsel.diagnose.logs.message import Facts, FirstOf, declared

# ---- vLLM ----------------------------------------------------------------------------------------------
# What vLLM says of the attention backend that it chose, and of those that it did not. Read: vllm-
# project/vllm v1/attention/backend.py (0014ca6b: validate_configuration), platforms/cuda.py (002db495),
# v1/attention/backends/fa_utils.py (00bd1493), and the selector of 0.4 to 0.8 in the issues named.

CHOOSE = (
    "--attention-backend NAME (VLLM_ATTENTION_BACKEND in older releases) with one that nothing speaks "
    "against; without the flag vLLM takes the first that is valid"
)

_CONFIG = re.compile(r"\b(\w{4,30})(?:=|: )('[^']{0,40}'|[\w.]{1,40})")
_BACKEND = re.compile(r"(\w{3,40}): \[([^\]\n]{0,400})\]")
_WHY = {
    "head_size": ("the head size", "FLASH210"),
    "dtype": ("the type of q, k and v", "FLASH200"),
    "kv_cache_dtype": ("the type of the cache (--kv-cache-dtype)", ""),
    "block_size": ("the block size (--block-size)", ""),
    "partial multimodal token full attention": ("prefixes of images that see all (mm_prefix)", ""),
    "MLA": ("MLA", ""),
    "non-MLA": ("models without MLA", ""),
    "attention sinks": ("attention sinks", "SDPA005"),
    "sink setting": ("attention sinks", "SDPA005"),
    "sparse": ("sparse attention", ""),
    "non-sparse": ("dense attention", ""),
    "compute capability": ("this GPU", ""),
    "per-head quant scales": ("scales per head", ""),
    "non-causal attention": ("attention that is not causal", ""),
    "batch invariance": ("batch invariance", ""),
    "KV connector": ("a KV connector", ""),
}
"""vLLM's reasons without " not supported", in words, and attnsel's rule where there is one."""


def _configuration(text: str) -> dict[str, Any]:
    """Fields of AttentionParams in vLLM's AttentionSelectorConfig."""
    stated = {name: value.strip("'") for name, value in _CONFIG.findall(text)}
    params: dict[str, Any] = {}
    if stated.get("head_size", "").isdigit():
        params["head_dim_qk"] = int(stated["head_size"])
    if stated.get("use_mla") == "True" and params.get("head_dim_qk") == 576:
        params["head_dim_v"] = 512
    if "dtype" in stated:
        params["dtype"] = stated["dtype"]
    if stated.get("has_sink") == "True":
        params["softmax_type"] = "learnable"
    if params:
        params["is_training"] = False
    return params


def _words(reasons: str) -> tuple[list[str], list[str]]:
    """Reasons as words, and rules that say the same."""
    words, codes = [], []
    for reason in (one.strip(" '\"") for one in reasons.split(",")):
        short, _, rest = reason.partition(" not supported")
        word, code = _WHY.get(short, (reason, "")) if not rest.strip() else (reason, "")
        words.append("a package that does not import" if reason == "ImportError" else word)
        codes += [code] if code else []
    return list(dict.fromkeys(word for word in words if word)), codes


def _every_backend(match: re.Match[str]) -> Facts:
    by_backend = {name: _words(reasons) for name, reasons in _BACKEND.findall(match["reasons"])}
    nearest = sorted(by_backend, key=lambda name: len(by_backend[name][0]))[:2]
    said = "; ".join(f"{name} lacks {', '.join(words)}" for name, (words, _) in by_backend.items())
    return {
        "text": match[0],
        "params": _configuration(match["config"]),
        "codes": tuple(dict.fromkeys(code for _, codes in by_backend.values() for code in codes)),
        "said": said,
        "nearest": " or ".join(f"{name} ({', '.join(by_backend[name][0])})" for name in nearest),
    }


def _one_backend(match: re.Match[str]) -> Facts:
    words, codes = _words(match["reasons"])
    return {"codes": tuple(dict.fromkeys(codes)), "said": ", ".join(words)}


_REASONS = r"with (?P<config>[^{]{0,700}?)\.? ?Reasons: (?P<reasons>\{[^}]{0,3000}\})"

_VLLM_MESSAGES = declared(
    "serving",
    "vLLM",
    {"every_backend": _every_backend, "one_backend": _one_backend},
    REASONS=_REASONS,
    CHOOSE=CHOOSE,
)


# ---- SGLang --------------------------------------------------------------------------------------------
# What SGLang says of an attention backend that was asked for and cannot be had. Read: sgl-project/sglang
# python/sglang/srt/layers/attention/attention_registry.py (00a66ebe) and vision.py; the rest from the
# issues named.

_SGLANG_MESSAGES = declared("serving", "SGLang")
# FlashInfer: its refusals, and the call that stands in the name of a kernel it could not compile.

_KERNEL = re.compile(
    r"dtype_q_(?P<dtype>bf16|f16|f32)\w*?_head_dim_qk_(?P<head_dim_qk>\d{1,5})_head_dim_vo_(?P<head_dim_v>\d{1,5})"
)


def _kernel_name(match: re.Match[str]) -> Facts:
    """The types, head dimensions, window and softcap that FlashInfer writes into the name of a kernel."""
    params: dict[str, Any] = {"is_training": False}
    if said := _KERNEL.search(match["uri"]):
        dtypes = {"bf16": "bf16", "f16": "fp16", "f32": "fp32"}
        params["dtype"] = dtypes[said["dtype"]]
        params |= {name: int(said[name]) for name in ("head_dim_qk", "head_dim_v")}
    return {"params": params, "text": match["uri"].replace("_", " ")}


def _mma_tiles(match: re.Match[str]) -> Facts:
    """Head dimensions, in tiles of 16."""
    dims = [16 * int(match[name]) for name in ("qk", "vo")]
    params = {"head_dim_qk": dims[0], "head_dim_v": dims[1], "is_training": False}
    return {"params": params, "head_dims": "/".join(map(str, dims))}


_FLASHINFER_MESSAGES = declared(
    "serving", "FlashInfer", {"kernel_name": _kernel_name, "mma_tiles": _mma_tiles}
)


LIBRARIES = (
    FirstOf(
        "vLLM",
        "its backend, or the reasons against each ('No valid attention backend found')",
        _VLLM_MESSAGES,
    ),
    FirstOf("SGLang", "refusals of --attention-backend", _SGLANG_MESSAGES),
    FirstOf("FlashInfer", "kernels that are not there for a GPU", _FLASHINFER_MESSAGES),
)
