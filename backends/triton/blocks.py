"""How large the tiles are: a table per architecture, padded head dimension and pass. No tuning at run time.

Every row was compiled ahead of time (``tests/proof/gate.py``) with Triton 3.7, for full, causal, windowed and
packed calls: it fits in shared memory and spills nothing in its loop. Packed sequences with other lengths for
keys than for queries, and softcap or ALiBi under a window, may spill in the dK/dV pass: slower, not wrong.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, NamedTuple


class Block(NamedTuple):
    """Rows and columns of a tile, and how a program is laid out.

    ``masks``: where scores are held against the bounds: in "all" tiles; at the "edges", in a loop of their
    own, which may need more registers; or in one loop with a "branch".
    ``always_right``: calls without a right bound get one that nothing reaches. Hopper's ptxas then leaves the
    products of the loop without masks asynchronous, which it else runs one by one (warning C7515).
    ``ahead``: a tile is read into registers while the one before it is used. From sm80 on Triton does that
    by itself, through ``stages``.
    """

    m: int
    n: int
    warps: int = 4
    stages: int = 2
    masks: Literal["all", "edges", "branch"] = "edges"
    always_right: bool = False
    ahead: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What a kernel is compiled with, at a launch as ahead of time."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,  # off by default from Triton 3.10 on
        }


class Tiles(NamedTuple):
    """The tiles of one call's passes."""

    forward: Block
    dkdv: Block
    dq: Block
    dbias: Block
    decode: Block | None = None  # None: the forward's


ARCHS = (75, 80, 86, 89, 90, 100, 120)

