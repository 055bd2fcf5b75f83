"""What a step of context parallelism asks of a kernel: the one place where such a question is made.

The question about the whole sequence meets the rules of context parallelism; then each kind of step is a
question of its own, and a candidate must be eligible for all of them: it is the steps that a kernel gets to
see. Planning and running both ask here. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any, NamedTuple

from attnsel.params import AttentionParams
from attnsel.params.exchanges import EXCHANGES
from attnsel.selection.step_geometry import Band, Kind, RingSizes, shapes
from attnsel.verdicts.verdict import Candidate, Reason


class RankLayout(NamedTuple):
    """``a2a`` ranks exchange heads for rows, ``ring`` such groups exchange keys; their product is cp_size."""

    comm: str
    a2a: int
    ring: int

    @property
    def gathers(self) -> bool:
        """Whether each of several groups gathers the keys of all."""
        return self.ring > 1 and EXCHANGES[self.comm].keys == "gathered"


class StepShape(NamedTuple):
    """Rows of queries and keys of a kernel call, and its kind (see step_geometry.py)."""

    seqlen_q: int
    seqlen_kv: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind} {self.seqlen_q}×{self.seqlen_kv}"


class StepRefusal(NamedTuple):
    """Why a step of this shape refuses a candidate that stands for the whole."""

    candidate: str
    step: StepShape
    reasons: tuple[Reason, ...]

    @property
    def noted_reasons(self) -> tuple[Reason, ...]:
        """The reasons, with the step beside each."""
        return tuple(reason.noted(f"in a step that is {self.step}") for reason in self.reasons)

    def as_dict(self) -> dict[str, Any]:
        step = {"kind": self.step.kind, "seqlen_q": self.step.seqlen_q, "seqlen_kv": self.step.seqlen_kv}
        reasons = [reason.as_dict() for reason in self.reasons]
        return {"candidate": self.candidate, "step": step, "reasons": reasons}


Judge = Callable[[str, AttentionParams], "Candidate"]
"""``judge(name, p)``: a candidate's verdict on a step, which is a question without ranks."""


def layouts(p: AttentionParams) -> list[RankLayout]:
    """How cp_size ranks may be laid out for an exchange; several for a nested one, the widest a2a first."""
    n, comm = p.cp_size, p.cp_comm_type
    record = EXCHANGES[comm]
    if not record.nested:
        return [RankLayout(comm, n, 1) if record.swaps_heads else RankLayout(comm, 1, n)]
    common = gcd(n, p.num_heads, p.num_gqa_groups)
    return [RankLayout(comm, a, n // a) for a in range(min(n // 2, common), 1, -1) if not common % a]


def merges_parts(p: AttentionParams, layout: RankLayout) -> bool:
    """Whether results of parts are merged, if only with a sink."""
    return layout.ring > 1 or p.softmax_type != "vanilla"


def sizes_of(p: AttentionParams, layout: RankLayout, offsets: bool) -> RingSizes:
    """What the steps depend on, for kernels with or without ``offsets``."""
    left, right = p.window_size
    shift = p.max_seqlen_kv - p.max_seqlen_q if p.bottom_right_diagonal and not p.padding else 0
    return RingSizes(
        p.max_seqlen_q,
        p.max_seqlen_kv,
        layout.ring,
        Band(None if left < 0 else shift - left, None if right < 0 else shift + right),
        offsets,
        absolute=p.core_attention_bias_type == "alibi" or p.dropout,
        apart=p.has_bias,
    )


def step_shapes(p: AttentionParams, layout: RankLayout, offsets: bool) -> tuple[StepShape, ...]:
    """The different calls that the ranks make, most pairs first."""
    return tuple(StepShape(*shape) for shape in shapes(sizes_of(p, layout, offsets), layout.comm))


def step_question(p: AttentionParams, layout: RankLayout, step: StepShape) -> AttentionParams:
    """One call as a question: its lengths and mask, a rank's heads. Sinks are added in the merge."""
    heads = p.num_heads // layout.a2a
    changes: dict[str, Any] = {
        "cp_size": 1,
        "num_heads": heads,
        "num_gqa_groups": p.num_gqa_groups // layout.a2a,
        "max_seqlen_q": step.seqlen_q,
        "max_seqlen_kv": step.seqlen_kv,
        "softmax_type": "vanilla",
        "return_lse": p.return_lse or merges_parts(p, layout),
    }
    if p.qkv_format == "thd":
        changes["pad_between_seqs"] = True  # a rank's rows of a sequence are chunks, filled or not
    if p.alibi_slopes_shape is not None:
        changes["alibi_slopes_shape"] = (*p.alibi_slopes_shape[:-1], heads)
    if step.kind in ("full", "diagonal"):
        causal = step.kind == "diagonal"
        base = "padding_causal" if p.padding else "causal"
        changes |= {
            "attn_mask_type": base if causal else ("padding" if p.padding else "no_mask"),
            "window_size": (-1, 0) if causal else (-1, -1),
            "bottom_right_diagonal": not causal,
        }
    elif step.kind == "offset":
        changes |= {
            "attn_mask_type": p.attn_mask_type.replace("_bottom_right", ""),
            "bottom_right_diagonal": not p.causal,
        }
    return p.rewritten(**changes)


def refused_step(
    name: str, offsets: bool, p: AttentionParams, layout: RankLayout, judge: Judge
) -> StepRefusal | None:
    """The first step that refuses a candidate; None where every step takes it."""
    for step in step_shapes(p, layout, offsets):
        seen = judge(name, step_question(p, layout, step))
        if seen.verdict == "refused":
            return StepRefusal(name, step, seen.reasons)
    return None


def steps_against(name: str, offsets: bool, p: AttentionParams, judge: Judge) -> StepRefusal | None:
    """Why a candidate is refused in the steps of every layout that the ranks may have."""
    first: StepRefusal | None = None
    for layout in layouts(p):
        refusal = refused_step(name, offsets, p, layout, judge)
        if refusal is None:
            return None
        first = first or refusal
    return first
