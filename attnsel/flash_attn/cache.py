"""``flash_attn_with_kvcache``: append to a cache in place, and attend to what it then holds. No gradient.

How attnsel gets the cache's own arguments, without copying the cache and without waiting for a GPU:

- lengths: as padding; the diagonal then ends at each sequence's own last row.
- block_table: as it is.
- cache_batch_idx: a contiguous cache is a pool with one page per entry, and the index its block table.
- cache_leftpad: a contiguous cache is also a pool of pages of one row each; each sequence's table then starts
  at its first real row (int32 [b, s_c], made per call). Distances from the last row do not change, so causal
  masks, windows and ALiBi need nothing else.

Where the lengths are known on the host, only that part of the cache is looked at, in steps of 256 rows, so
that a growing cache is one call signature for 256 tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.flash_attn.functions import call, empty_rows_are_plus_inf
from attnsel.flash_attn.options import (
    Options,
    Window,
    check_dense,
    check_lengths,
    check_pages,
    check_qkv,
    config_of,
    flag,
    refuse,
    rows_contiguous,
    whole,
)
from attnsel.flash_attn.rotary import rotated
from attnsel.runtime.call import NO_EXTRAS, Extras

_STEP = 256


class _Cache(NamedTuple):
    """The cache of a call: [b_c, s_c, g, d], or pages [pages, page_size, g, d] with ``block_table``."""

    k: Tensor
    v: Tensor
    seqlens: int | Tensor | None  # before the append; int32 [b], or None for all rows
    batch_idx: Tensor | None
    leftpad: Tensor | None
    block_table: Tensor | None

    @property
    def capacity(self) -> int:
        """Rows that a sequence may have."""
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def is_plain(self) -> bool:
        """Whether all rows count, and sequence m is entry m."""
        return all(value is None for value in self[2:])


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """q [b, s_q, h, d], caches [b_c, s_c, g, d] or pages [pages, page_size, g, d] -> out [b, s_q, h, d].

    k, v: [b, s_new, g, d], written into the cache from row cache_seqlens on before anything is read.
    rotary_cos, rotary_sin: [>= s_c, rotary_dim / 2] of q's dtype, only with k: k is rotated by its position
        in the cache; q too, row by row from cache_seqlens on, where causal or windowed, else all rows by
        cache_seqlens; a window that reaches all keys is none. ``rotary_interleaved``: pairs (0, 1), (2, 3),
        ..., else (0, rotary_dim / 2), ...
    cache_seqlens: rows in use before the append, int or int32 [b]; None for the whole cache.
    cache_batch_idx: int32 [b], the cache entry of each sequence. cache_leftpad: int32 [b], rows at the start
        that do not count. Neither with a block_table.
    block_table: int32 [b, n]; page_size is a multiple of 256.
    num_splits: at most 128, and not used: the kernel decides over how many programs it splits the keys,
        from shapes alone, so that a repeated call gives the same bits.
    return_softmax_lse: also return float32 [b, h, s_q], +inf where a row sees no key.

    Masks, softcap and ALiBi as in ``functions.py``, with s_k the sequence's own length after the append.
    Raises FlashAttentionError naming the argument; lengths and page numbers are checked only on the CPU. On a
    GPU an append beyond the cache ends in PyTorch's device-side assertion, and nothing is read outside it.
    """
    cache = _Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    options = Options(
        "flash_attn_with_kvcache", 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes,
        return_lse=return_softmax_lse,
    )  # fmt: skip
    interleaved = flag("rotary_interleaved", rotary_interleaved)
    with torch.no_grad():
        new = _check_cache(cache, q, k, v, num_splits)
        rows, capacity, plain = q.shape[1], cache.capacity, cache.is_plain
        equal = plain and capacity == rows
        cfg = config_of(options, "bshd", rows, capacity, padding=not plain, equal_lengths=equal)
        if rotary_cos is not None or rotary_sin is not None:
            _check_rotary(rotary_cos, rotary_sin, q, k, capacity)
            assert k is not None
            angles = (rotary_cos, rotary_sin, interleaved)
            q, k = _rotate(q, k, cache, angles, each_row=cfg.window_size is not None)
        if k is not None and v is not None:
            _append(cache, k, v)
        keys, values, extras = _keys_and_extras(cache, q.shape, new)
        if alibi_slopes is not None:
            extras = extras._replace(alibi_slopes=alibi_slopes)
        result = call(cfg, rows_contiguous(q), keys, values, extras)
        if return_softmax_lse:
            return result[0], empty_rows_are_plus_inf(result[1])
        return result


# ---- checks -----------------------------------------------------------------------------------------


def _check_cache(cache: _Cache, q: Tensor, k: Tensor | None, v: Tensor | None, num_splits: int) -> int:
    """The rows that are appended. Raises FlashAttentionError."""
    check_qkv(q, cache.k, cache.v, 4, names="q k_cache v_cache")
    batch = q.shape[0]
    for name, t in (("k_cache", cache.k), ("v_cache", cache.v)):
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            refuse(f"{name}.stride", t.stride(), "must have a contiguous last dimension")
    if whole("num_splits", num_splits) > 128:
        refuse("num_splits", num_splits, "must be at most 128")
    if cache.block_table is not None:
        check_pages(cache.block_table, cache.k, batch)
    elif cache.batch_idx is None and cache.k.shape[0] < batch:
        refuse("k_cache.shape", tuple(cache.k.shape), f"must have a row for each of {batch} sequences")
    for name, index in (("cache_batch_idx", cache.batch_idx), ("cache_leftpad", cache.leftpad)):
        if index is not None and cache.block_table is not None:
            refuse(name, "a tensor", "must be None with a block_table")
        if index is not None:
            check_lengths(name, index, batch, what="batch")
    if cache.seqlens is not None and not isinstance(cache.seqlens, int):
        check_lengths("cache_seqlens", cache.seqlens, batch, what="batch")
    new = _check_new(cache, q, k, v)
    _check_contents(cache, new)
    return new


def _check_new(cache: _Cache, q: Tensor, k: Tensor | None, v: Tensor | None) -> int:
    if k is None and v is None:
        return 0
    for name, t in (("k", k), ("v", v)):
        if t is None:
            refuse(name, None, "k and v must be given together")
        check_dense(name, t)
        if t.dim() != 4:
            refuse(f"{name}.shape", tuple(t.shape), "must be [b, s_new, g, d]")
        wanted = [q.shape[0], k.shape[1] if k is not None else 0, *cache.k.shape[2:]]
        if list(t.shape) != wanted or t.dtype != q.dtype:
            refuse(name, f"{t.dtype} {tuple(t.shape)}", f"must be {q.dtype} {wanted}")
    if cache.seqlens is None:
        refuse("cache_seqlens", None, "must be given with k: it says where k goes")
    assert k is not None
    if q.shape[1] > cache.capacity:
        allowed = f"must have at most the cache's {cache.capacity} rows when k is given"
        refuse("q.shape", tuple(q.shape), allowed)
    return k.shape[1]


def _check_contents(cache: _Cache, new: int) -> None:
    """Lengths and indices on the CPU must stay inside the cache."""
    if torch.compiler.is_compiling():
        return
    lengths = cache.seqlens
    if _on_host(lengths):
        values = [lengths] if isinstance(lengths, int) else lengths.tolist()  # type: ignore[union-attr]
        if any(n < 0 or n + new > cache.capacity for n in values):
            paged = " that block_table leads to" if cache.block_table is not None else ""
            appended = f" with the {new} rows of k" if new else ""
            allowed = f"must stay within the cache's {cache.capacity} rows{paged}{appended}"
            refuse("cache_seqlens", values, allowed)
        if cache.leftpad is not None and _on_host(cache.leftpad):
            pads = cache.leftpad.tolist()
            used = values * len(pads) if len(values) == 1 else values
            if any(not 0 <= pad <= n + new for pad, n in zip(pads, used, strict=True)):
                refuse("cache_leftpad", pads, f"must be at most the lengths, {[n + new for n in used]}")
    if cache.batch_idx is not None and _on_host(cache.batch_idx):
        rows = cache.batch_idx.tolist()
        if any(not 0 <= row < cache.k.shape[0] for row in rows):
            refuse("cache_batch_idx", rows, f"must be rows of the cache, 0 to {cache.k.shape[0] - 1}")


def _on_host(lengths: int | Tensor | None) -> bool:
    if isinstance(lengths, Tensor):
        return type(lengths) is Tensor and lengths.device.type == "cpu"
    return lengths is not None


def _check_rotary(cos: Tensor | None, sin: Tensor | None, q: Tensor, k: Tensor | None, capacity: int) -> None:
    if k is None:
        refuse("rotary_cos", "a tensor", "needs k and v: only what is appended can be turned")
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        if t is None:
            refuse(name, None, "rotary_cos and rotary_sin must be given together")
        check_dense(name, t)
        if t.dtype != q.dtype:
            refuse(f"{name}.dtype", str(t.dtype), f"must be q's, {q.dtype}")
        if t.dim() != 2 or t.shape[0] < capacity:
            refuse(f"{name}.shape", tuple(t.shape), f"must be [at least {capacity}, rotary_dim / 2]")
        if 2 * t.shape[1] > q.shape[-1] or t.shape[1] % 8:
            refuse("rotary_dim", 2 * t.shape[1], f"must be a multiple of 16, at most head_dim {q.shape[-1]}")
    assert cos is not None
    assert sin is not None
    if cos.shape != sin.shape:
        refuse("rotary_sin.shape", tuple(sin.shape), f"must be rotary_cos's, {tuple(cos.shape)}")


# ---- in place ---------------------------------------------------------------------------------------


def _rotate(
    q: Tensor, k: Tensor, cache: _Cache, angles: tuple[Any, Any, bool], *, each_row: bool
) -> tuple[Tensor, Tensor]:
    """q and k rotated by their positions in the cache; all of q by the first one unless ``each_row``."""
    cos, sin, interleaved = angles
    first = _first_new(cache, q)
    k = rotated(k, cos, sin, first + torch.arange(k.shape[1], device=q.device), interleaved)
    rows = first + torch.arange(q.shape[1], device=q.device) if each_row else first.expand(-1, q.shape[1])
    return rotated(q, cos, sin, rows, interleaved), k


def _first_new(cache: _Cache, q: Tensor) -> Tensor:
    """int64 [b, 1]: where each sequence's new rows go."""
    if isinstance(cache.seqlens, Tensor):
        return cache.seqlens.long()[:, None]
    return torch.full((q.shape[0], 1), cache.seqlens or 0, device=q.device)


