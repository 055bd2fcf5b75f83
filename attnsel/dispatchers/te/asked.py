"""A question in TransformerEngine's terms, and how one of its filters is written down."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attnsel.base.rows import read_rows
from attnsel.dispatchers.conditions import Filter, attribute, read_filter
from attnsel.environment import Environment
from attnsel.environment.versions import Version
from attnsel.params import AttentionParams
from attnsel.verdicts.dispatch import switches_in

FLASH_2, FLASH_3, FLASH_4 = "FlashAttention 2", "FlashAttention 3", "FlashAttention 4"
FUSED, UNFUSED = "FusedAttention", "UnfusedDotProductAttention"
FLASH = (FLASH_2, FLASH_3, FLASH_4)
EVERY = (*FLASH, FUSED, UNFUSED)
HALF = ("bf16", "fp16")
NEVER = Version(0)

LEVEL_1 = "a warning, whatever NVTE_DEBUG is"
LEVEL_2 = "a line under NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2"
RAISED = "the error that it raises when it runs"
NOTHING = "nothing: its query of cuDNN answers yes or no, without a reason"


class FilterInput(NamedTuple):
    """What a filter may read. ``te``: the release of TransformerEngine; ``on``: its switches."""

    p: AttentionParams
    env: Environment
    te: Version
    on: Mapping[str, str]

    @property
    def arch(self) -> int:
        return self.env.arch or 0

    @property
    def cudnn(self) -> Version:
        return self.env.cudnn or NEVER

    @property
    def fp8(self) -> bool:
        """Attention in FP8: the recipe has fp8_dpa, which fp8_mha forces."""
        return self.p.fp8 and self.p.recipe is not None and self.p.recipe.attention_in_fp8

    @property
    def fp8_query(self) -> bool:
        """Whether cuDNN is asked about FP8: by the recipe, or as the tensors are in FP8 without one."""
        return self.fp8 or self.p.fp8_attention

    @property
    def recipe(self) -> str:
        return str(getattr(self.p.recipe, "kind", "")) if self.fp8 else ""

    @property
    def deterministic(self) -> bool:
        return self.p.deterministic or self.on.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"

    @property
    def layout_group(self) -> str:
        """``hd_hd_hd``, ``3hd``, ``paged_kv_hd_hd_hd``, …: the layout without b, s and t."""
        return self.p.qkv_layout.replace("b", "").replace("s", "").replace("t", "")

    @property
    def q_format(self) -> str:
        return self.p.qkv_format

    @property
    def mixed(self) -> bool:
        """Whether queries and keys lie in different formats, as with caches: thd_2bshd."""
        parts = self.p.qkv_layout.removeprefix("paged_kv_").split("_")
        return len({part.replace("2", "").replace("3", "") for part in parts}) > 1

    @property
    def packed(self) -> bool:
        """Whether q, k and v all are packed sequences."""
        return self.p.qkv_format == "thd" and not self.mixed

    @property
    def square(self) -> bool:
        return self.p.max_seqlen_q == self.p.max_seqlen_kv

    @property
    def window(self) -> tuple[int, int]:
        """As DotProductAttention.forward hands it on: a causal mask has no keys on the right
        (check_set_window_size)."""
        left, right = self.p.window_size
        if self.p.causal:
            return left, 0
        return (-1, -1) if (left, right) == (-1, 0) else (left, right)

    @property
    def windowed(self) -> bool:
        left, right = self.window
        return left != -1 or right not in (-1, 0)

    @property
    def cached(self) -> bool:
        return self.p.kv_cache != "none"

    @property
    def bias(self) -> str:
        """As cuDNN is asked: ALiBi with slopes is a bias that is added; before 2.12 that between unequal
        lengths too."""
        kind = self.p.core_attention_bias_type
        slopes = self.p.alibi_slopes_shape is not None or (self.te < Version(2, 12) and not self.square)
        return "post_scale_bias" if kind == "alibi" and slopes else kind

    @property
    def bias_shape(self) -> str:
        """As cuDNN is asked: slopes for each sequence make a bias for each."""
        slopes = self.p.alibi_slopes_shape if self.p.core_attention_bias_type == "alibi" else None
        if slopes is not None:
            return "bhss" if len(slopes) == 2 else "1hss"
        return self.p.core_attention_bias_shape or "1hss"

    def enabled(self, name: str) -> bool:
        return self.on.get(name, "1") != "0"


_ROWS = read_rows("attnsel.dispatchers.te", "filters")
_KERNELS = {"2": FLASH_2, "3": FLASH_3, "4": FLASH_4, "fused": FUSED, "unfused": UNFUSED}
_TOLD = {"": LEVEL_2, "warning": LEVEL_1, "nothing": NOTHING}
_PLACES = (("", FilterInput), ("env.", Environment), ("p.", AttentionParams))


def filters(table: str, *functions: Callable[[FilterInput], object]) -> tuple[Filter, ...]:
    """The rows of ``data/filters.csv`` that are in this table; ``functions`` are words of their conditions,
    without the underscore that their names begin with."""
    named = {function.__name__.lstrip("_"): function for function in functions}
    found = (read_filter(row, named, _reading) for row in _ROWS if row["table"] == table)
    return tuple(
        one._replace(kernels=tuple(_KERNELS[word] for word in one.kernels), told=_TOLD[one.told])
        for one in found
    )


def _reading(word: str) -> Callable[[FilterInput], Any]:
    return (lambda a: a.enabled(word)) if word.startswith("NVTE_") else attribute(word, _PLACES)


SWITCHES = switches_in("attnsel.dispatchers.te")
"""The variables that decide which attention runs."""


def held(env: Environment) -> dict[str, str]:
    """The variables that are set in this process and have one of their values."""
    values = {switch.name: os.environ.get(switch.name) for switch in SWITCHES}
    return {s.name: value for s in SWITCHES if (value := values[s.name]) is not None and value in s.values}
