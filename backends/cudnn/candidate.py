"""What ``cudnn`` is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from attnsel.backends.cudnn.open_engines import planned_by
from attnsel.environment.versions import Version
from attnsel.params import ITEMSIZE
from attnsel.verdicts.record import CandidateRecord, Efficiency, Proven

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams
    from attnsel.verdicts.record import Memory


# ---- How much workspace a cuDNN attention call takes, where the library is not there to say it ---------
# The figure is that of the larger of the two plans, forward and backward: they do not run at the same time.
# The terms are cudnn-frontend's own buffers (scaled_dot_product_flash_attention.h, releases 1.20 to 1.32)
# and what each engine adds, read off the plans that libcudnn builds for described GPUs:
#
# - rows: a float32 for each query row, always; - dQ: float32 [b, h, s_q, d], added up over key tiles; sm8x
# and sm12x hold it twice, the second in whole tiles of 8 rows; so does sm10x for calls that only its
# fallback engine takes; - dP: 2 bytes for each score, in whole tiles. It takes dQ's place where the
# backward is deterministic (but for sm10x, whose kernel needs neither) or gives a gradient of the bias: the
# one term that grows with s_q * s_kv in every call that has it; - full dK and dV: per query head, where
# heads share keys; - dropped: a bit for each score, in whole tiles of 128 by 128, where sm10x drops any.
#
# How well it agrees, over 544 random calls that rules and library accept (cuDNN 9.19.0 and 9.28.0, an A100,
# H200, B200, RTX 4090 and RTX 5090; benchmarks/results/cudnn-workspaces.json): all within 1 MiB or 1 %, 539
# within 4 KiB, 414 to the byte; where it is low, by 366 KiB at most. Those calls shaped the formula. Of 317
# others (cuDNN 9.28.0, seed 7) 315 agree as closely, after FP8 on Blackwell and Hopper was put right by
# them; two on sm10x, whose fallback engine takes dQ twice, are off by that: once high, once low.
# ``tests/proof/conformance.py --backend cudnn --workspace`` asks about further calls and releases.
#
# For packed sequences the plan is built for lengths rounded up, by a quarter at most.


DP_LIMIT = 4 << 30
"""Above so many bytes of dP a deterministic backward on Hopper adds dQ up in order instead, where the library
can: slower, and its workspace grows with s_q alone. A choice of ours; nobody has measured where it pays."""

DP_LIMIT_VARIABLE = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"

ORDERED = {"cudnn": Version(9, 25, 0), "cudnn_frontend": Version(1, 27, 0)}
"""The first releases that can, together. cudnn-frontend asks for it only where that variable holds a limit:
without it cuDNN 9.28 with frontend 1.28 takes as much as 9.19 did (asked).

