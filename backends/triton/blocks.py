"""How large the tiles are: by architecture, padded head dimension and pass. No tuning at run time.

Every row of ``data/tiles.csv`` was compiled ahead of time, for full, causal, windowed and packed calls: it
fits in shared memory and spills nothing in its loop. Packed sequences with other lengths for keys than for
queries, and softcap or ALiBi under a window, may spill in the dK/dV pass: slower, not wrong.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from attnsel.base.rows import read_rows


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

DECODE_ROWS = (16, 32, 64)
MAX_SPLITS = 128  # what one program of the merge reads at once

PASSES = ("forward", "dkdv", "dq", "dbias", "decode")


@lru_cache(maxsize=1)
def _tiles() -> dict[tuple[str, str, str, int], list[Block]]:
    """The rows of ``data/tiles.csv`` by call, family, pass and width: one, of decode by rows."""
    found: dict[tuple[str, str, str, int], list[Block]] = {}
    for row in read_rows("attnsel.backends.triton", "tiles"):
        m, n, warps, stages = (int(row[name]) for name in ("m", "n", "warps", "stages"))
        masks: Any = row["masks"]
        block = Block(m, n, warps, stages, masks, row["always_right"] == "yes", row["ahead"] == "yes")
        found.setdefault((row["call"], row["family"], row["pass"], int(row["width"])), []).append(block)
    return found


def _tile(call: str, family: int | str, name: str, width: int) -> Block | None:
    return next(iter(_tiles().get((call, str(family), name, width), ())), None)


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
        block = _tile("paged", _family(arch), "forward", width) or block
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
    allowed = _tiles()["plain", str(_family(arch)), "decode", min(width, 512)]
    m = next((m for m in DECODE_ROWS if rows <= m), DECODE_ROWS[-1])
    if width <= 256 and (itemsize == 4 or heavy):
        # As the forward's, with no more rows than there are; and few, as each has its own head.
        block = _choose_dense("forward", arch, width, itemsize, heavy)
        assert block is not None
        return block._replace(m=min(m, block.m, 32))
    return next((block for block in allowed if block.m >= m), allowed[-1])


def _choose_dense(name: str, arch: int, width: int, itemsize: int, heavy: bool) -> Block | None:
    if itemsize == 4:
        return _tile("float32", "any", "any", width)
    family = _family(arch)
    if width > 256:
        return _tile("plain", family, name, 512)
    plain = None if name == "dbias" else _tile("plain", family, name, width)
    if name != "dbias" and (plain is None or not heavy):
        return plain
    block = _tile("heavy", "any", name, width)
    # Turing and Blackwell hold no two stages of it; on Hopper the pipelined loops of 64 would wait (C7515).
    alone = family in (75, 100) or ((family, width) == (90, 64) and name in ("forward", "dq"))
    return block._replace(stages=1) if block is not None and heavy and alone else block


def choose_special(name: str, arch: int, width: int, windowed: bool, packed: bool) -> Block | None:
    """The tile of a 16-bit call with a left bound (``windowed``) or packed sequences where it has its own;
    ``width``: of the wider head dimension."""
    key = _family(arch), name, max(64, pad(width))
    calls = (call for call, is_one in (("windowed", windowed), ("packed", packed)) if is_one)
    return next(filter(None, (_tile(call, *key) for call in calls)), None)


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
