"""What a cuDNN plan costs: to build, and to find again.

    python benchmarks/cudnn_plans.py              # on a GPU: real plans, host time beside sdpa.cudnn's
    python benchmarks/cudnn_plans.py --json FILE

Without a GPU the frontend is the emulation of tests/support/emulated_cudnn.py with nothing carried out, so
what is left is attnsel's own part of a call: checks, the look-up, the buffers, and what it tidies afterwards.
On a GPU a launch takes the place of each small operation.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import ROOT, Row, pairs, per_call, quiet, record, row, show, write

from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.cudnn import plans
from attnsel.backends.cudnn import plans as session
from attnsel.backends.cudnn import run as tensors
from attnsel.backends.cudnn.plans import PLANS
from attnsel.backends.cudnn.run import backward, forward, prepare
from attnsel.backends.sdpa import run as sdpa

HIT_BUDGET_US = 10.0  # look-up of a problem and its plan; carrying it out is not in it


def without_a_gpu() -> torch.device:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import emulated_cudnn

    emulated_cudnn.pygraph.execute = lambda *unused, **none: None
    made = session.Session(emulated_cudnn, object(), torch.device("cpu"), ("9.13.0", "emulated"))
    session.current = lambda device: made
    torch.set_num_threads(1)
    return made.device


def dense(device: torch.device, s: int = 256) -> tuple[Spec, Inputs]:
    """b 2, h 16/4, d 128, bshd memory, causal."""
    q, k, v = (
        torch.randn(2, s, heads, 128, dtype=torch.bfloat16, device=device).transpose(1, 2)
        for heads in (16, 4, 4)
    )
    return Spec(softmax_scale=128**-0.5, window_right=0, need_lse=True, need_grad=True), Inputs(q, k, v)


def packed(device: torch.device) -> tuple[Spec, Inputs]:
    """Three sequences of 256 rows in all."""
    q, k, v = (torch.randn(256, h, 128, dtype=torch.bfloat16, device=device) for h in (16, 4, 4))
    cu = torch.tensor([0, 60, 128, 256], dtype=torch.int32, device=device)
    spec = Spec(packed=True, softmax_scale=128**-0.5, window_right=0, need_grad=True)
    return spec, Inputs(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=128, max_seqlen_kv=128)


def timed(group: str, what: str, call: Callable[[], Any], **rest: Any) -> Row:
    per_call(call, 50)
    with quiet():
        samples = [per_call(call, 100) for _ in range(20)]
    return row(group, what, "µs", samples, **rest)


def builds(device: torch.device) -> list[Row]:
    """Forward and backward plan of a call that is new, five lengths of it."""
    seen = []
    for s in (256, 384, 512, 640, 768):
        spec, inputs = dense(device, s)
        begun = time.perf_counter()
        prepare(spec, inputs)
        seen.append(time.perf_counter() - begun)
    return [row("a plan that is new", "forward and backward", "s", seen)]


def hits(device: torch.device) -> list[Row]:
    rows, here = [], session.current(device)
    for name, made in (("dense", dense), ("packed", packed)):
        spec, inputs = made(device)
        result = forward(spec, inputs)
        dout = torch.randn_like(result.out)

        def find(spec: Spec = spec, inputs: Inputs = inputs) -> None:
            found = tensors.problem(spec, inputs)
            plans.plan_of(found.forward, found.forward_digest, here)

        rows.append(timed("a plan found again", f"{name}: look-up", find, budget=HIT_BUDGET_US))
        rows.append(timed("host time of a hit", f"{name}: forward", lambda s=spec, i=inputs: forward(s, i)))
        rows.append(
            timed(
                "host time of a hit",
                f"{name}: backward",
                lambda s=spec, i=inputs, r=result, d=dout: backward(s, i, r, d),
            )
        )
    return sorted(rows, key=lambda one: one.group)


def beside_sdpa(device: torch.device) -> list[Row]:
    """The same kernel through PyTorch: what its wrapper costs beside ours."""
    spec, inputs = dense(device)
    kernel = sdpa.KERNELS["sdpa.cudnn"]
    seen = pairs(lambda: forward(spec, inputs), lambda: kernel.forward(spec, inputs), count=30)
    torch.cuda.synchronize()
    return [row("beside sdpa.cudnn", "forward, ours", "µs", seen.first, ratio=seen.ratio())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else without_a_gpu()
    rows = [*(builds(device) if gpu else []), *hits(device), *(beside_sdpa(device) if gpu else [])]
    where = torch.cuda.get_device_name(device) if gpu else "no GPU: attnsel's own part, nothing carried out"
    show(f"cuDNN plans · {where} · {PLANS.info()}", rows)
    name = where.replace(" ", "-") if gpu else "cpu"
    write(
        options.json or ROOT / "benchmarks" / "results" / f"cudnn-plans-{name}.json",
        record("cudnn-plans", rows, device=where),
    )


if __name__ == "__main__":
    main()
