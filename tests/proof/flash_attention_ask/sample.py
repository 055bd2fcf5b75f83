"""Questions at random for FlashAttention's packages: what matters to them more than to others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnsel.params import AttentionParams
from sampling import Change, samples

_FP8_SHARE = 0.02  # attnsel hands FP8 to none of them: every such question has the same answer
_WIDTHS = (8, 16, 24, 32, 40, 48, 56, 80, 88, 104, 112, 152, 176, 208, 224, 240, 320, 448, 576)
_ODD = (1, 20, 36, 50, 100, 129, 132, 190)
_PAIRS = (
    *((192, 128), (192, 128), (128, 192), (64, 128), (128, 64), (96, 64), (72, 64), (40, 64), (256, 128)),
    *((192, 64), (160, 96), (64, 256), (64, 512), (576, 512), (512, 512), (256, 64), (200, 136)),
)
_RATIOS = ((6, 2), (12, 4), (24, 8), (32, 4), (40, 8), (64, 8), (96, 2), (128, 1), (16, 16))
_PAGES = (1, 3, 8, 16, 32, 64, 80, 96, 112, 128, 144, 256, 512, 1024)


def questions(seed: int, count: int, near: Sequence[Mapping[str, Any]] = ()) -> Iterator[AttentionParams]:
    """``count`` different questions; equal arguments give equal questions."""
    drawn = samples(seed, 2 * count + 100, near, _FP8_SHARE, _MORE)
    return itertools.islice(filter(_possible, drawn), count)


def _possible(p: AttentionParams) -> bool:
    """Whether a call can be like this: lengths come with pages, and heads in threes share no keys."""
    return (p.padding or p.kv_cache != "paged") and not (p.gqa and p.layout.group == "h3d")


def _softcap(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["softcap"] = rng.choice((10.0, 30.0, 50.0))


def _width(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["head_dim_qk"] = fields["head_dim_v"] = rng.choice(_ODD if rng.random() < 0.15 else _WIDTHS)


def _two_widths(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["head_dim_qk"], fields["head_dim_v"] = rng.choice(_PAIRS)


def _ratio(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["num_heads"], fields["num_gqa_groups"] = rng.choice(_RATIOS)
    fields.pop("alibi_slopes_shape", None)


def _one_query(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["max_seqlen_q"], fields["max_seqlen_kv"] = 1, rng.choice((1, 63, 512, 4096, 65536))


def _page(rng: random.Random, fields: dict[str, Any]) -> None:
    fields |= {
        "is_training": False,
        "kv_cache": "paged",
        "qkv_layout": rng.choice(("paged_kv_bshd_bshd_bshd", "paged_kv_thd_bshd_bshd")),
        "attn_mask_type": rng.choice(("padding", "padding_causal_bottom_right")),
        "page_size": rng.choice(_PAGES),
    }
    fields.pop("core_attention_bias_requires_grad", None)


def _bottom_right(rng: random.Random, fields: dict[str, Any]) -> None:
    """The diagonal that all of them have: others end most questions early."""
    kind = fields.get("attn_mask_type", "causal")
    if "causal" in kind and not kind.endswith("bottom_right"):
        fields["attn_mask_type"] = f"{kind}_bottom_right"


def _training(rng: random.Random, fields: dict[str, Any]) -> None:
    if fields.get("kv_cache", "none") == "none":
        fields["is_training"] = True
        fields["return_lse"] = rng.random() < 0.3
        fields["deterministic"] = rng.random() < 0.3


_MORE: tuple[Change, ...] = (
    _softcap,
    _width,
    _two_widths,
    _ratio,
    _one_query,
    _page,
    _bottom_right,
    _bottom_right,
    _training,
)
