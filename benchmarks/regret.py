"""What attnsel's order costs where somebody has measured: the time of its pick over the fastest.

    python benchmarks/regret.py                  # by architecture and source; exit 4 over a bound
    python benchmarks/regret.py --worst 20       # the measurements that it costs most
    python benchmarks/regret.py --write          # docs/reference/figures.md and its plot

Every measurement of rules/data/figures.csv that holds two candidates which stand for such a call is asked as
the question that it answers: its card, its cuDNN, its shape; a backward is asked as training. The pick is the
first of the measured kernels in attnsel's order.

"Whole" is what training costs where a source has both of its directions: the forward and the backward
together, since both run and take the same kernel. The bound of a source is held by it.

"Left out": each publisher in turn is taken away. A rule of rules/data/orders.csv that no other publisher's
measurement supports is dropped, and what was left out is ordered by the rules that stay. So it says what the
order is worth for those who have not published yet; "base" is the order of architectures, without any rule.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from attnsel import AttentionParams, Environment, select  # noqa: E402
from attnsel.environment.gpus import ARCHITECTURES  # noqa: E402
from attnsel.errors import InvalidInput  # noqa: E402
from attnsel.pages.figures import claims_of  # noqa: E402
from attnsel.rules import load_all  # noqa: E402
from attnsel.rules.figures import Measurement, measured, size  # noqa: E402
from attnsel.rules.orders import LEADS  # noqa: E402

MISSED = 4
MEAN, WORST, OF_A_SOURCE = 1.02, 1.42, 1.04
FEW = 4  # measurements of a source below which its mean says nothing
CALL = ("source", "gpu", "dtype", "mask", "window", "batch", "heads", "kv_heads", "seqlen_q", "seqlen_kv")
CALL += ("head_dim_qk", "head_dim_v", "other", "cudnn")
INSTALLED = {"flash_attn": "2.8.3", "flash_attn_3": "3.0.0b1", "flash_attn_4": "4.0.0b36"}
PAGE = ROOT / "docs" / "reference" / "figures.md"
PLOT = ROOT / "docs" / "images" / "figures.svg"


class Pick(NamedTuple):
    """What attnsel would run of the kernels that were measured and stand: ``standing``, best first."""

    one: Measurement
    standing: tuple[str, ...]
    forward: Measurement | None = None  # of a backward, that of the same call by the same source

    @property
    def fastest(self) -> str:
        return min(self.standing, key=self.one.times.__getitem__)

    @property
    def ratio(self) -> float:
        return self.one.times[self.standing[0]] / self.one.times[self.fastest]

    @property
    def whole(self) -> float:
        """The ratio of training, forward and backward; that of the measurement where it is not training, or
        no forward of all its kernels was published, or not as times, which alone can be added."""
        forward, times = self.forward.times if self.forward else {}, self.one.times
        if not set(self.standing) <= set(forward) or self.one.shape["unit"] not in ("ms", "us"):
            return self.ratio
        both = {name: times[name] + forward[name] for name in self.standing}
        return both[self.standing[0]] / min(both.values())

    @property
    def publisher(self) -> str:
        """Who measured: a project, or an issue of one; NVIDIA's files are one."""
        title = self.one.source["title"]
        return title.split(" benchmark/")[0].split(", chart")[0].split("@")[0]

    @property
    def title(self) -> str:
        name: str = self.one.shape["source"]
        return "fa3-paper" if name.startswith("fa3-paper") else name


def question(one: Measurement) -> AttentionParams:
    """The call that was measured; what the source does not say is as in most of the others."""
    row = one.shape
    heads, length = size(row, "heads") or 16, size(row, "seqlen_q") or 4096
    asked: dict[str, Any] = {
        "batch_size": size(row, "batch") or 2,
        "num_heads": heads,
        "num_gqa_groups": size(row, "kv_heads") or heads,
        "max_seqlen_q": length,
        "max_seqlen_kv": size(row, "seqlen_kv") or length,
        "head_dim_qk": size(row, "head_dim_qk") or 128,
        "head_dim_v": size(row, "head_dim_v") or 128,
        "attn_mask_type": row["mask"] or "no_mask",
        "is_training": row["direction"] != "fwd",
        "deterministic": bool(row["deterministic"]),
        "dtype": row["dtype"] if row["dtype"] in ("bf16", "fp16") else "bf16",
    }
    if row["window"]:
        asked["window_size"] = (int(row["window"]) if row["window"].isdigit() else 1024, 0)
    if "fp8" in row["dtype"]:
        kind = "mxfp8" if row["dtype"] == "mxfp8" else "delayed"
        asked |= {"fp8": True, "fp8_meta": {"recipe": {"kind": kind, "fp8_dpa": True}}}
    if row["other"] == "dropout":
        asked["attention_dropout"] = 0.1
    if "bias" in row["other"]:
        asked["core_attention_bias_type"] = "post_scale_bias"
    return AttentionParams(**asked)


