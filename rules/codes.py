"""Which codes lie in which file: the code of a new rule follows from what it is about.

``attnsel rules --ranges`` prints the table with the next free code of each range, and
tests/rules/test_lifecycle.py holds the rules to it. A range that is full stays, and its file gets a further
one. Every range begins above 000: ``<FAMILY>000`` is the rule that a record's ``takes`` makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import COMPONENTS, Device, Environment
from attnsel.environment.gpus import ARCHITECTURES
from attnsel.environment.versions import Version, Versions
from attnsel.params import AttentionParams
from attnsel.rules.api import REGISTRY, Example, Hint, Rule, removed
from attnsel.verdicts.reasons import Page


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
    Range("CUDNN", 7, 9, "rules/cudnn/since_9_8_forward.py", "strides"),
    Range("CUDNN", 10, 19, "rules/cudnn/since_9_8_masks.py", "diagonals and windows"),
    Range("CUDNN", 20, 29, "rules/cudnn/since_9_8_forward.py", "bias, ALiBi, soft cap, sinks"),
    Range("CUDNN", 30, 59, "rules/cudnn/since_9_8_masks.py", "masks, diagonals and windows"),
    Range("CUDNN", 101, 118, "rules/cudnn/before_9_8_forward.py", "devices, types, lengths, head dimensions"),
    Range("CUDNN", 119, 139, "rules/cudnn/before_9_8_masks.py", "bias, ALiBi, softmax"),
    Range("CUDNN", 140, 149, "rules/cudnn/since_9_8_forward.py", "sinks, the largest score, dropout"),
    Range("CUDNN", 150, 159, "rules/cudnn/since_9_8_forward.py", "FP32"),
    Range("CUDNN", 160, 169, "rules/cudnn/since_9_8_forward.py", "head dimensions: limits"),
    Range("CUDNN", 170, 179, "rules/cudnn/since_9_8_forward.py", "packed sequences, paged caches"),
    Range("CUDNN", 180, 199, "rules/cudnn/before_9_8_forward.py", "devices, types, lengths, head dimensions"),
    Range("CUDNN", 201, 229, "rules/cudnn/before_9_8_backward.py", "training"),
    Range("CUDNN", 230, 249, "rules/cudnn/since_9_8_backward.py", "training: head dimensions, bias"),
    Range("CUDNN", 250, 259, "rules/cudnn/since_9_8_backward_modes.py", "training: one query or one key"),
    Range("CUDNN", 260, 269, "rules/cudnn/since_9_8_backward_modes.py", "training: determinism"),
    Range("CUDNN", 270, 299, "rules/cudnn/since_9_8_backward_modes.py", "training: packed sequences"),
    Range("CUDNN", 301, 319, "rules/cudnn/fp8.py", "FP8: devices, recipes, types"),
    Range("CUDNN", 320, 349, "rules/cudnn/fp8_calls.py", "FP8: head dimensions, lengths, masks, layouts"),
    Range("CUDNN", 350, 369, "rules/cudnn/fp8_calls.py", "FP8: bias, softmax, dropout, determinism"),
    Range("CUDNN", 370, 399, "rules/cudnn/fp8_since_9_8.py", "FP8: what the library alone says"),
    Range("CUDNN", 401, 429, "rules/cudnn/before_9_8_masks.py", "masks and windows"),
    Range("CUDNN", 430, 459, "rules/cudnn/before_9_8_layouts.py", "packed sequences, paged caches"),
    Range("TRITON", 1, 19, "rules/triton.py", "devices, types, Triton's releases"),
    Range("TRITON", 20, 99, "rules/triton.py", "what fits"),
    Range("SDPA", 1, 99, "rules/sdpa/common.py", "every SDPA kernel"),
    Range("SDPA", 100, 199, "rules/sdpa/flash.py", "FlashAttention 2 on CUDA"),
    Range("SDPA", 200, 299, "rules/sdpa/others.py", "the memory-efficient kernel"),
    Range("SDPA", 300, 305, "rules/sdpa/cudnn.py", "cuDNN through SDPA: devices, types"),
    Range("SDPA", 306, 319, "rules/sdpa/cudnn.py", "cuDNN through SDPA: head dimensions"),
    Range("SDPA", 320, 399, "rules/sdpa/cudnn.py", "cuDNN through SDPA: lengths, dropout, bias"),
    Range("SDPA", 401, 499, "rules/sdpa/others.py", "plain operations"),
    Range("SDPA", 600, 699, "rules/sdpa/flash.py", "FlashAttention 2 with lengths, windows and pages"),
    Range("SDPA", 501, 599, "rules/sdpa/flash.py", "the flash kernel for CPUs"),
    Range("SDPA", 701, 799, "rules/sdpa/old.py", "PyTorch before 2.5"),
    Range("SDPA", 801, 899, "rules/sdpa/platforms.py", "ROCm, MPS, Windows"),
    Range("FLASH", 1, 99, "rules/flash_attention/common.py", "every generation of FlashAttention"),
    Range("FLASH", 201, 299, "rules/flash_attention/two.py", "FlashAttention 2, flash-attn"),
    Range("FLASH", 301, 399, "rules/flash_attention/three.py", "FlashAttention 3, hopper/"),
    Range("FLASH", 401, 409, "rules/flash_attention/four.py", "FlashAttention 4: releases, devices"),
    Range("FLASH", 410, 419, "rules/flash_attention/four.py", "FlashAttention 4: head dimensions"),
    Range("FLASH", 420, 429, "rules/flash_attention/four.py", "FlashAttention 4: features"),
    Range("FLASH", 430, 439, "rules/flash_attention/four.py", "FlashAttention 4: head_dim 256"),
    Range("FLASH", 440, 499, "rules/flash_attention/four.py", "FlashAttention 4: features"),
    Range("TILED", 1, 99, "rules/tiled.py", "the fallback"),
    Range("CP", 1, 19, "rules/context_parallel.py", "one sequence over many ranks"),
    Range("CP", 20, 99, "rules/context_parallel.py", "lengths of the steps"),
    Range("BUG", 1, 29, "rules/bugs.py", "libcudnn"),
    Range("BUG", 30, 59, "rules/bugs.py", "PyTorch"),
    Range("BUG", 60, 79, "rules/bugs.py", "FlashAttention's packages"),
    Range("HINT", 1, 99, "rules/hints.py", "questions that may not be what was meant"),
    Range("TE", 1, 99, "rules/hints.py", "TransformerEngine's own attention"),
    Range("PREF", 1, 99, "rules/preferences.py", "which of several goes first"),
)


def _of_other_candidates() -> Iterator[Range]:
    """A family that begins with a candidate needs no line here before it has several files."""
    known = {codes.prefix for codes in _WRITTEN}
    for record in CANDIDATES.values():
        if record.rules and record.family not in known and not record.plugin:
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


def split(code: str) -> tuple[str, int]:
    """``("CUDNN", 204)`` of a code."""
    prefix = code.rstrip("0123456789")
    return prefix, int(code[len(prefix) :])


# ---- The examples a rule carries, as questions: what its page shows and its test asks ------------------


_COMMON_FIRST = (90, 80, 100, 75, 89, 86, 120, 103, 121, 70, 87, 110)


def question(rule: Rule | Hint, example: Example) -> tuple[AttentionParams, Environment]:
    """``example`` inside the rule's gates: fields of AttentionParams, ``gpu``, ``device`` and versions.

    Raises InvalidInput for an example that contradicts itself, ValueError for gates that nothing passes.
    """
    given: dict[str, Any] = dict(example)
    machine: dict[str, Any] = {name: given.pop(name) for name in COMPONENTS if name in given}
    gpu = given.pop("gpu", None) or _some_gpu(rule)
    device = given.pop("device", None)
    for component in {versions.component for versions in rule.when} - set(machine):
        machine[component] = _some_version([v for v in rule.when if v.component == component])
    env = Environment.describe(gpu, **machine)
    more = {name: given.pop(name) for name in ("platform", "torch_flash", "missing") if name in given}
    if device is not None:
        kind: Any = "rocm" if device.startswith("gfx") else device
        env = env.replace(device=Device(type=kind, name=device))
    if more:
        env = env.replace(**more)
    return AttentionParams(**given), env


def _some_gpu(rule: Rule | Hint) -> str:
    if rule.arch is not None:
        for arch in (*_COMMON_FIRST, *ARCHITECTURES):
            if arch in rule.arch:
                return f"sm{arch}"
        raise ValueError(f"{rule.code}: no known architecture passes its gate")
    if rule.device is not None and "cuda" not in rule.device:
        return "cpu"
    return "H100"


def _some_version(gates: list[Versions]) -> Version:
    """A version inside all gates: some edge, or some gate's own sample."""
    candidates = sorted({gate.sample() for gate in gates} | {e for gate in gates for e in gate.edges()})
    for version in candidates:
        if all(version in gate for gate in gates):
            return version
    raise ValueError(f"no version lies in all of {[str(gate) for gate in gates]}")


