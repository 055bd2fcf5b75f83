"""Context parallelism: a model of 8 to 1,024 ranks from data sheets, and measurements where there are GPUs.

    python benchmarks/context_parallel.py                                    # the model; no GPU, no torch
    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --measure     # overlap and scaling, on GPUs
    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --measure --device cpu   # a rehearsal on Gloo

The model is that of ``attnsel explain --cp-size`` (attnsel/context_parallel/plan.py: what it assumes);
its record says ``"simulated": true``, and no figure in it was measured. Efficiency is the time of one rank
for the whole sequence, over ranks times their time.

Measured, forward: the module over all ranks; the same kernel calls with nothing sent; the same messages with
nothing computed. Overlap is the part of the shorter of the last two that the first does not pay for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure import record, write
from rich.console import Console
from rich.table import Table

from attnsel import AttentionParams, Environment
from attnsel.context_parallel import plan as cost
from attnsel.context_parallel.plan import Machine, plan
from attnsel.context_parallel.schedule import StepCall
from attnsel.selection.steps import RankLayout

RESULTS = Path(__file__).resolve().parent / "results"
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
GPUS = ("A100", "H100", "B200")
LENGTHS = (1 << 17, 1 << 20)
CALL: dict[str, Any] = {"batch_size": 1, "num_heads": 64, "num_gqa_groups": 64, "head_dim_qk": 128}


@dataclass(frozen=True)
class Simulated:
    """One exchange on paper; milliseconds, forward and backward. ``total_ms`` None: closed, ``why`` says."""

    gpu: str
    seqlen: int
    ranks: int
    exchange: str
    total_ms: float | None
    computes_ms: float | None = None
    waits_ms: float | None = None
    efficiency: float | None = None
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {**rounded, "simulated": True}


@dataclass(frozen=True)
class Measured:
    """One exchange on this machine; milliseconds, forward."""

    ranks: int
    exchange: str
    seqlen: int
    backend: str
    total_ms: float
    computes_ms: float
    sends_ms: float
    overlap: float
    efficiency: float

    def as_dict(self) -> dict[str, Any]:
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


# ---- on paper ---------------------------------------------------------------------------------------


def simulate() -> list[Simulated]:
    rows: list[Simulated] = []
    for gpu in GPUS:
        env = Environment.describe(gpu=gpu)
        for seqlen in LENGTHS:
            for ranks in RANKS:
                p = AttentionParams(**CALL, max_seqlen_q=seqlen, cp_size=ranks)
                made = plan(p, env)
                assert made.machine is not None
                for e in made.exchanges:
                    if e.estimate is None or e.layout is None:
                        why = ", ".join(reason.code for reason in e.why_not) or str(e.obstacle)
                        rows.append(Simulated(gpu, seqlen, ranks, e.comm, None, why=why))
                        continue
                    name = e.comm if e.comm != "a2a+p2p" else f"a2a {e.layout.a2a} + p2p {e.layout.ring}"
                    t = e.estimate
                    alone = one_rank(p, made.machine._replace(share=t.share))
                    ms = (1e3 * t.total, 1e3 * t.computes, 1e3 * t.waits)
                    rows.append(Simulated(gpu, seqlen, ranks, name, *ms, alone / (ranks * t.total)))
    return rows


def one_rank(p: AttentionParams, machine: Machine) -> float:
    """Seconds of one rank for the whole causal sequence, forward and backward, by the same model."""
    call = StepCall("whole", p.max_seqlen_q, p.max_seqlen_kv, p.max_seqlen_q * (p.max_seqlen_q + 1) // 2)
    layout = RankLayout("a2a", 1, 1)
    return sum(cost.call_time(call, p, layout, machine, phase) for phase in ("forward", "backward"))


# ---- measured ---------------------------------------------------------------------------------------


def measure(device: str, seqlen: int, repeats: int) -> list[Measured]:
    """Every exchange that is open on this machine. Started by torchrun; rank 0 gets the rows."""
    import torch
    import torch.distributed as dist

    import attnsel
    from attnsel.context_parallel import shard_sequence

    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    if device != "cpu":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    heads, d = CALL["num_heads"] if device != "cpu" else 8, CALL["head_dim_qk"]
    torch.manual_seed(0)
    whole = [torch.randn(1, seqlen, heads, d, device=device, dtype=dtype) for _ in range(3)]
    mine = [shard_sequence(t, dist.group.WORLD) for t in whole]

    def timed(call: Callable[[], Any]) -> float:
        """Seconds, the median over repeats of the slowest rank."""
        import statistics
        import time

        seen = []
        for i in range(repeats + 2):
            dist.barrier()
            start = time.perf_counter()
            call()
            if device != "cpu":
                torch.cuda.synchronize()
            spent = torch.tensor([time.perf_counter() - start], device=device)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if i >= 2:
                seen.append(float(spent))
        return statistics.median(seen)

    def module(**more: Any) -> Any:
        return attnsel.DotProductAttention(heads, d, qkv_format="bshd", attn_mask_type="causal", **more)

    rows = []
    with torch.no_grad():
        alone = timed(lambda: module()(*whole))
        for comm in ("p2p", "all_gather", "a2a"):
            core = module(cp_group=dist.group.WORLD, cp_comm_type=comm)
            total = timed(lambda core=core: core(*mine))
            p = core.last_selection.params
            e = plan(p, core.last_selection.environment)[comm]
            share = heads // e.layout.a2a
            calls = e.calls(rank if e.layout.ring > 1 else 0)
            computes = timed(lambda calls=calls, share=share: kernels(calls, whole, share))
            sends = timed(lambda comm=comm: messages(comm, mine))
            hidden = (computes + sends - total) / min(computes, sends)
            ms = (1e3 * total, 1e3 * computes, 1e3 * sends)
            backend = core.last_selection.backend
            rows.append(Measured(size, comm, seqlen, backend, *ms, hidden, alone / (size * total)))
    dist.barrier()
    dist.destroy_process_group()
    return rows if rank == 0 else []


def kernels(calls: Any, whole: list[Any], heads: int) -> None:
    """A rank's kernel calls, with nothing sent or merged."""
    import attnsel

    for call, times in calls.items():
        mask = "no_mask" if call.kind == "full" else "causal"
        q, k, v = (
            source[:, :rows, :heads]
            for source, rows in zip(whole, (call.seqlen_q, call.seqlen_kv, call.seqlen_kv), strict=True)
        )
        for _ in range(times):
            attnsel.attention(q, k, v, attn_mask_type=mask)