@lru_cache(maxsize=256)
def machine(gpu: str, cudnn: str) -> Environment:
    return Environment.describe(gpu, **INSTALLED, **({"cudnn": cudnn} if cudnn else {}))


def call(one: Measurement) -> tuple[str, ...]:
    """What is the same of a forward and of the backward that belongs to it."""
    return tuple(one.shape[column] for column in CALL)


def pick(one: Measurement, forward: Measurement | None) -> Pick | None:
    """None where fewer than two of the measured kernels stand for such a call."""
    row = one.shape
    cudnn = next((other["cudnn"] for other in one.rows if other["cudnn"]), "")
    try:
        selection = select(question(one), machine(row["gpu"] or f"sm{row['arch']}", cudnn))
    except InvalidInput:
        return None
    standing = tuple(c.name for c in selection.ranked if c.name in one.times)
    return Pick(one, standing, forward) if len(standing) > 1 else None


def picks_of(every: list[Measurement]) -> list[Pick]:
    forwards = {call(one): one for one in every if one.shape["direction"] == "fwd"}
    asked = (pick(o, forwards.get(call(o)) if o.shape["direction"] == "bwd" else None) for o in every)
    return [found for found in asked if found is not None]


def under(found: Pick, rows: tuple[Any, ...]) -> Pick:
    """The same with other rules: of what stands, in the order that these give."""
    beaten: dict[str, int] = dict.fromkeys(found.standing, 0)
    for _, claim in claims_of(found.one, rows):
        if claim.above in beaten and claim.below in beaten:
            beaten[claim.below] += 1
    return found._replace(standing=tuple(sorted(found.standing, key=beaten.__getitem__)))


def mean(ratios: Iterable[float]) -> float:
    """The geometric one."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def cost(picks: Iterable[Pick]) -> float:
    return mean(found.ratio for found in picks)


def whole_cost(picks: Iterable[Pick]) -> float:
    return mean(found.whole for found in picks)


def left_out(picks: list[Pick]) -> list[Pick]:
    """Every pick by the rules that another publisher's measurements support."""
    support: dict[str, set[str]] = defaultdict(set)
    for found in picks:
        for code, claim in claims_of(found.one):
            if claim.ratio > 1:
                support[code].add(found.publisher)
    return [under(f, tuple(r for r in LEADS if support[r.code] - {f.publisher})) for f in picks]


def grouped(picks: Iterable[Pick], by: Callable[[Pick], str]) -> dict[str, list[Pick]]:
    groups: dict[str, list[Pick]] = defaultdict(list)
    for found in picks:
        groups[by(found)].append(found)
    return dict(sorted(groups.items()))


def table(head: str, picks: list[Pick], base: list[Pick], out: list[Pick], by: Callable[[Pick], str]) -> str:
    columns = ("measurements", "base", "left out", "now", "worst now", "whole")
    lines = [f"| {head} | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    sides = grouped(base, by), grouped(out, by)
    for name, among in grouped(picks, by).items():
        means = (*map(cost, (sides[0][name], sides[1][name], among)), max(f.ratio for f in among))
        means += (whole_cost(among),)
        lines.append(f"| {name} | {len(among)} | {' | '.join(f'{value:.3f}' for value in means)} |")
    return "\n".join(lines)


def plot(picks: list[Pick], base: list[Pick]) -> str:
    """A line for each source: a ring for the order of architectures, a dot for the order now, on a scale of
    what it costs."""
    now, before = grouped(picks, lambda f: f.title), grouped(base, lambda f: f.title)
    names = sorted(now, key=lambda name: -cost(before[name]))
    left, step, width, most = 250, 18, 760, 1.7

    def x(value: float) -> float:
        return left + (min(value, most) - 1) / (most - 1) * (width - left - 30)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{step * len(names) + 60}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="16">time of the pick over the fastest: ring, by architecture; dot, now</text>',
    ]
    for value in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6):
        out.append(
            f'<line x1="{x(value)}" x2="{x(value)}" y1="40" y2="{step * len(names) + 44}" stroke="#ddd"/>'
        )
        out.append(f'<text x="{x(value)}" y="34" text-anchor="middle" fill="#666">{value}</text>')
    for place, name in enumerate(names):
        y = 52 + place * step
        old, new = cost(before[name]), cost(now[name])
        out.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{name}</text>')
        out.append(f'<line x1="{x(new)}" x2="{x(old)}" y1="{y}" y2="{y}" stroke="#bbb"/>')
        out.append(f'<circle cx="{x(old)}" cy="{y}" r="4" fill="white" stroke="#c33"/>')
        out.append(f'<circle cx="{x(new)}" cy="{y}" r="4" fill="#26a"/>')
    return "\n".join([*out, "</svg>", ""])


