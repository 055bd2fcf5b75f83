"""What diffusers, xformers, ComfyUI and SageAttention say of attention that they cannot give."""

from __future__ import annotations

import re
from typing import Any

from attnsel.diagnose.logs.message import Facts, FirstOf, Library, Message, clean, declared
from attnsel.diagnose.logs.parsers.flash_attn import CAST, REBUILD

# ---- diffusers -----------------------------------------------------------------------------------------
# What diffusers says of an attention backend that it cannot give. Read: diffusers 0.42.1
# (models/attention_dispatch.py, models/modeling_utils.py).

NATIVE = 'model.set_attention_backend("native"), which takes masks'

_DIFFUSERS_MESSAGES = declared("image_models", "diffusers", NATIVE=NATIVE, REBUILD=REBUILD)


# ---- xformers ------------------------------------------------------------------------------------------
# What xformers says of a call for which it has no operator: the tensors, and each operator's reasons.
# Read: facebookresearch/xformers and its successor MSLK, ops/fmha/common.py (not_supported_reasons,
# _ensure_op_ supports_or_raise), ops/fmha/dispatch.py, 0.0.16 to 0.0.33, in the issues named. Tensors are
# [b, s, h, d], [b, s, g, h, d] with g key/value heads, or [b * h, s, d].

_TENSOR = re.compile(r"\b(query|key|value)\s*: shape=\(([\d, ]{1,80})\) \((torch\.\w{1,20})\)")
_BIAS = re.compile(r"attn_bias\s*: <class '([\w.]{1,120})'>")
_DROPOUT = re.compile(r"\bp\s*: ([01](?:\.\d{1,20})?)\b")
_CAPABILITY = re.compile(r"your GPU has capability \((\d{1,2}), (\d)\)")
_CANDIDATES = {
    "fa2": "flash_attn.2",
    "flshatt": "flash_attn.2",
    "fa3": "flash_attn.3",
    "cutlass": "sdpa.efficient",
}
SDPA = "F.scaled_dot_product_attention in xformers' place (in ComfyUI --use-pytorch-cross-attention)"


_REASONS = declared("image_models", "xformers", CAST=CAST, SDPA=SDPA)


def _question(match: re.Match[str]) -> Facts:
    params: dict[str, Any] = {}
    shapes = {
        name: ([int(one) for one in shape.split(",") if one.strip()], dtype)
        for name, shape, dtype in _TENSOR.findall(match.string)
    }
    if "query" in shapes:
        shape, params["dtype"] = shapes["query"]
        params |= _of_query(shape)
    if "key" in shapes and len(shapes["key"][0]) in (3, 4, 5):
        params["max_seqlen_kv"] = shapes["key"][0][1]
        if len(shapes["key"][0]) >= 4:
            params["num_gqa_groups"] = shapes["key"][0][2]
    if "value" in shapes and shapes["value"][0]:
        params["head_dim_v"] = shapes["value"][0][-1]
    return {"params": params | _of_mask(match.string)}


def _of_query(shape: list[int]) -> dict[str, Any]:
    if len(shape) not in (3, 4, 5):
        return {}
    heads = 1
    for size in shape[2:-1]:
        heads *= size
    return {
        "qkv_layout": "bshd_bshd_bshd",
        "batch_size": shape[0],
        "max_seqlen_q": shape[1],
        "num_heads": heads,
        "head_dim_qk": shape[-1],
    }


def _of_mask(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    bias = _BIAS.search(text)
    if bias:
        name = bias[1].rpartition(".")[2]
        found["attn_mask_type"] = "causal" if "LowerTriangular" in name else "no_mask"
        if name == "Tensor":
            found["core_attention_bias_type"] = "post_scale_bias"
    dropout = _DROPOUT.search(text)
    if dropout and float(dropout[1]) < 1:
        found["attention_dropout"] = float(dropout[1])
    return found


def _refusal(match: re.Match[str]) -> Facts:
    lines = [line.strip() for line in match.string.splitlines()[1:] if line.strip()]
    reasons = [line for line in lines if not line.startswith("HINT")]
    meant = [next((one for one in _REASONS if re.search(one.pattern, line)), None) for line in reasons]
    causes = [clean(line) if one is None else one.known for one, line in zip(meant, reasons, strict=True)]
    known = [one for one in meant if one is not None]
    capability = _CAPABILITY.search(match.string)
    name = match["operator"]
    candidate = next((mine for prefix, mine in _CANDIDATES.items() if name.startswith(prefix)), "")
    return {
        "text": f"{name}: " + "; ".join(dict.fromkeys(reasons)),
        "candidates": (candidate,) if candidate else (),
        "known": f"{name}: " + "; ".join(dict.fromkeys(causes)),
        "fix": "; ".join(dict.fromkeys(str(one.fix) for one in known if one.fix)),
        "codes": tuple(dict.fromkeys(code for one in known for code in one.codes)),
        "environment": {"gpu": f"sm{capability[1]}{capability[2]}"} if capability else {},
    }


_XFORMERS = Library(
    "xformers",
    "'No operator found for memory_efficient_attention', its shapes and each operator's reasons",
    (
        Message(
            ("No operator found for `memory_efficient_attention", "does not support inputs:"),
            "No operator found for `memory_efficient_attention|"
            r"Operator `memory_efficient_attention\w{0,60}` does not support inputs:",
            kind="question",
            more="indented",
            read=_question,
            source="xformers/ops/fmha/dispatch.py: _run_priority_list, _ensure_op_supports_or_raise",
        ),
        *declared("image_models", "xformers raises", SDPA=SDPA),
        Message(
            pattern=r"`(?P<operator>[A-Za-z]\w{1,30})(?:[@-][\w.+-]{1,40})?` is not supported because:",
            more="indented",
            read=_refusal,
            source="xformers 0.0.16 to 0.0.33, ops/fmha/common.py: not_supported_reasons",
        ),
    ),
)


# ---- ComfyUI -------------------------------------------------------------------------------------------
# What ComfyUI says of SageAttention and of the attention that it uses. Read: Comfy-Org/ComfyUI
# comfy/ldm/modules/attention.py (attention_sage) and thu-ml/SageAttention core.py, as quoted in the
# issues named.

_COMFYUI_MESSAGES = declared("image_models", "ComfyUI")


def _sage_gpu(match: re.Match[str]) -> Facts:
    return {"environment": {"gpu": f"sm{match['sm']}"}}


_SAGE_MESSAGES = declared("image_models", "SageAttention", {"sage_sm": _sage_gpu})


LIBRARIES = (
    FirstOf("diffusers", "refusals of set_attention_backend", _DIFFUSERS_MESSAGES),
    _XFORMERS,
    FirstOf("ComfyUI", "'Error running sage attention'", _COMFYUI_MESSAGES),
    FirstOf("SageAttention", "its refusals", _SAGE_MESSAGES),
)
