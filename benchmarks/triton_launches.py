"""Host time of a Triton call: of launches that are remembered, beside those that Triton looks up again.

    python benchmarks/triton_launches.py
    python benchmarks/triton_launches.py --json benchmarks/results/triton-launches-cpu.json

The kernels are compiled for an H100, and the driver is one that does nothing (tests/support/mock_gpu.py):
what is left is Python's part of a call, before the driver's own. The tensors are tiny, on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import ROOT, Row, pairs, record, row, show, write

sys.path.insert(0, str(ROOT / "tests" / "support"))
import mock_gpu
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.triton import run
from attnsel.backends.triton import run as replay


def call(rows_q: int, rows_kv: int) -> tuple[Spec, Inputs]:
    """b 1, h 4/4, d 64, bshd memory, causal."""
    q, k, v = (
        torch.zeros(1, rows, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
        for rows in (rows_q, rows_kv, rows_kv)
    )
    spec = Spec(softmax_scale=0.125, window_right=0, bottom_right=True, need_grad=rows_q == rows_kv)
    return spec, Inputs(q, k, v)


def packed() -> tuple[Spec, Inputs]:
    q, k, v = (torch.zeros(48, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 16, 48], dtype=torch.int32)
    inputs = Inputs(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=32, max_seqlen_kv=32)
    return Spec(packed=True, softmax_scale=0.125, window_right=0, need_grad=True), inputs


def nowhere(*call: Any) -> list[Any]:
    return []


def nothing(*pass_: Any) -> None:
    return None


def compared(what: str, launch: Callable[[], Any], count: int) -> Row:
    """Remembered, over the same call where nothing is remembered nor recorded."""
    before = replay.place_for, replay.record

    def looked_up() -> None:
        replay.place_for, replay.record = nowhere, nothing
        try:
            launch()
        finally:
            replay.place_for, replay.record = before

    samples = pairs(launch, looked_up, count=count, calls=20)
    unremembered = statistics.median(samples.second)
    return row("a call, remembered", what, "µs", samples.first, baseline=unremembered, ratio=samples.ratio())


def rows(count: int) -> list[Row]:
    made = []
    for name, (spec, inputs) in {
        "forward": call(48, 48),
        "forward, packed": packed(),
        "decode and merge": call(1, 4096),
    }.items():
        made.append(compared(name, lambda s=spec, i=inputs: run.forward(s, i), count))
    for name, (spec, inputs) in {"backward": call(48, 48), "backward, packed": packed()}.items():
        result = run.forward(spec, inputs)
        dout = torch.zeros_like(result.out)
        made.append(
            compared(name, lambda s=spec, i=inputs, r=result, d=dout: run.backward(s, i, r, d), count)
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=40, help="samples, of 20 calls each")
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mock_gpu._Launcher.__call__ = lambda self, *arguments: None
    with mock_gpu.launching(90):
        found = rows(options.count)
    show("Triton launches · no GPU: Python's part of a call for an H100", found)
    if options.json:
        write(options.json, record("triton-launches", found))


if __name__ == "__main__":
    main()
