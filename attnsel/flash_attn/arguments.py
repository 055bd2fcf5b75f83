"""FlashAttention-2's arguments: checked as it checks them, and turned into attnsel's.

Shape letters: b batch, s_q / s_k rows, t_q / t_k packed rows, h query heads, g key/value heads, d head_dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from attnsel.errors import InvalidInput
from attnsel.runtime.call import NO_EXTRAS, Config, Extras, config
from attnsel.runtime.run import attend

HALVES = (torch.float16, torch.bfloat16)
WIDEST = 256  # head_dim; csrc/flash_attn/flash_api.cpp of FlashAttention 2.8

_OTHER_NAMES = {
    "query_layer": "q",
    "key_layer": "k",
    "value_layer": "v",
    "cu_seqlens_kv": "cu_seqlens_k",
    "cu_seqlens_kv_padded": "cu_seqlens_k",
    "cu_seqlens_q_padded": "cu_seqlens_q",
    "max_seqlen_kv": "max_seqlen_k",
    "attention_dropout": "dropout_p",
    "attn_mask_type": "causal",
}


class FlashAttentionError(InvalidInput, RuntimeError):
    """A bad argument, under flash_attn's name for it.

    A RuntimeError because flash_attn's checks raise that, a ValueError as attnsel's.
    """


def refuse(field: str, value: Any, allowed: str) -> NoReturn:
    raise FlashAttentionError(field, value, allowed)


def call(cfg: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras = NO_EXTRAS) -> Any:
    """``attend``, with its complaints under flash_attn's names, in q's dtype whatever autocast would make.

    Raises FlashAttentionError, NoBackendError.
    """
    if torch.compiler.is_compiling():
        return attend(cfg, q, k, v, extras)
    device = q.device.type
    try:
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != q.dtype:
            with torch.autocast(device, enabled=False):
                return attend(cfg, q, k, v, extras)
        return attend(cfg, q, k, v, extras)
    except InvalidInput as error:
        raise renamed(error) from error


def renamed(error: InvalidInput) -> FlashAttentionError:
    """The same complaint, under the name that flash_attn gives the argument."""
    head, dot, rest = error.field.partition(".")
    name, bracket, index = head.partition("[")
    return FlashAttentionError(
        f"{_OTHER_NAMES.get(name, name)}{bracket}{index}{dot}{rest}", error.value, error.allowed
    )


# ---- tensors ----------------------------------------------------------------------------------------


def check_qkv(q: Any, k: Any, v: Any, rank: int, *, names: str = "q k v", pages: bool = False) -> None:
    """Types and shapes of queries, keys and values, dense (rank 4) or packed (3), keys in pages or not.

    What the call itself would find (unequal batches, devices) is left to it.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _complain(q, k, v, rank, names, pages)
    shape, keys = q.shape, k.shape
    if not (
        q.dtype in HALVES
        and k.dtype == q.dtype == v.dtype
        and keys == v.shape
        and len(shape) == rank
        and len(keys) == (4 if pages else rank)
        and 0 < shape[-1] == keys[-1] <= WIDEST
        and keys[-2] != 0
        and shape[-2] % keys[-2] == 0
        and (rank == 3 or shape[0] != 0)
    ):
        _complain(q, k, v, rank, names, pages)


def _complain(q: Tensor, k: Tensor, v: Tensor, rank: int, names: str, pages: bool) -> None:
    """Says what of ``check_qkv`` does not hold."""
    for name, t in zip(names.split(), (q, k, v), strict=True):
        if not isinstance(t, Tensor):
            refuse(name, type(t).__name__, "must be a torch.Tensor")
        dims = 4 if pages and t is not q else rank
        if t.dim() != dims:
            refuse(f"{name}.shape", tuple(t.shape), f"must have {dims} dimensions")
    kv_names = names.split()[1:]
    if q.dtype not in HALVES:
        refuse("q.dtype", str(q.dtype), "FlashAttention takes float16 and bfloat16")
    for name, t in zip(kv_names, (k, v), strict=True):
        if t.dtype != q.dtype:
            refuse(f"{name}.dtype", str(t.dtype), f"must be q's, {q.dtype}")
        if t.shape[-1] != q.shape[-1]:
            refuse(f"{name}.shape", tuple(t.shape), f"must have q's head_dim, {q.shape[-1]}")
    if v.shape != k.shape:
        refuse(f"{kv_names[1]}.shape", tuple(v.shape), f"must be {kv_names[0]}'s, {tuple(k.shape)}")
    if not 0 < q.shape[-1] <= WIDEST:
        refuse("head_dim", q.shape[-1], f"must be 1 to {WIDEST}")
    heads, groups = q.shape[-2], k.shape[-2]
    if groups == 0 or heads % groups:
        refuse(
            f"{kv_names[0]}.shape", tuple(k.shape), f"its number of heads, {groups}, must divide q's {heads}"
        )
    if rank == 4 and q.shape[0] == 0:
        refuse("q.shape", tuple(q.shape), "must have a batch size above 0")


def rows_contiguous(t: Tensor) -> Tensor:
    """flash_attn copies what does not lie row by row, and so do we."""
    return t if t.stride(-1) == 1 else t.contiguous()


def unpacked(name: str, t: Tensor, rank: int, parts: int) -> tuple[Tensor, ...]:
    """The views of a packed tensor [..., parts, heads, head_dim]. Their gradients come back in one copy."""
    if not isinstance(t, Tensor):
        refuse(name, type(t).__name__, "must be a torch.Tensor")
    if t.dim() != rank or t.shape[-3] != parts:
        where = "b, s" if rank == 5 else "total"
        refuse(f"{name}.shape", tuple(t.shape), f"must be [{where}, {parts}, heads, head_dim]")
    return t.unbind(-3)


