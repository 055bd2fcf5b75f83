"""What was measured on this machine: a file of times, and the calls that its rows speak for.

A row is one kernel at one shape in one direction, as in rules/data/figures.csv, with the spread and the
memory behind it; those that share a pair were timed in turn. ``attnsel explain --measure`` appends them and
``Policy(figures=FILE)`` reads them. A row speaks for calls on the same card or CPU model that differ in sizes
alone: see ``Figures.about``.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from attnsel.environment import Environment
from attnsel.environment.gpus import look_up_gpu
from attnsel.errors import InvalidInput, printable, short
from attnsel.params import AttentionParams

Row = Mapping[str, str]

VERSION = 1
_KIND = ("dtype", "mask", "window", "deterministic", "head_dim_qk", "head_dim_v", "other")
_SIZES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_kv")
_TIME = ("kernel", "value", "unit", "tflops", "kernel_version", "cudnn", "torch", "pair", "source")
_STATED = ("arch", "direction", "gpu", *_KIND[:4], *_SIZES, *_KIND[4:], *_TIME)
COLUMNS = (*_STATED, "low", "high", "samples", "peak_bytes", "date")
"""Those of published figures; then the quartiles beside ``value``, their number, the most memory that a call
took beside its tensors, and the day."""

_HEAD = f"# attnsel.figures/{VERSION}: written by attnsel explain --measure, read by ATTNSEL_FIGURES\n"
_SCHEMA = re.compile(r"# attnsel\.figures/(\d+)")
_COUNTS = (*_SIZES, "head_dim_qk", "head_dim_v", "samples")
_UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6, "TFLOP/s": -1.0}
_DIRECTIONS = ("fwd", "bwd", "fwd+bwd")
_LENGTH, _ROOM = (
    1.0,
    2.0,
)  # powers of two: lengths may be half or twice, sequences x heads a quarter or fourfold
_MOST = 64 << 20  # bytes of a file


class Shape(NamedTuple):
    """One shape that was measured: powers of two of its sizes, and its kernels, the fastest first."""

    sizes: tuple[float, float, float]  # queries, keys, sequences x heads
    rows: tuple[Row, ...]

    @property
    def ranking(self) -> tuple[str, ...]:
        return tuple(row["kernel"] for row in self.rows)


class Figures(str):
    """A file as it was when it was read, written ``PATH@DIGEST``; another content is another value."""

    groups: tuple[tuple[Row, ...], ...]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return handler(str)

    @property
    def path(self) -> str:
        return self.rpartition("@")[0]

    @property
    def digest(self) -> str:
        return self.rpartition("@")[2]

    def about(self, p: AttentionParams, env: Environment) -> tuple[Shape, ...]:
        """The shapes that speak for calls like ``p`` there, whatever their lengths and batch: on this card or
        CPU model, in this direction (training: forward and backward together), with this dtype, mask, window,
        determinism, head dimensions, grouping of heads, and nothing else asked."""
        card, wanted = card_of(env), _kind(cells_of(p))
        if not card or p.context_parallel or p.fp8_attention:
            return ()
        found = []
        for group in self.groups:
            ways = {row["direction"] for row in group}
            way = next((way for way in ("fwd+bwd", "bwd", "fwd") if way in ways), "")
            rows = [row for row in group if row["direction"] == way]
            if (way != "fwd") == p.is_training and rows[0]["gpu"] == card and _kind(rows[0]) == wanted:
                sizes = tuple(
                    map(int, (rows[0][name] or 0 for name in ("seqlen_q", "seqlen_kv", "heads", "batch")))
                )
                found.append(Shape(_sizes(*sizes), tuple(sorted(rows, key=microseconds))))
        return tuple(reversed(found))  # of equals the newest comes first


def nearest(shapes: tuple[Shape, ...], p: AttentionParams) -> Shape | None:
    """The shape nearest to a call's: lengths within a factor of 2, sequences x heads of 4; else None."""
    queries, keys, room = _sizes(p.max_seqlen_q, p.max_seqlen_kv, p.num_heads, p.batch_size)
    best, least = None, math.inf
    for shape in shapes:
        of = shape.sizes
        q, k, r = abs(of[0] - queries), abs(of[1] - keys), abs(of[2] - room)
        if q <= _LENGTH and k <= _LENGTH and r <= _ROOM and q + k + r < least:
            best, least = shape, q + k + r
    return best