def page(picks: list[Pick], base: list[Pick], out: list[Pick]) -> str:
    one_only = {
        code: among
        for code, among in (
            (row.code, {f.publisher for f in picks for c, _ in claims_of(f.one) if c == row.code})
            for row in LEADS
        )
        if len(among) == 1
    }
    alone = "; ".join(f"{code} on {next(iter(who))}" for code, who in one_only.items())
    worst = sorted(picks, key=lambda f: -f.ratio)[:10]
    lines = [f"| {f.one.name} | {f.title} | {f.standing[0]} | {f.fastest} | {f.ratio:.2f} |" for f in worst]
    return f"""# What the order rests on

<!-- made by benchmarks/regret.py --write -->

Which of two kernels goes first rests on published times: rules/data/figures.csv has them with their
sources, and `attnsel rule PREF031` shows those of a rule. This page says what the order costs where somebody
has measured: the time of attnsel's pick over that of the fastest, as a geometric mean. Of {len(picks)}
measurements that hold two of attnsel's kernels it is {cost(picks):.3f}, {max(f.ratio for f in picks):.2f} at
worst. By the order of architectures alone it would be {cost(base):.3f}, {max(f.ratio for f in base):.2f}.

"Left out" is what a source says of an order that its publisher had no part in: a rule that nobody else's
measurements support is dropped there. On one publisher rest: {alone}. Where the column is
as high as "base", nobody else has measured such calls yet.

![What the order costs, by source](../images/figures.svg)

## By architecture

{table("architecture", picks, base, out, lambda f: f"sm{f.one.shape['arch']}")}

## By source

{table("source", picks, base, out, lambda f: f.title)}

## Where it costs most

| measurement | source | attnsel's pick | the fastest | ratio |
|---|---|---|---|--:|
{chr(10).join(lines)}

A backward is asked as training, in which the forward runs too and takes the same kernel: "whole" counts both
where a source has both. On an RTX PRO 6000 with a window FlashAttention 4 has the backward in 0.90 to 0.91
of cuDNN's time and the forward in 2.5 to 35 times of it, so cuDNN is first. p356 is one measurement that says
the opposite of another: for the same heads and lengths on an H100 the FlashAttention-3 paper has 646 TFLOP/s
for FlashAttention 3 and 600 for cuDNN (p839), and tritonbench#141 has 466 and 582. No order can follow both.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--worst", type=int, default=8, metavar="N", help="measurements that are shown")
    parser.add_argument("--write", action="store_true", help=f"{PAGE.name} and its plot")
    given = parser.parse_args()
    load_all()
    picks = picks_of([one for arch in ARCHITECTURES for one in measured(arch) if len(one.rows) > 1])
    base, out = [under(found, ()) for found in picks], left_out(picks)
    if given.write:
        PAGE.write_text(page(picks, base, out), encoding="utf-8")
        PLOT.write_text(plot(picks, base), encoding="utf-8")
        return 0
    print(f"{len(picks)} measurements: {cost(picks):.4f}, worst {max(f.ratio for f in picks):.2f}", end="; ")
    print(f"left out {cost(out):.4f}, worst {max(f.ratio for f in out):.2f}; base {cost(base):.4f}")
    print(table("architecture", picks, base, out, lambda f: f"sm{f.one.shape['arch']}"))
    print(table("source", picks, base, out, lambda f: f.title))
    for found in sorted(picks, key=lambda f: -f.ratio)[: given.worst]:
        kernels = f"{found.standing[0]}, fastest {found.fastest}"
        print(f"{found.ratio:.3f}  {found.one.name}  {kernels}  {found.title}")
    sources = {name: among for name, among in grouped(picks, lambda f: f.title).items() if len(among) >= FEW}
    over = [name for name, among in sources.items() if whole_cost(among) > OF_A_SOURCE]
    print(f"over {OF_A_SOURCE}: {', '.join(over) or 'no source'} (of {FEW} measurements or more)")
    worst = max(found.ratio for found in picks)
    return MISSED if over or cost(picks) > MEAN or worst > WORST else 0


if __name__ == "__main__":
    sys.exit(main())
