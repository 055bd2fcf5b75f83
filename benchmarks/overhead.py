"""What choosing costs: the budgets of the design, measured.

    python benchmarks/overhead.py                                  # about two minutes
    python benchmarks/overhead.py --quick                          # seconds; noisy
    python benchmarks/overhead.py --json benchmarks/results/overhead-cpu.json

A row is within its budget or it is not; the exit code is 0 either way. README.md beside this file says
how to read the figures.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from measure import ROOT, Row, pairs, quiet, record, row, show, steps, write

from attnsel import AttentionParams, Environment
from attnsel.decision import NO_EVIDENCE, _select, select
from attnsel.params.options import DelayedScaling
from attnsel.policy import Policy
from attnsel.selection.evaluate import fold

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces itself otherwise
try:
    import torch
except ModuleNotFoundError:
    torch = None

HIT_US = {("bshd", False): 2.0, ("bshd", True): 3.0, ("sbhd", False): 3.0, ("sbhd", True): 3.0}
NEW_LENGTH_US = 25.0
FEATURES_US = 40.0
EXPLANATION_US = 120.0
NEW_ENVIRONMENT_US = 200.0
DECISIONS_PER_S = {"params at hand": 25_000.0}
EXPLAIN_S = 0.30
DOUBLING = 2.1  # S twice as long: 2 is linear, 4 is an S×S tensor

PLAIN_POLICY = Policy()
QUESTION = ["--gpu", "H100", "--cudnn", "9.1.0", "--head-dim-qk", "192", "--head-dim-v", "128"]


class Effort(NamedTuple):
    """How often each thing is measured."""

    pairs: int
    lengths: int
    selections: int
    passes: int
    processes: int
    tokens: int


FULL = Effort(pairs=1500, lengths=3000, selections=1500, passes=15, processes=21, tokens=2048)
QUICK = Effort(pairs=20, lengths=20, selections=20, passes=1, processes=1, tokens=512)


def decide(p: AttentionParams, env: Environment) -> Any:
    """``attnsel.select`` past its memo: the choice, and no more than it takes."""
    return _select.__wrapped__(p, env, PLAIN_POLICY, NO_EVIDENCE)


def explain(p: AttentionParams, env: Environment) -> Any:
    """The choice, and every candidate's verdict with its reasons and adaptations."""
    selection = decide(p, env)
    return selection.candidates and selection


# ---- a call on a cache hit --------------------------------------------------------------------------

B, S, H, D = 1, 4, 2, 8  # tiny: the kernel costs little, so that what is around it shows

TO_KERNEL: dict[str, Callable[[Any], Any]] = {
    "bshd": lambda t: t.transpose(1, 2),
    "sbhd": lambda t: t.permute(1, 2, 0, 3),
}


def by_hand(qkv_format: str, q: Any, k: Any, v: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The aten op and F.scaled_dot_product_attention, with the views a module's output needs."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    sdpa = torch.nn.functional.scaled_dot_product_attention
    scale = D**-0.5
    if qkv_format == "bshd":

        def aten() -> Any:
            out = op(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, True, scale=scale)[0]
            return out.transpose(1, 2).reshape(B, S, H * D)

        def functional() -> Any:
            out = sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale)
            return out.transpose(1, 2).reshape(B, S, H * D)

    else:

        def aten() -> Any:
            q_, k_, v_ = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
            return op(q_, k_, v_, 0.0, True, scale=scale)[0].permute(2, 0, 1, 3).reshape(S, B, H * D)

        def functional() -> Any:
            q_, k_, v_ = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
            return sdpa(q_, k_, v_, is_causal=True, scale=scale).permute(2, 0, 1, 3).reshape(S, B, H * D)

    return aten, functional


