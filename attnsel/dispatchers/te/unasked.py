"""What a release of TransformerEngine cannot be asked, or does not run on: no filter is reached then."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from attnsel.dispatchers.te.asked import FilterInput
from attnsel.dispatchers.te.filters import flash_attn_2_range
from attnsel.environment.versions import Version


class _Missing(NamedTuple):
    """``words``: what a call needs that releases before ``since`` have not; with None, what holds of all."""

    needs: Callable[[FilterInput], object]
    words: str
    since: tuple[int, int] | None
    lines: str


OLDEST_CUDNN = Version(9, 12)
"""From 2.20 on; before, no release looks at it."""
_DPA = "dot_product_attention.py, DotProductAttention.forward"
_RECIPE = "common/recipe/__init__.py"
_MISSING = (
    _Missing(
        lambda a: a.env.device.type != "cuda", "runs on CUDA GPUs only", None, "get_device_compute_capability"
    ),
    _Missing(
        lambda a: a.p.qkv_format == "bhsd",
        "takes q, k and v as sbhd, bshd or thd, not bhsd",
        None,
        f"{_DPA} of 2.20.2, 2423-2427",
    ),
    _Missing(lambda a: a.p.softcap, "softcap", (2, 20), "utils.py of 2.20.2, 838-866"),
    _Missing(lambda a: a.p.return_max_logit, "return_max_logit", (2, 9), "utils.py of 2.9, AttentionParams"),
    _Missing(
        lambda a: a.p.softmax_type != "vanilla", "softmax_type", (2, 8), "utils.py of 2.8, AttentionParams"
    ),
    _Missing(
        lambda a: a.mixed or a.p.kv_cache == "paged",
        "layouts of such a KV cache",
        (2, 2),
        "utils.py of 2.2, get_qkv_format",
    ),
    _Missing(lambda a: a.recipe == "block", "Float8BlockScaling", (2, 3), f"{_RECIPE} of 2.3, 298"),
    _Missing(lambda a: a.recipe == "current", "Float8CurrentScaling", (2, 2), f"{_RECIPE} of 2.2, 187"),
    _Missing(lambda a: a.recipe == "mxfp8", "MXFP8BlockScaling", (2, 0), f"{_RECIPE} of 2.0, 165"),
    _Missing(
        lambda a: a.p.cp_size > 1 and a.p.cp_comm_type == "a2a+p2p",
        "cp_comm_type a2a+p2p",
        (1, 12),
        "attention.py of 1.12, 4280",
    ),
)


def unasked(a: FilterInput) -> tuple[str, str]:
    """Why it cannot be asked, and where that is written; empty where it can."""
    if a.te < Version(1, 12):
        oldest, before = flash_attn_2_range(a)
        if a.env.flash_attn is None or not oldest <= a.env.flash_attn < before:
            text = f"TransformerEngine {a.te} needs flash-attn, at least {oldest} and below {before}"
            return f"{text}: it is {a.env.flash_attn or 'not installed'}.", "v1.11 attention.py:92, 4816-4821"
    if Version(2, 20) <= a.te and a.cudnn < OLDEST_CUDNN:
        text = f"TransformerEngine {a.te} needs cuDNN {OLDEST_CUDNN} and raises at import"
        return (
            f"{text}: it is {a.env.cudnn or 'not installed'}.",
            "2.20.2 common/__init__.py:24-44, MIN_CUDNN_VERSION",
        )
    for missing in _MISSING:
        if missing.needs(a) and (missing.since is None or a.te < Version(*missing.since)):
            if missing.since is None:
                return f"TransformerEngine {missing.words}.", missing.lines
            first = ".".join(map(str, missing.since))
            return f"TransformerEngine {a.te} has no {missing.words}: since {first}.", missing.lines
    return "", ""
