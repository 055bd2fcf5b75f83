"""Whether the choice that follows measurements is the fastest: random calls, measured and measured again.

    python tests/proof/measured_choice.py                 # 60 calls on this machine, some ten minutes
    python tests/proof/measured_choice.py --count 10 --seed 3 --budget 2

Each call is measured into a file as ``attnsel explain --measure`` does. Then, with the whole file as policy,
the choice is compared with a second measurement: the median of the ratios of its time to that of each other
candidate, round by round, as they take turns. It ends with 4 where fewer than 95 % are within 5 %.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.runtime.measure import Measuring
from attnsel.verdicts.measured import append

NEAR, WANTED = 1.05, 0.95


def drawn(seed: int, count: int) -> list[AttentionParams]:
    """Calls that differ in everything that moves the order of sdpa.flash, sdpa.math and tiled on a CPU."""
    rng, found = random.Random(seed), []
    for number in range(count):
        groups = rng.choice((1, 2, 4, 8))
        queries = rng.choice((16, 64, 96, 128, 200, 256, 384, 512, 768))
        p = AttentionParams(
            dtype=("fp32", "bf16")[number % 2],
            is_training=number % 4 < 2,
            batch_size=rng.choice((1, 2, 3, 4)),
            num_heads=groups * rng.choice((1, 1, 2)),
            num_gqa_groups=groups,
            max_seqlen_q=queries,
            max_seqlen_kv=rng.choice((queries, queries, 2 * queries)),
            head_dim_qk=rng.choice((16, 32, 64, 80, 128)),
            attn_mask_type=rng.choice(("causal", "no_mask")),
            window_size=rng.choice(((-1, -1), (-1, -1), (-1, -1), (32, 0))),
            qkv_layout=rng.choice(("bshd", "bshd", "bhsd", "sbhd")),
        )
        found.append(p)
    return found


def behind(measuring: Measuring, name: str) -> tuple[float, str]:
    """How many times as long as the fastest a candidate takes, and which that is."""
    own = next(one for one in measuring.timed if one.name == name)
    ratios = {
        one.name: statistics.median(a / b for a, b in zip(own.whole, one.whole, strict=False))
        for one in measuring.timed
        if one.samples
    }
    return max((ratio, other) for other, ratio in ratios.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument(
        "--budget", type=float, default=5.0, help="seconds for each of two measurements of a call"
    )
    options = parser.parse_args()
    env, calls = Environment.detect("cpu"), drawn(options.seed, options.count)
    near, ratios, unfollowed = 0, [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.csv")
        for p in calls:
            first = Measuring(select(p, env))
            first.run(options.budget)
            append(file, first.rows())
        policy = Policy(figures=file)
        for number, p in enumerate(calls, 1):
            followed, published = select(p, env, policy=policy), select(p, env)
            again = Measuring(published)
            again.run(options.budget)
            ratio, fastest = behind(again, followed.backend or "")
            unfollowed.append(behind(again, published.backend or "")[0])
            ratios.append(ratio)
            near += ratio <= NEAR
            what = (
                f"{p.dtype} {'training' if p.is_training else 'forward'} s{p.max_seqlen_q}x{p.max_seqlen_kv}"
            )
            print(f"{number:3} {what:28} {followed.backend} {ratio:.3f} times {fastest}", flush=True)
    for name, among in (("measured", ratios), ("published", unfollowed)):
        within = sum(ratio <= NEAR for ratio in among)
        print(f"{name} order: {within} of {len(among)} within {NEAR}, worst {max(among):.2f}")
    return 0 if near >= WANTED * len(calls) else 4


if __name__ == "__main__":
    sys.exit(main())
