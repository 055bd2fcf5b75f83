"""Launches remembered by the signature of a call: the second of its kind only swaps tensors.

Between a call and its launch lie some hundred arguments, and Triton looks at each of them at every launch to
find the compiled kernel. They follow from the ``Spec``, from shapes, strides, dtypes and alignments of the
tensors, and from which of those are one: with the same of all that, the same compiled kernels get the same
numbers and other tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec

from .launch import Launch, same_tensor, triton_is_among

# Releases whose source was read: there a compiled kernel's own launch takes what Triton's gives it, constants
# included. In 3.2 it takes no constants.
_RELEASES = ((3, 3), (3, 9))
# Arguments of kernels -> the tensors that each may be, the first that there is: fields of ``Inputs`` and of
# ``Result``, and what a pass allocates.
_SOURCES = {
    "Q": ("q",), "K": ("k",), "V": ("v",), "Bias": ("bias",), "Mask": ("attn_mask",),
    "Slopes": ("alibi_slopes",), "Sinks": ("softmax_offset",), "LenQ": ("seqlens_q",),
    "LenKV": ("seqlens_kv",), "CuQ": ("cu_seqlens_q",), "CuKV": ("cu_seqlens_kv",),
    "StartQ": ("cu_seqlens_q_padded",), "StartKV": ("cu_seqlens_kv_padded",), "Seed": ("dropout_seed",),
    "Offset": ("dropout_offset",), "Table": ("block_table",),
    "Out": ("out",), "Lse": ("lse",), "MaxLogit": ("max_logit",),
    "PartOut": ("part_out",), "PartLse": ("part_lse",), "PartPeak": ("part_peak",),
    "DOut": ("dout",), "DLse": ("dlse",), "Lse2": ("lse2",), "Delta": ("delta",),
    "DQ": ("dq",), "DK": ("parts_k", "dk"), "DV": ("parts_v", "dv"), "DBias": ("dbias",),
    "DSinks": ("dsinks",),
}  # fmt: skip


class Made(NamedTuple):
    """A tensor that a pass allocates. ``fill``: what its elements begin with; None: anything."""

    tensor: Tensor
    fill: float | None = None


class _Memory(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None


class _Recorded(NamedTuple):
    """One launch without its tensors."""

    kernel: Any  # compiled
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    slots: tuple[tuple[int, int], ...]  # places among the arguments, and which tensor goes there


class Pass(NamedTuple):
    """All that a forward, or a backward, does: what it allocates, by name, and what it launches."""

    memory: dict[str, _Memory]
    launches: tuple[_Recorded, ...]


def place_for(name: str, spec: Spec, inputs: Inputs, more: tuple[Tensor | None, ...] = ()) -> list[Pass]:
    """Where the pass of such a call is kept: an empty list until ``record`` has put it there.

    ``name``: forward or backward; ``more``: tensors beside the inputs.
    """
    i = inputs
    alike = same_tensor(i.seqlens_q, i.seqlens_kv), same_tensor(i.cu_seqlens_q, i.cu_seqlens_kv)
    wants = i.bias is not None and i.bias.requires_grad
    try:
        return _place((name, spec, alike, wants, *_signature(inputs), *_signature(more)))
    except RuntimeError:  # a tensor without strides or memory: whoever checks the call says so
        return []


def _signature(values: Iterable[Any]) -> Iterator[Any]:
    """Of tensors what launches follow from, of anything else itself."""
    for v in values:
        if isinstance(v, Tensor):
            yield v.shape, v.stride(), v.dtype, v.data_ptr() & 15, v.get_device()
        else:
            yield v


@lru_cache(maxsize=4096)
def _place(key: tuple[Any, ...]) -> list[Pass]:
    return []


def record(
    place: list[Pass],
    launched: list[tuple[Launch, Any]],
    given: Mapping[str, Tensor | None],
    made: Mapping[str, Made],
) -> None:
    """Keep a pass: its launches, each with the kernel that Triton compiled and launched for it.

    ``given``: the call's tensors by name, in the order in which ``again`` will get them. A pass with a tensor
    that is neither given nor made, such as a copy of one, is not kept: the next call would need another.
    """
    if place or not remembers():
        return
    tensors = [*given.items(), *((name, one.tensor) for name, one in made.items())]
    where = {name: number for number, (name, t) in enumerate(tensors) if t is not None}
    recorded = []
    for launch, kernel in launched:
        slots = []
        for number, (name, value) in enumerate(launch.args.items()):
            if isinstance(value, Tensor):
                source = next((where[s] for s in _SOURCES.get(name, ()) if s in where), None)
                held = None if source is None else tensors[source][1]
                if source is None or held is None or held.data_ptr() != value.data_ptr():
                    return
                slots.append((number, source))
        if kernel is None:
            return
        arguments = tuple(None if isinstance(value, Tensor) else value for value in launch.args.values())
        recorded.append(_Recorded(kernel, (launch.programs, 1, 1), arguments, tuple(slots)))
    memory = {name: _Memory(tuple(t.shape), t.stride(), t.dtype, fill) for name, (t, fill) in made.items()}
    place.append(Pass(memory, tuple(recorded)))


def again(kept: Pass, given: tuple[Any, ...], device: torch.device) -> dict[str, Tensor]:
    """Allocate and launch, on the current device and stream; what was allocated, by name."""
    made = {}
    for name, (shape, stride, dtype, fill) in kept.memory.items():
        made[name] = t = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if fill is not None:
            t.fill_(fill)
    tensors = (*given, *made.values())
    for kernel, grid, arguments, slots in kept.launches:
        filled = list(arguments)
        for number, source in slots:
            filled[number] = tensors[source]
        kernel[grid](*filled)
    return made


def forget() -> None:
    _place.cache_clear()


def remembers() -> bool:
    """Whether launches are remembered with the installed Triton."""
    return triton_is_among(_RELEASES)
