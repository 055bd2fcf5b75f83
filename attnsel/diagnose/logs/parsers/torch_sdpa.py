"""PyTorch: what F.scaled_dot_product_attention warns of, raises, and what goes wrong inside it.

Read: aten/src/ATen/native/transformers/ of PyTorch 2.4 (cuda/sdp_utils.cpp, sdp_utils_cpp.h,
sdp_utils_cpp.cpp, attention.cpp) and cuda/sdp_utils.cpp of about 2.9; the texts of 2.0 from
lucidrains/x-transformers#143. Ends of ranges beyond these are inferred; texts of MHA.cpp, of attention.cu and
of the allocator are as issues show them. The
reasons of a kernel stand below its header ("Flash attention kernel not used because:"); Python shows each
once per line of code. Most state what they saw, from which the rules say why; the fix stands with the
message. What cuDNN itself says inside F.sdpa: ``cudnn.py``.
"""

from __future__ import annotations

import re

from attnsel.diagnose.logs.message import Facts, Library, declared
from attnsel.params import read_dtype

_SIZES = re.compile(r"\[([\d, ]+)\]")


def dtype_of(text: str) -> str | None:
    """attnsel's name for a dtype as C++ prints it ("struct c10::BFloat16", "Half", "float")."""
    name = read_dtype(text.strip().removeprefix("struct ").removeprefix("c10::").lower())
    return name if name in ("bf16", "fp16", "fp32", "fp64") else None


def _on_gpu(match: re.Match[str]) -> Facts:
    """A range that ends at sm90 was written before PyTorch 2.7."""
    return {"supposed": {"torch": "2.6.0"} if match["last"] == "90" else {}}


def _dtype(match: re.Match[str]) -> Facts:
    dtype = dtype_of(match["q"])
    return {"params": {} if dtype is None else {"dtype": dtype}}


def _rank(match: re.Match[str]) -> Facts:
    return {"params": {"tensors": {"rank": int(match["rank"])}}}


def _mask_dtype(match: re.Match[str]) -> Facts:
    dtype, mask = dtype_of(match["q"]), dtype_of(match["mask"])
    params: dict[str, object] = {"attn_mask_type": "arbitrary"}
    params |= {} if dtype is None else {"dtype": dtype}
    if mask is not None:
        params["tensors"] = {"mask": {"shape": (1, 1, 1, 1), "stride": (1, 1, 1, 1), "dtype": mask}}
    return {"params": params}


def _shapes(match: re.Match[str]) -> Facts | None:
    """Batch, heads, lengths and head dimensions from the sizes of q, k and v, [b, h, s, d]."""
    found = [[int(n) for n in sizes.split(",")] for sizes in _SIZES.findall(match[0])[:3]]
    if len(found) < 3 or any(len(sizes) != 4 for sizes in found):
        return {}
    q, k, v = found
    params = {
        "batch_size": q[0],
        "num_heads": q[1],
        "max_seqlen_q": q[2],
        "head_dim_qk": q[3],
        "num_gqa_groups": k[1],
        "max_seqlen_kv": k[2],
        "head_dim_v": v[3],
    }
    return {"params": params}


def _broadcast(match: re.Match[str]) -> Facts | None:
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
    where = {0: "batches", 1: "heads", 2: "queries", 3: "keys"}.get(dim)
    if where is None:
        return None
    return {
        "known": f"the mask does not broadcast to the scores [b, h, s_q, s_kv]: {a} and {b} {where}",
        "fix": "a mask [b or 1, h or 1, s_q or 1, s_kv]; with a cache s_kv is the length of the cache and "
        "the new tokens together",
    }


def _not_compiled(match: re.Match[str]) -> Facts:
    """A place with backslashes is a Windows build."""
    where = match["where"] or ""
    told: dict[str, object] = {"text": "Torch was not compiled with flash attention."}
    if "\\" in where:
        told["environment"] = {"platform": "windows"}
    return told


_NO_MASK = (
    "is_causal=True, or no mask, where the mask says no more than that; else let the memory-efficient "
    "kernel run: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])"
)

_PYTORCH = Library(
    "PyTorch",
    '"No available kernel" of F.scaled_dot_product_attention, the warnings of each kernel, what it raises, '
    "and running out of memory inside it",
    declared(
        "torch_sdpa",
        "F.sdpa",
        {
            "on_gpu": _on_gpu,
            "not_compiled": _not_compiled,
            "dtype": _dtype,
            "rank": _rank,
            "shapes": _shapes,
            "mask_dtype": _mask_dtype,
            "broadcast": _broadcast,
        },
        NO_MASK=_NO_MASK,
    ),
    candidates=("sdpa.flash", "sdpa.efficient", "sdpa.cudnn"),
    dispatcher="torch",
    usual={"qkv_layout": "bhsd", "attn_mask_type": "no_mask"},
    source="transformers/cuda/sdp_utils.cpp, 2.0 to 2.14",
    ask="The warnings of each kernel stand above the first such error only: look there",
)

LIBRARIES = (_PYTORCH,)
