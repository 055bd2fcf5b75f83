"""What watching costs: steps of small models on the CPU, with and without `attnsel.watch()`.

    python benchmarks/watch_overhead.py                                  # about two minutes
    python benchmarks/watch_overhead.py --quick                          # seconds; noisy
    python benchmarks/watch_overhead.py --json benchmarks/results/watch-overhead-cpu.json

Every pair times both ways one after the other in one process, in changing order, in CPU time of one thread,
so that other work on the machine counts for neither; the figure is the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import Pairs, Row, quiet, record, row, show, steps, write
from torch import Tensor, nn
from torch.nn import functional as F

import attnsel

WITHIN = 0.05  # of a step
WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 3, 128
BATCH = 4


class Block(nn.Module):
    """A transformer's block, whose attention is F.sdpa, or written out by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        hidden = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        self.register_buffer("hidden", hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            mixed = scores.masked_fill(self.hidden[:s, :s], -torch.inf).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, WIDTH))
        return x + self.down(F.gelu(self.up(self.after(x))))


def model(by_hand: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(64, WIDTH), *(Block(by_hand) for _ in range(LAYERS)), nn.Linear(WIDTH, 64)
    )


def training(by_hand: bool) -> Callable[[], None]:
    made = model(by_hand)
    optimizer = torch.optim.AdamW(made.parameters(), 1e-4)
    tokens = torch.randint(64, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        loss = F.cross_entropy(made(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def inference(by_hand: bool) -> Callable[[], None]:
    made = model(by_hand).eval()
    tokens = torch.randint(64, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        with torch.inference_mode():
            made(tokens)

    return step


def cpu_time(step: Callable[[], None]) -> float:
    """Microseconds of CPU time for a step."""
    start = time.process_time_ns()
    step()
    step()
    return (time.process_time_ns() - start) / 2e3


def compare(step: Callable[[], None], count: int) -> tuple[Pairs, int]:
    """``step`` watched and not, timed side by side inside one session's life, and how many calls it saw.

    The session has read its first calls, as a run of more than a minute has.
    """
    with attnsel.watch() as session:
        for _ in range(60):
            step()
        hooks = session._hooks
        assert hooks is not None
        seen = Pairs([], [])
        with quiet():
            for i in range(count):
                for which in (0, 1) if i % 2 == 0 else (1, 0):
                    if which:
                        with hooks.paused():
                            seen[1].append(cpu_time(step))
                    else:
                        seen[0].append(cpu_time(step))
    return seen, sum(site.calls for site in session.sites)


def section(name: str, made: Callable[[], Callable[[], None]], count: int) -> list[Row]:
    timed, calls = compare(made(), count)
    assert calls >= 60 * LAYERS, f"{name}: {calls} calls seen"
    more = [a / b - 1 for a, b in zip(timed.first, timed.second, strict=True)]
    base = sorted(timed.second)[len(timed.second) // 2]
    told = row(
        "watched", name, "of a step", more, budget=WITHIN, baseline=base, note=f"{base / 1e3:.1f} ms a step"
    )
    return [told]


def beginning(count: int) -> list[Row]:
    """What the first steps cost, in which operators are read: once for a run."""
    more = []
    for _ in range(count):
        step = training(by_hand=False)
        for _ in range(3):
            step()
        times = []
        for watched in (False, True):
            start = time.process_time()
            if watched:
                with attnsel.watch():
                    for _ in range(30):
                        step()
            else:
                for _ in range(30):
                    step()
            times.append(time.process_time() - start)
        more.append((times[1] - times[0]) * 1e3)
    return [row("once for a run", "30 training steps, watched from the first − not watched", "ms", more)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few samples: whether it runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    count = 10 if options.quick else 100
    torch.set_num_threads(1)
    cases: dict[str, Callable[[], Callable[[], None]]] = {
        f"{what}, {how}": (lambda make=make, by_hand=by_hand: make(by_hand))
        for what, make in (("training", training), ("inference", inference))
        for how, by_hand in (("F.sdpa", False), ("by hand", True))
    }
    sections = [
        (name, lambda name=name, made=made: section(name, made, count * (3 if "inference" in name else 1)))
        for name, made in cases.items()
    ]
    rows = list(steps([*sections, ("the beginning", lambda: beginning(3 if options.quick else 10))]))
    show("What watching costs", rows)
    if options.json is not None:
        write(options.json, record("watch-overhead", rows, quick=options.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
