"""What a row of a message does not say by itself: the functions that rows name as their ``reader``.

Each takes the match of the row's pattern and gives fields of a Finding and words of its sentences; None where
the message is not meant after all.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

from attnsel.diagnose.logs.message import Facts, Finding, clean, messages, stated
from attnsel.dispatchers.te.config import configs
from attnsel.environment.mentions import cards_in
from attnsel.environment.names import lacking  # noqa: F401  # rows name it
from attnsel.environment.releases import bundled_frontend
from attnsel.environment.versions import Version

_rows = cache(messages)


def _meaning(file: str, part: str, reason: str) -> Finding:
    """What a reason inside a message means, by the first row that fits; itself where none does."""
    found = (row.find(reason) for row in _rows(file, part))
    return next((one for one in found if one is not None), Finding("", "note", reason, known=clean(reason)))


def package(match: re.Match[str]) -> Facts:
    """A package's release, without what its build adds; torch's says CUDA's too (+cu130)."""
    name = re.sub(r"^nvidia-|-cu\d\d$", "", match["package"]).replace("-", "_")
    cuda = match["torch_cu"] if name == "torch" else None
    built = {"cuda": f"{cuda[:2]}.{cuda[2:]}"} if cuda else {}
    return {"environment": {**built, name: match["version"]}}


def cards(match: re.Match[str]) -> Facts | None:
    """The cards that a line of prose says its writer has; all of the log decide (``the_card``)."""
    named = cards_in(match.string)
    return {"environment": {"named": named}, "cards": ", ".join(named)} if named else None


_SIZES = re.compile(r"\[([\d, ]+)\]")
_AXES = {0: "batches", 1: "heads", 2: "queries", 3: "keys"}  # of the scores


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
    if dim not in _AXES:
        return None
    return {
        "known": f"the mask does not broadcast to the scores [b, h, s_q, s_kv]: {a} and {b} {_AXES[dim]}",
        "fix": "{MASK_FIX}",
    }


def sizes(match: re.Match[str]) -> Facts:
    """How much shared memory a kernel needs, and the head dimensions that its constants state."""
    need, limit = match["need"], match["limit"]
    dims = re.search(r"QK_HEAD_DIM=(\d{1,4})\b.{0,400}?\bV_HEAD_DIM=(\d{1,4})\b", match.string)
    return {
        "sizes": f" ({need} bytes of {limit})" if need else "",
        "params": {"head_dim_qk": int(dims[1]), "head_dim_v": int(dims[2])} if dims else {},
    }


_ERROR = re.compile(r"cuDNN (?:Frontend )?[Ee]rror: [^\n]*")


def whole(match: re.Match[str]) -> Facts:
    """The whole of what PyTorch raises, which is then cuDNN's message and not PyTorch's too."""
    raised = _ERROR.search(match.string)
    return {"text": raised[0] if raised and raised.end() >= match.end() else match[0]}


# The last of them are plain torch operators: no candidate of attnsel's.
_ALL = ("flash_attn.2", "flash_attn.3", "flash_attn.4", "cudnn", "UnfusedDotProductAttention")


def configuration(match: re.Match[str]) -> Facts | None:
    """The configuration that is printed, unless it is cut off or another library's."""
    config = next(configs(match[0]), None)
    if config is None:
        return None
    environment = {**({} if config.gpu is None else {"gpu": config.gpu}), **config.versions}
    release = config.versions.get("transformer_engine")
    frontend = None if release is None else bundled_frontend(Version.parse(release))
    if frontend is not None and config.versions.get("cudnn") is not None:
        environment["cudnn_frontend"] = str(frontend)  # the one inside, whatever is installed beside it
    return {"params": config.params, "environment": environment, "unread": config.unread}


def disabled(match: re.Match[str]) -> Facts:
    """What the reason says of the call, and what helps; what is said later wins."""
    told: dict[str, Any] = {"candidates": _backends(match["backend"]), "params": {}, "environment": {}}
    for row in _rows("transformer_engine", "TransformerEngine reasons"):
        if (reason := row.find(match[0])) is None:
            continue
        figures = {name: int(value) for name, value in reason.params.items() if str(value).isdecimal()}
        told["params"] |= {**reason.params, **figures}
        told["environment"] |= reason.environment
        told |= {name: said for name in ("known", "fix", "link") if (said := getattr(reason, name))}
    return told


def chosen(match: re.Match[str]) -> Facts:
    """Whose version stands behind its name: of FlashAttention that says which one it is."""
    if match["backend"] == "NoBackend":
        return {"kind": "error", "candidates": ()}
    major = (match["version"] or "").partition(".")[0]
    if match["backend"] == "FlashAttention":
        return {"candidates": (f"flash_attn.{major}",) if major in ("2", "3", "4") else ()}
    return {"candidates": _backends(match["backend"])}