def check_lengths(name: str, t: Any, batch: int | None = None, *, what: str = "batch + 1") -> int:
    """An int32 vector of lengths; returns how many entries it has."""
    if not isinstance(t, Tensor):
        refuse(name, type(t).__name__, "must be a torch.Tensor")
    if t.dtype != torch.int32:
        refuse(f"{name}.dtype", str(t.dtype), "must be torch.int32")
    if t.dim() != 1 or (batch is not None and t.shape[0] != batch):
        refuse(f"{name}.shape", tuple(t.shape), f"must be [{what}]" + (f" = [{batch}]" if batch else ""))
    return int(t.shape[0])


def check_pages(block_table: Any, k: Tensor, batch: int) -> None:
    """A block table, and pages of a size that FlashAttention-2 takes."""
    if not isinstance(block_table, Tensor) or block_table.dtype != torch.int32:
        found = str(getattr(block_table, "dtype", type(block_table).__name__))
        refuse("block_table.dtype", found, "must be torch.int32")
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        refuse("block_table.shape", tuple(block_table.shape), f"must be [batch, pages] with batch = {batch}")
    if k.shape[1] == 0 or k.shape[1] % 256:
        refuse("page size", k.shape[1], "must be a multiple of 256")


def number(name: str, value: Any) -> float:
    """A finite float from a number or a 0-d tensor."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        refuse(name, value, "must be a number")
    if not -float("inf") < result < float("inf"):
        refuse(name, value, "must be a finite number")
    return result


# ---- what is visible --------------------------------------------------------------------------------


def plan(
    label: str,
    qkv_format: str,
    rows: int,
    keys: int,
    window_size: Any,
    softmax_scale: Any,
    softcap: Any,
    dropout_p: Any = 0.0,
    *,
    causal: bool,
    alibi: bool,
    lengths: bool,
    same_lengths: bool,
    deterministic: bool = False,
    return_lse: bool = False,
    is_training: bool = False,
) -> tuple[Config, tuple[int, int]]:
    """The static side of a call, and the (left, right) bounds that it applies, -1 for none.

    ``rows`` and ``keys`` are the longest there are. ``lengths``: sequences have lengths of their own;
    ``same_lengths``: queries and keys are known to have the same, so that the diagonal starts at the top left
    corner too. A repeated call finds what it found.
    """
    make = _plan if torch.compiler.is_compiling() else _planned
    return make(
        label,
        qkv_format,
        rows,
        keys,
        _window(window_size),
        softmax_scale if softmax_scale is None else number("softmax_scale", softmax_scale),
        number("softcap", softcap),
        number("dropout_p", dropout_p),
        bool(causal),
        alibi,
        lengths,
        same_lengths,
        bool(deterministic),
        return_lse,
        is_training,
    )


def _plan(
    label: str,
    qkv_format: str,
    rows: int,
    keys: int,
    window: tuple[int, int],
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
    causal: bool,
    alibi: bool,
    lengths: bool,
    same_lengths: bool,
    deterministic: bool,
    return_lse: bool,
    is_training: bool,
) -> tuple[Config, tuple[int, int]]:
    if not 0.0 <= dropout_p < 1.0:
        refuse("dropout_p", dropout_p, "must be at least 0 and below 1")
    if softcap < 0.0:
        refuse("softcap", softcap, "must be above 0, or 0 for none")
    bounds = band(causal, window, rows, keys, alibi=alibi)
    kind = "padding" if lengths else "no_mask"
    if bounds[1] == 0:
        kind = "padding_causal" if lengths else "causal"
        kind += "" if same_lengths else "_bottom_right"
    made = config(
        qkv_format=qkv_format,
        attn_mask_type=kind,
        window_size=None if bounds == (-1, -1) else bounds,
        softmax_scale=softmax_scale,
        softcap=softcap,
        attention_dropout=dropout_p,
        bias_type="alibi" if alibi else "no_bias",
        is_training=is_training or dropout_p > 0.0,
        deterministic=deterministic,
        return_lse=return_lse,
        label=label,
    )
    return made, bounds


_planned = lru_cache(maxsize=4096)(_plan)


def _window(window_size: Any) -> tuple[int, int]:
    """Two ints; from tensors as well, which may not be kept: they may change."""
    try:
        left, right = (int(bound) for bound in window_size)
    except (TypeError, ValueError):
        refuse("window_size", window_size, "must be two ints, (left, right)")
    return left, right


def band(causal: bool, window: tuple[int, int], rows: int, keys: int, *, alibi: bool) -> tuple[int, int]:
    """The bounds that the package's kernel applies.

    As csrc/flash_attn/flash_api.cpp of FlashAttention 2.8 has it: ``causal`` closes the right side, except
    for a single row, where it changes nothing; a bound as wide as the keys is none; and beside a left bound
    an open right side is ``keys`` wide, which hides keys of rows that lie further above the diagonal.
    """
    left, right = window
    if causal and (rows != 1 or alibi):
        right = 0
    left = -1 if left < 0 or left >= keys else left
    right = -1 if right < 0 or right >= keys > 0 else right
    if left >= 0 and right < 0 and rows > keys + 1:
        right = keys
    return left, right


def empty_rows_are_plus_inf(lse: Tensor) -> Tensor:
    """FlashAttention's LSE of a row that sees no key is +inf, so that exp(score - lse) is 0."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)
