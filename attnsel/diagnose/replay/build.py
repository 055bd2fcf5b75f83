"""The tensors of a call again: shapes, strides, offsets and shared memory of the file; numbers from a seed.

The same seed gives the same numbers on every device, and in the program of ``script.py``.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.errors import InvalidInput, in_words, short
from attnsel.runtime.call import Extras
from attnsel.runtime.replay_file import ReplayFile, TensorRecord

_MASK = ("attention_mask", "attention_mask.q", "attention_mask.kv")


class Built(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    extras: Extras


def load_data(path: Path, file: ReplayFile) -> dict[str, Tensor]:
    """The numbers that were kept; none where there are none. Raises InvalidInput."""
    if not file.data:
        return {}
    beside = path.parent / file.data
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files that torch did not write: they are refused
            held = torch.load(beside, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes the reader raise
        raise InvalidInput("data", str(beside), f"cannot be read: {in_words(error)}") from None
    if not isinstance(held, dict) or not all(isinstance(t, Tensor) for t in held.values()):
        raise InvalidInput("data", str(beside), "must hold tensors by name")
    return {str(name): t for name, t in held.items()}


def build(file: ReplayFile, device: torch.device, seed: int, data: dict[str, Tensor]) -> Built:
    """Raises InvalidInput where the file lacks what the call needs, or asks for more memory than there is."""
    _check_size(file)
    made: dict[str, Tensor] = {}
    for number in dict.fromkeys(record.storage for record in file.tensors):
        views = [record for record in file.tensors if record.storage == number]
        memory = _memory(views, number, seed)
        for record in views:
            made[record.name] = _view(record, memory, data.get(record.name))
    placed = _placed(made, file, device)
    mask: Any = placed.pop("attention_mask", None)
    if "attention_mask.q" in placed:
        mask = (placed.pop("attention_mask.q"), placed.pop("attention_mask.kv", None))
    extras = Extras(attention_mask=mask)
    others: dict[str, Any] = {name: t for name, t in placed.items() if name not in "qkv"}
    others |= {"max_seqlen_q": file.max_seqlen_q, "max_seqlen_kv": file.max_seqlen_kv}
    return Built(placed["q"], placed["k"], placed["v"], extras._replace(**others))


def _check_size(file: ReplayFile) -> None:
    spans: dict[int, int] = {}
    for record in file.tensors:
        itemsize: int = getattr(torch, record.dtype).itemsize
        spans[record.storage] = max(spans.get(record.storage, 0), record.span * itemsize)
    total = sum(spans.values())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else total
    if total > pages:
        raise InvalidInput("tensors", f"{total} bytes", "are more than this machine has memory")


def _memory(views: list[TensorRecord], number: int, seed: int) -> Tensor:
    """The memory that these tensors are views of, on the CPU."""
    dtype: torch.dtype = getattr(torch, views[0].dtype)
    if any(getattr(torch, view.dtype) != dtype for view in views):
        raise InvalidInput("tensors", [view.name for view in views], "share memory and differ in dtype")
    count = max(view.span for view in views)
    if not dtype.is_floating_point:
        return torch.zeros(count, dtype=dtype)
    generator = torch.Generator().manual_seed(seed * 100 + number)
    return torch.randn(count, generator=generator).to(dtype)


def _view(record: TensorRecord, memory: Tensor, data: Tensor | None) -> Tensor:
    view = memory.as_strided(record.shape, record.stride, record.storage_offset)
    if data is not None:
        _fill(record, view, data)
    elif record.values is not None:
        _fill(record, view, torch.tensor(record.values).reshape(record.shape))
    elif record.name in _MASK:
        _fill(record, view, _mask(record))
    elif not view.is_floating_point() and view.numel():
        raise InvalidInput(
            f"{record.name}.values", None, "were not kept, and the call is another without them"
        )
    if record.name == "alibi_slopes" and data is None:
        view.abs_()
    return view


def _fill(record: TensorRecord, view: Tensor, values: Tensor) -> None:
    for dim, stride in enumerate(record.stride):
        if stride == 0 and record.shape[dim] > 1:  # its entries are the same memory
            view, values = view.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    if tuple(values.shape) != tuple(view.shape):
        said = f"must have the shape {tuple(view.shape)}"
        raise InvalidInput(f"data of {record.name}", short(tuple(values.shape)), said)
    view.copy_(values)


def _mask(record: TensorRecord) -> Tensor:
    """Padding at the end as it was; of other masks as many entries, at random, and never a whole row."""
    if record.lengths is not None and len(record.shape) == 4 and len(record.lengths) == record.shape[0]:
        hidden = torch.arange(record.shape[-1]) >= torch.tensor(record.lengths)[:, None]
        return hidden[:, None, None].expand(record.shape)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.rand(record.shape, generator=generator) < (record.hidden or 0.0)
    if record.shape and record.shape[-1]:
        hidden[..., 0] = False
    return hidden


def _placed(made: dict[str, Tensor], file: ReplayFile, device: torch.device) -> dict[str, Tensor]:
    """On the device, with the memory that they share there too; leaves where gradients are wanted.

    What was one tensor under two names (lengths of queries and of keys) is one again: kernels take that for
    equal lengths.
    """
    memories: dict[int, Tensor] = {}
    views: dict[Any, Tensor] = {}
    placed: dict[str, Tensor] = {}
    for record in file.tensors:
        memory = made[record.name]._base
        assert memory is not None
        if record.storage not in memories:
            memories[record.storage] = memory.to(device)
        where = (record.storage, record.shape, record.stride, record.storage_offset)
        key = (record.name, *where) if record.name in "qkv" else where
        if key not in views:
            view = memories[record.storage].as_strided(*where[1:])
            views[key] = view.requires_grad_(record.requires_grad and view.is_floating_point())
        placed[record.name] = views[key]
    return placed