Source: NVIDIA/cudnn-frontend#398; the header named above, releases 1.26 (not there) and 1.27.
"""

_FLOAT32 = 4
_HALF = 2


def workspace(p: AttentionParams, env: Environment) -> Memory:
    """What cuDNN takes for ``p`` beyond its tensors."""
    arch = env.device.arch
    if arch is None:
        return "workspace", 0
    bias_gradient = p.has_bias and p.core_attention_bias_requires_grad
    return "workspace", _taken(p, arch, p.deterministic and not adds_in_order(p, env), bias_gradient)


def workspace_in_pytorch(p: AttentionParams, env: Environment) -> Memory:
    """The same for PyTorch's calls of cuDNN, which ask neither for determinism nor for a bias's gradient."""
    arch = env.device.arch
    return "workspace", 0 if arch is None else _taken(p, arch, False, False)


def dp_bytes(batch: int, heads: int, rows: int, keys: int) -> int:
    """dP [b, h, s_q, s_kv] on Hopper, as cudnn-frontend counts it against its limit."""
    return batch * heads * round_up(rows, 64) * round_up(keys, 128) * _HALF


def can_add_in_order(cudnn: Version | None, cudnn_frontend: Version | None) -> bool:
    """Whether these releases have the backward on Hopper that adds dQ up in order."""
    if cudnn is None or cudnn_frontend is None:
        return False
    return cudnn >= ORDERED["cudnn"] and cudnn_frontend >= ORDERED["cudnn_frontend"]


def adds_in_order(p: AttentionParams, env: Environment) -> bool:
    """Whether the backward of this call is built to add dQ up in order."""
    if env.device.arch != 90 or not p.deterministic or p.fp8_attention:
        return False
    if p.has_bias and p.core_attention_bias_requires_grad:
        return False
    if dp_bytes(p.batch_size, p.num_heads, p.max_seqlen_q, p.max_seqlen_kv) <= DP_LIMIT:
        return False
    return can_add_in_order(env.cudnn, env.cudnn_frontend)


def _taken(p: AttentionParams, arch: int, deterministic: bool, bias_gradient: bool) -> int:
    """Bytes of the larger plan. ``deterministic``: and not by adding up in order."""
    taken = _both(p, arch)
    return taken + _backward(p, arch, deterministic, bias_gradient) if p.is_training else taken


def _both(p: AttentionParams, arch: int) -> int:
    """What either plan takes. The dropped scores are written down in both."""
    slopes = round_up(_FLOAT32 * p.num_heads, 16) if p.core_attention_bias_type == "alibi" else 0
    descriptors = 1536 if p.qkv_format == "thd" and 90 <= arch < 110 else 0
    taken = slopes + descriptors + (256 if arch == 90 else 128)
    if p.dropout and 100 <= arch < 110:
        scores = p.batch_size * p.num_heads * round_up(p.max_seqlen_q, 128) * round_up(p.max_seqlen_kv, 128)
        taken += scores // 8
    return taken


def _backward(p: AttentionParams, arch: int, deterministic: bool, bias_gradient: bool) -> int:
    per_head = p.batch_size * p.num_heads
    rows, keys = p.max_seqlen_q, p.max_seqlen_kv
    blackwell = 100 <= arch < 110
    taken = per_head * rows * _FLOAT32
    shared = p.num_gqa_groups != p.num_heads
    if p.fp8_attention and blackwell:
        full = per_head * keys * (p.head_dim_qk + p.head_dim_v) * 2 * _FLOAT32
        return 2 * taken + (full if shared else 0)
    deterministic = deterministic and not p.fp8_attention  # that backward adds up in no other way
    if shared:
        taken += per_head * keys * (p.head_dim_qk + p.head_dim_v) * max(_HALF, ITEMSIZE[p.dtype])
    if bias_gradient or (deterministic and not blackwell):
        if arch == 90:
            return taken + dp_bytes(p.batch_size, p.num_heads, rows, keys)
        return taken + per_head * round_up(rows, 64) * round_up(keys, 64) * _HALF
    if deterministic:
        return taken
    width = per_head * p.head_dim_qk * _FLOAT32
    taken += rows * width
    if p.deterministic and arch == 90 and not p.fp8_attention:
        taken += per_head * -(-rows // 64) * 8  # whose turn it is, for each tile of rows
    if arch < 90 or arch >= 120 or (blackwell and _left_to_the_fallback(p)):
        taken += round_up(rows, 8) * width
    return taken


def _left_to_the_fallback(p: AttentionParams) -> bool:
    """sm10x calls that engine 5 does not take, as far as that was seen."""
    return p.max_seqlen_kv <= 128 and p.head_dim_qk <= 128 and not p.dropout


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# Every call that nvidia-cudnn-frontend has a graph for; which of them a release runs, rules/cudnn/ knows.
_TAKES = (
    "bf16", "fp16", "fp32", "fp8", "cuda",
    "training", "causal", "window", "top_left", "bottom_right", "padding", "thd", "gaps", "paged", "gqa",
    "head_dim_v", "bias", "bias_grad", "alibi", "sinks", "dropout", "deterministic", "lse", "max_logit",
    "strides", "cuda_graph",
)  # fmt: skip

EXACT_CHANGES = (
    "drop_mask", "unpack", "zero_padding", "pad_sequence", "pad_head_dim_qk", "pad_head_dim_v", "expand_gqa",
    "contiguous",
)  # fmt: skip

CUDNN_EFFICIENCY = (
    Efficiency({90}, 0.62, "617 of 989 TFLOP/s on an H100 (FlashAttention-3 paper)"),
    Efficiency({100, 103}, 0.68, "1708 of 2500 TFLOP/s on a GB200, cuDNN 9.22 (cudnn-frontend's benchmarks)"),
)

_ON_HOPPER = Proven(
    "sm90",
    frozenset({
        "alibi", "bf16", "bias", "bias_grad", "bottom_right", "causal", "cuda_graph",
        "deterministic", "dropout", "fp16", "gaps", "gqa", "lse", "max_logit", "padding", "paged",
        "sinks", "strides", "thd", "top_left", "training", "window",
    }),
    256,
)  # fmt: skip
"""What benchmarks/results/gpu-h200.json shows, and tests/benchmarks/test_proven.py holds it to."""

CANDIDATES = (
    CandidateRecord(
        name="cudnn",
        title="cuDNN fused attention",
        family="CUDNN",
        kernel="attnsel.backends.cudnn.run",
        takes=_TAKES,
        rules=("attnsel.rules.cudnn",),
        limits="rules",
        needs=("torch", "cudnn", "cudnn_frontend"),
        adaptations=EXACT_CHANGES,
        memory=workspace,
        less_memory=(ORDERED,),
        dropout="own",
        library="cudnn",
        beyond=planned_by,
        explain_refusal="attnsel.rules.cudnn.words:rules_that_say",
        proven=(_ON_HOPPER,),
        unproven_last=False,  # the kernels are NVIDIA's; the code around them is checked on its first call
        kernel_family="cudnn",
        plan_per_length=True,
        efficiency=CUDNN_EFFICIENCY,
    ),
)


# ---- What libcudnn says when it refuses, brought to what a person can use ------------------------------
# "No valid engine configs" comes with a stack of warnings for each engine that was tried; the first of a
# stack is the engine's own reason, the rest is the way up. Engines made for another GPU, or for a call of
# another shape, always refuse: their reasons tell something only where there are no others.


class EngineRefusal(NamedTuple):
    """One engine's reason. ``arch`` is 90 for sm90."""

    engine: int
    arch: int
    status: str  # CUDNN_STATUS_… without that beginning
    reason: str


