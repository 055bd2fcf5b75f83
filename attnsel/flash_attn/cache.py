"""``flash_attn_with_kvcache``: append to a cache in place, and attend to what it then holds. No gradient.

How the cache's own arguments are said to attnsel, without copying the cache and without waiting for a GPU:

- lengths: as padding; the diagonal is then anchored at each sequence's own end.
- block_table: as it is.
- cache_batch_idx: a contiguous cache is a pool with one page per row, and the index its block table.
- cache_leftpad: a contiguous cache is also a pool of pages of one row each; each sequence's table then starts
  at its first real row (int32 [b, s_c], made per call). Distances from the last row stay what they are, so
  causal masks, windows and ALiBi need nothing else.

Where the lengths are known on the host, only that part of the cache is looked at, in steps of 256 rows, so
that a growing cache asks one question for 256 tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.flash_attn.arguments import (
    call,
    check_lengths,
    check_pages,
    check_qkv,
    empty_rows_are_plus_inf,
    plan,
    refuse,
    rows_contiguous,
)
from attnsel.flash_attn.layers.rotary import rotated
from attnsel.runtime.call import NO_EXTRAS, Extras

_STEP = 256


class _Cache(NamedTuple):
    """A checked call's cache. ``lengths`` are from before the append: int, int32 [b], or None: all of it."""

    k: Tensor
    v: Tensor
    capacity: int
    lengths: int | Tensor | None
    batch_idx: Tensor | None
    leftpad: Tensor | None
    table: Tensor | None

    @property
    def is_plain(self) -> bool:
        """All of it counts, and sequence m is entry m."""
        return all(value is None for value in self[3:])


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """q [b, s_q, h, d], caches [b_c, s_c, g, d] or pages [pages, page_size, g, d] -> out [b, s_q, h, d].

    k, v: [b, s_new, g, d], written into the cache at cache_seqlens, ... before anything is read.
    rotary_cos, rotary_sin: [>= s_c, rotary_dim / 2] of q's dtype, only with k: k is turned by its place in
        the cache; q too, row by row from cache_seqlens on, where causal or windowed, else all rows by
        cache_seqlens. ``rotary_interleaved``: pairs (0, 1), (2, 3), ..., else halves.
    cache_seqlens: rows in use before the append, int or int32 [b]; None for the whole cache.
    cache_batch_idx: int32 [b], the cache row of each sequence. cache_leftpad: int32 [b], rows at the start
        that are not there. Neither with a block_table.
    block_table: int32 [b, n]; page_size is a multiple of 256.
    num_splits: at most 128, and otherwise a hint: the kernel decides over how many programs it splits the
        keys, from shapes alone, so that a repeated call gives the same bits.
    return_softmax_lse: also return float32 [b, h, s_q], +inf where a row sees no key.

    Masks, softcap and ALiBi as in ``functions.py``, with s_k the sequence's own length after the append.
    Raises FlashAttentionError naming the argument; lengths and page numbers are looked at where they lie on
    the CPU. On a GPU an append beyond the cache ends in PyTorch's device-side assertion, and nothing is read
    outside the cache.
    """
    with torch.no_grad():
        cache = _checked(
            q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, num_splits
        )
        cfg, bounds = plan(
            "flash_attn_with_kvcache",
            "bshd",
            q.shape[1],
            cache.capacity,
            window_size,
            softmax_scale,
            softcap,
            causal=causal,
            alibi=alibi_slopes is not None,
            lengths=not cache.is_plain,
            same_lengths=cache.is_plain and cache.capacity == q.shape[1],
            return_lse=return_softmax_lse,
        )
        if rotary_cos is not None or rotary_sin is not None:
            _check_rotary(rotary_cos, rotary_sin, q, k, cache.capacity)
            turned = (rotary_cos, rotary_sin, rotary_interleaved)
            assert k is not None
            q, k = _turn(q, k, cache, turned, each_row=bounds != (-1, -1))
        new = 0
        if k is not None and v is not None:
            new = k.shape[1]
            _append(cache, k, v)
        keys, values, extras = _as_attnsel_takes_it(cache, q.shape, new)
        if alibi_slopes is not None:
            extras = extras._replace(alibi_slopes=alibi_slopes)
        result = call(cfg, rows_contiguous(q), keys, values, extras)
        if return_softmax_lse:
            return result[0], empty_rows_are_plus_inf(result[1])
        return result


# ---- checks -----------------------------------------------------------------------------------------


