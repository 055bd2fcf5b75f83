"""Which tiles are chosen, and what every kernel of a call is launched with: recorded, for GPUs not there.

Accept what changed with ``pytest tests/backends/triton/test_recorded.py --snapshot-update``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attention_cases import CASES, Case, build, int32, packed, upstream
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.triton import blocks
from attnsel.backends.triton import run as triton_run
from attnsel.backends.triton.launch import Launch, check, make_call
from attnsel.backends.triton.launch_decode import choose_splits
from recorded import Differences, Record, roomy
from recorded import record as record

torch.set_num_threads(1)

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
        for d, e in ((64, 64), (65, 8), (8, 65), (128, 129), (257, 64)):
            lines.append(f"sm{arch} descriptor {d}/{e}: {said(blocks.choose_descriptor(arch, d, e, 2))}")
    record.holds("tiles", lines)
    assert blocks.choose_descriptor(90, 64, 64, 4) is None
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
    record.holds("splits", lines)
    assert (choose_splits(call, 90, 4, 0), choose_splits(call, 90, 4, 128)) == (0, 128)
    for wrong in (-1, 129):
        with pytest.raises(ValueError, match="splits must be"):
            choose_splits(call, 90, 4, wrong)


# Every axis has a size of its own, and every stride follows from memory with room behind each row.
SIZES = {"b": 3, "h": 12, "g": 2, "s_q": 37, "s_kv": 53, "d": 48, "e": 32}
PAGES = {"block_table": int32([[2, 0, 1], [1, 2, 0], [0, 1, 2]]), "seqlens_kv": int32([20, 33, 7])}
MORE: list[tuple[Case, dict[str, Any]]] = [
    (Case("short queries", sizes={"s_q": 5}), {}),
    (Case("short queries, no largest score", {"return_max_logit": False}, sizes={"s_q": 5}), {}),
    (
        Case("short queries of latent attention", {"need_grad": False}, sizes={"s_q": 5, "d": 576, "e": 512}),
        {},
    ),
    (Case("one short query, one split", sizes={"s_q": 1, "s_kv": 7}), {}),
    (Case("576/512", {"need_grad": False}, sizes={"d": 576, "e": 512}), {}),
    (Case("272/256", {"need_grad": False}, sizes={"d": 272, "e": 256}), {}),
    (Case("pages", {"need_grad": False}), PAGES),
    (Case("pages, short queries", {"need_grad": False}, sizes={"s_q": 5}), PAGES),
    (Case("pages, longest 30", {"need_grad": False, **packed("").spec}), {**PAGES, "max_seqlen_kv": 30}),
    (packed("longest given"), {"max_seqlen_q": 17, "max_seqlen_kv": 19}),
    (Case("wide bounds", {"window_left": 1 << 31, "window_right": 1 << 32}), {}),
    (Case("all dropped", {"dropout_p": 1.0}), {"dropout_seed": torch.tensor(5)}),
    (Case("slopes for one sequence", sizes={"b": 1}), {"alibi_slopes": torch.ones(1, 12)}),
]


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
    return (
        f"{name} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}{list(value.stride())}".replace(
            ", ", ","
        )
    )


def test_launches(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    same = Differences()
    lines = []
    for case, more in [*[(case, {}) for case in CASES], *MORE]:
        sized = dataclasses.replace(case, sizes={**SIZES, **case.sizes})
        spec, inputs = build(sized, torch.float16)
        inputs = inputs._replace(
            **{name: roomy(t) for name, t in zip("qkv", inputs[:3], strict=True)}, **more
        )
        if "block_table" in more:
            pools = (roomy(torch.zeros(3, 2, 16, width, dtype=torch.float16)) for width in (48, 32))
            inputs = inputs._replace(k=next(pools), v=next(pools), cu_seqlens_kv=None)
        if inputs.bias is not None:
            inputs.bias.requires_grad_()
        for arch, processors in ((75, 4), (90, 132)):
            for launch, given in launches_of(monkeypatch, arch, processors, spec, inputs):
                values = {name: shown(value, given) for name, value in launch.args.items()}
                values |= {"programs": launch.programs, "tile": said(launch.block)}
                kind = f"sm{arch} {launch.name}"
                lines.append(f"{case.name} | {kind} | {same.line(kind, values)}")
    record.holds("launches", lines)


def laid(shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=torch.float16, device=META)


def test_limits_are_where_they_are_said_to_be() -> None:
    """The last that is taken and the first that is not."""
    far = 1 << 24

    def refused(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> str:
        cu = torch.empty(2, dtype=torch.int32, device=META) if spec.packed else None
        try:
            check(spec, Inputs(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu))
        except ValueError as error:
            return str(error)
        return ""

    def widths(d: int, e: int, **fields: Any) -> str:
        x, y = (torch.empty(1, 1, 2, n, dtype=torch.float16, device=META) for n in (d, e))
        return refused(Spec(**fields), x, x, y)

    assert [bool(widths(*w)) for w in ((576, 512), (577, 512), (576, 513))] == [False, True, True]
    assert [bool(widths(*w, need_grad=True)) for w in ((256, 256), (257, 8), (8, 257))] == [False, True, True]
    for name in ("q_offset", "kv_offset"):
        for sign in (1, -1):
            assert [bool(widths(8, 8, **{name: sign * n})) for n in ((1 << 30) - 1, 1 << 30)] == [False, True]
    for rows in (2, 0):
        shape = [1, 1, 1, 8] if rows else [1, 1, 8]
        plain = laid((*shape[:rows], 3, *shape[rows + 1 :]), (*([8] * (len(shape) - 1)), 1))
        for apart in (far - 1, far):
            steps = list(plain.stride())
            steps[rows] = apart
            for side in range(3):
                three = [plain] * 3
                three[side] = laid(tuple(plain.shape), tuple(steps))
                said_no = refused(Spec(packed=not rows), *three)
                assert said_no.startswith(f"rows of {'qkv'[side]}") if apart == far else not said_no
    for side in range(3):
        three = [laid((1, 1, 3, 8), (48, 48, 16, 1))] * 3
        three[side] = laid((1, 1, 3, 8), (48, 48, 16, 2))
        assert refused(Spec(), *three).startswith(f"the innermost stride of {'qkv'[side]} is 2")
        three[side] = laid((1, 1, 3, 8), (48, 48, 16, 1)).bfloat16()
        assert "must share" in refused(Spec(), *three)