# --------------------------------------------------------------------------------------------------------
# Codes that were in use once. No other rule is given one of them, and ``attnsel rule CODE`` still answers.
#
# A rule goes in two steps. First it is deprecated: its decorator says ``replaced_by="CUDNN204"``, and it
# refuses as before. A release later the function goes, and a line comes here::
#
# removed("CUDNN999", release="0.3.0", replaced_by="CUDNN204", why="CUDNN204 has the true edge.")
#
# ``release``: the first one without it. ``replaced_by``: what to read instead, if anything took over.
# ``why``: one or two sentences.


removed(
    "CUDNN334",
    release="0.1.0",
    why="FP8 with a padded bottom-right mask was unknown because no framework uses it. From cuDNN 9.8 on the "
    "rules follow the library instead, which takes it.",
)
removed(
    "CUDNN354",
    release="0.1.0",
    replaced_by="CUDNN353",
    why="Attention sinks with FP8 waited for cuDNN 9.21.0 on Blackwell, as in TransformerEngine. The library "
    "takes them from 9.13.0 on.",
)
removed(
    "CUDNN359",
    release="0.1.0",
    why="Deterministic FP8 with attention sinks was refused, as in TransformerEngine. From cuDNN 9.8 on the "
    "rules follow the library instead, which takes it.",
)
removed("TILED002", release="0.1.0", why="tiled read no paged key/value cache. It does now.")
removed("TRITON022", release="0.1.0", why="Wide fp32 heads had not been compiled yet. They have been since.")
removed(
    "SDPA001",
    release="0.1.0",
    why="Before PyTorch 2.5 only plain attention was known. SDPA707 to SDPA732 say what each release has.",
)
for _code in (
    *("SDPA701", "SDPA702", "SDPA703", "SDPA704", "SDPA705", "SDPA706"),
    *("SDPA711", "SDPA712", "SDPA713", "SDPA714", "SDPA730"),
):
    removed(
        _code,
        release="0.1.0",
        replaced_by="INSTALL001",
        why="It was about PyTorch 2.0 or 2.1, and what is older than 2.2 is not known any more.",
    )
