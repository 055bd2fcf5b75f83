"""Which codes lie in which file: the code of a new rule follows from what it is about.

``attnsel rules --ranges`` prints the table with the next free code of each range, and
tests/rules/test_lifecycle.py holds the rules to it. A range that is full stays, and its file gets a further
one. Every range begins above 000: ``<FAMILY>000`` is the rule that a record's ``takes`` makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.rules.api import REGISTRY
from attnsel.verdicts.verdict import Page


class Range(NamedTuple):
    """Codes from ``first`` to ``last``, both among them, for the rules in one file."""

    prefix: str
    first: int
    last: int
    file: str
    about: str

    @property
    def module(self) -> str:
        """The file as a module, which is how a page names it."""
        return f"attnsel.{self.file.removesuffix('.py').replace('/', '.')}"

    def has(self, code: str) -> bool:
        prefix, number = split(code)
        return prefix == self.prefix and self.first <= number <= self.last

    def next_free(self) -> str | None:
        """The code after the last one that is or was in use; None in a full range. Gaps are not filled."""
        known = (split(code) for code in (*REGISTRY.pages, *REGISTRY.removed) if self.has(code))
        number = max((number + 1 for _, number in known), default=self.first)
        return None if number > self.last else f"{self.prefix}{number:03}"


_WRITTEN = (
    Range("INSTALL", 1, 99, "rules/common.py", "libraries that must be installed"),
    Range("DEVICE", 1, 99, "rules/common.py", "devices, and something to compute"),
    Range("POLICY", 1, 99, "rules/policies.py", "what the user allowed or forbade"),
    Range("MEMORY", 1, 99, "rules/policies.py", "what does not fit the GPU"),
    Range("RUNTIME", 1, 99, "rules/policies.py", "what this process saw refuse, or go wrong"),
    # cuDNN below 9.8: 101 to 139, 180 to 229 and 401 to 459. FP8: 301 to 399. The others: 9.8 and newer.
    Range("CUDNN", 1, 3, "rules/cudnn/since_9_8_forward.py", "releases, devices, FP64"),
    Range("CUDNN", 4, 4, "rules/cudnn/since_9_8_masks.py", "arbitrary masks"),
    Range("CUDNN", 5, 6, "rules/cudnn/since_9_8_forward.py", "head dimensions: multiples"),
    Range("CUDNN", 7, 9, "rules/cudnn/since_9_8_layouts.py", "strides"),
    Range("CUDNN", 10, 19, "rules/cudnn/since_9_8_masks.py", "diagonals and windows"),
    Range("CUDNN", 20, 29, "rules/cudnn/since_9_8_scores.py", "bias, ALiBi, soft cap, sinks"),
    Range("CUDNN", 30, 59, "rules/cudnn/since_9_8_masks.py", "masks, diagonals and windows"),
    Range("CUDNN", 101, 118, "rules/cudnn/before_9_8_forward.py", "devices, types, lengths, head dimensions"),
    Range("CUDNN", 119, 139, "rules/cudnn/before_9_8_scores.py", "bias, ALiBi, softmax"),
    Range("CUDNN", 140, 149, "rules/cudnn/since_9_8_scores.py", "sinks, the largest score, dropout"),
    Range("CUDNN", 150, 159, "rules/cudnn/since_9_8_forward.py", "FP32"),
    Range("CUDNN", 160, 169, "rules/cudnn/since_9_8_forward.py", "head dimensions: limits"),
    Range("CUDNN", 170, 179, "rules/cudnn/since_9_8_layouts.py", "packed sequences, paged caches"),
    Range("CUDNN", 180, 199, "rules/cudnn/before_9_8_forward.py", "devices, types, lengths, head dimensions"),
    Range("CUDNN", 201, 229, "rules/cudnn/before_9_8_backward.py", "training"),
    Range("CUDNN", 230, 249, "rules/cudnn/since_9_8_backward.py", "training: head dimensions, bias"),
    Range("CUDNN", 250, 259, "rules/cudnn/since_9_8_backward_rows.py", "training: one query or one key"),
    Range("CUDNN", 260, 269, "rules/cudnn/since_9_8_backward_modes.py", "training: determinism"),
    Range("CUDNN", 270, 299, "rules/cudnn/since_9_8_backward_modes.py", "training: packed sequences"),
    Range("CUDNN", 301, 319, "rules/cudnn/fp8.py", "FP8: devices, recipes, types"),
    Range("CUDNN", 320, 349, "rules/cudnn/fp8_shapes.py", "FP8: head dimensions, lengths, masks, layouts"),
    Range("CUDNN", 350, 369, "rules/cudnn/fp8_features.py", "FP8: bias, softmax, dropout, determinism"),
    Range("CUDNN", 370, 399, "rules/cudnn/fp8_since_9_8.py", "FP8: what the library alone says"),
    Range("CUDNN", 401, 429, "rules/cudnn/before_9_8_masks.py", "masks and windows"),
    Range("CUDNN", 430, 459, "rules/cudnn/before_9_8_layouts.py", "packed sequences, paged caches"),
    Range("TRITON", 1, 19, "rules/triton.py", "devices, types, Triton's releases"),
    Range("TRITON", 20, 99, "rules/triton.py", "what fits"),
    Range("SDPA", 1, 99, "rules/sdpa/common.py", "every SDPA kernel"),
    Range("SDPA", 100, 199, "rules/sdpa/flash.py", "FlashAttention 2 on CUDA"),
    Range("SDPA", 200, 299, "rules/sdpa/efficient.py", "the memory-efficient kernel"),
    Range("SDPA", 300, 305, "rules/sdpa/cudnn.py", "cuDNN through SDPA: devices, types"),
    Range("SDPA", 306, 319, "rules/sdpa/cudnn_heads.py", "cuDNN through SDPA: head dimensions"),
    Range("SDPA", 320, 399, "rules/sdpa/cudnn.py", "cuDNN through SDPA: lengths, dropout, bias"),
    Range("SDPA", 401, 499, "rules/sdpa/math.py", "plain operations"),
    Range("SDPA", 600, 699, "rules/sdpa/varlen.py", "FlashAttention 2 with lengths, windows and pages"),
    Range("SDPA", 501, 599, "rules/sdpa/cpu.py", "the flash kernel for CPUs"),
    Range("SDPA", 701, 799, "rules/sdpa/old.py", "PyTorch before 2.5"),
    Range("SDPA", 801, 899, "rules/sdpa/platforms.py", "ROCm, MPS, Windows"),
    Range("FLASH", 1, 99, "rules/flash_attention/common.py", "every generation of FlashAttention"),
    Range("FLASH", 201, 299, "rules/flash_attention/two.py", "FlashAttention 2, flash-attn"),
    Range("FLASH", 301, 399, "rules/flash_attention/three.py", "FlashAttention 3, hopper/"),
    Range("FLASH", 401, 409, "rules/flash_attention/four.py", "FlashAttention 4: releases, devices"),
    Range("FLASH", 410, 419, "rules/flash_attention/four_heads.py", "FlashAttention 4: head dimensions"),
    Range("FLASH", 420, 429, "rules/flash_attention/four.py", "FlashAttention 4: features"),
    Range("FLASH", 430, 439, "rules/flash_attention/four_heads.py", "FlashAttention 4: head_dim 256"),
    Range("FLASH", 440, 499, "rules/flash_attention/four.py", "FlashAttention 4: features"),
    Range("TILED", 1, 99, "rules/tiled.py", "the fallback"),
    Range("CP", 1, 19, "rules/context_parallel.py", "one sequence over many ranks"),
    Range("CP", 20, 99, "rules/context_parallel.py", "lengths of the steps"),
    Range("BUG", 1, 29, "rules/bugs.py", "libcudnn"),
    Range("BUG", 30, 59, "rules/bugs.py", "PyTorch"),
    Range("BUG", 60, 79, "rules/bugs.py", "FlashAttention's packages"),
    Range("HINT", 1, 99, "rules/hints.py", "questions that may not be what was meant"),
    Range("TE", 1, 99, "rules/transformer_engine.py", "TransformerEngine's own attention"),
    Range("PREF", 1, 99, "rules/preferences.py", "which of several goes first"),
)


def _of_other_candidates() -> Iterator[Range]:
    """A family that begins with a candidate needs no line here before it has several files."""
    known = {codes.prefix for codes in _WRITTEN}
    for record in CANDIDATES.values():
        if record.family not in known and not record.plugin:
            known.add(record.family)
            file = f"{record.rules[0].removeprefix('attnsel.').replace('.', '/')}.py"
            yield Range(record.family, 1, 999, file, record.title)


RANGES = (*_WRITTEN, *_of_other_candidates())


def ranges_of(where: str) -> tuple[Range, ...]:
    """The ranges of a family ("CUDNN") or of a file, whose path may begin anywhere ("before_9_8_masks.py").

    Raises KeyError naming what there is.
    """
    found = tuple(
        codes for codes in RANGES if where.upper() == codes.prefix or f"/{codes.file}".endswith(f"/{where}")
    )
    if not found:
        families = ", ".join(dict.fromkeys(codes.prefix for codes in RANGES))
        raise KeyError(f"no range for {where!r}: a file under rules/, or one of {families}")
    return found


def range_of(page: Page) -> Range | None:
    """The range that a page's code is of, where the page lies in the range's file."""
    return next((codes for codes in RANGES if codes.has(page.code) and codes.module == page.module), None)


def free_codes(where: str) -> tuple[str, ...]:
    """The next free code of every range of a family or a file; full ranges have none."""
    return tuple(code for codes in ranges_of(where) if (code := codes.next_free()) is not None)


def split(code: str) -> tuple[str, int]:
    """``("CUDNN", 204)`` of a code."""
    prefix = code.rstrip("0123456789")
    return prefix, int(code[len(prefix) :])
