"""What messages of vLLM and FlashInfer need beside their rows: lists of reasons, names of kernels."""

from __future__ import annotations

import re
from typing import Any

from attnsel.diagnose.logs.message import Facts
from attnsel.diagnose.logs.parsers import messages

_CONFIG = re.compile(r"\b(\w{4,30})(?:=|: )('[^']{0,40}'|[\w.]{1,40})")
_BACKEND = re.compile(r"(\w{3,40}): \[([^\]\n]{0,400})\]")
_KERNEL = re.compile(
    r"dtype_q_(?P<dtype>bf16|f16|f32)\w*?_head_dim_qk_(?P<head_dim_qk>\d{1,5})_head_dim_vo_(?P<head_dim_v>\d{1,5})"
)


def every_backend(match: re.Match[str]) -> Facts:
    """vLLM's reasons against each of its backends, and the two with the fewest."""
    by_backend = {name: _words(reasons) for name, reasons in _BACKEND.findall(match["reasons"])}
    nearest = sorted(by_backend, key=lambda name: len(by_backend[name][0]))[:2]
    return {
        "params": _configuration(match["config"]),
        "codes": tuple(dict.fromkeys(code for _, codes in by_backend.values() for code in codes)),
        "said": "; ".join(f"{name} lacks {', '.join(words)}" for name, (words, _) in by_backend.items()),
        "nearest": " or ".join(f"{name} ({', '.join(by_backend[name][0])})" for name in nearest),
    }


def one_backend(match: re.Match[str]) -> Facts:
    """vLLM's reasons against the backend that was asked for."""
    words, codes = _words(match["reasons"])
    return {"codes": codes, "said": ", ".join(words)}


def _words(reasons: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Reasons as words, and rules that say the same."""
    said = [reason.strip(" '\"") for reason in reasons.split(",")]
    meant = [
        next((one.says for one in messages("serving", "vLLM reasons") if one.find(r)), None) for r in said
    ]
    words = (reason if one is None else one.known for reason, one in zip(said, meant, strict=True))
    codes = (code for one in meant if one is not None for code in one.codes)
    return tuple(dict.fromkeys(filter(None, words))), tuple(dict.fromkeys(codes))


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


def mma_tiles(match: re.Match[str]) -> Facts:
    """Head dimensions, in tiles of 16."""
    dims = [16 * int(match[name]) for name in ("qk", "vo")]
    params = {"head_dim_qk": dims[0], "head_dim_v": dims[1], "is_training": False}
    return {"params": params, "head_dims": "/".join(map(str, dims))}


def kernel_name(match: re.Match[str]) -> Facts:
    """The types and head dimensions that FlashInfer writes into the name of a kernel."""
    params: dict[str, Any] = {"is_training": False}
    if said := _KERNEL.search(match["uri"]):
        params["dtype"] = {"bf16": "bf16", "f16": "fp16", "f32": "fp32"}[said["dtype"]]
        params |= {name: int(said[name]) for name in ("head_dim_qk", "head_dim_v")}
    return {"params": params, "text": match["uri"].replace("_", " ")}