_ENGINE = re.compile(r'"engineId":(\d+),"smVersion":(\d+)')
_REASON = re.compile(r"CUDNN_STATUS_(\w+); Reason: (.*)")
_OF_COURSE = re.compile(r"only \w+ is supported for this engine|KERNEL_CFG knob must be set")
_FUNCTION = re.compile(r"function (\w+)\(\)")
_SHOWN = 3


def engine_refusals(message: str) -> tuple[EngineRefusal, ...]:
    """Each engine's own reason, in the order in which they were tried."""
    found = []
    engine: re.Match[str] | None = None
    for line in message.splitlines():
        engine = _ENGINE.search(line) or engine
        reason = _REASON.search(line)
        if engine is not None and reason is not None:
            # " at: " introduces the condition in the library's source.
            text = reason[2].split(" at: ")[0].strip()
            found.append(EngineRefusal(int(engine[1]), int(engine[2]) // 10, reason[1], text))
            engine = None
    return tuple(found)


def in_short(message: str) -> str:
    """A refusal in one line: the frontend's own words, or the reasons of the engines, at most three."""
    first = " ".join(message.split("\n", 1)[0].split())
    refusals = engine_refusals(message)
    if not refusals:
        return first
    by_reason: dict[str, list[int]] = {}
    for refused in refusals:
        by_reason.setdefault(refused.reason, []).append(refused.engine)
    telling = {reason: engines for reason, engines in by_reason.items() if not _OF_COURSE.match(reason)}
    shown = telling or by_reason
    groups = [f"engine {', '.join(map(str, engines))}: {reason}" for reason, engines in shown.items()]
    more = len(by_reason) - min(len(groups), _SHOWN)
    rest = f"; {more} more" if more > 0 else ""
    return f"no engine takes it ({'; '.join(groups[:_SHOWN])}{rest})"


def refusal(node: str, stage: str, message: str, logged: Sequence[str] = ()) -> str:
    """Why no plan came out of a graph: which direction, where, the library's reason and what it logged."""
    direction = "backward" if node.endswith("backward") else "forward"
    text = f"cuDNN builds no {direction} plan ({stage}): {in_short(message) or 'no reason given'}"
    log = log_in_short(logged)
    return f"{text}; its log: {log}" if log else text


def log_in_short(logged: Sequence[str]) -> str:
    """What a log adds to an error's message, in one line; a bare list of calls becomes their names."""
    functions = [found[1] for found in map(_FUNCTION.search, logged) if found is not None]
    reasons = [found[2].split(" at: ")[0].strip() for found in _REASON.finditer("\n".join(logged))]
    unique = list(dict.fromkeys(reasons))[:_SHOWN]
    if functions:
        unique.append("in " + ", ".join(dict.fromkeys(functions)))
    return "; ".join(unique)