# (family, pass) -> {widest padded head dimension: block}. None: no tile that fits and does not spill.
_TABLE: dict[tuple[int, str], dict[int, Block | None]] = {
    (75, "forward"): {
        64: Block(128, 32, 4, 1, ahead=True),
        128: Block(128, 32, 8, 1, ahead=True),
        256: Block(64, 32, 8, 1),
    },
    (75, "dkdv"): {
        64: Block(32, 128, 8, 1, masks="all", ahead=True),
        128: Block(32, 64, 8, 1),
        256: None,
    },
    (75, "dq"): {
        64: Block(64, 32, 4, 1, ahead=True),
        128: Block(64, 32, 4, 1),
        256: Block(32, 32, 8, 1),
    },
    (80, "forward"): {
        64: Block(128, 64, 4, 3, masks="all"),
        128: Block(128, 64, 8, 3),
        256: Block(64, 64, 8, 2),
    },
    (80, "dkdv"): {
        64: Block(32, 128, 8, 2, masks="all"),
        128: Block(64, 64, 8, 2, masks="all"),
        256: Block(32, 32, 8, 2, masks="all"),
    },
    (80, "dq"): {
        64: Block(128, 64, 8, 2),
        128: Block(128, 32, 8, 2),
        256: Block(64, 32, 8, 2),
    },
    (86, "forward"): {
        64: Block(128, 64, 4, 3, masks="all"),
        128: Block(128, 64, 8, 3),
        256: Block(64, 64, 8, 1),
    },
    (86, "dkdv"): {
        64: Block(32, 128, 8, 2, masks="all"),
        128: Block(64, 64, 8, 2, masks="all"),
        256: Block(32, 32, 8, 2, masks="all"),
    },
    (86, "dq"): {
        64: Block(128, 64, 8, 2),
        128: Block(128, 32, 8, 2),
        256: Block(64, 32, 8, 1),
    },
    (90, "forward"): {
        64: Block(128, 128, 8, 2, always_right=True),
        128: Block(128, 128, 8, 2, always_right=True),
        256: Block(128, 64, 8, 2, always_right=True),
    },
    (90, "dkdv"): {
        64: Block(64, 128, 8, 2, masks="branch"),
        128: Block(32, 128, 8, 2, masks="all"),
        256: Block(32, 32, 8, 1, masks="all"),
    },
    (90, "dq"): {
        64: Block(128, 64, 8, 2, always_right=True),
        128: Block(128, 64, 8, 2, always_right=True),
        256: Block(64, 32, 8, 2, always_right=True),
    },
    (100, "forward"): {
        64: Block(64, 64, 4, 2, masks="all"),
        128: Block(128, 64, 8, 2),
        256: Block(64, 64, 8, 2, masks="all"),
    },
    (100, "dkdv"): {
        64: Block(64, 128, 8, 2, masks="all"),
        128: Block(64, 128, 8, 1, masks="all"),
        256: Block(32, 32, 8, 2, masks="all"),
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
        64: Block(32, 128, 8, 2, masks="all"),
        128: Block(64, 64, 8, 1, masks="all"),
        256: Block(32, 32, 8, 2, masks="all"),
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

# Where a left bound, or packed sequences, take registers that the tile above does not leave. On A100 eight
# warps read K and V twice as often as four: not where the four of the table do not spill.
_WINDOWED = {
    (80, "forward", 64): Block(128, 64, 8, 3),
    (80, "forward", 128): Block(128, 32, 8, 3),
    (90, "forward", 128): Block(128, 128, 8, 2, masks="branch"),
    (90, "dkdv", 128): Block(32, 128, 8, 2, masks="branch"),
}
_PACKED = {
    (75, "dkdv", 64): Block(32, 128, 8, 1, masks="all"),
    (80, "forward", 64): Block(128, 64, 8, 3),
    (100, "dkdv", 64): Block(32, 128, 8, 2, masks="all"),
}

# Forward over pages, whose addresses take registers, where they spill in the tile above.
_PAGED = {
    (80, 64): Block(128, 64, 8, 3, masks="all"),
    (80, 256): Block(64, 32, 8, 2),
    (86, 64): Block(128, 64, 8, 3, masks="all"),
    (90, 256): Block(128, 64, 8, 2, masks="all"),
    (120, 64): Block(128, 64, 8, 3, masks="all"),
}

# Forward above 256, 16-bit: 576/512 of multi-head latent attention.
_LATENT = {
    75: Block(16, 32, 8, 1),
    80: Block(32, 64, 8, 1),
    86: Block(32, 32, 8, 1),
    90: Block(64, 32, 8, 1, masks="all"),
    100: Block(32, 32, 8, 1),
    120: Block(32, 32, 8, 1),
}

# Decode: columns, warps and stages by family and width, for each of DECODE_ROWS. None: more rows or fewer.
DECODE_ROWS = (16, 32, 64)
_DECODE: dict[int, dict[int, tuple[tuple[int, int, int] | None, ...]]] = {
    75: {
        64: ((64, 4, 1), (64, 4, 1), (64, 8, 1)),
        128: ((64, 4, 1), (64, 4, 1), (64, 8, 1)),
        256: ((32, 4, 1), None, (32, 8, 1)),
        512: ((32, 8, 1), (16, 8, 1), None),
    },
    80: {
        64: ((128, 4, 3), (128, 4, 3), (64, 4, 3)),
        128: ((64, 4, 3), (64, 4, 3), (64, 8, 2)),
        256: ((64, 8, 2), (64, 8, 2), (32, 8, 2)),
        512: ((32, 8, 1), (32, 8, 2), None),
    },
    86: {
        64: ((64, 4, 3), (64, 4, 3), (64, 4, 3)),
        128: ((64, 4, 2), (64, 4, 2), (64, 8, 2)),
        256: ((32, 4, 2), (32, 8, 2), (32, 8, 2)),
        512: (None, (32, 8, 1), None),
    },
    90: {
        64: ((128, 4, 3), (64, 4, 3), (128, 4, 3)),
        128: ((64, 4, 3), (64, 4, 3), (64, 4, 3)),
        256: ((64, 4, 2), (64, 8, 2), (64, 8, 2)),
        512: ((32, 8, 2), (32, 8, 2), (32, 8, 1)),
    },
    100: {
        64: ((128, 4, 3), (64, 4, 3), (64, 4, 3)),
        128: ((64, 4, 3), (64, 4, 3), (64, 4, 3)),
        256: ((64, 4, 2), (64, 8, 2), (64, 8, 2)),
        512: ((32, 8, 2), (32, 8, 2), None),
    },
    120: {
        64: ((64, 4, 3), (64, 4, 3), (64, 4, 3)),
        128: ((64, 4, 2), (64, 8, 2), (64, 8, 2)),
        256: ((32, 4, 2), (32, 8, 2), (32, 8, 2)),
        512: ((32, 8, 1), (32, 8, 1), None),
    },
}
MAX_SPLITS = 128  # what one program of the merge reads at once

PASSES = ("forward", "dkdv", "dq", "dbias", "decode")


def pad(width: int) -> int:
    """The power of two a head dimension is padded to; dots want at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def pieces(width: int) -> tuple[int, int]:
    """A wide head dimension as a power of two and the rest, padded one by one; (width, 0) up to 256."""
    first = 1 << (width.bit_length() - 1)
    return (width, 0) if width <= 256 or width == first else (first, width - first)


def choose(
    name: str,
    arch: int,
    head_dim_qk: int,
    head_dim_v: int,
    itemsize: int,
    heavy: bool = False,
    rows: int = 64,
    page_size: int = 0,
) -> Block:
    """The tile of one pass (``PASSES``) on an architecture such as 90; ``heavy``: bias, mask or dropout.

    ``rows``: of a decode call, query rows times heads of a group. ``page_size``: of keys in pages.

    Raises ValueError where there is none: head dimensions over 256 in a backward pass or in float32, over
    576 (q, k) and 512 (v) anywhere, over 128 in Turing's dK/dV pass.
    """
    width = max(64, pad(head_dim_qk), pad(head_dim_v))
    if width > 256:
        _check_latent(name, head_dim_qk, head_dim_v, itemsize)
    if name == "decode":
        return _fit_pages(_choose_decode(arch, width, itemsize, heavy, rows), page_size)
    block = _choose_dense(name, arch, width, itemsize, heavy)
    if block is None:
        raise ValueError(
            f"no {name} tile for head_dim {head_dim_qk} (q, k) and {head_dim_v} (v) fits sm{arch} without "
            "spilling; at most 128"
        )
    if page_size and itemsize == 2 and not heavy:
        block = _PAGED.get((_family(arch), width), block)
    return _fit_pages(block, page_size)


def _fit_pages(block: Block, page_size: int) -> Block:
    """Fewer columns where that lets a page hold whole tiles: one page number is read per tile then.

    Triton's pipeliner counts the load of a page number as a level before that of the page: keys are as many
    tiles ahead as without pages with twice the stages less one.
    """
    if not page_size:
        return block
    columns = math.gcd(block.n, page_size)
    n = columns if columns >= 64 else block.n
    return block._replace(n=n, stages=2 * block.stages - 1)


def _choose_decode(arch: int, width: int, itemsize: int, heavy: bool, rows: int) -> Block:
    of_rows = _DECODE[_family(arch)][min(width, 512)]
    m = next((m for m in DECODE_ROWS if rows <= m), DECODE_ROWS[-1])
    if width <= 256 and (itemsize == 4 or heavy):
        # As the forward's, with no more rows than there are; and few, as each has its own head.
        block = _choose_dense("forward", arch, width, itemsize, heavy)
        assert block is not None
        return block._replace(m=min(m, block.m, 32))
    allowed = [(m, of) for m, of in zip(DECODE_ROWS, of_rows, strict=True) if of is not None]
    m, (n, warps, stages) = next((each for each in allowed if each[0] >= m), allowed[-1])
    # On Turing, but for the one tile that would spill.
    return Block(m, n, warps, stages, ahead=arch < 80 and width <= 256 and (m, width) != (32, 128))


def _choose_dense(name: str, arch: int, width: int, itemsize: int, heavy: bool) -> Block | None:
    if width > 256:
        return _LATENT[_family(arch)]
    if itemsize == 4:
        return _FLOAT32[width]
    family = _family(arch)
    block = _HEAVY["dbias"][width] if name == "dbias" else _TABLE[family, name][width]
    if block is not None and heavy:
        block = _HEAVY[name][width]
        # On Hopper the pipelined loops of 64 would wait for each product (C7515).
        alone = family in (75, 100) or ((family, width) == (90, 64) and name in ("forward", "dq"))
        return block._replace(stages=1) if alone else block
    return block


def choose_special(name: str, arch: int, width: int, windowed: bool, packed: bool) -> Block | None:
    """The tile of a 16-bit call with a left bound (``windowed``) or packed sequences where it has its own;
    ``width``: of the wider head dimension."""
    key = _family(arch), name, max(64, pad(width))
    return (_WINDOWED.get(key) if windowed else None) or (_PACKED.get(key) if packed else None)


def _check_latent(name: str, head_dim_qk: int, head_dim_v: int, itemsize: int) -> None:
    got = f"got {head_dim_qk} (q, k) and {head_dim_v} (v)"
    if name not in ("forward", "decode") or head_dim_qk > 576 or head_dim_v > 512:
        raise ValueError(f"Triton kernels stop at head_dim 256, the forward at 576 and 512; {got}")
    if itemsize == 4:
        raise ValueError(f"in float32 the Triton kernels stop at head_dim 256; {got}")


def _family(arch: int) -> int:
    """The table's row for an architecture: equal shared memory and matrix instructions."""
    if arch in (86, 89):
        return 86
    for family in (120, 100, 90, 80, 75):
        if arch >= family:
            return family
    raise ValueError(f"the Triton kernels need sm75 (Turing) or newer, got sm{arch}")


# Of ``split_count``'s estimate, in the time of one tile: to start a program and write its part, and to merge.
_START, _MERGE = 2, 2


@lru_cache(maxsize=4096)
def split_count(programs: int, processors: int, tiles: int) -> int:
    """Over how many programs a row block's keys are split, 1 to MAX_SPLITS: the least estimated time.

    ``programs``: row blocks of the call; ``processors``: of the device, which hold two programs each (0: one
    program runs after the other, as on the interpreter); ``tiles``: of the longest keys. The estimate is not
    a measurement: rounds of programs over the device, each a start and a share of the tiles, and a merge.
    """
    if not processors:
        return 1

    def time(splits: int) -> int:
        rounds = -(-programs * splits // (2 * processors))
        return rounds * (_START - (-tiles // splits)) + (_MERGE if splits > 1 else 0)

    return min(range(1, max(1, min(MAX_SPLITS, tiles)) + 1), key=time)


def interpreted(s_q: int, s_kv: int) -> Tiles:
    """Tiles for the interpreter, whose cost is their number: as few as hold the sequences, up to 128."""
    block = Block(max(16, min(128, pad(s_q))), max(16, min(128, pad(s_kv))))
    return Tiles(*[block] * len(Tiles._fields))
