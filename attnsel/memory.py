"""What a candidate allocates while it runs, beyond the call's own tensors, their results and gradients.

Counted: stored scores, ``tiled``'s tiles, and what adaptations make (masks, copies, repeated heads). Not
counted: rows of statistics such as the log-sum-exp, which grow with s and not with s * s. cuDNN's workspace
is known to the library alone, once a plan is built; ``attnsel explain --ask-library`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attnsel.params import ITEMSIZE

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams
    from attnsel.verdict import Adaptation

Part = tuple[str, int]
"""What it is, in words, and its bytes."""

_FLOAT32 = 4


def score_tensors(p: AttentionParams, env: Environment) -> Part:
    """What ``sdpa.math`` holds of size [b, h, s_q, s_kv] at its peak.

    Half precision is computed in float32. Forward: the scores, their softmax, and one byte each to find rows
    that see nothing. With a backward: the probabilities and two gradients; dropout adds its mask.
    Source: peaks of torch 2.13's CPU allocator for s = 1024, forward 9 bytes a score in bf16 and fp32,
    training 12 and 12, with dropout 16 and 16; _scaled_dot_product_attention_math on CUDA is the same code.
    """
    wide = max(_FLOAT32, ITEMSIZE[p.dtype])
    held = 2 * wide + 1
    if p.is_training:
        held = (4 if p.dropout else 3) * wide
    return "scores", held * p.batch_size * p.num_heads * p.max_seqlen_q * p.max_seqlen_kv


def tiles(p: AttentionParams, env: Environment) -> Part:
    """What ``tiled`` holds at a time: at most five float32 tiles.

    Source: backends/tiled/tiles.py, choose_blocks (elements of a tile); peaks of torch 2.13's CPU allocator:
    2.3 to 3.2 tiles forward, 5 with the backward and dropout.
    """
    largest = 1 << 19 if env.device.type == "cpu" else 1 << (22 if p.dropout else 24)
    scores = p.batch_size * p.num_heads * p.max_seqlen_q * p.max_seqlen_kv
    return "tiles", 5 * _FLOAT32 * min(largest, scores)


_OWN: dict[str, Callable[[AttentionParams, Environment], Part]] = {
    "sdpa.math": score_tensors,
    "tiled": tiles,
}

_MADE: dict[str, str] = {
    "fold_mask": "mask",
    "contiguous": "copies",
    "expand_gqa": "repeated heads",
}


def memory_parts(
    name: str, p: AttentionParams, env: Environment, adaptations: tuple[Adaptation, ...] = ()
) -> tuple[Part, ...]:
    """What candidate ``name`` allocates for ``p``, the candidate's own first; empty when nothing counts."""
    own = _OWN.get(name)
    parts = [] if own is None else [own(p, env)]
    parts += [(_MADE.get(made.name, made.name), made.bytes) for made in adaptations]
    return tuple(part for part in parts if part[1])