def _append(cache: _Cache, k: Tensor, v: Tensor) -> None:
    new, lengths = k.shape[1], cache.seqlens
    if isinstance(lengths, int) and cache.batch_idx is None and cache.block_table is None:
        cache.k[: k.shape[0], lengths : lengths + new] = k
        cache.v[: k.shape[0], lengths : lengths + new] = v
        return
    rows = _first_new(cache, k) + torch.arange(new, device=k.device)
    if cache.block_table is not None:
        page_size = cache.k.shape[1]
        at = (cache.block_table.gather(1, rows // page_size).long(), rows % page_size)
    elif cache.batch_idx is not None:
        at = (cache.batch_idx.long()[:, None], rows)
    else:
        at = (torch.arange(k.shape[0], device=k.device)[:, None], rows)
    cache.k.index_put_(at, k)
    cache.v.index_put_(at, v)


# ---- the cache as attnsel's arguments ---------------------------------------------------------------


def _keys_and_extras(cache: _Cache, shape: torch.Size, new: int) -> tuple[Tensor, Tensor, Extras]:
    """Keys, values, and the lengths and tables of those that count; ``shape``: q's."""
    batch, rows = shape[0], shape[1]
    if cache.is_plain:
        return cache.k[:batch], cache.v[:batch], NO_EXTRAS
    longest, lengths = _longest(cache, new), _lengths(cache, batch, new)
    k, v, table = cache.k, cache.v, cache.block_table
    if cache.leftpad is not None:
        k, v, table = _rows_as_pages(cache, batch, longest)
        lengths = lengths - cache.leftpad
    elif table is None and cache.batch_idx is not None:
        table = cache.batch_idx[:, None]
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    if table is not None:
        return k, v, Extras(cu_seqlens_kv=ends, block_table=table, max_seqlen_kv=longest)
    if rows == 0:
        all_rows = torch.zeros(batch + 1, dtype=torch.int32, device=k.device)
    else:
        all_rows = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=k.device)
    return k[:batch, :longest], v[:batch, :longest], Extras(cu_seqlens_q=all_rows, cu_seqlens_kv=ends)


def _longest(cache: _Cache, new: int) -> int:
    """Rows of the cache that may be in use, rounded up in steps; all of them where the host cannot know."""
    lengths = cache.seqlens
    capacity = cache.capacity
    if torch.compiler.is_compiling() or not _on_host(lengths):
        return capacity
    longest = lengths if isinstance(lengths, int) else int(lengths.max())  # type: ignore[union-attr]
    return min(capacity, max(1, -(-(longest + new) // _STEP)) * _STEP)


def _lengths(cache: _Cache, batch: int, new: int) -> Tensor:
    """int32 [b], after the append. On a GPU at most the capacity, which the kernels rely on."""
    if isinstance(cache.seqlens, Tensor):
        lengths = cache.seqlens + new if new else cache.seqlens
        return lengths.clamp(max=cache.capacity) if not _on_host(cache.seqlens) else lengths
    length = cache.capacity if cache.seqlens is None else cache.seqlens + new
    return torch.full((batch,), length, dtype=torch.int32, device=cache.k.device)


def _rows_as_pages(cache: _Cache, batch: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """The caches as pools of pages of one row, and a table [b, longest] from each one's first real row on."""
    assert cache.leftpad is not None
    k, v = cache.k, cache.v
    if _rows_per_entry(k) is None or _rows_per_entry(k) != _rows_per_entry(v):
        k, v = k.contiguous(), v.contiguous()
    apart = _rows_per_entry(k)
    assert apart is not None
    entries = torch.arange(batch, device=k.device) if cache.batch_idx is None else cache.batch_idx
    first = entries * apart + cache.leftpad
    table = first[:, None] + torch.arange(longest, device=k.device)
    count = (k.shape[0] - 1) * apart + k.shape[1]
    pools = [
        t.as_strided((count, 1, *t.shape[2:]), (t.stride(1), t.stride(1), t.stride(2), t.stride(3)))
        for t in (k, v)
    ]
    return pools[0], pools[1], table.to(torch.int32)


def _rows_per_entry(cache: Tensor) -> int | None:
    """Rows from one cache entry to the next, as they lie in memory; None if that is not a whole number."""
    if cache.shape[0] == 1:
        return cache.shape[1]
    step = cache.stride(1)
    return cache.stride(0) // step if step > 0 and cache.stride(0) % step == 0 else None
