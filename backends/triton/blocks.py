"""How large the tiles are: a table per architecture, padded head dimension and pass. No tuning at run time.

Every row was compiled ahead of time (``gate.py``) with Triton 3.6 to 3.9, full and causal: it fits in shared
memory and spills nothing, but for 8 accesses of sm90's dK/dV pass at 128 with 3.9. Packed calls, and softcap or
ALiBi under a window, may spill in the dK/dV pass: slower, not wrong.
"""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """Rows and columns of a tile, and how a program is laid out.

    ``split``: tiles that no bound crosses get a loop without masks; two loops may need more registers.
    """

    m: int
    n: int
    warps: int = 4
    stages: int = 2
    split: bool = True


class Tiles(NamedTuple):
    """The tiles of one call's passes."""

    forward: Block
    dkdv: Block
    dq: Block
    dbias: Block


ARCHS = (75, 80, 86, 89, 90, 100, 120)

# (family, pass) -> {widest padded head dimension: block}. None: no tile that fits and does not spill.
_TABLE: dict[tuple[int, str], dict[int, Block | None]] = {
    (75, "forward"): {
        64: Block(128, 32, 4, 1, split=False),
        128: Block(128, 32, 8, 1, split=False),
        256: Block(64, 32, 8, 1),
    },
    (75, "dkdv"): {
        64: Block(32, 128, 8, 1, split=False),
        128: Block(32, 64, 8, 1, split=False),
        256: None,
    },
    (75, "dq"): {
        64: Block(64, 32, 4, 1),
        128: Block(64, 32, 4, 1),
        256: Block(32, 32, 8, 1),
    },
    (80, "forward"): {
        64: Block(128, 64, 4, 3, split=False),
        128: Block(128, 64, 8, 3),
        256: Block(64, 64, 8, 2),
    },
    (80, "dkdv"): {
        64: Block(32, 64, 8, 2, split=False),
        128: Block(64, 64, 8, 2, split=False),
        256: Block(32, 32, 8, 2, split=False),
    },
    (80, "dq"): {
        64: Block(128, 64, 8, 2),
        128: Block(128, 32, 8, 2),
        256: Block(64, 32, 8, 2),
    },
    (86, "forward"): {
        64: Block(128, 64, 4, 3, split=False),
        128: Block(128, 64, 8, 3),
        256: Block(64, 64, 8, 1),
    },
    (86, "dkdv"): {
        64: Block(32, 128, 8, 2, split=False),
        128: Block(64, 64, 8, 2, split=False),
        256: Block(32, 32, 8, 2, split=False),
    },
    (86, "dq"): {
        64: Block(128, 64, 8, 2),
        128: Block(128, 32, 8, 2),
        256: Block(64, 32, 8, 1),
    },
    (90, "forward"): {
        64: Block(128, 128, 8, 2),
        128: Block(128, 128, 8, 2),
        256: Block(128, 64, 8, 2),
    },
    (90, "dkdv"): {
        64: Block(32, 128, 8, 2, split=False),
        128: Block(32, 128, 8, 2, split=False),
        256: Block(32, 32, 8, 2, split=False),
    },
    (90, "dq"): {
        64: Block(128, 64, 8, 2),
        128: Block(128, 64, 8, 2),
        256: Block(64, 32, 8, 2),
    },
    (100, "forward"): {
        64: Block(64, 64, 4, 2, split=False),
        128: Block(128, 64, 8, 2),
        256: Block(64, 64, 8, 2, split=False),
    },
    (100, "dkdv"): {
        64: Block(64, 128, 8, 2, split=False),
        128: Block(64, 128, 8, 1, split=False),
        256: Block(32, 32, 8, 2, split=False),
    },
    (100, "dq"): {
        64: Block(128, 64, 8, 2),
        128: Block(128, 64, 8, 2),
        256: Block(128, 32, 8, 2),
    },
    (120, "forward"): {
        64: Block(128, 64, 8, 2),
        128: Block(128, 64, 8, 3),
        256: Block(64, 64, 8, 1),
    },
    (120, "dkdv"): {
        64: Block(32, 128, 8, 2, split=False),
        128: Block(64, 64, 8, 1, split=False),
        256: Block(32, 32, 8, 2, split=False),
    },
    (120, "dq"): {
        64: Block(128, 64, 8, 2),
        128: Block(128, 32, 8, 2),
        256: Block(64, 32, 8, 1),
    },
}
# With a bias, a mask or dropout a pair takes many more registers; stages 1 on Turing, as above, and on
# Blackwell. With every feature at once nothing spills at 64 and 128 with Triton 3.7; 256 was not tried.
_HEAVY: dict[str, dict[int, Block]] = {
    "forward": {64: Block(64, 64, 4, 2), 128: Block(64, 32, 8, 2), 256: Block(32, 32, 8, 1)},
    "dkdv": {64: Block(32, 32, 8, 1), 128: Block(32, 32, 8, 1), 256: Block(16, 32, 8, 1)},
    "dq": {64: Block(64, 32, 4, 2), 128: Block(32, 32, 4, 1), 256: Block(32, 32, 8, 1)},
    "dbias": {64: Block(32, 32, 8, 1), 128: Block(16, 64, 8, 1), 256: Block(32, 32, 8, 1)},
}
# float32 multiplies without tensor cores, as plain PyTorch does: small tiles, few registers.
_FLOAT32 = {64: Block(32, 32, 8, 1), 128: Block(32, 32, 8, 1), 256: Block(16, 32, 8, 1)}