def messages(comm: str, mine: list[Any]) -> None:
    """A forward's messages, with nothing computed."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v = mine
    if comm == "a2a":
        for t in (q, k, v, q):
            flat = t.reshape(size, -1).contiguous()
            dist.all_to_all_single(torch.empty_like(flat), flat)
    elif comm == "all_gather":
        for t in (k, v):
            dist.all_gather([torch.empty_like(t) for _ in range(size)], t.contiguous())
    else:
        block = torch.cat([k.reshape(-1), v.reshape(-1)])
        for _ in range(size - 1):
            arrived = torch.empty_like(block)
            ops = [
                dist.P2POp(dist.isend, block, (rank + 1) % size),
                dist.P2POp(dist.irecv, arrived, (rank - 1) % size),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            block = arrived


# ---- printing ---------------------------------------------------------------------------------------


def show(title: str, rows: list[Any]) -> None:
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in asdict(rows[0]):
        table.add_column(column, no_wrap=True)
    for row in rows:
        values = asdict(row).values()
        table.add_row(*("–" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v) for v in values))
    Console(width=150).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="on this machine's GPUs, under torchrun")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seqlen", type=int, default=1 << 16, help="of --measure")
    parser.add_argument("--repeats", type=int, default=20, help="of --measure")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the record goes")
    chosen = parser.parse_args()
    if not chosen.measure:
        rows: list[Any] = list(simulate())
        name, more = "context-parallel-simulated", {"simulated": True, "measurement": False}
    else:
        rows = list(measure(chosen.device, chosen.seqlen, chosen.repeats))
        name, more = f"context-parallel-{chosen.device}", {"measurement": chosen.device != "cpu"}
    if rows:
        show(name, rows)
        write(chosen.out / f"{name}.json", record(name, rows, **more))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