def _sizes(queries: int, keys: int, heads: int, batch: int) -> tuple[float, float, float]:
    return math.log2(queries or 1), math.log2(keys or 1), math.log2(heads * batch or 1)


def microseconds(row: Row) -> float:
    """A time; of a rate what is smaller the faster it is, for kernels of one shape."""
    factor = _UNITS[row["unit"]]
    return float(row["value"]) * factor if factor > 0 else 1 / float(row["value"])


def _kind(cells: Row) -> tuple[Any, ...]:
    return (*(cells[name] for name in _KIND), cells["heads"] != cells["kv_heads"])


def cells_of(p: AttentionParams) -> dict[str, str]:
    """A call as cells. ``other``: what has no column of its own; what it makes slower it makes so for some
    kernels alone."""
    left, right = p.window_size
    other = [
        "packed" if p.qkv_format == "thd" else "",
        f"{p.core_attention_bias_type} {p.core_attention_bias_shape or ''}".strip()
        if p.core_attention_bias_type != "no_bias"
        else "",
        "bias gradient" if p.core_attention_bias_requires_grad else "",
        p.softmax_type if p.softmax_type != "vanilla" else "",
        "softcap" if p.softcap else "",
        "dropout" if p.attention_dropout else "",
        f"{p.kv_cache} cache" if p.kv_cache != "none" else "",
        f"window right {right}" if p.windowed and not p.causal else "",
    ]
    return {
        "dtype": p.dtype,
        "mask": p.attn_mask_type,
        "window": str(left) if p.windowed else "",
        "deterministic": "1" if p.deterministic else "",
        "batch": str(p.batch_size),
        "heads": str(p.num_heads),
        "kv_heads": str(p.num_gqa_groups),
        "seqlen_q": str(p.max_seqlen_q),
        "seqlen_kv": str(p.max_seqlen_kv),
        "head_dim_qk": str(p.head_dim_qk),
        "head_dim_v": str(p.head_dim_v),
        "other": "; ".join(filter(None, other)),
    }


def card_of(env: Environment) -> str:
    """The card as the catalogue names it; of a CPU, which is no machine that is only described, its model."""
    device = env.device
    if device.type == "cpu":
        return cpu_model() if env.detected else ""
    try:
        return look_up_gpu(device.name).name
    except ValueError:
        return device.name


