"""Keys and values in pages: what a block table must be, and the kernels' arguments for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec


def check_pages(spec: Spec, inputs: Inputs) -> None:
    """ValueError for a block table that the kernels cannot take.

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
    batch = _batch(spec, inputs)
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(f"block_table must be int32 [{batch}, n], got {table.dtype} {list(table.shape)}")
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError(f"rows of block_table must be contiguous, got strides {table.stride()}")
    if lengths is None or lengths.dtype != torch.int32 or lengths.shape != (batch,):
        got = "none" if lengths is None else f"{lengths.dtype} {list(lengths.shape)}"
        raise ValueError(f"with a block_table seqlens_kv must be int32 [{batch}], got {got}")
    if table.device.type == "cpu" and lengths.device.type == "cpu":
        _check_entries(table, lengths, k.shape[0], k.shape[2], longest_paged(inputs))


def _batch(spec: Spec, inputs: Inputs) -> int:
    if spec.packed and inputs.cu_seqlens_q is not None:
        return inputs.cu_seqlens_q.numel() - 1
    return inputs.q.shape[0]


def _check_entries(table: Tensor, lengths: Tensor, pages: int, page_size: int, longest: int) -> None:
    used = (lengths.clamp(0, longest) + page_size - 1) // page_size
    wrong = (table < 0) | (table >= pages)
    wrong &= torch.arange(table.shape[1]) < used[:, None]
    found = wrong.nonzero()
    if len(found):
        sequence, entry = found[0].tolist()
        allowed = f"0 to {pages - 1}" if pages else "none: the pools are empty"
        raise ValueError(
            f"block_table[{sequence}, {entry}] is {int(table[sequence, entry])}; allowed: {allowed} "
            f"(sequence {sequence} has {int(lengths[sequence])} rows in pages of {page_size})"
        )


def page_size(inputs: Inputs) -> int:
    """Rows of a page; 0 where keys and values are not in pages."""
    return 0 if inputs.block_table is None else inputs.k.shape[2]


def longest_paged(inputs: Inputs) -> int:
    """What bounds a sequence's keys: the table's width, and ``max_seqlen_kv`` where it is given."""
    table = inputs.block_table
    assert table is not None
    # Nothing can be read from a pool without pages.
    rows = table.shape[1] * inputs.k.shape[2] if inputs.k.shape[0] else 0
    return rows if inputs.max_seqlen_kv is None else min(rows, inputs.max_seqlen_kv)


def page_args(inputs: Inputs) -> dict[str, Any]:
    """The kernels' arguments for pages. PAGE_SIZE is a constant of theirs: every column is divided by it."""
    table = inputs.block_table
    return {
        "Table": table,
        "table_b": 0 if table is None else table.stride(0),
        "pages": 0 if table is None else inputs.k.shape[0],
        "PAGE_SIZE": page_size(inputs),
    }
