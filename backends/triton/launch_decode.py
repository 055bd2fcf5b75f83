"""Short queries as launches: the keys split over programs, and the merge of the parts.

How many splits is decided from shapes and the device's size, never from lengths that lie on the device: a
CUDA graph replays whatever lengths its tensors hold by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .blocks import MAX_SPLITS, Block, pad, split_count
from .decode import decode_kernel, merge_kernel
from .launch import Launch, LaunchCall, forward_args, make_launch, tile_count

# Queries of at most this many rows are decoded. The backward reads out and lse alone, which are the
# forward's, so that calls with one may be decoded as well.
SHORT = 16


@dataclass(frozen=True, slots=True)
class Parts:
    """What each split leaves for the merge, float32 [splits, b, longest_q, h] and ``out`` [..., e]."""

    out: Tensor
    lse: Tensor
    peak: Tensor | None  # where max_logit is asked for


def choose_splits(call: LaunchCall, arch: int | None, processors: int, asked: int | None = None) -> int:
    """Over how many programs the keys of a row block are split; 0: not a call to decode.

    ``processors``: streaming multiprocessors of the device, 0 on the interpreter. ``asked`` overrides the
    choice; raises ValueError above MAX_SPLITS and below 0.
    """
    if asked is not None:
        if not 0 <= asked <= MAX_SPLITS:
            raise ValueError(f"splits must be 0 (no decode kernel) to {MAX_SPLITS}, got {asked}")
        return asked
    if call.longest_q > SHORT:
        return 0
    block = call.block("decode", arch)
    programs = call.batch * call.groups * tile_count(call.longest_q * call.group, block.m)
    return split_count(programs, processors, tile_count(call.longest_kv, block.n))


def make_parts(call: LaunchCall, splits: int, block: Block) -> Parts | None:
    """Memory for the parts; None for one split, which writes the results itself."""
    # More than 16 rows of latent attention take every register: what finishes them would be spilled.
    crowded = block.m > 16 and max(call.d, call.e) > 256
    if splits == 1 and not crowded:
        return None
    shape = (splits, call.batch, call.longest_q, call.heads)
    device = call.inputs.q.device
    lse = torch.empty(shape, dtype=torch.float32, device=device)
    out = torch.empty((*shape, call.e), dtype=torch.float32, device=device)
    return Parts(out, lse, torch.empty_like(lse) if call.spec.return_max_logit else None)


def decode_launches(
    call: LaunchCall,
    out: Tensor,
    lse: Tensor,
    max_logit: Tensor | None,
    parts: Parts | None,
    block: Block,
) -> list[Launch]:
    """Decode, and the merge where there are parts. ``max_logit``: float32 [h, b, longest_q], or None."""
    tiles = tile_count(call.longest_q * call.group, block.m)
    splits = 1 if parts is None else parts.lse.shape[0]
    args: dict[str, Any] = {
        **forward_args(call, out, lse, max_logit, block),
        "PartOut": None if parts is None else parts.out,
        "PartLse": None if parts is None else parts.lse,
        "PartPeak": None if parts is None else parts.peak,
        "tiles": tiles,
        "splits": splits,
        "longest_q": call.longest_q,
        "groups": call.groups,
        "BLOCK_S": MAX_SPLITS,
        # As many parts as 4 warps hold in 32 registers each.
        "CHUNK": max(4, min(32, 4096 // pad(call.e))),
    }
    programs = tiles * splits * call.groups * call.batch
    launches = [make_launch("decode", decode_kernel, programs, args, block)]
    if parts is not None:
        merged = call.longest_q * call.heads * call.batch
        launches.append(make_launch("merge", merge_kernel, merged, args, Block(1, 1, 4, 1)))
    return launches