@lru_cache(maxsize=1)
def cpu_model() -> str:
    """The model of this machine's CPU, without what a cell must not hold."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        name = next((line.partition(":")[2] for line in file if line.startswith("model name")), name)
    return printable(" ".join(name.replace(",", " ").split())) or "CPU"


# ---- the file ---------------------------------------------------------------------------------------


def read_figures(path: str | os.PathLike[str]) -> Figures:
    """A file of measurements. Raises ValueError with what of it is wrong."""
    from hashlib import blake2b  # for whoever has such a file

    name = os.path.abspath(os.path.expanduser(path))
    try:
        if os.path.getsize(name) > _MOST:
            raise _wrong(f"is longer than {_MOST >> 20} MiB")
        content = Path(name).read_bytes()
    except OSError as error:
        raise _wrong(f"cannot be read: {error.strerror or error}") from None
    made = Figures(f"{name}@{blake2b(content, digest_size=8).hexdigest()}")
    groups: dict[str, list[Row]] = {}
    for number, row in _rows(name, content)[1]:
        groups.setdefault(row["pair"] or f"line {number}", []).append(row)
    made.groups = tuple(map(tuple, groups.values()))
    return made


def _wrong(why: str) -> ValueError:
    return ValueError(f"{why}; allowed: a file that attnsel explain --measure wrote")


def _rows(name: str, content: bytes) -> tuple[list[str], list[tuple[int, Row]]]:
    """The columns of a file, and its rows with the numbers of their lines. Raises ValueError."""
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError:
        raise _wrong("is damaged: it is no UTF-8 text") from None
    found = _SCHEMA.match(lines[0])
    if found and int(found[1]) > VERSION:
        raise _wrong(f"was written by a newer attnsel ({found[0][2:]}, and this one reads /{VERSION})")
    columns: list[str] = []
    rows: list[tuple[int, Row]] = []
    for number, line in enumerate(lines, 1):
        cells = line.rstrip("\r").split(",")
        if line[:1] == "#" or not line.strip():
            continue
        if not columns:
            columns = cells
            if lacking := [column for column in _STATED if column not in columns]:
                raise _wrong(f"is no table of measurements: it lacks the column {lacking[0]}")
            continue
        if len(cells) != len(columns):
            cut = f"line {number} is damaged: it has {len(cells)} cells of {len(columns)}"
            raise _wrong(cut)
        row = dict.fromkeys(COLUMNS, "") | dict(zip(columns, cells, strict=True)) | {"file": name}
        if bad := _bad_cell(row):
            raise _wrong(f"line {number} is damaged: {bad} = {short(row[bad])}")
        rows.append((number, row))
    if not columns:
        raise _wrong("is empty: it has no columns")
    return columns, rows


def _bad_cell(row: Row) -> str:
    """The first cell that cannot be what it should, or "". Those of published rows may be empty."""
    for name in _COUNTS:
        if row[name] and not (row[name].isascii() and row[name].isdecimal() and len(row[name]) < 19):
            return name
    for name, allowed in (("direction", _DIRECTIONS), ("unit", tuple(_UNITS))):
        if row[name] not in allowed:
            return name
    try:
        value = float(row["value"])
    except ValueError:
        return "value"
    if not (math.isfinite(value) and value > 0):
        return "value"
    return "" if row["kernel"] else "kernel"


def writable(path: Path) -> None:
    """Raises InvalidInput, before minutes are spent, for what rows cannot be appended to."""
    _before(os.path.realpath(path.expanduser()))


def _before(name: str) -> bytes:
    """What a file that is appended to holds now. Raises InvalidInput."""
    try:
        if not os.path.lexists(name):
            if os.path.isdir(folder := os.path.dirname(name)) and not os.access(folder, os.W_OK):
                raise InvalidInput("--out", name, "its folder cannot be written")
            return f"{_HEAD}{','.join(COLUMNS)}\n".encode()
        if not os.path.isfile(name):
            raise InvalidInput("--out", name, "must be a file")
        content = Path(name).read_bytes()
    except OSError as error:
        raise InvalidInput("--out", name, f"cannot be read: {error.strerror or error}") from None
    try:
        columns = _rows(name, content)[0]
    except ValueError as error:
        why = str(error).partition(";")[0]
        raise InvalidInput("--out", name, f"{why}; it stays as it is: name another file") from None
    if tuple(columns) != COLUMNS:
        raise InvalidInput("--out", name, "has other columns than attnsel explain --measure writes")
    return content if content.endswith(b"\n") else content + b"\n"


def append(path: Path, groups: Sequence[Sequence[Row]]) -> None:
    """Add rows, each group under a pair of its own: whole or not at all, whoever else writes or stops this.

    Raises InvalidInput for a file that is none of ours, OSError where it cannot be written.
    """
    name = os.path.realpath(path.expanduser())
    folder = os.path.dirname(name)
    os.makedirs(folder, exist_ok=True)
    with _locked(f"{name}.lock"):
        content = _before(name)
        last = max((int(n) for n in re.findall(rb",m(\d+),", content)), default=0)
        lines = [
            ",".join({**row, "pair": f"m{last + number}"}.get(column, "") for column in COLUMNS)
            for number, group in enumerate(groups, 1)
            for row in group
        ]
        handle, made = tempfile.mkstemp(dir=folder, prefix=".figures-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content + "".join(f"{line}\n" for line in lines).encode())
                file.flush()
                os.fsync(file.fileno())
            os.chmod(made, os.stat(name).st_mode & 0o777 if os.path.exists(name) else 0o644)
            os.replace(made, name)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(made)


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """One process at a time; the system lets go of it when a process ends, however it does."""
    with open(name, "ab") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except ImportError:  # Windows
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined]
        yield
