"""What diffusers, xformers and ComfyUI say of attention that they cannot give."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from attnsel.diagnose.logs.message import Facts, FirstOf, Library, Message, clean, error
from attnsel.diagnose.logs.parsers.flash_attn import CAST, REBUILD

# ---- diffusers -----------------------------------------------------------------------------------------
# What diffusers says of an attention backend that it cannot give. Read: diffusers 0.42.1
# (models/attention_dispatch.py, models/modeling_utils.py).

_DISPATCH = "diffusers 0.42.1, models/attention_dispatch.py"

NATIVE = 'model.set_attention_backend("native"), which takes masks'

_DIFFUSERS_MESSAGES = (
    error(
        pattern=r"`?attn_mask`? is not (?:yet )?supported for (?P<backend>flash-attn (?:[234]|(?:varlen "
        r")?hub)|sage|Sage|native flash|aiter|XLA)[\w -]{0,40}",
        known="the model passes a mask and {backend} takes none: diffusers refuses rather than drop it. "
        "Where the mask hides nothing (a single prompt without padding) the model's code could pass None",
        codes=("SDPA101",),
        fix=(
            NATIVE,
            'set_attention_backend("flash_varlen"), which packs a padding mask',
            "a batch of equal prompts",
        ),
        source=f"{_DISPATCH}:3038, 3094, 3294, 3499, 4066; huggingface/diffusers#13801, "
        "Tongyi-MAI/Z-Image#117",
    ),
    error(
        pattern=r"`?(?P<what>enable_gqa|dropout_p|return_lse)`? is not (?:yet )?supported (?:for|by) "
        r"(?P<backend>[\w `.-]{3,60})",
        known="{backend} has no {what}",
        fix=NATIVE,
        source=f"{_DISPATCH}:958, 1089, 1197, 1624, 1977",
    ),
    error(
        pattern=r"(?:[\w ]{0,30}[Bb]ackend|Backend) '(?P<backend>\w{1,60})' is not usable because (?:of "
        r"missing package or the version is too old|the `(?P<package>\w{1,60})` package isn't available)",
        known='what set_attention_backend("{backend}") needs is not installed, or is too old',
        codes=("INSTALL005",),
        fix=(
            "what the message names; without a build: pip install kernels and the backend's _hub form",
            NATIVE,
        ),
        source=f"{_DISPATCH}:539 to 607",
    ),
    error(
        pattern=r"Backend '(?P<backend>\w{1,60})' needs to be used with a `kernels` version of at least "
        r"(?P<least>[\d.]{1,120}\d)",
        known="the package kernels is older than {least}",
        fix="pip install -U kernels",
        source=f"{_DISPATCH}:565",
    ),
    error(
        pattern=r"Kernel module '(?P<module>[\w.]{1,120})' does not define attribute path "
        r"'(?P<path>[\w.]{1,120})'",
        known="the kernel that the Hub gives now no longer has the name that this diffusers asks it for "
        "({path})",
        fix=("a newer diffusers", 'set_attention_backend("native"), or "flash" with the flash-attn package'),
        source=f"{_DISPATCH}:726; huggingface/diffusers#14012, PKU-YuanGroup/Helios#140",
    ),
    error(
        pattern=r"(?P<package>flash_attn(?:_3)?|sageattention|xformers) (?:is installed but )?failed to "
        r"import: (?P<why>[^\n]{3,120})\. Falling back to native",
        known="{package} is installed and does not load; diffusers goes on with F.sdpa: {why}",
        codes=("INSTALL005",),
        fix=REBUILD,
        source=f"{_DISPATCH}:89, 107, 126, 183",
    ),
    error(
        "does not support context parallelism. Please set a compatible attention backend",
        known="this backend cannot be spread over ranks",
        fix="set_attention_backend with one of those that the message lists, before enable_parallelism",
        source="diffusers 0.42.1, models/modeling_utils.py:651, 1803",
    ),
    error(
        pattern=r"Query, key, and value must be (?:either bfloat16 or float16|bfloat16)",
        params={"dtype": "fp32"},
        known="q, k and v are not in half precision, which this backend needs",
        codes=("FLASH200", "HINT005"),
        fix="torch_dtype=torch.bfloat16 in from_pretrained, or pipe.to(torch.bfloat16)",
        source=f"{_DISPATCH}:503, 509",
    ),
    error(
        pattern=r"must be on a CUDA device with compute capability >= (?P<least>\d{1,9}\.\d)",
        known="this backend needs compute capability {least}",
        fix=NATIVE,
        source=f"{_DISPATCH}:479",
    ),
    error(
        pattern=r"`?backend='?(?P<backend>\w{1,60})'?`? must be one of the following",
        known="diffusers has no attention backend of that name",
        fix="one of those that the message lists",
        source="diffusers 0.42.1, models/modeling_utils.py:645",
    ),
)


# ---- xformers ------------------------------------------------------------------------------------------
# What xformers says of a call for which it has no operator: the tensors, and each operator's reasons.
# Read: facebookresearch/xformers and its successor MSLK, ops/fmha/common.py (not_supported_reasons,
# _ensure_op_ supports_or_raise), ops/fmha/dispatch.py, 0.0.16 to 0.0.33, in the issues named. Tensors are
# [b, s, h, d], [b, s, g, h, d] with g key/value heads, or [b * h, s, d].

_XFORMERS_SOURCE = "xformers 0.0.16 to 0.0.33, ops/fmha/common.py: not_supported_reasons"
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


class _Reason(NamedTuple):
    """``pattern`` in a reason, what it means, rules that say the same, and what helps."""

    pattern: str
    cause: str
    fix: str = ""
    codes: tuple[str, ...] = ()


_REASONS = (
    _Reason(
        r"attn_bias\.stride\(-2\) % (\d{1,9}) != 0|attn_bias is not correctly aligned",
        "the rows of the mask do not begin at multiples of 8 elements (the number of keys is no multiple "
        "of 8)",
        "allocate the mask with its last dimension rounded up to a multiple of 8 and pass a slice of it: "
        "torch.zeros(b, h, s_q, 504)[..., :498] for 498 keys",
        ("HINT008",),
    ),
    _Reason(
        r"dtype=torch\.float32 \(supported",
        "q, k and v are fp32, which the operator has not",
        CAST,
        ("HINT005",),
    ),
    _Reason(r"dtype=(torch\.\w{1,60}) \(supported", "the operator has no kernel for this type", CAST),
    _Reason(
        r"requires device with capability [<>=]{1,40} \(\d{1,9}, \d\) but your GPU has capability \(\d{1,9}, "
        r"\d\) \(too new\)",
        "the operator was not compiled for so new a GPU",
        f"an xformers that is built for the card and this torch (pip install -U xformers), or {SDPA}",
    ),
    _Reason(
        r"requires device with capability",
        "the operator is for other GPUs",
    ),
    _Reason(
        r"attn_bias type is <class 'torch\.Tensor'>",
        "the operator takes no mask tensor",
        "a mask that xformers knows by its name, such as LowerTriangularMask or BlockDiagonalMask",
    ),
    _Reason(r"attn_bias type is", "the operator does not have this kind of mask"),
    _Reason(
        r"max\(query\.shape\[-1\](?:,| !=) value\.shape\[-1\]\) > (\d{1,9})",
        "the head dimension is above what the operator has",
        f"the operator cutlass, which has any head dimension (no op= argument), or {SDPA}",
    ),
    _Reason(r"query\.shape\[-1\] != value\.shape\[-1\]", "head dimensions of keys and values differ", SDPA),
    _Reason(r"min\(query\.shape\[-1\]|only head-dim|head-dim", "the head dimension is none that it has"),
    _Reason(
        r"wasn't built|xFormers wasn't build with CUDA",
        "the operator is not in this build of xformers",
        "the xformers wheel for this torch and CUDA: pip install -U xformers --index-url of the torch in "
        "use; python -m xformers.info lists what is there",
    ),
    _Reason(r"device=\w{1,60} \(supported", "the tensors are on another device", "move the model to the GPU"),
    _Reason(
        r"bf16 is only supported on A100\+",
        "bf16 before Ampere",
        "fp16 in place of bf16",
        ("SDPA202",),
    ),
    _Reason(r"dropout > 0", "the operator has no dropout", "p=0.0"),
    _Reason(r"custom scale", "the operator has no scale of one's own"),
    _Reason(r"operator is non-deterministic", "deterministic algorithms are asked for"),
)


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
    causes = [clean(line) if one is None else one.cause for one, line in zip(meant, reasons, strict=True)]
    known = [one for one in meant if one is not None]
    capability = _CAPABILITY.search(match.string)
    name = match["operator"]
    candidate = next((mine for prefix, mine in _CANDIDATES.items() if name.startswith(prefix)), "")
    return {
        "text": f"{name}: " + "; ".join(dict.fromkeys(reasons)),
        "candidates": (candidate,) if candidate else (),
        "known": f"{name}: " + "; ".join(dict.fromkeys(causes)),
        "fix": "; ".join(dict.fromkeys(one.fix for one in known if one.fix)),
        "codes": tuple(dict.fromkeys(code for one in known for code in one.codes)),
        "environment": {"gpu": f"sm{capability[1]}{capability[2]}"} if capability else {},
    }


_XFORMERS = Library(
    "xformers",
    "'No operator found for memory_efficient_attention', its shapes and each operator's reasons",
    (
        Message(
            "No operator found for `memory_efficient_attention",
            kind="question",
            more="indented",
            read=_question,
            source="xformers/ops/fmha/dispatch.py: _run_priority_list",
        ),
        Message(
            pattern=r"Operator `memory_efficient_attention\w{0,60}` does not support inputs:",
            kind="question",
            more="indented",
            read=_question,
            source="xformers/ops/fmha/dispatch.py: _ensure_op_supports_or_raise",
        ),
        Message(
            pattern=r"`(?P<operator>[A-Za-z]\w{1,30})(?:[@-][\w.+-]{1,40})?` is not supported because:",
            more="indented",
            read=_refusal,
            source=_XFORMERS_SOURCE,
        ),
    ),
)


# ---- ComfyUI -------------------------------------------------------------------------------------------
# What ComfyUI says of SageAttention and of the attention that it uses. Read: Comfy-Org/ComfyUI
# comfy/ldm/modules/attention.py (attention_sage) and thu-ml/SageAttention core.py, as quoted in the
# issues named.

_COMFYUI_MESSAGES = (
    error(
        pattern=r"Error running sage attention: (?:Unsupported head_dim: (?P<head_dim_qk>\d{1,9})|headdim "
        r"should be in (?P<sizes>\[[\d, ]{1,40}\]))",
        known="SageAttention has head dimensions 64, 96 and 128 (some builds up to 128); ComfyUI calls "
        "PyTorch's attention for this layer instead",
        fix="nothing to repair: the layers that fit keep SageAttention; without the flag the lines stop",
        source="ComfyUI comfy/ldm/modules/attention.py, attention_sage; Comfy-Org/ComfyUI#7352, #10689",
    ),
    error(
        pattern=r"Error running sage attention: SM(?P<sm>\d{1,9}) kernel is not available",
        known="this build of SageAttention was compiled without its sm{sm} kernels; every call goes to "
        "PyTorch's attention, so that the flag makes nothing faster",
        fix="a SageAttention wheel for this torch and CUDA, built with the card's architecture (12.0 for "
        "RTX 50)",
        source="SageAttention core.py; Comfy-Org/ComfyUI#9671, woct0rdho/SageAttention#50",
    ),
    error(
        "Error running sage attention: Input tensors must be in dtype",
        params={"dtype": "fp32"},
        known="SageAttention computes in fp16 and bf16, and these tensors are fp32",
        codes=("HINT005",),
        fix="no --force-fp32 and no --fp32-text-enc",
        source="SageAttention core.py",
    ),
    error(
        pattern=r"Error running sage attention: (?P<why>[^\n]{3,160}?), using pytorch attention instead",
        known="SageAttention fails ({why}), and ComfyUI calls PyTorch's attention instead",
        fix="--use-pytorch-cross-attention, or a SageAttention built for this torch and GPU",
        source="ComfyUI comfy/ldm/modules/attention.py, attention_sage",
    ),
    Message(
        pattern=r"^\W*Using (?P<backend>sage|xformers|pytorch|split|sub quadratic|flash) (?:optimization for "
        r")?attention",
        kind="chosen",
        source="ComfyUI comfy/ldm/modules/attention.py",
    ),
)


LIBRARIES = (
    FirstOf("diffusers", "refusals of set_attention_backend", _DIFFUSERS_MESSAGES),
    _XFORMERS,
    FirstOf("ComfyUI", "'Error running sage attention'", _COMFYUI_MESSAGES),
)