def cache_hits(effort: Effort) -> list[Row]:
    """DotProductAttention.forward beside the same kernel called by hand."""
    from attnsel import DotProductAttention

    rows = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for qkv_format, grad in product(("bshd", "sbhd"), (False, True)):
        shape = (B, S, H, D) if qkv_format == "bshd" else (S, B, H, D)
        q, k, v = (torch.randn(shape, requires_grad=grad) for _ in range(3))
        module = DotProductAttention(H, D, qkv_format=qkv_format, backend="sdpa.flash")
        aten, functional = by_hand(qkv_format, q, k, v)
        torch.testing.assert_close(module(q, k, v), aten())

        def forward(module: Any = module, q: Any = q, k: Any = k, v: Any = v) -> Any:
            return module.forward(q, k, v)

        def call(module: Any = module, q: Any = q, k: Any = k, v: Any = v) -> Any:
            return module(q, k, v)

        name = f"{qkv_format}, {'with' if grad else 'no'} grad"
        for what, ours, theirs, budget in (
            (f"{name}: forward − aten op by hand", forward, aten, HIT_US[qkv_format, grad]),
            (f"{name}: module(q, k, v) − aten op by hand", call, aten, None),
            (f"{name}: forward − F.sdpa", forward, functional, None),
        ):
            seen = pairs(ours, theirs, count=effort.pairs)
            baseline = sorted(seen.second)[len(seen.second) // 2]
            rows.append(
                row("a call on a cache hit", what, "µs", seen.differences(), budget=budget, baseline=baseline,
                    ratio=seen.ratio())
            )  # fmt: skip
    torch.set_num_threads(threads)
    return rows


# ---- a question never seen before ------------------------------------------------------------------


def questions() -> dict[str, tuple[AttentionParams, Environment]]:
    h100 = Environment.describe("H100")
    recipe = {"recipe": DelayedScaling(fp8_dpa=True)}
    return {
        "H100, causal training": (AttentionParams(), h100),
        "H100, cuDNN 9.1.0, head_dim 192/128": (
            AttentionParams(head_dim_qk=192, head_dim_v=128),
            Environment.describe("H100", cudnn="9.1.0"),
        ),
        "H100, window (128, 0): SDPA folds a mask": (AttentionParams(window_size=(128, 0)), h100),
        "A100, cuDNN 8.9.7, s 16534": (
            AttentionParams(max_seqlen_q=16534),
            Environment.describe("A100", cudnn="8.9.7"),
        ),
        "H100, FP8 delayed scaling": (AttentionParams(fp8=True, fp8_meta=recipe), h100),
    }


def machines() -> dict[str, Environment]:
    return {
        "A100, cuDNN 8.9.7": Environment.describe("A100", cudnn="8.9.7"),
        "H100, cuDNN 9.1.0": Environment.describe("H100", cudnn="9.1.0"),
        "H100": Environment.describe("H100"),
        "B200": Environment.describe("B200"),
    }


Way = Callable[[AttentionParams, Environment], Any]


def new_lengths(effort: Effort) -> list[Row]:
    """What a server pays that meets a sequence length for the first time."""
    env = Environment.describe("H100")
    lengths = [AttentionParams(max_seqlen_q=s, max_seqlen_kv=s) for s in range(1, effort.lengths + 1)]
    group = f"a new length, {effort.lengths} of them on an H100"
    return [
        row(group, name, "µs", [timed(way, p.derive(), env) for p in lengths], budget=budget)
        for name, way, budget in (
            ("decided", decide, NEW_LENGTH_US),
            ("explained: every candidate, every reason", explain, EXPLANATION_US),
        )
    ]


def features(effort: Effort) -> list[Row]:
    """The features grid, question by question: what a decision costs, and an explanation."""
    grid = [AttentionParams(**changes) for changes in feature_grid()]
    rows = []
    for what, way, budget in (("decided", decide, FEATURES_US), ("explained", explain, EXPLANATION_US)):
        everywhere: list[float] = []
        by_machine = []
        for name, env in machines().items():
            seen = []
            for p in grid:
                way(p, env)
                turns = [timed(way, p.derive(), env) for _ in range(effort.passes)]
                seen.append(sorted(turns)[len(turns) // 2])
            by_machine.append(row(f"the features grid, {what}", name, "µs", seen))
            everywhere += seen
        rows += [
            row(f"the features grid, {what}", "all four machines", "µs", everywhere, budget=budget),
            *by_machine,
        ]
    return rows


def known_and_new(effort: Effort) -> list[Row]:
    """Five questions: in a known environment, and in one whose rules are yet to be folded."""
    asked = questions()
    groups = (
        ("a decision, known environment", decide, effort.selections, None, lambda: None),
        ("an explanation, known environment", explain, effort.selections, EXPLANATION_US, lambda: None),
        ("a decision, new environment", decide, effort.selections // 2, NEW_ENVIRONMENT_US, fold.cache_clear),
    )
    rows = []
    for group, way, count, budget, before in groups:
        samples = ask_in_turn(way, asked, count, before)
        rows += [
            row(group, name, "µs", samples[name], budget=budget, note=f"→ {decide(*asked[name]).backend}")
            for name in asked
        ]
    return rows


def timed(way: Way, p: AttentionParams, env: Environment) -> float:
    """Microseconds of one question. ``p`` should know nothing of itself yet: ``derive()`` makes it so."""
    start = time.perf_counter_ns()
    way(p, env)
    return (time.perf_counter_ns() - start) / 1e3


def ask_in_turn(
    way: Way,
    asked: dict[str, tuple[AttentionParams, Environment]],
    count: int,
    before: Callable[[], Any],
) -> dict[str, list[float]]:
    """Microseconds of each question, one after the other, ``count`` times over."""
    seen: dict[str, list[float]] = {name: [] for name in asked}
    for p, env in asked.values():
        way(p, env)
    with quiet():
        for _ in range(count):
            for name, (p, env) in asked.items():
                before()
                seen[name].append(timed(way, p.derive(), env))
    return seen


# ---- planning ---------------------------------------------------------------------------------------


def shape_grid() -> Iterator[dict[str, Any]]:
    """Plain attention over what people vary first."""
    dtypes, head_dims, lengths = ("bf16", "fp16"), (64, 96, 128, 192, 256), (1024, 4096, 16534)
    masks, groups, modes = ("no_mask", "causal"), (16, 4), (True, False)
    for dtype, d, s, mask, g, training in product(dtypes, head_dims, lengths, masks, groups, modes):
        yield {
            "dtype": dtype,
            "head_dim_qk": d,
            "head_dim_v": d,
            "max_seqlen_q": s,
            "max_seqlen_kv": s,
            "attn_mask_type": mask,
            "window_size": (-1, -1),
            "num_gqa_groups": g,
            "is_training": training,
        }


def feature_grid() -> Iterator[dict[str, Any]]:
    """One feature at a time, as the support matrix has it."""
    features: list[dict[str, Any]] = [
        {},
        {"num_gqa_groups": 4},
        {"attn_mask_type": "padding_causal"},
        {"attn_mask_type": "causal_bottom_right", "bottom_right_diagonal": True},
        {"attn_mask_type": "arbitrary", "window_size": (-1, -1)},
        {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding_causal"},
        {"window_size": (128, 0)},
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": "1hss"},
        {"core_attention_bias_type": "alibi"},
        {"softmax_type": "learnable"},
        {"softcap": 30.0},
        {"attention_dropout": 0.1},
        {"deterministic": True},
        {"return_max_logit": True},
        {"cp_size": 2},
    ]
    for d, s, training, feature in product((64, 128, 256), (2048, 16534), (True, False), features):
        yield {
            "head_dim_qk": d, "head_dim_v": d, "max_seqlen_q": s, "max_seqlen_kv": s, "is_training": training,
            **feature,
        }  # fmt: skip


def planning(effort: Effort) -> list[Row]:
    """Decisions per second through a grid, each with a question made for it."""
    base = AttentionParams()
    environments = list(machines().values())
    ways: dict[str, Callable[[Any], AttentionParams]] = {
        "params by replace, validated": lambda changes: base.replace(**changes),
        "params by derive, unchecked": lambda changes: base.derive(**changes),
        "params at hand": lambda ready: ready,
    }
    rows = []
    for grid, cells in (("shapes", list(shape_grid())), ("features", list(feature_grid()))):
        ready = [base.replace(**changes) for changes in cells]
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(effort.passes):
            for name, make in ways.items():
                rates[name].append(sweep(make, ready if name == "params at hand" else cells, environments))
        count = f"{len(cells) * len(environments)} decisions"
        rows += [
            row("planning on one core", f"{grid}, {name}", "/s", samples, budget=DECISIONS_PER_S.get(name),
                bound="at least", note=count)
            for name, samples in rates.items()
        ]  # fmt: skip
    return rows


def sweep(make: Callable[[Any], AttentionParams], cells: list[Any], environments: list[Environment]) -> float:
    """Decisions per second, none of them remembered from before."""
    _select.cache_clear()
    with quiet():
        start = time.perf_counter()
        for env in environments:
            for cell in cells:
                select(make(cell), env)
        return len(cells) * len(environments) / (time.perf_counter() - start)


# ---- the command ------------------------------------------------------------------------------------

TORCH_STAYS_OUT = """
import sys
from attnsel.cli import main
main(sys.argv[1:])
assert "torch" not in sys.modules
"""


def command(effort: Effort) -> list[Row]:
    """``attnsel explain`` from start to end, and what of that any Python program pays."""
    programs = {
        "attnsel explain --gpu H100 …": ["-m", "attnsel", "explain", *QUESTION],
        "of that: the interpreter": ["-c", "pass"],
        "of that: interpreter, import attnsel": ["-c", "import attnsel"],
        "of that: interpreter, import the command": ["-c", "import attnsel.cli.explain"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    process(["-c", TORCH_STAYS_OUT, "explain", *QUESTION])
    for turn in range(effort.processes + 1):
        for name, arguments in programs.items():
            taken = process(arguments)
            if turn:  # the first round compiles and caches what is imported
                seconds[name].append(taken)
    budgets = [EXPLAIN_S, None, None, None]
    return [
        row("attnsel explain, whole process", name, "s", samples, budget=budget)
        for (name, samples), budget in zip(seconds.items(), budgets, strict=True)
    ]


def process(arguments: list[str]) -> float:
    """Wall seconds of a fresh interpreter. Raises CalledProcessError when it fails."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=True)
    return time.perf_counter() - start


# ---- memory -----------------------------------------------------------------------------------------


def memory(effort: Effort) -> list[Row]:
    """Forward and backward when S doubles; ``sdpa.math`` shows what S×S looks like."""
    rows = []
    short, long = effort.tokens, 2 * effort.tokens
    for backend, budget in (("tiled", DOUBLING), ("sdpa.math", None)):
        for what, meter in (("peak allocated", peak_bytes), ("largest tensor made", largest_tensor)):
            small, large = meter(backend, short), meter(backend, long)
            note = f"{small / 2**20:.1f} → {large / 2**20:.1f} MiB at S {short} → {long}"
            samples = [large / small]
            rows.append(
                row("memory when S doubles", f"{backend}: {what}", "×", samples, budget=budget, note=note)
            )
    return rows


def train_once(backend: str, s: int) -> Callable[[], None]:
    """One forward and backward, [b, s, h, d] = [1, s, 2, 64], causal."""
    from attnsel import attention

    q, k, v = (torch.randn(1, s, 2, 64, requires_grad=True) for _ in range(3))
    return lambda: attention(q, k, v, attn_mask_type="causal", backend=backend).sum().backward()


def peak_bytes(backend: str, s: int) -> int:
    """The most that was allocated at one time, above what was there before."""
    step = train_once(backend, s)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def largest_tensor(backend: str, s: int) -> int:
    """Bytes of the largest storage that an operator's output has."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor):
                    self.bytes = max(self.bytes, t.untyped_storage().nbytes())
            return out

    step = train_once(backend, s)
    with Largest() as seen:
        step()
    return seen.bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few samples: whether it runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    # Settings of the shell it is started from are no part of the questions.
    for name in [name for name in os.environ if name.startswith("ATTNSEL_")]:
        del os.environ[name]
    effort = QUICK if options.quick else FULL
    sections = [
        ("a new length", new_lengths),
        ("the features grid", features),
        ("five questions", known_and_new),
        ("planning", planning),
        ("attnsel explain", command),
    ]
    if torch is not None:
        sections = [("a call on a cache hit", cache_hits), *sections, ("memory", memory)]
    rows = list(steps([(name, lambda section=section: section(effort)) for name, section in sections]))
    show("What choosing costs", rows)
    if torch is None:
        print("torch is not installed: calls and memory were not measured.")
    if options.json is not None:
        write(options.json, record("overhead", rows, quick=options.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
