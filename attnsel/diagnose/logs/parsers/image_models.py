"""What messages of xformers need beside their rows: the call's tensors, and the reasons below an operator."""

from __future__ import annotations

import math
import re
from typing import Any

from attnsel.diagnose.logs.message import Facts, clean
from attnsel.diagnose.logs.parsers import messages

_TENSOR = re.compile(r"\b(query|key|value)\s*: shape=\(([\d, ]{1,80})\) \((torch\.\w{1,20})\)")
_BIAS = re.compile(r"attn_bias\s*: <class '(?:[\w.]{1,120}\.)?(\w{1,120})'>")
_DROPOUT = re.compile(r"\bp\s*: ([01](?:\.\d{1,20})?)\b")
_CAPABILITY = re.compile(r"your GPU has capability \((\d{1,2}), (\d)\)")
_CANDIDATES = {
    "fa2": "flash_attn.2",
    "flshatt": "flash_attn.2",
    "fa3": "flash_attn.3",
    "cutlass": "sdpa.efficient",
}


def question(match: re.Match[str]) -> Facts:
    """The call: tensors are [b, s, h, d], [b, s, g, h, d] with g key/value heads, or [b * h, s, d]."""
    params: dict[str, Any] = {}
    shapes = {}
    for name, shape, dtype in _TENSOR.findall(match.string):
        shapes[name] = [int(one) for one in shape.split(",") if one.strip()]
        if name == "query":
            params["dtype"] = dtype
    q, k, v = (shapes.get(name, []) for name in ("query", "key", "value"))
    if len(q) in (3, 4, 5):
        params |= {
            "qkv_layout": "bshd_bshd_bshd",
            "batch_size": q[0],
            "max_seqlen_q": q[1],
            "num_heads": math.prod(q[2:-1]),
            "head_dim_qk": q[-1],
        }
    if len(k) in (3, 4, 5):
        params["max_seqlen_kv"] = k[1]
    if len(k) in (4, 5):
        params["num_gqa_groups"] = k[2]
    if v:
        params["head_dim_v"] = v[-1]
    if bias := _BIAS.search(match.string):
        params["attn_mask_type"] = "causal" if "LowerTriangular" in bias[1] else "no_mask"
        params |= {"core_attention_bias_type": "post_scale_bias"} if bias[1] == "Tensor" else {}
    if (dropout := _DROPOUT.search(match.string)) and float(dropout[1]) < 1:
        params["attention_dropout"] = float(dropout[1])
    return {"params": params}


def refusal(match: re.Match[str]) -> Facts:
    """An operator, and what the reasons below its name mean."""
    lines = [line.strip() for line in match.string.splitlines()[1:] if line.strip()]
    reasons = [line for line in lines if not line.startswith("HINT")]
    known = messages("image_models", "xformers")
    meant = [next((one.says for one in known if one.find(line)), None) for line in reasons]
    causes = [clean(line) if one is None else one.known for one, line in zip(meant, reasons, strict=True)]
    told = [one for one in meant if one is not None]
    capability = _CAPABILITY.search(match.string)
    name = match["operator"]
    return {
        "text": f"{name}: " + "; ".join(dict.fromkeys(reasons)),
        "candidates": tuple(mine for start, mine in _CANDIDATES.items() if name.startswith(start)),
        "known": f"{name}: " + "; ".join(dict.fromkeys(causes)),
        "fix": "; ".join(dict.fromkeys(one.fix for one in told if one.fix)),
        "codes": tuple(dict.fromkeys(code for one in told for code in one.codes)),
        "environment": {"gpu": f"sm{capability[1]}{capability[2]}"} if capability else {},
    }
