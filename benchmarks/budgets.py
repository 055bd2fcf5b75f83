"""The budgets of the design, measured: what choosing costs, in a call, in a decision, in a whole process.

    python benchmarks/budgets.py                                # five minutes of CPU
    python benchmarks/budgets.py --quick                        # a minute: whether it runs, not how fast
    python benchmarks/budgets.py --only hit,command             # sections with one of these words
    python benchmarks/budgets.py --json benchmarks/results/budgets.json --gate-log gate.log

Each turn takes what is measured, what it is held against, and a calibration, in CPU time and in changing
order. What counts is the quotient with the calibration beside it, so that a slower core, or other work on it,
falls on both; µs are this quotient times what the calibration takes on an idle core of the machine of record
(``REFERENCE_US``). Of whole processes the calibration is a bare python. Instructions are counted where there
is a valgrind: they repeat.

The exit code is 4 where a budget is missed by more than the row's noise. README.md beside this file says how
to read the figures.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice, product
from pathlib import Path
from typing import Any, NamedTuple

from measure import ROOT, Row, progress, quiet, record, row, show, write

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces itself otherwise

MISSED = 4
REFERENCE_US = (
    10.4  # calibration() on an idle core of the machine of record: AMD EPYC (family 26), Python 3.11
)
KEYS = tuple(range(1000))
TABLE = dict.fromkeys(KEYS)
Calls = Mapping[str, Callable[[], Any]]


def calibration() -> None:
    table = TABLE
    for key in KEYS:
        table[key]


class Effort(NamedTuple):
    """How often each thing is measured."""

    turns: int
    processes: int
    tokens: int
    counted: bool


FULL = Effort(turns=600, processes=15, tokens=2048, counted=True)
QUICK = Effort(turns=8, processes=1, tokens=512, counted=False)


@dataclass(frozen=True)
class Figure(Row):
    """A row with a budget and its ``noise``, in its unit: by so much a run on a busy machine may be over it.

    ``multiple``: of the calibration. ``measured``: the median in µs by the clock; ``lowest`` likewise.
    ``instructions``: of one. ``missing``: why it was not measured here, or what holds it instead.
    """

    noise: float = 0.0
    multiple: float | None = None
    measured: float | None = None
    lowest: float | None = None
    instructions: int | None = None
    missing: str = ""

    @property
    def within(self) -> bool | None:
        if self.missing or self.budget == 0.0:  # nothing at all: never more than the noise
            return None if self.missing else not self.missed
        return super().within

    @property
    def missed(self) -> bool:
        """Whether the budget is missed by more than the noise."""
        if self.budget is None or self.missing:
            return False
        over = self.budget - self.median if self.bound == "at least" else self.median - self.budget
        return over > self.noise


def unmeasured(group: str, what: str, unit: str, budget: float | None, why: str, **more: Any) -> Figure:
    return Figure(group, what, unit, 0.0, 0.0, 0.0, 0, budget=budget, missing=why, note=why, **more)


# ---- timing -----------------------------------------------------------------------------------------


def in_turn(calls: Sequence[Callable[[], Any]], turns: int, each: int) -> list[list[float]]:
    """Microseconds of CPU per call, of ``each`` calls at a time, in changing order."""
    seen: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(each):
            call()
    with quiet():
        for turn in range(turns):
            for place in range(len(calls)):
                which = (turn + place) % len(calls)
                call = calls[which]
                start = time.thread_time_ns()
                for _ in range(each):
                    call()
                seen[which].append((time.thread_time_ns() - start) / each / 1e3)
    return seen


def timed(group: str, what: str, call: Callable[[], Any], turns: int, each: int = 10, **more: Any) -> Figure:
    """A row in µs. With ``bound`` "at least" it is a rate, per second."""
    taken, beside = in_turn((call, calibration), turns, each)
    samples = [REFERENCE_US * a / b for a, b in zip(taken, beside, strict=True)]
    unit = "µs"
    if more.get("bound") == "at least":
        samples, unit = [1e6 / sample for sample in samples], "/s"
    return figure(group, what, unit, samples, taken, **more)


def figure(
    group: str, what: str, unit: str, samples: Sequence[float], taken: Sequence[float], **more: Any
) -> Figure:
    made = row(group, what, unit, samples)
    multiple = 1e6 / made.median / REFERENCE_US if unit == "/s" else made.median / REFERENCE_US
    kept = {
        **made.__dict__,
        "multiple": multiple,
        "lowest": min(taken),
        "measured": row("", "", "", taken).median,
    }
    return Figure(**{**kept, **more})


# ---- a call on a cache hit --------------------------------------------------------------------------

B, S, H, D = 1, 4, 2, 8  # tiny: the kernel costs little, so that what is around it shows
PLAIN_US, EXTRAS_US = 2.5, 4.0
HIT_NOISE_US, COMPILED_NOISE_US = 0.5, 1.0  # in the second guards are checked on both sides


class Hit(NamedTuple):
    """A call, and the same op by hand, with the views that its result needs."""

    ours: Callable[[], Any]
    by_hand: Callable[[], Any]
    budget: float | None
    note: str = ""


def hits(compiled: bool = False) -> dict[str, Hit]:
    """The calls in eager mode, or the one that is compiled, for which PyTorch loads its compiler."""
    import torch

    from attnsel import DotProductAttention, attention, scaled_dot_product_attention

    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    scale = D**-0.5

    def aten(q: Any, k: Any, v: Any, causal: bool = True, bias: Any = None) -> Any:
        return op(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)[0]

    def bshd(q: Any, k: Any, v: Any, *more: Any) -> Any:
        return aten(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *more).transpose(1, 2)

    def module_bshd(q: Any, k: Any, v: Any, *more: Any) -> Any:
        return bshd(q, k, v, *more).reshape(B, S, H * D)

    def module_sbhd(q: Any, k: Any, v: Any) -> Any:
        out = aten(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3))
        return out.permute(2, 0, 1, 3).reshape(S, B, H * D)

    def tensors(*shape: int, grad: bool = False) -> list[Any]:
        return [torch.randn(shape, requires_grad=grad) for _ in range(3)]

    qkv, heads_first, by_rows = tensors(B, S, H, D), tensors(B, H, S, D), tensors(S, B, H, D)
    trained, trained_rows = tensors(B, S, H, D, grad=True), tensors(S, B, H, D, grad=True)
    bias = torch.randn(1, H, S, S)
    biased: dict[str, Any] = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    unmasked = {"attn_mask_type": "no_mask", **biased}
    hidden = torch.ones(1, 1, S, S, dtype=torch.bool).triu_(1)
    masked: dict[str, Any] = {"attn_mask_type": "arbitrary", "attention_mask": hidden}
    visible = {**masked, "attention_mask": hidden & False}
    module = DotProductAttention(H, D, qkv_format="bshd", backend="sdpa.flash")
    rows_module = DotProductAttention(H, D, qkv_format="sbhd", backend="sdpa.flash")
    chosen: dict[str, Any] = {"backend": "sdpa.flash", "softmax_scale": scale}
    if compiled:
        graph: dict[str, Any] = {"backend": "eager", "dynamic": False}

        def called(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, attn_mask_type="causal", backend="sdpa.flash", softmax_scale=scale)

        ours = torch.compile(called, **graph)
        by_hand, note = torch.compile(bshd, **graph), "the same operators in the graph"
        return {"attention under torch.compile": Hit(partial(ours, *qkv), partial(by_hand, *qkv), 0.0, note)}
    return {
        "attention": Hit(
            partial(attention, *qkv, attn_mask_type="causal", **chosen), partial(bshd, *qkv), PLAIN_US
        ),
        "attention, with a bias": Hit(
            partial(attention, *qkv, **biased, **chosen), partial(bshd, *qkv, False, bias), EXTRAS_US
        ),
        "attention, with a mask on the CPU": Hit(
            partial(attention, *qkv, **masked, **chosen),
            lambda: bshd(*qkv, False, torch.zeros(1, 1, S, S).masked_fill_(hidden, -torch.inf)),
            EXTRAS_US,
            "added to the scores by hand as well",
        ),
        "attention, with a mask on the CPU that hides nothing": Hit(
            partial(attention, *qkv, **visible, **chosen), partial(bshd, *qkv, False), EXTRAS_US
        ),
        "forward": Hit(partial(module.forward, *qkv), partial(module_bshd, *qkv), PLAIN_US),
        "forward, with a bias": Hit(
            partial(module.forward, *qkv, **unmasked), partial(module_bshd, *qkv, False, bias), EXTRAS_US
        ),
        "forward, with grad": Hit(
            partial(module.forward, *trained), partial(module_bshd, *trained), PLAIN_US
        ),
        "forward, sbhd": Hit(
            partial(rows_module.forward, *by_rows), partial(module_sbhd, *by_rows), PLAIN_US
        ),
        "forward, sbhd, with grad": Hit(
            partial(rows_module.forward, *trained_rows), partial(module_sbhd, *trained_rows), PLAIN_US
        ),
        "Module.__call__ around forward": Hit(partial(module, *qkv), partial(module.forward, *qkv), None),
        "F.sdpa's place": Hit(
            partial(scaled_dot_product_attention, *heads_first, is_causal=True, scale=scale),
            partial(aten, *heads_first),
            PLAIN_US,
        ),
        "F.sdpa's place, with a mask": Hit(
            partial(scaled_dot_product_attention, *heads_first, attn_mask=bias, scale=scale),
            partial(aten, *heads_first, causal=False, bias=bias),
            None,
            "on a CPU its contents are read at each call",
        ),
    }  # fmt: skip


def hit_rows(effort: Effort) -> list[Figure]:
    """What our calls take more than the op by hand."""
    group = "a hit, more than the op by hand"
    if importlib.util.find_spec("torch") is None:
        return [
            unmeasured(group, "attention, forward, F.sdpa's place", "µs", PLAIN_US, "torch is not installed")
        ]
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = []
    of_each = (part for compiled in (False, True) for part in hits(compiled).items())
    for what, (ours, by_hand, budget, note) in of_each:
        torch.testing.assert_close(ours(), by_hand())
        for _ in range(60):
            ours(), by_hand(), calibration()
        first, second, beside = in_turn((ours, by_hand, calibration), effort.turns, 20)
        more = [a - b for a, b in zip(first, second, strict=True)]
        samples = [REFERENCE_US * a / b for a, b in zip(more, beside, strict=True)]
        baseline, ratio = row("", "", "", second).median, row("", "", "", first).median
        told = {"budget": budget, "noise": HIT_NOISE_US if budget else COMPILED_NOISE_US, "note": note}
        told |= {"baseline": baseline, "ratio": ratio / baseline}
        made.append(figure(group, what, "µs", samples, more, **told))
    torch.set_num_threads(threads)
    return made


# ---- a question never seen before -------------------------------------------------------------------

NEW_LENGTH_US, FEATURES_US, ENVIRONMENT_US = 25.0, 40.0, 200.0
EXPLANATION_US, WAYS_OUT_US, PER_SECOND = 120.0, 10_000.0, 25_000.0
NOISE, WAYS_OUT_NOISE = 0.15, 0.25  # of the budget: a busy core slows down decisions more than look-ups


class Asking:
    """The questions, and ways to ask: ``select`` past its memo, up to the choice or to every reason."""

    def __init__(self) -> None:
        from attnsel import AttentionParams, Environment
        from attnsel.decision import NO_EVIDENCE, _select, select
        from attnsel.params.options import DelayedScaling
        from attnsel.policy import Policy

        self.params, self.describe, self.select = AttentionParams, Environment.describe, select
        self.more, self.unlimited = (Policy(), NO_EVIDENCE), _select.__wrapped__
        self.forget = _select.cache_clear
        self.measured = self.more
        self.h100 = self.describe("H100")
        #: As a machine of that kind finds itself: nothing is assumed.
        self.found = self.h100.model_copy(update={"assumed": (), "detected": True})
        self.machines = [
            self.describe("A100", cudnn="8.9.7"),
            self.describe("H100", cudnn="9.1.0"),
            self.h100,
            self.describe("B200"),
        ]
        recipe = {"recipe": DelayedScaling(fp8_dpa=True)}
        self.questions = [
            (self.params(), self.h100),
            (self.params(head_dim_qk=192, head_dim_v=128), self.machines[1]),
            (self.params(window_size=(128, 0)), self.h100),
            (self.params(max_seqlen_q=16534), self.machines[0]),
            (self.params(fp8=True, fp8_meta=recipe), self.h100),
        ]
        #: Of each, kernels cannot run it that something could change.
        self.refused = [
            (self.params(head_dim_qk=192, head_dim_v=128), self.machines[1]),
            (self.params(), self.describe("T4")),
            (self.params(max_seqlen_q=16534), self.machines[0]),
            (self.params(window_size=(128, 0), softcap=30.0), self.describe("B200")),
            (
                self.params(qkv_layout="thd_thd_thd", attn_mask_type="padding_causal"),
                self.describe("RTX 4090"),
            ),
        ]

    def decide(self, p: Any, env: Any) -> Any:
        """The choice, and no more than it takes."""
        return self.unlimited(p, env, *self.more)

    def read_measurements(self, folder: str) -> None:
        """Write a file of measurements that speaks for the default question at every length, and read it."""
        from attnsel import Policy
        from attnsel.decision import NO_EVIDENCE
        from attnsel.verdicts.measured import append, cells_of

        p = self.params()
        told = {"arch": "90", "gpu": "H100", "unit": "us", "direction": "fwd+bwd" if p.is_training else "fwd"}
        for length in (2**n for n in range(8, 15)):
            cells = {**cells_of(p), **told, "seqlen_q": str(length), "seqlen_kv": str(length)}
            rows = [{**cells, "kernel": name, "value": value} for name, value in MEASURED]
            append(Path(folder) / "figures.csv", rows)
        self.measured = (Policy(figures=os.path.join(folder, "figures.csv")), NO_EVIDENCE)
        chosen = self.decide_measured(p.replace(max_seqlen_q=300, max_seqlen_kv=300), self.found).chosen
        assert chosen is not None
        assert chosen.name == MEASURED[0][0], "the file says nothing of these questions"

    def decide_measured(self, p: Any, env: Any) -> Any:
        return self.unlimited(p, env, *self.measured)

    def explain(self, p: Any, env: Any) -> Any:
        """The choice, and every candidate's verdict with its reasons and adaptations."""
        return self.decide(p, env).candidates

    def ways_out(self, p: Any, env: Any) -> Any:
        return self.decide(p, env).unlocks

    def lengths(self, pairs: Sequence[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """One after the other, each time with a length that was not asked before."""
        made = [(p.replace(max_seqlen_q=256, max_seqlen_kv=256), env) for p, env in pairs]
        for s in count(300):
            for p, env in made:
                yield p.derive(max_seqlen_q=s, max_seqlen_kv=s), env

    def environments(self, found: bool) -> Iterator[tuple[Any, Any]]:
        """Machines that were not asked about before, each with the next of the questions."""
        gpus = (
            "H100",
            "A100",
            "B200",
            "L40S",
            "RTX 4090",
            "T4",
            "H200",
            "A10G",
            "RTX 5090",
            "L4",
            "V100",
            "RTX 3090",
        )
        minors = [f"9.{minor}.{patch}" for minor in range(1, 15) for patch in (0, 1)]
        places = product(("2.9.1", "2.10.0", "2.8.0", "2.7.1"), minors, gpus)
        for n, (torch, cudnn, gpu) in enumerate(places):
            env = self.describe(gpu, torch=torch, cudnn=cudnn)
            if found:
                env = env.model_copy(update={"assumed": (), "detected": True})
            yield self.questions[n % len(self.questions)][0].derive(), env


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
    for d, training, feature in product((64, 128, 256), (True, False), features):
        yield {"head_dim_qk": d, "head_dim_v": d, "is_training": training, **feature}


def asked(
    way: Callable[[Any, Any], Any], questions: Iterator[tuple[Any, Any]], ready: int
) -> Callable[[], Any]:
    """A call that asks the next question; ``ready`` of them are made now, as making them is not measured."""
    made = iter([next(questions) for _ in range(ready)])
    return lambda: way(*next(made))


DESCRIBED = "a new length, a described machine, versions assumed"
FOUND = "a new length, a machine that was found"
WITH_FILE = "a new length, a machine that was found, with a file of measurements"
MEASURED = (("sdpa.flash", "100"), ("cudnn", "300"))  # µs, made up: the opposite of the published order
FEATURES = "a new length, over all features on four machines, the median"
PLANNED = "per second, parameters at hand, over all features, remembered"
EXPLAINED = "a new length: every candidate, every reason"
EXPLAINED_FEATURES = "over all features on four machines, the median"
WAYS_OUT = "all of them, the mean of five questions that kernels refuse"


def decision_calls(asking: Asking, ready: int, only: Sequence[str] = ()) -> Calls:
    """What is asked of known machines: one call, one question, ``ready`` times."""
    grid = [(asking.params(**changes), env) for env in asking.machines for changes in feature_grid()]
    described, found = [(asking.params(), asking.h100)], [(asking.params(), asking.found)]

    def of(way: Callable[[Any, Any], Any], pairs: Sequence[tuple[Any, Any]]) -> Callable[[], Any]:
        # Warm: modules are loaded and rules folded by a kind's first question, and split by its second.
        lengths = asking.lengths(pairs)
        for p, env in (*pairs, *islice(lengths, len(pairs))):
            way(p, env)
        return asked(way, lengths, ready)

    ways: dict[str, tuple[Callable[[Any, Any], Any], Sequence[tuple[Any, Any]]]] = {
        DESCRIBED: (asking.decide, described),
        FOUND: (asking.decide, found),
        WITH_FILE: (asking.decide_measured, found),
        FEATURES: (asking.decide, grid),
        PLANNED: (asking.select, grid),
        EXPLAINED: (asking.explain, described),
        EXPLAINED_FEATURES: (asking.explain, grid),
        WAYS_OUT: (asking.ways_out, asking.refused),
    }
    return {what: of(*way) for what, way in ways.items() if not only or what in only}


def decision_rows(effort: Effort) -> list[Figure]:
    asking, turns = Asking(), effort.turns
    with tempfile.TemporaryDirectory() as folder:
        asking.read_measurements(folder)
    calls = decision_calls(asking, ready=(turns + 20) * 20)

    def of(
        group: str, what: str, call: Callable[[], Any], budget: float, turns: int, each: int, **more: Any
    ) -> Figure:
        """One row. Over many questions a turn is one of them, so that the median is theirs."""
        noise = (WAYS_OUT_NOISE if what == WAYS_OUT else NOISE) * budget
        return timed(group, what, call, turns, each, budget=budget, noise=noise, **more)

    new, new_found = (asked(asking.decide, asking.environments(found), turns + 1) for found in (False, True))
    rows = [
        of("a decision", DESCRIBED, calls[DESCRIBED], NEW_LENGTH_US, turns, 20),
        of("a decision", FOUND, calls[FOUND], NEW_LENGTH_US, turns, 20),
        of("a decision", WITH_FILE, calls[WITH_FILE], NEW_LENGTH_US, turns, 20),
        of("a decision", FEATURES, calls[FEATURES], FEATURES_US, 2 * turns, 1),
        of("a decision", "a new machine that was found", new_found, ENVIRONMENT_US, turns, 1),
        of("a decision", "a new described machine, versions assumed", new, ENVIRONMENT_US, turns, 1),
        of("a decision", PLANNED, calls[PLANNED], PER_SECOND, turns // 5 + 1, 90, bound="at least"),
        of("an explanation", EXPLAINED, calls[EXPLAINED], EXPLANATION_US, turns, 10),
        of("an explanation", EXPLAINED_FEATURES, calls[EXPLAINED_FEATURES], EXPLANATION_US, turns, 1),
        of("ways out", WAYS_OUT, calls[WAYS_OUT], WAYS_OUT_US, turns // 10 + 1, len(asking.refused)),
    ]
    asking.forget()
    return rows


# ---- whole processes --------------------------------------------------------------------------------

QUESTION = ["--gpu", "H100", "--cudnn", "9.1.0", "--head-dim-qk", "192", "--head-dim-v", "128"]
COMMANDS: dict[str, tuple[list[str], float]] = {
    "import attnsel": (["-c", "import attnsel"], 2.0),
    "attnsel --version": (["-m", "attnsel", "--version"], 3.0),
    "attnsel --help": (["-m", "attnsel", "--help"], 8.0),
    "attnsel explain --short": (["-m", "attnsel", "explain", *QUESTION, "--short"], 12.0),
    "attnsel rule CUDNN204": (["-m", "attnsel", "rule", "CUDNN204"], 10.0),
}
BARE = ["-c", "pass"]


def child_environment() -> dict[str, str]:
    """As in a shell: with bytecode, in one order of hashes, so that instructions repeat."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "ATTNSEL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**kept, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


def process_us(arguments: list[str]) -> float:
    """CPU of a fresh interpreter, the system's for it too. Raises CalledProcessError when it fails."""
    import resource  # Windows has none

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=child_environment(), capture_output=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e6


def instructions(arguments: list[str]) -> int | None:
    """Of a whole process, by callgrind; None where there is none, or it cannot run this python."""
    if shutil.which("valgrind") is None:
        return None
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    return int(found[1]) if found and done.returncode == 0 else None


def command_rows(effort: Effort) -> list[Figure]:
    """CPU of whole processes in bare pythons, and instructions of both where they can be counted."""
    group = "a whole process, in bare pythons"
    for arguments, _ in COMMANDS.values():
        process_us(arguments)  # the first one compiles what is imported
    bare_count = instructions(BARE) if effort.counted else None
    made = []
    for what, (arguments, budget) in COMMANDS.items():
        taken, bare = [], []
        for turn in range(effort.processes):
            for which in (0, 1) if turn % 2 else (1, 0):
                (taken, bare)[which].append(process_us((arguments, BARE)[which]))
        samples = [a / b for a, b in zip(taken, bare, strict=True)]
        of_clock = row(group, what, "×", samples, budget=budget)
        counted = instructions(arguments) if bare_count is not None else None
        by_count = counted / bare_count if counted and bare_count else None
        made.append(
            Figure(
                **{
                    **of_clock.__dict__,
                    "noise": NOISE * budget,
                    "multiple": of_clock.median,
                    "measured": row("", "", "", taken).median,
                    "lowest": min(taken),
                    "instructions": counted,
                    "note": "" if by_count is None else f"{by_count:.1f} × its instructions",
                }
            )
        )
    return made


# ---- memory, and what other tools tell ----------------------------------------------------------------

DOUBLING = 2.1  # S twice as long: 2 is linear, 4 is an S×S tensor


def memory_rows(effort: Effort) -> list[Figure]:
    """Forward and backward of `tiled` when S doubles; ``sdpa.math`` shows what S×S looks like."""
    group = "memory when S doubles"
    held = "held by tests/backends/test_contract.py: no kernel makes an S×S tensor"
    elsewhere = unmeasured(group, "triton, cudnn", "×", DOUBLING, held)
    if importlib.util.find_spec("torch") is None:
        return [elsewhere, unmeasured(group, "tiled", "×", DOUBLING, "torch is not installed")]
    rows = [elsewhere]
    short, long = effort.tokens, 2 * effort.tokens
    for backend, budget in (("tiled", DOUBLING), ("sdpa.math", None)):
        for what, meter in (("peak allocated", peak_bytes), ("largest tensor made", largest_tensor)):
            small, large = meter(backend, short), meter(backend, long)
            note = f"{small / 2**20:.1f} → {large / 2**20:.1f} MiB at S {short} → {long}"
            made = row(group, f"{backend}: {what}", "×", [large / small], budget=budget, note=note)
            rows.append(Figure(**made.__dict__))
    return rows


def train_once(backend: str, s: int) -> Callable[[], None]:
    """One forward and backward, [b, s, h, d] = [1, s, 2, 64], causal."""
    import torch

    from attnsel import attention

    q, k, v = (torch.randn(1, s, 2, 64, requires_grad=True) for _ in range(3))
    return lambda: attention(q, k, v, attn_mask_type="causal", backend=backend).sum().backward()


def peak_bytes(backend: str, s: int) -> int:
    """The most that was allocated at one time, above what was there before."""
    import torch

    step = train_once(backend, s)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def largest_tensor(backend: str, s: int) -> int:
    """Bytes of the largest storage that an operator's output has."""
    import torch
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


PLANS = "held by tests/proof/test_no_plan_storm.py"


def told_rows(log: Path | None) -> list[Figure]:
    """What is a count that a test holds, and what the gate's own log tells."""
    plans = unmeasured("plans and kernels", "while a cache grows, and prompts of many lengths", "", 16, PLANS)
    text = "" if log is None else log.read_text(encoding="utf-8")
    rows = [plans]
    for what, pattern, budget in (
        ("README's test command", r"^ *(\d+)s  README's second command", 5.0),
        ("the gate", r"^== done: (\d+)s", 15.0),
    ):
        found = re.search(pattern, text, re.MULTILINE)
        group, unit, noise = "on two idle cores", "min", budget / 4
        if found is None:
            why = "told from a log of .ci/run: --gate-log FILE"
            rows.append(unmeasured(group, what, unit, budget, why, noise=noise))
        else:
            told = row(
                group, what, unit, [int(found[1]) / 60], budget=budget, note="from the log of the gate"
            )
            rows.append(Figure(**{**told.__dict__, "noise": noise}))
    return rows


# ---- instructions of one call -------------------------------------------------------------------------

#: Row by row: how often a child process repeats it under callgrind.
COUNTED = {DESCRIBED: 200, FOUND: 200, EXPLAINED: 100, WAYS_OUT: 10}
COUNTED_HITS = {"attention": 300, "forward": 300, "F.sdpa's place": 300}


def counted_calls() -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Each with its row and how often it is repeated; of a hit, our call and the op by hand with a minus."""
    yield "", lambda: None, 1  # what counting itself takes
    calls = decision_calls(Asking(), 2 * max(COUNTED.values()), tuple(COUNTED))
    for what, times in COUNTED.items():
        yield what, calls[what], times
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
        made = hits()
        for what, times in COUNTED_HITS.items():
            yield what, made[what].ours, times
            yield what, made[what].by_hand, -times


def be_counted() -> None:
    """The child's part: each call in a loop, around which callgrind writes down what it has counted."""
    for what, call, times in counted_calls():
        for _ in range(abs(times)):  # as often as it is counted: Python specialises what it repeats
            call()
        write_counts()
        for _ in range(abs(times)):
            call()
        write_counts()
        print(what, times, sep="\t", flush=True)


def write_counts() -> None:
    subprocess.run(["callgrind_control", "-d", str(os.getpid())], capture_output=True, check=True)


def counts() -> dict[str, int]:
    """Instructions of one call, by row; of a hit, what it takes more than the op by hand."""
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        return {}
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "out"
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", sys.executable, __file__]
        asked = [*command, "--be-counted"]
        done = subprocess.run(asked, cwd=ROOT, env=child_environment(), capture_output=True, text=True)
        if done.returncode:
            print(f"instructions were not counted: {done.stderr[-300:]}", file=sys.stderr)
            return {}
        told = [line.split("\t") for line in done.stdout.splitlines()]
        loops = [total_of(Path(f"{out}.{2 * (n + 1)}")) for n in range(len(told))]
    found: dict[str, float] = {}
    for (what, times), total in zip(told, loops, strict=True):
        found[what] = found.get(what, 0.0) + (total - loops[0]) / int(times)
    return {what: round(count) for what, count in found.items() if what}


def total_of(dump: Path) -> int:
    """What was counted since the dump before."""
    found = re.search(r"^totals: (\d+)", dump.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    assert found is not None, dump
    return int(found[1])


# ---- the program --------------------------------------------------------------------------------------


def sections(effort: Effort, log: Path | None) -> Iterator[tuple[str, str, Callable[[], list[Figure]]]]:
    """Name, words by which --only finds it, and what makes the rows."""
    yield "a call on a cache hit", "hit attention forward sdpa", partial(hit_rows, effort)
    yield "decisions", "decision explanation ways out", partial(decision_rows, effort)
    yield "whole processes", "command import explain rule", partial(command_rows, effort)
    yield "memory", "memory", partial(memory_rows, effort)
    yield "told elsewhere", "plans gate", partial(told_rows, log)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few samples: whether it runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="sections with one of these: hit,command,memory,…"
    )
    parser.add_argument(
        "--gate-log", type=Path, metavar="FILE", help="what .ci/run printed: its times are rows"
    )
    parser.add_argument("--be-counted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Settings of the shell it is started from are no part of the questions.
    for name in [name for name in os.environ if name.startswith("ATTNSEL_")]:
        del os.environ[name]
    if options.be_counted:
        be_counted()
        return 0
    effort = QUICK if options.quick else FULL
    started = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    words = [word for word in options.only.split(",") if word]
    wanted = [
        (name, rows) for name, found_by, rows in sections(effort, options.gate_log)
        if not words or any(word in found_by for word in words)
    ]  # fmt: skip
    rows: list[Figure] = []
    for name in progress([name for name, _ in wanted]):
        rows += dict(wanted)[name]()
    if effort.counted:
        of_row = counts() if any(made.what in {*COUNTED, *COUNTED_HITS} for made in rows) else {}
        rows = [replace(made, instructions=of_row.get(made.what, made.instructions)) for made in rows]
    show("What choosing costs", rows)
    for made in rows:
        if made.missing:
            print(f"not measured: {made.group}: {made.what}: {made.missing}")
        if made.missed:
            print(f"missed by more than its noise: {made.group}: {made.what}", file=sys.stderr)
    if options.json is not None:
        more = {"quick": options.quick, "calibration_us": REFERENCE_US, "load_average_start": started}
        write(options.json, record("budgets", rows, **more))
    return MISSED if any(made.missed for made in rows) and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
