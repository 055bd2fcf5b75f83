"""Calls of FlashAttention's packages: the same on their stand-ins and on a GPU."""

from __future__ import annotations

from typing import NamedTuple

from attention_cases import BOTTOM_RIGHT, CASES, CAUSAL, Case, packed
from attnsel.backends.flash_attention import four, three, two
from attnsel.backends.flash_attention.kernel import Kernel
from varlen_cases import MORE


class Release(NamedTuple):
    generation: int
    version: str
    kernel: Kernel


RELEASES = [
    *(Release(2, version, two.KERNEL) for version in ("2.5.9.post1", "2.6.3", "2.7.4.post1", "2.8.3")),
    Release(3, "3.0.0b1", three.KERNEL),
    Release(3, "3.0.0", three.KERNEL),
    Release(4, "4.0.0b20", four.KERNEL),
    Release(4, "4.0.0b36", four.KERNEL),
]
NEVER = {"q_offset", "kv_offset", "dropout_p"}
ALIBI = [
    Case("alibi, causal", {**CAUSAL, "bottom_right": True}, {"alibi_slopes": "b h"}),
    Case("alibi, window", {"window_left": 5, "window_right": 3, "bottom_right": True}, {"alibi_slopes": "h"}),
    Case("alibi, lengths, causal", BOTTOM_RIGHT, {"seqlens": "b", "alibi_slopes": "b h"}, {"s_q": 27}),
    packed("alibi, causal", BOTTOM_RIGHT, {"alibi_slopes": "b h"}),
    packed("alibi, gaps", BOTTOM_RIGHT, {"alibi_slopes": "h", "cu_seqlens_padded": ""}),
]
SINKS = [
    Case("sinks", {"softmax_type": "learnable"}, {"softmax_offset": "h"}),
    Case("sinks, rows that see no key", {**BOTTOM_RIGHT, "softmax_type": "learnable"},
         {"softmax_offset": "h"}, {"s_q": 40}),
    Case("off by one", {"softmax_type": "off-by-one"}),
    packed("sinks, gaps", {"softmax_type": "learnable"}, {"softmax_offset": "h", "cu_seqlens_padded": ""}),
]  # fmt: skip
EVERY = [*CASES, *MORE, *ALIBI, *SINKS]


def takes(release: Release, case: Case) -> bool:
    """Whether the package has arguments for it; what rules and adaptations see to is left out as well."""
    spec, tensors = case.spec, case.tensors
    if NEVER & set(spec) or {"bias", "attn_mask"} & set(tensors):
        return False
    if "alibi_slopes" in tensors and (release.generation != 2 or not spec.get("bottom_right")):
        return False
    if "softmax_type" in spec and release.version != "4.0.0b36":
        return False
    if spec.get("softcap") and release.version in ("2.5.9.post1", "4.0.0b20"):
        return False
    apart = spec.get("packed") or {"seqlens_q", "seqlens_kv"} & set(tensors)
    bounded = {"window_left", "window_right"} & set(spec)
    known = spec.get("bottom_right") or {"self", "seqlens"} & set(tensors)
    crosses = case.sizes.get("s_q", 21) < 27 and spec.get("window_right", 99) < 6
    return not (bounded and not known and (apart or crosses)) and "e" not in case.sizes
