"""Which candidate runs the steps of a call, chosen for the shapes these steps have.

The question about the whole sequence meets the rules of context parallelism; then each kind of step is a
question of its own, and a candidate must be eligible for all of them. What a step refuses is told among the
reasons of the whole, with the step's own lengths.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from attnsel.backends.contract import Spec
from attnsel.context_parallel.group import ContextParallel
from attnsel.context_parallel.steps import Band, Kind, Sizes, shapes
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams, Tensors
from attnsel.runtime.bind import make_spec
from attnsel.runtime.call import Config, Extras
from attnsel.runtime.inputs import ask
from attnsel.runtime.run import environment_of, needs_grad, policy_of
from attnsel.select import Candidate, Evidence, Selection, select
from attnsel.settings import Settings

OFFSETS = frozenset({"triton", "tiled"})
"""Candidates whose kernels are told where in the sequence their rows and columns lie."""

ROW_DIM = {"bshd": 1, "sbhd": 0, "bhsd": 2, "thd": 0}


class Chosen(NamedTuple):
    selection: Selection
    spec: Spec  # the whole call's
    need_grad: bool


def question(
    cp: ContextParallel, config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> tuple[AttentionParams, bool]:
    """What is asked about the whole sequence, and whether a backward will come. Raises InvalidInput."""
    need_grad = needs_grad(q, k, v, extras)
    training = config.is_training or config.attention_dropout > 0.0 or need_grad
    if extras.block_table is not None:
        raise InvalidInput(
            "block_table", "a tensor", "must be left out with a cp_group: a cache has no ranks"
        )
    dim = ROW_DIM[config.qkv_format]
    whole = [t if t.dim() <= dim else _stretched(t, dim, cp.size) for t in (q, k, v)]
    bias = extras.core_attention_bias
    if bias is not None and bias.dim() >= 2 and bias.shape[-2] != 1:
        extras = extras._replace(core_attention_bias=_stretched(bias, bias.dim() - 2, cp.size))
    p = ask(config, whole[0], whole[1], whole[2], extras, training)
    for field in ("num_heads", "num_gqa_groups"):
        if getattr(p, field) % cp.a2a.size and cp.comm_type == "a2a+p2p":
            raise InvalidInput(
                field, getattr(p, field), f"must divide over the a2a group's {cp.a2a.size} ranks"
            )
    return p.derive(cp_size=cp.size, cp_comm_type=cp.comm_type, tensors=Tensors()), need_grad


def _stretched(t: Tensor, dim: int, times: int) -> Tensor:
    """A view of the whole sequence's shape, for its shape alone."""
    shape = list(t.shape)
    shape[dim] *= times
    return (t.narrow(dim, 0, 1) if t.shape[dim] else t).expand(shape)


def sizes_of(cp: ContextParallel, p: AttentionParams, spec: Spec, name: str, shift: int = 0) -> Sizes:
    """The steps' sizes for a candidate. ``shift``: of a bottom-right diagonal."""
    left, right = spec.window_left, spec.window_right
    return Sizes(
        p.max_seqlen_q,
        p.max_seqlen_kv,
        cp.ring.size,
        Band(None if left < 0 else shift - left, None if right < 0 else shift + right),
        offsets=name in OFFSETS,
        absolute=p.core_attention_bias_type == "alibi" or p.dropout,
        apart=p.has_bias,
    )


def choose(
    cp: ContextParallel,
    config: Config,
    p: AttentionParams,
    need_grad: bool,
    device: Tensor,
    settings: Settings,
    evidence: Evidence,
) -> Chosen:
    """The selection for the whole call, and what its steps add. Raises nothing: it may have no backend."""
    policy = policy_of(config, settings)
    policy = policy.replace(adapt="never")  # tensors are passed on as they are
    env = environment_of(device)
    whole = select(p, env, policy=policy, evidence=evidence)
    spec = make_spec(config, p, need_grad)
    candidates: list[Candidate] = []
    for candidate in whole.candidates:
        if candidate.verdict != "refused":
            candidate = _with_steps(cp, candidate, p, spec, env, policy, evidence)
        candidates.append(candidate)
    candidates.sort(key=lambda c: c.verdict == "refused")
    standing = [c.name for c in candidates if c.verdict != "refused" and (c.executable or not env.detected)]
    backend = standing[0] if standing else None
    return Chosen(replace(whole, candidates=tuple(candidates), backend=backend), spec, need_grad)


def _with_steps(
    cp: ContextParallel,
    candidate: Candidate,
    p: AttentionParams,
    spec: Spec,
    env: Any,
    policy: Any,
    evidence: Evidence,
) -> Candidate:
    """The candidate as all steps see it: refused if one of them refuses it, for that step's reasons."""
    shift = p.max_seqlen_kv - p.max_seqlen_q if spec.bottom_right and not p.padding else 0
    for rows, columns, kind in shapes(sizes_of(cp, p, spec, candidate.name, shift), cp.comm_type):
        step = step_question(p, cp, rows, columns, kind)
        seen = select(step, env, policy=policy, evidence=evidence)[candidate.name]
        if seen.verdict == "refused":
            known = {reason.code for reason in candidate.reasons}
            reasons = (*candidate.reasons, *(r for r in seen.reasons if r.code not in known))
            return candidate._replace(verdict="refused", reasons=reasons)
    return candidate


def step_question(
    p: AttentionParams, cp: ContextParallel, rows: int, columns: int, kind: Kind
) -> AttentionParams:
    """One step as a question: its lengths and heads, no ranks. Sinks are added when results are merged."""
    heads = p.num_heads // cp.a2a.size
    changes: dict[str, Any] = {
        "cp_size": 1,
        "num_heads": heads,
        "num_gqa_groups": p.num_gqa_groups // cp.a2a.size,
        "max_seqlen_q": rows,
        "max_seqlen_kv": columns,
        "softmax_type": "vanilla",
        "return_lse": cp.ring.size > 1,
    }
    if p.qkv_format == "thd":
        changes["pad_between_seqs"] = True
    if p.alibi_slopes_shape is not None:
        changes["alibi_slopes_shape"] = (*p.alibi_slopes_shape[:-1], heads)
    if kind in ("full", "diagonal"):
        causal = kind == "diagonal"
        base = "padding_causal" if p.padding else "causal"
        changes |= {
            "attn_mask_type": base if causal else ("padding" if p.padding else "no_mask"),
            "window_size": (-1, 0) if causal else (-1, -1),
            "bottom_right_diagonal": not causal,
        }
    elif kind == "offset":
        changes |= {
            "attn_mask_type": p.attn_mask_type.replace("_bottom_right", ""),
            "bottom_right_diagonal": not p.causal,
        }
    return p.derive(**changes)
