"""How one tensor lies, as it says itself; and what it does not say as None."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attnsel.params.layout.overlap import meets_itself

_MOST_ALIGNED = 256  # bytes; what allocators give, and more than any load is wide


class TensorLayout(NamedTuple):
    """How one tensor lies. Strides and offset count elements, as torch does.

    ``base.as_strided(shape, stride, offset)`` over the whole of its storage is the tensor again.
    """

    name: str  # q, k or v
    dims: str  # a letter for each dimension: b batch (or page), s rows, t packed rows, h heads, d head_dim
    shape: tuple[int, ...]  # -1 where even that is not said (nested tensors)
    stride: tuple[int, ...] | None  # None: sparse, nested, or of symbolic sizes
    offset: int | None  # from the start of its storage; None where strides are, and under torch.compile
    itemsize: int
    storage: int | None  # tensors with the same number share memory; None: not known, or there is none
    start: int | None  # bytes from the start of what they share; offset * itemsize but for foreign memory
    alignment: int | None  # bytes, at most 256, that the first element's address is a multiple of
    real: bool  # it has an address; without one (meta, fake) storage is taken to start aligned
    contiguous: bool  # as torch says

    @property
    def memory(self) -> str:
        """The dimensions in memory order, ``1`` for one of stride 0: its one element serves all."""
        if self.stride is None:
            return self.dims
        order = _memory_order(self.shape, self.stride)
        return "".join("1" if self.expanded(dim) else self.dims[dim] for dim in order)

    def expanded(self, dim: int) -> bool:
        return self.stride is not None and self.stride[dim] == 0 and self.shape[dim] > 1

    @property
    def dense(self) -> bool:
        """No gaps and no steps, in whatever order; stride 0 aside."""
        if self.stride is None:
            return self.contiguous
        return all(step == packed for step, packed in zip(self.stride, self.packed_stride, strict=True))

    @property
    def packed_stride(self) -> tuple[int, ...]:
        """The strides its dimensions would have without gaps, in their order in memory. A dimension of size
        1, or of stride 0, keeps its own."""
        assert self.stride is not None
        packed, inside = list(self.stride), 1
        for dim in reversed(_memory_order(self.shape, self.stride)):
            if self.shape[dim] > 1 and self.stride[dim]:
                packed[dim] = inside
                inside *= self.shape[dim]
        return tuple(packed)

    @property
    def overlaps_itself(self) -> bool | None:
        """Whether two indices are one element; None: not known."""
        return None if self.stride is None else meets_itself(self.shape, self.stride)

    @property
    def row_alignment(self) -> int | None:
        """Bytes, at most 256, that the address of every row along the last dimension is a multiple of."""
        if self.alignment is None or self.stride is None:
            return None
        steps = [s * self.itemsize for n, s in zip(self.shape[:-1], self.stride[:-1], strict=True) if n > 1]
        return math.gcd(self.alignment, *steps)

    @property
    def token(self) -> str:
        """Its part of a layout's name."""
        if self.dense:
            return self.memory
        steps = () if self.stride is None else tuple(zip(self.shape, self.stride, strict=True))
        # What stride 0 repeats is said by the letter 1.
        stepped = [(n, step) for n, step in steps if step]
        meets = meets_itself(tuple(n for n, _ in stepped), tuple(step for _, step in stepped))
        return f"{'overlap' if meets else 'view'}({self.memory})"

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dims": self.dims,
            "shape": [_number(n) for n in self.shape],
            "stride": None if self.stride is None else list(self.stride),
            "offset": self.offset,
            "itemsize": self.itemsize,
            "storage": self.storage,
            "memory": self.memory,
            "dense": self.dense,
            "contiguous": self.contiguous,
            "alignment": self.alignment,
            "row_alignment": self.row_alignment,
            "overlaps_itself": self.overlaps_itself,
        }


def traced(name: str, dims: str, t: Any) -> TensorLayout:
    # Sizes may be symbolic here: nothing is compared, so that no guard is added.
    return TensorLayout(
        name,
        dims,
        tuple(t.shape),
        tuple(t.stride()),
        None,
        t.element_size(),
        None,
        None,
        None,
        False,
        t.is_contiguous(),
    )


class _Storage(NamedTuple):
    number: int
    address: int  # 0: it has none
    origin: int  # the address that ``start`` counts from


def storages(tensors: tuple[Any, ...]) -> list[_Storage | None]:
    """The storage of each, numbered in order; memory that lies in two storages counts as one."""
    found: list[tuple[Any, int, int] | None] = [_storage(t) for t in tensors]
    numbered: list[_Storage | None] = []
    for i, one in enumerate(found):
        if one is None:
            numbered.append(None)
            continue
        storage, address, size = one
        number, origin = i, address
        for j, other in enumerate(found):
            if other is None:
                continue
            begins, ends = other[1], other[1] + other[2]
            touching = bool(address and begins) and address < ends and begins < address + size
            if other[0] is storage or touching:
                number, origin = min(number, j), min(origin, begins)
        numbered.append(_Storage(number, address, origin))
    order = {number: i for i, number in enumerate(dict.fromkeys(s.number for s in numbered if s is not None))}
    return [None if s is None else s._replace(number=order[s.number]) for s in numbered]


def _storage(t: Any) -> tuple[Any, int, int] | None:
    """(the storage, its address, its size in bytes); None where there is none."""
    try:
        storage = t.untyped_storage()
        address = int(storage.data_ptr())
        return storage, address, int(storage.nbytes()) if address else 0  # a fake one's may be symbolic
    except Exception:  # sparse, functorch's and wrapping tensors each raise something else
        return None


def read(name: str, dims: str, t: Any, held: _Storage | None) -> TensorLayout:
    shape, stride, offset = _said(lambda: tuple(t.shape), (-1,) * len(dims)), None, None
    strided = bool(_said(lambda: str(t.layout) == "torch.strided" and not t.is_nested, False))
    if strided:
        stride, offset = _said(lambda: (tuple(t.stride()), t.storage_offset()), (None, None))
    if stride is not None and any(type(n) is not int for n in (*shape, *stride, offset)):
        stride = offset = None  # symbolic: comparing them would guard on them, or fail
    itemsize = _said(t.element_size, 1)
    start = alignment = None
    if held is not None and offset is not None:
        alignment = math.gcd(held.address + offset * itemsize, _MOST_ALIGNED)
        start = held.address - held.origin + offset * itemsize
    number = None if held is None or offset is None else held.number
    real = held is not None and held.address != 0
    contiguous = strided and bool(_said(t.is_contiguous, False))
    return TensorLayout(
        name, dims, shape, stride, offset, itemsize, number, start, alignment, real, contiguous
    )


def _said(ask: Any, otherwise: Any) -> Any:
    try:
        return ask()
    except Exception:
        return otherwise


def _number(n: Any) -> int | str:
    return n if type(n) is int else str(n)


def _memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Dimensions from the widest stride to the narrowest. One that is never stepped along (of size 1 or
    stride 0) goes where it is indexed: right before the next that is."""
    keys: list[int] = []
    inside = 0
    for n, step in zip(reversed(shape), reversed(stride), strict=True):
        if n > 1 and step:
            inside = step
        keys.append(inside)
    keys.reverse()
    return sorted(range(len(shape)), key=lambda dim: (-keys[dim], dim))