def _checked(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    num_splits: int,
) -> _Cache:
    check_qkv(q, k_cache, v_cache, 4, names="q k_cache v_cache")
    batch = q.shape[0]
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            refuse(f"{name}.stride", t.stride(), "must have a contiguous last dimension")
    if int(num_splits) > 128:
        refuse("num_splits", num_splits, "must be at most 128")
    capacity = k_cache.shape[1]
    if block_table is not None:
        check_pages(block_table, k_cache, batch)
        for name, other in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
            if other is not None:
                refuse(name, "a tensor", "must be None with a block_table")
        capacity *= block_table.shape[1]
    elif cache_batch_idx is not None:
        check_lengths("cache_batch_idx", cache_batch_idx, batch, what="batch")
    elif k_cache.shape[0] < batch:
        refuse("k_cache.shape", tuple(k_cache.shape), f"must have a row for each of {batch} sequences")
    if cache_leftpad is not None:
        check_lengths("cache_leftpad", cache_leftpad, batch, what="batch")
    if cache_seqlens is not None and not isinstance(cache_seqlens, int):
        check_lengths("cache_seqlens", cache_seqlens, batch, what="batch")
    new = _check_new(q, k_cache, k, v, cache_seqlens, capacity)
    cache = _Cache(k_cache, v_cache, capacity, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    _check_contents(cache, new)
    return cache


def _check_new(
    q: Tensor, k_cache: Tensor, k: Tensor | None, v: Tensor | None, cache_seqlens: Any, capacity: int
) -> int:
    """The rows that are appended."""
    if k is None and v is None:
        return 0
    for name, t in (("k", k), ("v", v)):
        if t is None:
            refuse(name, None, "k and v must be given together")
        wanted = [q.shape[0], k.shape[1] if k is not None else 0, *k_cache.shape[2:]]
        if list(t.shape) != wanted or t.dtype != q.dtype:
            refuse(name, f"{t.dtype} {tuple(t.shape)}", f"must be {q.dtype} {wanted}")
    if cache_seqlens is None:
        refuse("cache_seqlens", None, "must be given with k: it says where k goes")
    assert k is not None
    if q.shape[1] > capacity:
        refuse("q.shape", tuple(q.shape), f"must have at most the cache's {capacity} rows when k is given")
    return k.shape[1]


def _check_contents(cache: _Cache, new: int) -> None:
    """That lengths and indices which lie on the CPU stay inside the cache."""
    if torch.compiler.is_compiling():
        return
    lengths = cache.lengths
    if _on_host(lengths):
        values = [lengths] if isinstance(lengths, int) else lengths.tolist()  # type: ignore[union-attr]
        if any(n < 0 or n + new > cache.capacity for n in values):
            room = f"{cache.capacity} rows" + (
                " that block_table leads to" if cache.table is not None else ""
            )
            appended = f" with the {new} rows of k" if new else ""
            refuse("cache_seqlens", values, f"must stay within the cache's {room}{appended}")
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


def _turn(
    q: Tensor, k: Tensor, cache: _Cache, turned: tuple[Any, Any, bool], *, each_row: bool
) -> tuple[Tensor, Tensor]:
    """q and k by their places in the cache."""
    cos, sin, interleaved = turned
    first = _first_new(cache, q)
    k = rotated(k, cos, sin, first + torch.arange(k.shape[1], device=q.device), interleaved)
    places = first + torch.arange(q.shape[1], device=q.device) if each_row else first.expand(-1, q.shape[1])
    return rotated(q, cos, sin, places, interleaved), k


def _first_new(cache: _Cache, q: Tensor) -> Tensor:
    """int64 [b, 1]: where each sequence's new rows go."""
    if isinstance(cache.lengths, Tensor):
        return cache.lengths.long()[:, None]
    return torch.full((q.shape[0], 1), cache.lengths or 0, device=q.device)


def _append(cache: _Cache, k: Tensor, v: Tensor) -> None:
    new, lengths = k.shape[1], cache.lengths
    if isinstance(lengths, int) and cache.batch_idx is None and cache.table is None:
        cache.k[: k.shape[0], lengths : lengths + new] = k
        cache.v[: k.shape[0], lengths : lengths + new] = v
        return
    rows = _first_new(cache, k) + torch.arange(new, device=k.device)
    if cache.table is not None:
        page_size = cache.k.shape[1]
        at = (cache.table.gather(1, rows // page_size).long(), rows % page_size)
    elif cache.batch_idx is not None:
        at = (cache.batch_idx.long()[:, None], rows)
    else:
        at = (torch.arange(k.shape[0], device=k.device)[:, None], rows)
    cache.k.index_put_(at, k)
    cache.v.index_put_(at, v)


# ---- for the selector -------------------------------------------------------------------------------


def _as_attnsel_takes_it(cache: _Cache, shape: torch.Size, new: int) -> tuple[Tensor, Tensor, Extras]:
    """Keys, values, and what says which of them count."""
    batch, rows = shape[0], shape[1]
    if cache.is_plain:
        return cache.k[:batch], cache.v[:batch], NO_EXTRAS
    device, longest = cache.k.device, _longest(cache, new)
    lengths = _lengths(cache, batch, new)
    k, v, table = cache.k, cache.v, cache.table
    if cache.leftpad is not None:
        k, v, table = _rows_as_pages(cache, batch, longest)
        lengths = lengths - cache.leftpad
    elif table is None and cache.batch_idx is not None:
        table = cache.batch_idx[:, None]
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    if table is not None:
        return k, v, Extras(cu_seqlens_kv=ends, block_table=table, max_seqlen_kv=longest)
    all_rows = torch.arange(0, (batch + 1) * rows, max(rows, 1), dtype=torch.int32, device=device)
    if rows == 0:
        all_rows = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return k[:batch, :longest], v[:batch, :longest], Extras(cu_seqlens_q=all_rows, cu_seqlens_kv=ends)


def _longest(cache: _Cache, new: int) -> int:
    """Rows of the cache that may be in use: as far as the host knows, in steps."""
    lengths = cache.lengths
    if torch.compiler.is_compiling() or not _on_host(lengths):
        return cache.capacity
    longest = lengths if isinstance(lengths, int) else int(lengths.max())  # type: ignore[union-attr]
    return min(cache.capacity, max(1, -(-(longest + new) // _STEP)) * _STEP)


def _lengths(cache: _Cache, batch: int, new: int) -> Tensor:
    """int32 [b], after the append. On a GPU cut at the capacity, which the kernels rely on."""
    if isinstance(cache.lengths, Tensor):
        lengths = cache.lengths + new if new else cache.lengths
        return lengths.clamp(max=cache.capacity) if not _on_host(cache.lengths) else lengths
    length = cache.capacity if cache.lengths is None else cache.lengths + new
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
    """Rows from one cache entry to the next, as they lie in memory; None where that is no whole number."""
    if cache.shape[0] == 1:
        return cache.shape[1]
    step = cache.stride(1)
    return cache.stride(0) // step if step > 0 and cache.stride(0) % step == 0 else None
