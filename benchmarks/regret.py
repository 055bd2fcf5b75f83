"""What attnsel's order costs where somebody has measured: the time of its pick over the fastest.

    python benchmarks/regret.py                       # by architecture and by source; exit 4 over a bound
    python benchmarks/regret.py --worst 20            # the measurements that it costs most
    python benchmarks/regret.py --page docs/reference/figures.md   # the same as a page, with its plot beside it

Every measurement of rules/data/figures.csv that holds two candidates which stand for such a call is asked as
the question that it answers: its card, its cuDNN, its shape; a backward is asked as training. The pick is the
first of the measured kernels in attnsel's order. Left out, each source in turn: whether a rule still has rows
that support it without that source, and what the order costs on what was left out.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from attnsel import AttentionParams, Environment, select
from attnsel.errors import InvalidInput
from attnsel.rules import REGISTRY, load_all
from attnsel.rules.figures import Measurement, Shape, every, sources

MISSED = 4
MEAN, WORST, PER_SOURCE = 1.02, 1.42, 1.04
INSTALLED = {"flash_attn": "2.8.3", "flash_attn_3": "3.0.0b1", "flash_attn_4": "4.0.0b36"}


class Pick(NamedTuple):
    """``kernel`` is what attnsel would run of those that were measured, ``ratio`` its time over the fastest's."""

    one: Measurement
    kernel: str
    fastest: str
    ratio: float


def question(shape: Shape) -> AttentionParams:
    """The call that was measured; what the source does not say is as in most of the others."""
    mask = {"arbitrary": "arbitrary", "causal": "causal"}.get(shape.mask, "no_mask")
    heads, length = shape.heads or 16, shape.seqlen_q or 4096
    asked: dict[str, Any] = {
        "batch_size": shape.batch or 2,
        "num_heads": heads,
        "num_gqa_groups": shape.kv_heads or heads,
        "max_seqlen_q": length,
        "max_seqlen_kv": shape.seqlen_kv or length,
        "head_dim_qk": shape.head_dim_qk or 128,
        "head_dim_v": shape.head_dim_v or 128,
        "attn_mask_type": mask,
        "is_training": shape.training,
        "deterministic": shape.deterministic,
        "dtype": shape.dtype if shape.dtype in ("bf16", "fp16") else "bf16",
    }
    if shape.window:
        asked["window_size"] = (int(shape.window) if shape.window.isdigit() else 1024, 0)
    if "fp8" in shape.dtype:
        kind = "mxfp8" if shape.dtype == "mxfp8" else "delayed"
        asked |= {"fp8": True, "fp8_meta": {"recipe": {"kind": kind, "fp8_dpa": True}}}
    if shape.other == "dropout":
        asked["attention_dropout"] = 0.1
    if "bias" in shape.other:
        asked["core_attention_bias_type"] = "post_scale_bias"
    return AttentionParams(**asked)


@lru_cache(maxsize=256)
def machine(gpu: str, cudnn: str) -> Environment:
    versions = {**INSTALLED, **({"cudnn": cudnn} if cudnn else {})}
    return Environment.describe(gpu, **versions)


def pick(one: Measurement) -> Pick | None:
    """None where fewer than two of the measured kernels stand for such a call, or the card is not known."""
    if not one.shape.arch:
        return None
    cudnn = next((figure.cudnn for figure in one.figures if figure.cudnn), "")
    try:
        selection = select(question(one.shape), machine(one.shape.gpu or f"sm{one.shape.arch}", cudnn))
    except InvalidInput:
        return None
    times = {figure.kernel: figure.time for figure in one.figures}
    standing = [c.name for c in selection.ranked if c.name in times]
    if len(standing) < 2:
        return None
    fastest = min(standing, key=times.__getitem__)
    return Pick(one, standing[0], fastest, times[standing[0]] / times[fastest])


def mean(picks: Iterable[Pick]) -> float:
    ratios = [math.log(pick.ratio) for pick in picks]
    return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worst", type=int, default=8)
    given = parser.parse_args()
    load_all()
    picks = [found for found in map(pick, every()) if found is not None]
    by_arch: dict[int, list[Pick]] = defaultdict(list)
    by_source: dict[str, list[Pick]] = defaultdict(list)
    for found in picks:
        by_arch[found.one.shape.arch].append(found)
        by_source[found.one.source].append(found)
    print(f"all {len(picks)}: {mean(picks):.4f}, worst {max(p.ratio for p in picks):.2f}")
    for arch, among in sorted(by_arch.items()):
        print(f"sm{arch} {len(among)}: {mean(among):.4f}, worst {max(p.ratio for p in among):.2f}")
    for source, among in sorted(by_source.items(), key=lambda item: -mean(item[1])):
        print(f"{source} {len(among)}: {mean(among):.4f}, worst {max(p.ratio for p in among):.2f}")
    for found in sorted(picks, key=lambda p: -p.ratio)[: given.worst]:
        print(found.one.name, found.one.shape, found.kernel, found.fastest, round(found.ratio, 3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
