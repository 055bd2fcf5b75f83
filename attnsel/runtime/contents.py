"""What the numbers in length tensors and padding masks must be. To read them may wait for a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from attnsel.backends.pages import wrong_page
from attnsel.errors import InvalidInput
from attnsel.runtime.call import Config, Extras
from attnsel.runtime.inputs import mask_pair
from attnsel.runtime.sizes import Sizes, lengths_of
from attnsel.runtime.trivial_mask import is_noted

if TYPE_CHECKING:
    from torch import Tensor


def check_contents(config: Config, sizes: Sizes, q: Tensor, k: Tensor, extras: Extras) -> None:
    """Raises InvalidInput. Reads the tensors, so: for CPU tensors, or on request."""
    for name, cu, padded, rows in (
        ("cu_seqlens_q", extras.cu_seqlens_q, extras.cu_seqlens_q_padded, q.shape[0]),
        ("cu_seqlens_kv", extras.cu_seqlens_kv, extras.cu_seqlens_kv_padded, k.shape[0]),
    ):
        if cu is None:
            continue
        values = cu.tolist()
        _check_ascending(name, values)
        longest = sizes.seqlen_q if name == "cu_seqlens_q" else sizes.seqlen_kv
        lengths = [b - a for a, b in pairwise(values)]
        if max(lengths, default=0) > longest:
            raise InvalidInput(name, values, f"must not hold a sequence longer than {longest} rows")
        if config.qkv_format != "thd" or (name == "cu_seqlens_kv" and extras.block_table is not None):
            continue
        if padded is None:
            if values[-1] != rows:
                raise InvalidInput(name, values, f"must end at the number of tokens, {rows}")
            continue
        starts = padded.tolist()
        _check_ascending(f"{name}_padded", starts)
        room = [b - a for a, b in pairwise(starts)]
        if starts[-1] > rows:
            raise InvalidInput(f"{name}_padded", starts, f"must not end beyond the number of tokens, {rows}")
        if any(length > space for length, space in zip(lengths, room, strict=True)):
            raise InvalidInput(name, values, f"must fit into the room that {name}_padded gives, {starts}")
    if extras.block_table is not None and extras.cu_seqlens_kv is not None:
        rows_kv = lengths_of(extras.cu_seqlens_kv)
        wrong = wrong_page(extras.block_table, rows_kv, page_size=k.shape[1], pages=k.shape[0])
        if wrong is not None:
            sequence, entry, page = wrong
            raise InvalidInput(
                f"block_table[{sequence}, {entry}]",
                page,
                f"must be a page of the pool, 0 to {k.shape[0] - 1}",
            )
    for mask in dict.fromkeys(mask_pair(extras)):
        if is_noted(mask) and bool(mask.any()):
            raise InvalidInput("attention_mask", tuple(mask.shape), "must hide nothing, as was said of it")
    if config.attn_mask_type != "arbitrary":
        for name, mask in zip(("attention_mask (q)", "attention_mask (kv)"), mask_pair(extras), strict=False):
            rows_masked = mask.flatten(1)
            if bool((rows_masked[:, :-1] & ~rows_masked[:, 1:]).any()):
                raise InvalidInput(
                    name, tuple(mask.shape), "must mask the end of each sequence (True = masked out); for "
                    "another pattern use attn_mask_type 'arbitrary'"
                )  # fmt: skip


def _check_ascending(name: str, values: list[int]) -> None:
    if values[0] != 0 or any(b < a for a, b in pairwise(values)):
        raise InvalidInput(name, values, "must start at 0 and never descend")