def _backends(name: str) -> tuple[str, ...]:
    """attnsel's candidates: of "FlashAttention 2 and 4" these two, of "FlashAttention" all."""
    if name.startswith("FlashAttention"):
        return tuple(f"flash_attn.{major}" for major in re.findall(r"\d", name) or "234")
    return {"FusedAttention": ("cudnn",), "all backends": _ALL}.get(name, (name,))


_CONFIG = re.compile(r"\b(\w{4,30})(?:=|: )('[^']{0,40}'|[\w.]{1,40})")
_BACKEND = re.compile(r"(\w{3,40}): \[([^\]\n]{0,400})\]")


def every_backend(match: re.Match[str]) -> Facts:
    """vLLM's reasons against each of its backends, and the two nearest: what names a flag weighs little."""
    by_backend = {name: _words(reasons) for name, reasons in _BACKEND.findall(match["reasons"])}
    weigh = {name: sum(1 if "(--" in one else 9 for one in words) for name, (words, _) in by_backend.items()}
    nearest = sorted(weigh, key=lambda name: weigh[name])[:2]
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
    meant = [_meaning("serving", "vLLM reasons", one.strip(" '\"")) for one in reasons.split(",")]
    words = dict.fromkeys(one.known for one in meant if one.known)
    return tuple(words), tuple(dict.fromkeys(code for one in meant for code in one.codes))


def _configuration(text: str) -> dict[str, Any]:
    """Fields of AttentionParams in vLLM's AttentionSelectorConfig: none of sparse attention, no such call."""
    stated = {} if "use_sparse=True" in text else {n: v.strip("'") for n, v in _CONFIG.findall(text)}
    params: dict[str, Any] = {}
    if stated.get("head_size", "").isdigit():
        params["head_dim_qk"] = int(stated["head_size"])
    if stated.get("use_mla") == "True" and params.get("head_dim_qk") == 576:
        params["head_dim_v"] = 512
    if "dtype" in stated:
        params["dtype"] = stated["dtype"]
    if stated.get("has_sink") == "True":
        params["softmax_type"] = "learnable"
    return params


def kernel_name(match: re.Match[str]) -> Facts:
    """The types and head dimensions that FlashInfer writes into the name of a kernel."""
    said = re.search(_rows("serving", "a kernel's name")[0].pattern, match["uri"])
    return {"params": stated(said)[0] if said else {}, "text": match["uri"].replace("_", " ")}


_TENSOR = re.compile(r"\b(query|key|value)\s*: shape=\(([\d, ]{1,80})\) \((torch\.\w{1,20})\)")
_BIAS = re.compile(r"attn_bias\s*: <class '(?:[\w.]{1,120}\.)?(\w{1,120})'>")
_DROPOUT = re.compile(r"\bp\s*: ([01](?:\.\d{1,20})?)\b")
_CANDIDATES = {  # by how the names of xformers' operators begin
    "fa2": "flash_attn.2",
    "flsh": "flash_attn.2",
    "fa3": "flash_attn.3",
    "cut": "sdpa.efficient",
}


def tensors(match: re.Match[str]) -> Facts:
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


def operator(match: re.Match[str]) -> Facts | None:
    """An operator and what its reasons mean, however a page breaks the lines; None without any below it."""
    parts = re.split(_rows("image_models", "where a reason begins")[0].pattern, match.string[match.end() :])
    told = [said for one in parts if (said := " ".join(one.split()))]
    if not (reasons := [one for one in told if not one.startswith("HINT")] or told):
        return None
    # What holds for every operator is told once: where the tensors lie, a build without CUDA, a card that is
    # too old, which bf16 counts beside.
    shared = [r for s in ("device=", "xFormers", "requires .*>=? .8,") for r in reasons if re.match(s, r)][:1]
    if shared and shared[0].startswith("requires"):
        shared += [reason for reason in reasons if reason.startswith("bf16 is")]
    name, meant = match["operator"], [_meaning("image_models", "xformers", r) for r in shared or reasons]
    return {
        "text": f"{name}: " + "; ".join(dict.fromkeys(reasons)),
        "candidates": tuple(mine for start, mine in _CANDIDATES.items() if name.startswith(start)),
        "known": ("" if shared else f"{name}: ") + "; ".join(dict.fromkeys(one.known for one in meant)),
        "fix": "; ".join(dict.fromkeys(one.fix for one in meant if one.fix)),
        "codes": () if shared else tuple(dict.fromkeys(code for one in meant for code in one.codes)),
        "environment": {name: value for one in meant for name, value in one.environment.items()},
    }
