"""cuDNN's graphs, workspaces and described GPUs as recorded values; rows and lengths by their definition.

Accept what changed with ``pytest tests/backends/cudnn/test_recorded.py --snapshot-update``.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated_cudnn
from attention_cases import int32
from attnsel import AttentionParams, Environment
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.cudnn import run as tensors
from attnsel.backends.cudnn.ask.libraries import device_json
from attnsel.backends.cudnn.build import declare
from attnsel.backends.cudnn.candidate import workspace, workspace_in_pytorch
from attnsel.backends.cudnn.graph import UIDS, Graph, backward, forward, planned
from attnsel.base.records import to_json
from attnsel.environment.gpus import ARCHITECTURES, catalogue
from attnsel.errors import InvalidInput, UnsupportedArgument
from recorded import ASKED, Differences, calls
from records import Record

torch.set_num_threads(1)

FOLDER = Path(__file__).parent / "recorded"


def shown(graph: Graph) -> dict[str, Any]:
    """A graph, and the function's keywords that the frontend is told."""
    values: dict[str, Any] = {"io": graph.io_dtype, **dict(graph.options)}
    for way, those in (("in", graph.inputs), ("out", graph.outputs)):
        for t in those:
            known = f"{t.dtype}{list(t.dims)}{list(t.strides)} {t.ragged} {t.reordering}"
            values[f"{way} {t.name}"] = known.replace(", ", ",").strip()
    for offsets in graph.ragged:
        values[offsets.name] = f"{offsets.dtype}[{offsets.entries}] x{offsets.unit} {offsets.side}"
    made = declare(graph, emulated_cudnn, device_property="a GPU", sm_version=90)
    assert made.how.keys() & {"handle", "device_property", "sm_version"} == {"device_property", "sm_version"}
    returned = zip(graph.outputs, made.results, strict=False)
    told = {**{t.name: one for t, one in returned if t.name not in made.tensors}, **made.tensors}
    for t in (*graph.inputs, *graph.outputs):
        one = told[t.name]
        offsets = getattr(one.ragged_offset, "name", "")
        order = getattr(getattr(one, "reordering_type", None), "name", "")
        assert (one.uid, one.dim, one.stride) == (t.uid, [*t.dims], [*t.strides]), t
        assert (offsets, order.removeprefix("REORDERING_")) == (t.ragged, t.reordering), t
    for name, value in made.given.items():
        if not isinstance(value, emulated_cudnn.Tensor) and name not in graph.options:
            parts = value if isinstance(value, tuple) else (value,)
            values[f"told {name}"] = [getattr(part, "name", part) for part in parts]
    return values


def test_graphs(record: Record) -> None:
    same = Differences()
    lines = [f"uids | {' '.join(f'{name}={uid}' for name, uid in UIDS.items())}"]

    def add(name: str, graph: Graph) -> None:
        assert Graph.from_dict(to_json(graph)) == graph
        lines.append(f"{name} | {graph.node} | {same.line(graph.node, shown(graph))}")

    for case, spec, inputs in calls(torch.bfloat16):
        try:
            tensors.check(spec, inputs)
        except ValueError as error:
            lines.append(f"{case} | no: {str(error).split(':')[0]}")
            continue
        found = tensors.problem(spec, inputs)
        add(case, found.forward)
        if found.backward is not None:
            add(case, found.backward)
        lines.append(f"{case} | for each row: {found.per_row}")
        for buffer, t in tensors.length_buffers(found.call, found.forward, inputs).items():
            lines.append(f"{case} | {buffer} {t.dtype} {t.tolist()}")
    for name, fields in {**ASKED["planned"], **ASKED["planned, their graphs alone"]}.items():
        try:
            call = planned(AttentionParams(**{**ASKED["planned sizes"], **fields}))
            add(f"planned, {name}", forward(call))
            if call.need_grad:
                add(f"planned, {name}", backward(call))
        except (InvalidInput, UnsupportedArgument) as error:
            lines.append(f"planned, {name} | no: {str(error).split(':')[0]}")
    record.holds(FOLDER / "graphs.txt", lines)


def test_workspaces_and_described_gpus(record: Record) -> None:
    same = Differences()
    lines = []
    for gpu in ("RTX 3090", "A100", "RTX 4090", "H100", "B200", "B300", "Thor", "RTX 5090", "GB10"):
        env = Environment.describe(gpu, cudnn="9.28.0", cudnn_frontend="1.28.0")
        for name, fields in ASKED["planned"].items():
            taken = []
            for more in (
                {"max_seqlen_kv": 128, "head_dim_qk": 128},
                {"max_seqlen_kv": 129},
                {"deterministic": True},
                {"max_seqlen_kv": 128},
                {"max_seqlen_kv": 129, "head_dim_qk": 128, "max_seqlen_q": 65, "num_gqa_groups": 12},
            ):
                p = AttentionParams(**{**ASKED["planned sizes"], **fields, **more})
                taken.append(f"{workspace(p, env)[1]} {workspace_in_pytorch(p, env)[1]}")
            lines.append(f"{gpu}, {name}: {', '.join(taken)}")
    named = [(card.arch, card.name) for card in catalogue().values() if card.arch in ARCHITECTURES]
    for arch, name in sorted({*((arch, "") for arch, _ in named), *named, (90, "A100"), (80, "A card")}):
        try:
            lines.append(f"sm{arch} {name}: {same.line('', device_json(arch, name))}")
        except ValueError:
            lines.append(f"sm{arch} {name}: nothing is known")
    lines.append(f"given: {same.line('', device_json(90, 'H100', memory=7, sm_count=5))}")
    record.holds(FOLDER / "devices.txt", lines)