# Forward above 256, 16-bit: 576/512 of multi-head latent attention.
_LATENT = {
    75: Block(16, 32, 8, 1),
    80: Block(32, 64, 8, 1),
    86: Block(32, 32, 8, 1),
    90: Block(64, 32, 8, 1, split=False),
    100: Block(32, 32, 8, 1),
    120: Block(32, 32, 8, 1),
}

PASSES = ("forward", "dkdv", "dq", "dbias")


def pad(width: int) -> int:
    """The power of two a head dimension is padded to; dots want at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def pieces(width: int) -> tuple[int, int]:
    """A wide head dimension as a power of two and the rest, padded one by one; (width, 0) up to 256."""
    first = 1 << (width.bit_length() - 1)
    return (width, 0) if width <= 256 or width == first else (first, width - first)


def choose(
    name: str, arch: int, head_dim_qk: int, head_dim_v: int, itemsize: int, heavy: bool = False
) -> Block:
    """The tile of one pass (``PASSES``) on an architecture such as 90; ``heavy``: bias, mask or dropout.

    Raises ValueError where there is none: head dimensions over 256 in a backward pass or in float32, over
    576 (q, k) and 512 (v) anywhere, over 128 in Turing's dK/dV pass.
    """
    width = max(64, pad(head_dim_qk), pad(head_dim_v))
    if width > 256:
        return _choose_latent(name, arch, head_dim_qk, head_dim_v, itemsize)
    if itemsize == 4:
        return _FLOAT32[width]
    family = _family(arch)
    block = _HEAVY["dbias"][width] if name == "dbias" else _TABLE[family, name][width]
    if block is not None and heavy:
        block = _HEAVY[name][width]
        return block._replace(stages=1) if family in (75, 100) else block
    if block is None:
        raise ValueError(
            f"no {name} tile for head_dim {head_dim_qk} (q, k) and {head_dim_v} (v) fits sm{arch} without "
            "spilling; at most 128"
        )
    return block


def _choose_latent(name: str, arch: int, head_dim_qk: int, head_dim_v: int, itemsize: int) -> Block:
    got = f"got {head_dim_qk} (q, k) and {head_dim_v} (v)"
    if name != "forward" or head_dim_qk > 576 or head_dim_v > 512:
        raise ValueError(f"Triton kernels stop at head_dim 256, the forward at 576 and 512; {got}")
    if itemsize == 4:
        raise ValueError(f"in float32 the Triton kernels stop at head_dim 256; {got}")
    return _LATENT[_family(arch)]


def _family(arch: int) -> int:
    """The table's row for an architecture: equal shared memory and matrix instructions."""
    if arch in (86, 89):
        return 86
    for family in (120, 100, 90, 80, 75):
        if arch >= family:
            return family
    raise ValueError(f"the Triton kernels need sm75 (Turing) or newer, got sm{arch}")


def interpreted(s_q: int, s_kv: int) -> Tiles:
    """Tiles for the interpreter, whose cost is their number: as few as hold the sequences, up to 128."""
    block = Block(max(16, min(128, pad(s_q))), max(16, min(128, pad(s_kv))))
    return Tiles(block, block, block, block)
