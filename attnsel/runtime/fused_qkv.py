"""q, k and v out of one packed buffer, as TransformerEngine's ``qkv_layer`` and ``kv_layer`` say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnsel.errors import InvalidInput
from attnsel.params.layout import FORMATS

_FORMATS = ("bshd", "sbhd", "thd")


def unpack(
    q: Any, k: Any, v: Any, qkv_layer: Any, kv_layer: Any, interleave_dim: int, qkv_format: str, paged: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of ``qkv_layer`` [.., 3, h, d], or k and v of ``kv_layer`` [.., 2, g, d].

    ``interleave_dim`` -2 stands for [.., h, 3, d] and [.., g, 2, d]. No copy; one stack in the backward gives
    the packed gradient. Raises InvalidInput for any other shape, for tensors given twice or not at all, and
    with pages.
    """
    if not isinstance(interleave_dim, int):
        raise InvalidInput("qkv_interleave_dim", interleave_dim, "must be -3 (bs3hd) or -2 (bsh3d)")
    if qkv_layer is None and kv_layer is None:
        raise InvalidInput("qkv_interleave_dim", interleave_dim, "must be -3 without qkv_layer or kv_layer")
    if qkv_layer is not None and kv_layer is not None:
        raise InvalidInput("kv_layer", "a tensor", "must be left out beside qkv_layer, which holds k and v")
    name, packed, count = ("qkv_layer", qkv_layer, 3) if kv_layer is None else ("kv_layer", kv_layer, 2)
    given = {"query_layer": q, "key_layer": k, "value_layer": v}
    for other in list(given)[3 - count :]:
        if given[other] is not None:
            raise InvalidInput(other, "a tensor", f"must be left out beside {name}, which holds it")
    if count == 2 and q is None:
        raise InvalidInput("query_layer", None, "must be given with kv_layer, which holds k and v only")
    if paged:
        raise InvalidInput("block_table", "a tensor", f"must be left out with {name}: pages are not packed")
    if interleave_dim not in (-3, -2):
        raise InvalidInput("qkv_interleave_dim", interleave_dim, "must be -3 (bs3hd) or -2 (bsh3d)")
    if qkv_format not in _FORMATS:
        raise InvalidInput("qkv_format", qkv_format, f"must be one of {', '.join(_FORMATS)} with {name}")
    if not isinstance(packed, torch.Tensor):
        raise InvalidInput(name, type(packed).__name__, "must be a torch.Tensor")
    if packed.is_nested or packed.layout != torch.strided:
        raise InvalidInput(f"{name}.layout", str(packed.layout), "must be dense and strided")
    rank = FORMATS[qkv_format].rank + 1
    if packed.dim() != rank:
        allowed = f"must have {rank} dimensions with qkv_format {qkv_format!r}"
        raise InvalidInput(f"{name}.shape", tuple(packed.shape), allowed)
    if packed.shape[interleave_dim] != count:
        allowed = f"must have size {count} in dimension {interleave_dim} (qkv_interleave_dim)"
        raise InvalidInput(f"{name}.shape", tuple(packed.shape), allowed)
    views = packed.unbind(interleave_dim)
    return (views[0], views[1], views[2]) if count == 3 else (q, views[0], views[1])


def missing(q: Any, k: Any, v: Any) -> InvalidInput:
    """What to raise where one of the three is None and nothing packed stands for it."""
    name = "query_layer" if q is None else "key_layer" if k is None else "value_layer"
    return InvalidInput(name, None, "must be given, or qkv_layer or kv_layer that holds it")
