"""What was measured on this machine: a file of times, and the calls that its rows speak for.

A row is one kernel at one shape in one direction, as in rules/data/figures.csv, with the spread and the
memory behind it; those that share a pair were timed in turn. ``attnsel explain --measure`` appends them,
``Policy(figures=FILE)`` reads them, and ``Figures.about`` says for which calls they speak.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from attnsel.base.files import replace_whole
from attnsel.environment import Environment
from attnsel.environment.gpus import look_up_gpu
from attnsel.errors import InvalidInput, printable, short
from attnsel.params import AttentionParams

Row = Mapping[str, str]

VERSION = 1
_KIND = ("dtype", "mask", "window", "deterministic", "head_dim_qk", "head_dim_v", "other")
_SIZES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_kv")
_TIME = ("kernel", "value", "unit", "tflops", "kernel_version", "cudnn", "torch", "pair", "source")
_PUBLISHED = ("arch", "direction", "gpu", *_KIND[:4], *_SIZES, *_KIND[4:], *_TIME)
COLUMNS = (*_PUBLISHED, "low", "high", "samples", "peak_bytes", "date")
"""Those of published figures; then the quartiles beside ``value``, their number, the most memory that a call
took beside its tensors, and the day."""

_HEAD = f"# attnsel.figures/{VERSION}: written by attnsel explain --measure, read by ATTNSEL_FIGURES\n"
_UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6, "TFLOP/s": 0.0}
_WAYS = ("fwd+bwd", "bwd", "fwd")
_CELLS = dict.fromkeys((*_SIZES, "head_dim_qk", "head_dim_v", "samples"), r"\d{0,18}")
_CELLS |= {"direction": r"fwd|bwd|fwd\+bwd", "unit": "us|ms|s|TFLOP/s", "kernel": r"\S.*"}
_CELLS |= {"value": r"(?=.*[1-9])\d+\.?\d*([eE][+-]?\d\d?)?"}
_LENGTH, _ROOM = 1.0, 2.0  # powers of two that lengths, and sequences x heads, may be apart


class Shape(NamedTuple):
    """One shape that was measured: powers of two of queries, keys and sequences x heads, and its kernels, the
    fastest first."""

    sizes: tuple[float, float, float]
    rows: tuple[Row, ...]
    ranking: tuple[str, ...]


class Figures(str):
    """A file as it was when it was read, written ``PATH@DIGEST``; another content is another value."""

    groups: tuple[list[Row], ...]

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
        """The shapes that speak for calls like ``p`` there, whatever their lengths and batch; newest first.

        On the same card or CPU model, in the same direction (of training forward and backward together),
        with the same dtype, mask, window, determinism, head dimensions and ``other``, grouped heads or not.
        Of several ranks and FP8 nothing is measured.
        """
        card, wanted = card_of(env), _kind(cells_of(p))
        found = []
        for group in self.groups if card and not (p.context_parallel or p.fp8_attention) else ():
            way = next(way for way in _WAYS if any(row["direction"] == way for row in group))
            rows = sorted((row for row in group if row["direction"] == way), key=microseconds)
            first = rows[0]
            if (way != "fwd") == p.is_training and first["gpu"] == card and _kind(first) == wanted:
                sizes = _sizes(
                    *(int(first[name] or 0) for name in ("seqlen_q", "seqlen_kv", "heads", "batch"))
                )
                found.append(Shape(sizes, tuple(rows), tuple(row["kernel"] for row in rows)))
        return tuple(reversed(found))


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
    value = float(row["value"])
    return value * _UNITS[row["unit"]] or 1 / value


def _kind(cells: Row) -> tuple[Any, ...]:
    return (*(cells[name] for name in _KIND), cells["heads"] != cells["kv_heads"])


def cells_of(p: AttentionParams) -> dict[str, str]:
    """A call as cells. ``other``: what has no column of its own and that some kernels take longer for."""
    left, right = p.window_size
    bias = p.core_attention_bias_type
    other = (
        (p.qkv_format == "thd", "packed"),
        (bias != "no_bias", " ".join(filter(None, (bias, p.core_attention_bias_shape)))),
        (p.core_attention_bias_requires_grad, "bias gradient"),
        (p.softmax_type != "vanilla", p.softmax_type),
        (p.softcap, "softcap"),
        (p.attention_dropout, "dropout"),
        (p.kv_cache != "none", f"{p.kv_cache} cache"),
        (p.windowed and not p.causal, f"{right} keys to the right"),
    )
    fields = ("batch_size", "num_heads", "num_gqa_groups", "max_seqlen_q", "max_seqlen_kv")
    return {
        "dtype": p.dtype,
        "mask": p.attn_mask_type,
        "window": str(left) if p.windowed else "",
        "deterministic": "1" if p.deterministic else "",
        **{cell: str(getattr(p, name)) for cell, name in zip(_SIZES, fields, strict=True)},
        "head_dim_qk": str(p.head_dim_qk),
        "head_dim_v": str(p.head_dim_v),
        "other": "; ".join(words for asked, words in other if asked),
    }


def card_of(env: Environment) -> str:
    """The card as the catalogue names it; of a CPU its model, or "" where it is only described."""
    if env.device.type == "cpu":
        return _cpu_model() if env.detected else ""
    try:
        return look_up_gpu(env.device.name).name
    except ValueError:
        return env.device.name


@lru_cache(maxsize=1)
def _cpu_model() -> str:
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        name = next((line.partition(":")[2] for line in file if line.startswith("model name")), name)
    return printable(" ".join(name.replace(",", " ").split())) or "CPU"


# ---- the file ---------------------------------------------------------------------------------------


def read_figures(path: str | os.PathLike[str]) -> Figures:
    """A file of measurements; of ``PATH@DIGEST`` that content alone. Raises ValueError with what is wrong."""
    from hashlib import blake2b  # for whoever has such a file

    again = re.fullmatch(r"(.+)@([0-9a-f]{16})", os.fspath(path))
    name = os.path.abspath(os.path.expanduser(again[1] if again else path))
    try:
        content = Path(name).read_bytes() if os.path.isfile(name) or not os.path.exists(name) else b""
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from None
    made, groups = Figures(f"{name}@{blake2b(content, digest_size=8).hexdigest()}"), dict[str, list[Row]]()
    if again and made.digest != again[2]:
        raise ValueError(f"holds something else than when it was read ({made.digest})")
    for number, row in enumerate(_rows(content)[1]):
        groups.setdefault(row["pair"] or f"row {number}", []).append({**row, "file": name})
    made.groups = tuple(groups.values())
    return made


def _rows(content: bytes) -> tuple[list[str], list[Row]]:
    """The columns of a file, and its rows. Raises ValueError."""
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise ValueError("is damaged: it is no UTF-8 text") from None
    found = re.match(r"# attnsel\.figures/(\d{1,9})", lines[0]) if lines else None
    if found and int(found[1]) > VERSION:
        raise ValueError(f"is of a newer attnsel: it holds {found[0][2:]}, and this one reads /{VERSION}")
    cells = [(number, line.split(",")) for number, line in enumerate(lines, 1) if line and line[0] != "#"]
    columns = cells[0][1] if cells else []
    if lacking := [name for name in _PUBLISHED if name not in columns]:
        raise ValueError(f"is no file of measurements: it lacks the column {lacking[0]}")
    rows: list[Row] = []
    for number, values in cells[1:]:
        if len(values) != len(columns):
            raise ValueError(f"is damaged: line {number} has {len(values)} cells, not {len(columns)}")
        row = dict.fromkeys(COLUMNS, "") | dict(zip(columns, values, strict=True))
        for name, allowed in _CELLS.items():
            if not re.fullmatch(allowed, row[name], re.ASCII):
                raise ValueError(f"is damaged: line {number} has {name} {short(row[name])}")
        rows.append(row)
    return columns, rows


def appendable(path: Path) -> bytes:
    """What a file that is to get rows holds now. Raises InvalidInput for one that must stay as it is."""
    name = os.path.realpath(path.expanduser())
    folder = os.path.dirname(name)
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK) or (os.path.lexists(name) and not os.path.isfile(name)):
            raise ValueError("is no file, or lies in a folder that cannot be written")
        if not os.path.lexists(name):
            return f"{_HEAD}{','.join(COLUMNS)}\n".encode()
        content = Path(name).read_bytes()
        if tuple(_rows(content)[0]) != COLUMNS:
            raise ValueError("has other columns than attnsel explain --measure writes")
    except (OSError, ValueError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise InvalidInput("--out", name, f"{why}; name another file") from None
    return content if content.endswith(b"\n") else content + b"\n"


def append(path: Path, rows: Sequence[Row]) -> None:
    """Add rows under a pair of their own: whole or not at all, whoever else writes or stops this.

    Raises InvalidInput as ``appendable``, OSError where it cannot be written.
    """
    name = os.path.realpath(path.expanduser())
    with _locked(f"{name}.lock"):
        content = appendable(path)
        last = max(map(int, re.findall(rb",m(\d{1,9}),", content)), default=0)
        lines = (
            ",".join({**row, "pair": f"m{last + 1}"}.get(column, "") for column in COLUMNS) for row in rows
        )
        replace_whole(name, content + "".join(f"{line}\n" for line in lines).encode(), f"{name}.new")


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """One process at a time; the system lets go of it when a process ends, however it does."""
    with open(name, "ab") as file:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
