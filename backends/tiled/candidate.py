"""What ``tiled`` is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.verdicts.record import CandidateRecord, Memory

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams

_TAKES = (
    "bf16", "fp16", "fp32", "fp64", "cuda", "rocm", "cpu", "mps", "xpu",
    "training", "causal", "window", "top_left", "bottom_right", "padding", "mask", "thd", "gaps", "paged",
    "gqa", "head_dim_v", "bias", "bias_grad", "alibi", "softcap", "sinks", "dropout", "deterministic", "lse",
    "max_logit", "strides", "cuda_graph", "empty", "offsets", "head_offset",
)  # fmt: skip

# Elements of a tile of scores: 2 MiB of float32 stay in a CPU's cache; more fills an accelerator. Philox
# holds several int64 words per entry: smaller tiles with dropout keep the peak in bounds.
CPU_TILE = 1 << 19
DEVICE_TILE = 1 << 24
DEVICE_TILE_WITH_DROPOUT = 1 << 22

_TILES_HELD = 5
_FLOAT32 = 4


def tile_elements(on_cpu: bool, dropout: bool) -> int:
    """The most elements of one tile."""
    if on_cpu:
        return CPU_TILE
    return DEVICE_TILE_WITH_DROPOUT if dropout else DEVICE_TILE


def tiles(p: AttentionParams, env: Environment) -> Memory:
    """What ``tiled`` holds at a time: at most five float32 tiles.

    Source: peaks of torch 2.13's CPU allocator: 2.3 to 3.2 tiles forward, 5 with the backward and dropout.
    """
    scores = p.batch_size * p.num_heads * p.max_seqlen_q * p.max_seqlen_kv
    largest = tile_elements(env.device.type == "cpu", p.dropout)
    return "tiles", _TILES_HELD * _FLOAT32 * min(largest, scores)


CANDIDATES = (
    CandidateRecord(
        name="tiled",
        title="flash attention in plain PyTorch operations, O(S) memory",
        family="TILED",
        kernel="attnsel.backends.tiled.kernel",
        takes=_TAKES,
        rules=("attnsel.rules.tiled",),
        limits="rules",
        adaptations=("drop_mask",),
        memory=tiles,
        trusted=True,
        last_resort=True,
    ),
)
