"""What messages of F.scaled_dot_product_attention need beside their rows: types and sizes in C++'s words."""

from __future__ import annotations

import re

from attnsel.diagnose.logs.message import Facts
from attnsel.params import read_dtype

_SIZES = re.compile(r"\[([\d, ]+)\]")
_DIMENSIONS = {0: "batches", 1: "heads", 2: "queries", 3: "keys"}  # of the scores


def _dtype_of(text: str) -> str | None:
    """attnsel's name for a dtype as C++ prints it ("struct c10::BFloat16", "Half", "float")."""
    name = read_dtype(text.strip().removeprefix("struct ").removeprefix("c10::").lower())
    return name if name in ("bf16", "fp16", "fp32", "fp64") else None


def on_gpu(match: re.Match[str]) -> Facts:
    """A range that ends at sm90 was written before PyTorch 2.7."""
    return {"supposed": {"torch": "2.6.0"} if match["last"] == "90" else {}}


def dtype(match: re.Match[str]) -> Facts:
    """The type of the query."""
    name = _dtype_of(match["q"])
    return {"params": {} if name is None else {"dtype": name}}


def rank(match: re.Match[str]) -> Facts:
    """Of how many dimensions the tensors are."""
    return {"params": {"tensors": {"rank": int(match["rank"])}}}


def mask_dtype(match: re.Match[str]) -> Facts:
    """The types of the query and of a mask that is not of that type."""
    params: dict[str, object] = {"attn_mask_type": "arbitrary", **dtype(match)["params"]}
    if (mask := _dtype_of(match["mask"])) is not None:
        params["tensors"] = {"mask": {"shape": (1, 1, 1, 1), "stride": (1, 1, 1, 1), "dtype": mask}}
    return {"params": params}


def shapes(match: re.Match[str]) -> Facts:
    """Batch, heads, lengths and head dimensions from the sizes of q, k and v, [b, h, s, d]."""
    found = [[int(n) for n in sizes.split(",")] for sizes in _SIZES.findall(match[0])[:3]]
    if len(found) < 3 or any(len(sizes) != 4 for sizes in found):
        return {}
    q, k, v = found
    names = ("batch_size", "num_heads", "max_seqlen_q", "head_dim_qk")
    more = {"num_gqa_groups": k[1], "max_seqlen_kv": k[2], "head_dim_v": v[3]}
    return {"params": {**dict(zip(names, q, strict=True)), **more}}


def broadcast(match: re.Match[str]) -> Facts | None:
    """Two sizes that do not go together inside F.sdpa: of heads, or of a mask beside the scores."""
    a, b, dim = int(match["a"]), int(match["b"]), int(match["dim"])
    if dim == 1 and b and a > b and a % b == 0:
        return {
            "params": {"num_heads": a, "num_gqa_groups": b},
            "known": f"q has {a} heads, k and v {b}, and F.sdpa repeats none by itself",
            "fix": f"F.scaled_dot_product_attention(…, enable_gqa=True) (torch 2.5 and newer), or k and v "
            f"with repeat_interleave({a // b}, dim=1) before",
        }
    if dim == 1 and a and b > a and b % a == 0:
        return {
            "params": {"num_heads": a},
            "known": f"q has {a} heads and k {b}: k and v were repeated for more heads than q has",
            "fix": "k and v with the heads of q: no repeat_kv where they have all heads already (MLA); "
            "in a configuration num_key_value_heads that fits num_attention_heads",
        }
    if dim not in _DIMENSIONS:
        return None
    return {
        "known": "the mask does not broadcast to the scores [b, h, s_q, s_kv]: "
        f"{a} and {b} {_DIMENSIONS[dim]}",
        "fix": "a mask [b or 1, h or 1, s_q or 1, s_kv]; with a cache s_kv is the length of the cache and "
        "the new tokens together",
    }


def not_compiled(match: re.Match[str]) -> Facts:
    """A place with backslashes is a Windows build."""
    return {"environment": {"platform": "windows"} if "\\" in (match["where"] or "") else {}}
