"""Which tiles are chosen, and what every kernel of a call is launched with: recorded, for GPUs not there.

Accept what changed with ``pytest tests/backends/triton/test_recorded.py --snapshot-update``.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attention_cases import upstream
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.triton import blocks
from attnsel.backends.triton import run as triton_run
from attnsel.backends.triton.launch import Launch, check, choose_splits, make_call
from recorded import Differences, calls
from records import Record

torch.set_num_threads(1)

FOLDER = Path(__file__).parent / "recorded"

ARCHS = (75, 80, 86, 89, 90, 100, 103, 120)
META = torch.device("meta")


def said(block: blocks.Block | None) -> str:
    if block is None:
        return "none"
    flags = [name for name in ("always_right", "ahead") if getattr(block, name)]
    return " ".join([f"{block.m}x{block.n} w{block.warps} s{block.stages} {block.masks}", *flags])


def described(d: int, e: int, dtype: torch.dtype, rows: int, page: int, feature: str) -> tuple[Spec, Inputs]:
    """A call with no data and the features whose names are in ``feature``."""
    shape_q = (rows, 3, d) if "packed" in feature else (2, 3, rows, d)
    k, v = ((500, 3), (500, 3)) if "packed" in feature else ((2, 3, 700), (2, 3, 700))
    if page:
        k = v = (9, 3, page)
    more: dict[str, Any] = {}
    if "packed" in feature:
        more = {f"cu_seqlens_{side}": torch.empty(3, dtype=torch.int32, device=META) for side in ("q", "kv")}
    if page:
        more = {"block_table": torch.empty(2, 5, dtype=torch.int32, device=META)}
    if "bias" in feature:
        more["bias"] = torch.empty(1, 1, rows, 700, device=META)
    if "mask" in feature:
        more["attn_mask"] = torch.empty(1, 1, rows, 700, dtype=torch.bool, device=META)
    q, k, v = (torch.empty(s, dtype=dtype, device=META) for s in (shape_q, (*k, d), (*v, e)))
    spec = Spec(
        packed="packed" in feature,
        window_left=0 if "left" in feature else -1,
        window_right=0 if "right" in feature else -1,
        dropout_p=0.1 if "dropout" in feature else 0.0,
    )
    return spec, Inputs(q, k, v, **more)


FEATURES = ("plain", "left", "right", "packed", "packed left", "bias", "mask", "dropout", "left bias")
WIDTHS = ((64, 64), (16, 16), (72, 64), (64, 72), (80, 64), (64, 128), (256, 144), (272, 64), (576, 512))


def test_tiles(record: Record) -> None:
    def chosen(name: str, arch: int, d: int, e: int) -> Iterator[tuple[str, str]]:
        every: list[tuple[str, torch.dtype, int, int]] = [(f, torch.float16, 64, 0) for f in FEATURES]
        every += [(f, torch.float32, 64, 0) for f in ("plain", "packed left")]
        every += [("", torch.float16, 64, page) for page in (16, 32, 64, 96, 128)]
        every += [("", torch.float32, 64, 64), ("bias", torch.float16, 64, 64)]
        if name == "decode":
            every += [("", t, n, 0) for t in (torch.float16, torch.float32) for n in (1, 16, 17, 32, 33, 65)]
        for feature, dtype, rows, page in every:
            if "packed" in feature and name == "decode":
                continue
            words = [feature, "float32" if dtype.itemsize == 4 else "", f"page {page}" if page else ""]
            words += [f"{rows} rows"] if rows != 64 else []
            try:
                block = said(make_call(*described(d, e, dtype, rows, page, feature)).block(name, arch))
            except ValueError:
                block = "none"
            yield block, " ".join(filter(None, words)) or "16-bit"

    lines = []
    for arch in ARCHS:
        for name in blocks.PASSES:
            for d, e in WIDTHS:
                cells: dict[str, list[str]] = {}
                for block, words in chosen(name, arch, d, e):
                    cells.setdefault(block, []).append(words)
                shown = "; ".join(f"{block}: {', '.join(words)}" for block, words in cells.items())
                lines.append(f"sm{arch} {name} {d}/{e}: {shown}")
    record.holds(FOLDER / "tiles.txt", lines)
    assert blocks.Block(1, 2, 3, 4).options == {"num_warps": 3, "num_stages": 4, "enable_fp_fusion": True}


def test_interpreters_tiles_hold_the_sequences() -> None:
    for s_q, s_kv in ((1, 200), (16, 17), (17, 16), (128, 129), (65, 64)):
        m, n = (min(128, max(16, 2 ** math.ceil(math.log2(s)))) for s in (s_q, s_kv))
        assert {(block.m, block.n) for block in blocks.interpreted(s_q, s_kv) if block} == {(m, n)}
    assert [blocks.pieces(n) for n in (256, 257, 512, 576)] == [(256, 0), (256, 1), (512, 0), (512, 64)]


def test_splits(record: Record) -> None:
    lines = []
    for programs in (1, 7, 64, 300):
        for processors in (0, 1, 16, 132):
            row = [str(blocks.split_count(programs, processors, n)) for n in (0, 1, 2, 5, 40, 128, 129, 1000)]
            lines.append(f"{programs} programs on {processors} processors: {' '.join(row)}")
    for rows in (1, 16, 17):
        call = make_call(*described(64, 64, torch.float16, rows, 0, "plain"))
        lines.append(
            f"{rows} rows: {choose_splits(call, 90, 132)}, asked for 3: {choose_splits(call, 90, 4, 3)}"
        )
    record.holds(FOLDER / "splits.txt", lines)
    assert (choose_splits(call, 90, 4, 0), choose_splits(call, 90, 4, 128)) == (0, 128)
    for wrong in (-1, 129):
        with pytest.raises(ValueError, match="splits must be"):
            choose_splits(call, 90, 4, wrong)


def launches_of(
    monkeypatch: pytest.MonkeyPatch, arch: int, processors: int, spec: Spec, inputs: Inputs
) -> Iterator[tuple[Launch, dict[str, Tensor]]]:
    """What forward and backward launch, and the tensors that went in."""
    ran: list[Launch] = []
    monkeypatch.setattr(triton_run, "_run", lambda launch, device, arch: ran.append(launch))
    monkeypatch.setattr(triton_run, "_arch", lambda q: arch)
    monkeypatch.setattr(triton_run, "_processors", lambda device: processors)
    result = triton_run.forward(spec, inputs)
    given: dict[str, Any] = {**inputs._asdict(), **result._asdict()}
    if spec.need_grad:
        given["dout"], dlse = upstream(result)
        given["dlse"] = dlse.mT.contiguous().mT
        triton_run.backward(spec, inputs, result, given["dout"], given["dlse"])
    for launch in ran:
        yield launch, {name: t for name, t in given.items() if isinstance(t, Tensor)}


def shown(value: Any, given: dict[str, Tensor]) -> str:
    if not isinstance(value, Tensor):
        return f"{value:.9g}" if isinstance(value, float) else str(value)
    known = [name for name, t in given.items() if t.data_ptr() == value.data_ptr() and t.numel()]
    name = known[0] if known else "new"
    lies = f"{list(value.shape)}{list(value.stride())}".replace(", ", ",")
    return f"{name} {str(value.dtype).removeprefix('torch.')}{lies}"


def test_launches(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    same = Differences()
    lines = []
    for case, spec, inputs in calls(torch.float16):
        for arch, processors in ((75, 4), (90, 132)):
            for launch, given in launches_of(monkeypatch, arch, processors, spec, inputs):
                values = {name: shown(value, given) for name, value in launch.args.items()}
                values |= {"programs": launch.programs, "tile": said(launch.block)}
                kind = f"sm{arch} {launch.name}"
                lines.append(f"{case} | {kind} | {same.line(kind, values)}")
    record.holds(FOLDER / "launches.txt", lines)


def test_limits_are_where_they_are_said_to_be() -> None:
    """The last that is taken and the first that is not."""

    def taken(shape: list[int], row: int = 640, inner: int = 1, wide: str = "qkv", **fields: Any) -> str:
        """The tensors that ``wide`` names have this shape and strides, the others are plain."""
        spec = Spec(packed=len(shape) == 3, **fields)
        cu = torch.empty(2, dtype=torch.int32, device=META) if spec.packed else None
        plain = [*shape[:-1], 8]
        strides = (row, 1 << 30, inner) if spec.packed else (1 << 30, 1 << 30, row, inner)
        three = (
            torch.empty_strided(shape if name in wide else plain, strides, dtype=torch.float16, device=META)
            if name in wide
            else torch.empty(plain, dtype=torch.float16, device=META)
            for name in "qkv"
        )
        try:
            check(spec, Inputs(*three, cu_seqlens_q=cu, cu_seqlens_kv=cu))
        except ValueError as error:
            return str(error)
        return "taken"

    for wide, last, more in (("qk", 576, {}), ("v", 512, {}), ("qk", 256, {"need_grad": True})):
        assert taken([1, 1, 3, last], wide=wide, **more) == "taken"
        assert taken([1, 1, 3, last + 1], wide=wide, **more).startswith(
            f"Triton kernels stop at head_dim {last}"
        )
    for name, sign in itertools.product(("q_offset", "kv_offset"), (1, -1)):
        assert taken([1, 1, 3, 8], **{name: sign * ((1 << 30) - 1)}) == "taken"
        assert taken([1, 1, 3, 8], **{name: sign << 30}).startswith("positions must stay below")
    for name, shape in itertools.product("qkv", ([1, 1, 3, 8], [3, 1, 8])):
        assert taken(shape, row=(1 << 24) - 1, wide=name) == "taken"
        assert taken(shape, row=1 << 24, wide=name).startswith(f"rows of {name} lie 16777216")
        assert taken(shape, inner=2, wide=name).startswith(f"the innermost stride of {name} is 2")
    assert taken([1, 1, 1, 8], row=1 << 24) == taken([1, 1, 3, 1], inner=2) == "taken"
