"""Which forwards go through tensor descriptors, and what such a launch needs: nothing here runs one.

The descriptor kernel compiles, is right on Triton's interpreter, and as the PTX of Hopper executed on a CPU
(``tests/proof/ptx_interpreter``); whether it wins, only a GPU can tell, and none has run it. Until a result
under benchmarks/results says so it is not chosen by itself: DEFAULT is off, and
``forward(..., variant="descriptor")`` runs it, for the benchmark that settles it. For it: its machine code is
specialised as it should be, and published figures for Hopper (forward, head_dim 128,
facebookexperimental/triton#205) are 407 to 487 TFLOP/s without and 449 to 526 with specialised warps. Against
it: a program first makes three descriptors, so that short calls would keep the pointer kernel, and a fault in
how specialised warps wait for each other would hang the GPU rather than fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor

from .blocks import Block, choose_descriptor, interpreted
from .forward_descriptor import forward_descriptor_kernel
from .launch import Launch, LaunchCall, forward_args, make_launch, tile_count, triton_is_among

DEFAULT = False
KERNEL = "forward_descriptor"
VARIANTS = ("pointer", "descriptor")
# Releases whose machine code was looked at. In 3.4 256 does not fit, and one allocator serves all threads.
_RELEASES = ((3, 5), (3, 9))
# An estimate: the three descriptors cost about as much as one tile of 128 keys.
_LEAST_KEYS = 1024
_LEAST_ROWS = 128  # of a tile
_ALIGNMENT = 16  # bytes, of a descriptor's base and strides
_WIDEST_STRIDE = 1 << 40  # bytes


def descriptor_launch(
    call: LaunchCall, arch: int | None, out: Tensor, lse: Tensor, variant: str | None
) -> Launch | None:
    """This forward as a launch of the descriptor kernel where it shall be one (``descriptor_block``).

    Run it inside ``scratch_memory``.
    """
    block = descriptor_block(call, arch, variant)
    if block is None:
        return None
    i = call.inputs
    rows_kv = i.k.shape[0 if call.spec.packed else 2]
    tiles = tile_count(call.longest_q, block.m)
    args = {
        **forward_args(call, out, lse, None, block),
        "tiles": tiles,
        "TAIL": call.spec.packed or i.seqlens_kv is not None or rows_kv % block.n != 0,
    }
    return make_launch(KERNEL, forward_descriptor_kernel, tiles * call.heads * call.batch, args, block)


def descriptor_block(call: LaunchCall, arch: int | None, variant: str | None) -> Block | None:
    """The descriptor kernel's tile where this forward shall use it; ``variant`` None: as the table says.

    Raises ValueError for an unknown variant, and when "descriptor" is asked for and cannot be had.
    """
    if variant not in (None, *VARIANTS):
        raise ValueError(
            f"variant is {variant!r}; allowed: {', '.join(VARIANTS)}, or None for the table's choice"
        )
    if variant == "pointer":
        return None
    if variant is None and not (DEFAULT and arch is not None and arch >= 90 and _worth_it(call)):
        return None
    reason = obstacle(call)
    block = None if reason else _tile(call, arch)
    if variant is not None and block is None:
        reason = reason or f"no tile for head_dim {call.d} and {call.e} or a feature of the call on sm{arch}"
        raise ValueError(f"variant 'descriptor' is not possible: {reason}")
    return block


def _worth_it(call: LaunchCall) -> bool:
    """Whether the programs have enough to do; tiles of the caller's own are the pointer kernel's."""
    spec, keys = call.spec, call.longest_kv
    if spec.window_left >= 0 and spec.window_right >= 0:
        keys = min(keys, spec.window_left + spec.window_right)
    return call.tiles is None and keys >= _LEAST_KEYS and call.longest_q >= _LEAST_ROWS


def obstacle(call: LaunchCall) -> str | None:
    """Why the descriptor kernel cannot take this call on any device; None: it can."""
    spec, i = call.spec, call.inputs
    if not tried():
        return f"Triton {triton.__version__} was not tried with it (3.5 to 3.9 were)"
    if i.q.element_size() != 2:
        return f"it has no {i.q.dtype} tile"
    if max(call.d, call.e) > 256:
        return f"it stops at head_dim 256, got {call.d} and {call.e}"
    if spec.return_max_logit or spec.dropout_p:
        return "it has no largest logit and no dropout"
    for name in ("bias", "attn_mask", "block_table"):
        if getattr(i, name) is not None:
            return f"it takes no {name}"
    for name, t in (("q", i.q), ("k", i.k), ("v", i.v)):
        if reason := _unreachable(name, t, spec.packed):
            return reason
    return None


def tried() -> bool:
    """Whether the installed Triton is one that the kernel was compiled with."""
    return triton_is_among(_RELEASES)


def _unreachable(name: str, t: Tensor, packed: bool) -> str | None:
    """What of ``[b, h, s, d]`` (packed ``[t, h, d]``) the hardware's descriptors cannot address."""
    size = t.element_size()
    if t.data_ptr() % _ALIGNMENT:
        return f"{name} does not begin at a multiple of {_ALIGNMENT} bytes"
    row = t.stride(0 if packed else 2)
    if row < t.shape[-1] or row * size >= _WIDEST_STRIDE:
        return f"the row stride of {name} is {row}: rows that overlap or lie too far apart"
    # Where there is only one, nothing is a stride away; a row's stride is in the descriptor all the same.
    for step, count in [(row, 2), *((t.stride(dim), t.shape[dim]) for dim in range(t.dim() - 1))]:
        if count > 1 and step * size % _ALIGNMENT:
            return f"a stride of {name} is {step}, which is no multiple of {_ALIGNMENT} bytes"
    return None


def _tile(call: LaunchCall, arch: int | None) -> Block | None:
    if arch is not None and arch < 90:
        return None
    if call.tiles is not None:
        return call.tiles.forward
    if arch is None:
        return interpreted(call.longest_q, call.longest_kv).forward
    if arch >= 100 and (call.spec.softcap or (call.spec.window_left >= 0 and call.spec.window_right >= 0)):
        return None  # these spill
    return choose_descriptor(arch, call.d, call.e, call.inputs.q.element_size())


@contextlib.contextmanager
def scratch_memory(device: torch.device) -> Iterator[None]:
    """Where descriptors made in a kernel live: memory of torch's allocator, on the stream of the launch.

    The caller's own ``triton.set_allocator`` holds again afterwards.
    """
    from triton.runtime import _allocation

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    allocator: ContextVar[Any] = _allocation._allocator
    token = allocator.set(allocate)
    try:
        yield
    finally:
        allocator.reset(token)
