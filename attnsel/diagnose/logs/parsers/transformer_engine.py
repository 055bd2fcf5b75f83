"""TransformerEngine: NVTE_DEBUG=1 with NVTE_DEBUG_LEVEL=1 or 2, and what it raises.

Read at v1.9, 1.11, 1.13, 2.0, 2.3, 2.6, 2.8, 2.10, 2.12, 2.14, 2.16, 2.17 and 2.20.0.dev0: the texts that
pytorch/attention.py (up to 1.13) and pytorch/attention/ log and raise; releases between them are inferred.
The text of JAX is as NVIDIA/TransformerEngine#568 shows it. Most reasons say themselves what they are about
("Disabling X as …"): one declaration reads them all, and those below it know more.
"""

from __future__ import annotations

import re

from attnsel.diagnose.logs.message import Facts, Library, Message, declared
from attnsel.dispatchers.te.config import configs
from attnsel.environment.releases import bundled_frontend
from attnsel.environment.versions import Version

_FLASH = ("flash_attn.2", "flash_attn.3", "flash_attn.4")
_UNFUSED = "UnfusedDotProductAttention"  # plain torch operators: no candidate of attnsel's
_ALL = (*_FLASH, "cudnn", _UNFUSED)
_BACKENDS: dict[str, tuple[str, ...]] = {
    "FlashAttention 2 and 4": ("flash_attn.2", "flash_attn.4"),
    "FlashAttention 2": ("flash_attn.2",),
    "FlashAttention 3": ("flash_attn.3",),
    "FlashAttention 4": ("flash_attn.4",),
    "FlashAttention": _FLASH,
    "FusedAttention": ("cudnn",),
    _UNFUSED: (_UNFUSED,),
    "all backends": _ALL,
}


def _question(match: re.Match[str]) -> Facts | None:
    config = next(configs(match[0]), None)
    if config is None:
        return None
    environment = {**({} if config.gpu is None else {"gpu": config.gpu}), **config.versions}
    release = config.versions.get("transformer_engine")
    frontend = None if release is None else bundled_frontend(Version.parse(release))
    if frontend is not None and config.versions.get("cudnn") is not None:
        environment["cudnn_frontend"] = str(frontend)  # the one inside, whatever is installed beside it
    return {"params": config.params, "environment": environment, "unread": config.unread}


# What a reason says of the call, at level 1, where no configuration stands above it.
_SAYS: tuple[tuple[str, str, object], ...] = (
    (r"qkv_format = thd\b(?! is)", "qkv_layout", "thd"),
    (r"padding between sequences|pad_between_seqs = True", "pad_between_seqs", True),
    (r"for arbitrary mask", "attn_mask_type", "arbitrary"),
    (r"for ALiBi|as ALiBi requires", "core_attention_bias_type", "alibi"),
    (r"for max_logit", "return_max_logit", True),
    (r"determinis", "deterministic", True),
    (r"softmax_type = learnable", "softmax_type", "learnable"),
    (r"softmax_type = off-by-one", "softmax_type", "off-by-one"),
    (r"compute capability = sm120", "gpu", "sm120"),
    (r"context parallelism with softmax_type", "cp_size", 2),
)
_SINKS_P2P = (
    "with a sink in the softmax (gpt-oss) TransformerEngine spreads a sequence over ranks by cp_comm_type "
    "a2a only; p2p has no backend"
)
_DIMS = re.compile(r"Found:.*?head_dim_qk = (\d+)(?:.*?head_dim_v = (\d+))?(?:.*?on sm(\d+))?")

# By what a reason says, what a user of TransformerEngine can do.
_FIXES: tuple[tuple[str, str], ...] = (
    (
        r"due to (?P<switch>NVTE_\w+=0)",
        "{switch} switches this backend off: unset it (Megatron-LM sets all three for --attention-backend; "
        "auto leaves the choice to TransformerEngine)",
    ),
    (
        r"padding between sequences|pad_between_seqs = True",
        "leave out cu_seqlens_q_padded and cu_seqlens_kv_padded where there are no gaps "
        "(pad_between_seqs=False)",
    ),
    (
        r"determinis",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO=1 where bitwise equal results are not needed",
    ),
    (r"requires flash-attn [\d.]+\+|install flash-attn >= ", "pip install a newer flash-attn"),
    (
        r"does not support MLA",
        "FusedAttention is the way for head_dim_qk above head_dim_v: give it the cuDNN, layout and mask that "
        "it needs; or pad head_dim_v to head_dim_qk",
    ),
    (
        r"for arbitrary mask",
        'say what the mask is (attn_mask_type="padding_causal" with cu_seqlens, or a window_size) instead of '
        "passing it as a tensor",
    ),
)


def _disabled(match: re.Match[str]) -> Facts:
    text = match[0]
    params: dict[str, object] = {}
    environment: dict[str, object] = {}
    for pattern, name, value in _SAYS:
        if re.search(pattern, text):
            (environment if name == "gpu" else params)[name] = value
    found = _DIMS.search(text)
    if found is not None:
        params["head_dim_qk"] = int(found[1])
        params |= {"head_dim_v": int(found[2])} if found[2] else {}
        environment |= {"gpu": f"sm{found[3]}"} if found[3] else {}
    told: dict[str, object] = {"params": params, "environment": environment}
    told["candidates"] = _BACKENDS[match["backend"]]
    for pattern, fix in _FIXES:
        if (why := re.search(pattern, text)) is not None:
            told["fix"] = fix.format(switch=why.groupdict().get("switch") or "")
            break
    if "due to NVTE_" in text:
        told["known"] = "switched off by an environment variable"
    if "context parallelism with softmax_type" in text:
        told |= {"known": _SINKS_P2P, "link": "NVIDIA/TransformerEngine#2541", "fix": 'cp_comm_type="a2a"'}
    return told


def _chosen(match: re.Match[str]) -> Facts:
    name, version = match["backend"], match["version"] or ""
    if name == "NoBackend":
        return {"kind": "error", "candidates": ()}
    if name == "FlashAttention":
        release = version.partition(".")[0]
        return {"candidates": (f"flash_attn.{release}",) if release in ("2", "3", "4") else ()}
    return {"candidates": _BACKENDS[name]}


_TRANSFORMER_ENGINE = Library(
    "TransformerEngine",
    'what NVTE_DEBUG=1 with NVTE_DEBUG_LEVEL=1 or 2 prints; "No dot product attention backend is available"',
    (
        Message(
            pattern=r"Running with config=.*",
            kind="question",
            more="brackets",
            read=_question,
        ),
        Message(
            "Disabling FlashAttention to give FusedAttention preference",
            kind="note",
        ),
        Message(
            pattern=r"Disabling (?P<backend>" + "|".join(_BACKENDS) + r")\b(?! to give | \d to prefer)[^\n]*",
            read=_disabled,
        ),
        *declared("transformer_engine", "TransformerEngine", {"chosen": _chosen}),
    ),
    candidates=(*_FLASH, "cudnn"),
    dispatcher="te",
    source="dot_product_attention/utils.py, 1.9 to 2.20",
    ask="Run it once with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2, which prints the call and every reason",
)

LIBRARIES = (_TRANSFORMER_ENGINE,)
