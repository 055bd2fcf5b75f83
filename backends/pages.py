"""Keys and values in pages: what a block table must be, and what it holds."""

from __future__ import annotations

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec


def check_pages(spec: Spec, inputs: Inputs) -> None:
    """ValueError for a block table that no kernel can take.

    Entries are held against the pool on CPU tensors only: on a GPU that would be a synchronisation, and the
    kernels clamp page numbers instead, so that nothing outside the pool is read.
    """
    table, k, v, lengths = inputs.block_table, inputs.k, inputs.v, inputs.seqlens_kv
    assert table is not None
    if spec.need_grad:
        raise ValueError("keys and values in pages (block_table) have no backward")
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "with a block_table k and v are pools [pages, g, page_size, head_dim] of equal pages, got "
            f"{list(k.shape)} and {list(v.shape)}"
        )
    if k.shape[2] < 1:
        raise ValueError(f"page_size must be at least 1, got k of {list(k.shape)}")
    batch = inputs.q.shape[0]
    if spec.packed and inputs.cu_seqlens_q is not None:
        batch = inputs.cu_seqlens_q.numel() - 1
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(f"block_table must be int32 [{batch}, n], got {table.dtype} {list(table.shape)}")
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError(f"rows of block_table must be contiguous, got strides {table.stride()}")
    if lengths is None or lengths.dtype != torch.int32 or lengths.shape != (batch,):
        got = "none" if lengths is None else f"{lengths.dtype} {list(lengths.shape)}"
        raise ValueError(f"with a block_table seqlens_kv must be int32 [{batch}], got {got}")
    if table.device.type != "cpu" or lengths.device.type != "cpu":
        return
    wrong = wrong_page(table, lengths, pages=k.shape[0], page_size=k.shape[2])
    if wrong is not None:
        sequence, entry, page = wrong
        allowed = f"0 to {k.shape[0] - 1}" if k.shape[0] else "none: the pools are empty"
        raise ValueError(
            f"block_table[{sequence}, {entry}] is {page}; allowed: {allowed} "
            f"(sequence {sequence} has {int(lengths[sequence])} rows in pages of {k.shape[2]})"
        )


def wrong_page(table: Tensor, lengths: Tensor, *, pages: int, page_size: int) -> tuple[int, int, int] | None:
    """The first entry in use that is no page of the pool: (sequence, entry, page). Reads the tensors."""
    used = torch.arange(table.shape[1], device=table.device) * page_size < lengths[:, None]
    found = (used & ((table < 0) | (table >= pages))).nonzero()
    if len(found) == 0:
        return None
    sequence, entry = found[0].tolist()
    return sequence, entry, int(table[sequence, entry])


def page_size(inputs: Inputs) -> int:
    """Rows of a page; 0 where keys and values are not in pages."""
    return 0 if inputs.block_table is None else inputs.k.shape[2]


def longest_paged(inputs: Inputs) -> int:
    """What bounds a sequence's keys: the table's width, and ``max_seqlen_kv`` where it is given."""
    assert inputs.block_table is not None
    # Nothing can be read from a pool without pages.
    rows = inputs.block_table.shape[1] * inputs.k.shape[2] if inputs.k.shape[0] else 0
    return rows if inputs.max_seqlen_kv is None else min(rows, inputs.max_seqlen_kv)