def test_lengths_are_rounded_to_four_steps_of_a_doubling() -> None:
    doublings = [2**k + 2**k * step // 4 for k in range(3, 14) for step in (1, 2, 3, 4)]
    lengths = [*range(17), 128, *[n for n in doublings if n > 128 and n % 128 == 0]]
    counts = [*range(9), *doublings]
    for n in range(1, 4000):
        assert tensors.bucket(n) == min(at for at in lengths if at >= n)
        assert tensors.sequences(n) == min(at for at in counts if at >= n)


WINDOWS = list(itertools.product((-1, 0, 2, 9), (-1, 0, 3), (False, True)))
LENGTHS: list[tuple[bool, list[int] | None, list[int] | None]] = [
    (False, None, None),
    (False, [5, 0, 3], [2, 7, 0]),
    (False, [1, 4, 5], None),
    (False, None, [1, 6, 7]),
    (True, [5, 0, 3], [2, 7, 1]),
]


@pytest.mark.parametrize(("s_q", "s_kv"), [(5, 7), (9, 2)])
def test_rows_that_see_no_key_are_those_of_the_definition(s_q: int, s_kv: int) -> None:
    for (left, right, bottom_right), (is_packed, len_q, len_kv) in itertools.product(WINDOWS, LENGTHS):
        spec = Spec(packed=is_packed, window_left=left, window_right=right, bottom_right=bottom_right)
        q, k = torch.zeros(3, 1, s_q, 8), torch.zeros(3, 1, s_kv, 8)
        real_q, real_kv = len_q or [s_q] * 3, [min(n, s_kv) for n in len_kv or [s_kv] * 3]
        about: dict[str, Tensor | None] = {"seqlens_q": len_q and int32(len_q)}
        about["seqlens_kv"] = len_kv and int32(real_kv)
        if is_packed:
            q, k = torch.zeros(12, 1, 8), torch.zeros(20, 1, 8)
            about = {
                f"cu_seqlens_{side}": int32([0, *itertools.accumulate(n)])
                for side, n in (("q", real_q), ("kv", real_kv))
            }
        inputs = Inputs(q, k, k, **about)
        found = tensors.problem(spec, inputs)
        buffers = tensors.length_buffers(found.call, found.forward, inputs)
        rows = tensors.rows_of(found.call, inputs, buffers)
        b, _, most, _ = found.call.q.dims
        for n, row in itertools.product(range(b), range(most)):
            absent = row >= real_q[n]
            center = row + (real_kv[n] - real_q[n] if bottom_right else 0)
            blind = not absent and not any(
                (left < 0 or j >= center - left) and (right < 0 or j <= center + right)
                for j in range(real_kv[n])
            )
            said = [bool(t[n, row]) if t is not None else False for t in rows]
            assert said == [absent, blind], (spec, about, n, row)
            assert rows.dead is None or bool(rows.dead[n, row]) == (absent or blind)
        beyond = tensors.absent_keys(found.call, buffers)
        if is_packed or not (len_q or len_kv):
            assert beyond is None
        else:
            assert beyond is not None
            assert beyond.tolist() == [[j >= n for j in range(s_kv)] for n in real_kv]


@pytest.mark.parametrize("begins", [None, [1, 6, 8, 12]])
def test_packed_rows_know_their_sequence(begins: list[int] | None) -> None:
    lengths = [4, 0, 3]
    cu = int32([0, 4, 4, 7])
    inputs = Inputs(*[torch.zeros(14, 1, 8)] * 3, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    inputs = inputs._replace(cu_seqlens_q_padded=None if begins is None else int32(begins))
    call = tensors.problem(Spec(packed=True), inputs).call
    found = tensors.tokens_of(call, inputs, int32(lengths))
    first = begins or cu.tolist()
    real = {first[n] + row: (n, row) for n, length in enumerate(lengths) for row in range(length)}
    assert found.outside.tolist() == [t not in real for t in range(14)]
    assert {t: (int(found.sequence[t]), int(found.row[t])) for t in real} == real
    assert 0 <= int(found.row.min()) <= int(found.row.max()) < call.q.dims[2]
    assert 0 <= int(found.sequence.min()) <= int(found.sequence.max()) < 3
