"""What a call over ranks asks: the question about the whole sequence, and its selection."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from attnsel.backends.registry import CANDIDATES
from attnsel.context_parallel.group import ContextParallel
from attnsel.decision import Selection, select
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams, Tensors
from attnsel.runtime.call import Call
from attnsel.runtime.dispatch import environment_of, policy_of
from attnsel.runtime.inputs import params_of
from attnsel.runtime.sizes import lengths_of
from attnsel.selection.inquiry import Inquiry
from attnsel.selection.steps import refused_step
from attnsel.verdicts.evidence import Evidence
from attnsel.verdicts.verdict import Candidate


def whole_params(cp: ContextParallel, call: Call) -> AttentionParams:
    """The question about the whole sequence. Raises InvalidInput."""
    if call.paged:
        raise InvalidInput(
            "block_table", "a tensor", "must be left out with a cp_group: a cache has no ranks"
        )
    rows, extras = call.config.form.rows, call.extras
    q, k, v = (t if t.dim() <= rows else _stretched(t, rows, cp.size) for t in (call.q, call.k, call.v))
    bias = extras.core_attention_bias
    if bias is not None and bias.dim() >= 2 and bias.shape[-2] != 1:
        extras = extras._replace(core_attention_bias=_stretched(bias, bias.dim() - 2, cp.size))
    p = params_of(call._replace(q=q, k=k, v=v, extras=extras))
    for field in ("num_heads", "num_gqa_groups"):
        if getattr(p, field) % cp.a2a.size and cp.record.nested:
            raise InvalidInput(
                field, getattr(p, field), f"must divide over the a2a group's {cp.a2a.size} ranks"
            )
    check_packed(cp, call)
    return p.derive(cp_size=cp.size, cp_comm_type=cp.comm_type, tensors=Tensors())


def _stretched(t: Tensor, dim: int, times: int) -> Tensor:
    """A view of the whole sequence's shape, for its shape alone."""
    shape = list(t.shape)
    shape[dim] *= times
    return (t.narrow(dim, 0, 1) if t.shape[dim] else t).expand(shape)


def select_for_ranks(
    cp: ContextParallel, call: Call, evidence: Evidence, environment: Environment | None = None
) -> Selection:
    """The selection for the whole call, over the ranks as they are laid out; where q is by default."""
    p, policy = whole_params(cp, call), policy_of(call)
    environment = environment or environment_of(call.q)
    answer = select(p, environment, policy=policy, evidence=evidence)
    if not cp.record.nested:
        return answer
    # The question does not say how many ranks exchange heads; these do.
    inquiry = Inquiry(p, answer.environment, policy, evidence, steps=False)

    def seen(candidate: Candidate) -> Candidate:
        if candidate.verdict == "refused":
            return candidate
        name = candidate.name
        refusal = refused_step(name, CANDIDATES[name].offsets, p, cp.layout, inquiry.judge_step)
        if refusal is None:
            return candidate
        return candidate._replace(verdict="refused", reasons=(*candidate.reasons, *refusal.noted_reasons))

    candidates = sorted(map(seen, answer.candidates), key=lambda c: c.verdict == "refused")
    return answer.narrowed(tuple(candidates))


def check_packed(cp: ContextParallel, call: Call) -> None:
    """Packed sequences are cut one by one, so each needs a length that divides. Read on the CPU only."""
    if not call.config.form.packed:
        return
    for name, t in (("cu_seqlens_q", call.q), ("cu_seqlens_kv", call.k)):
        padded, real = getattr(call.extras, f"{name}_padded"), getattr(call.extras, name)
        starts, of = (real, name) if padded is None else (padded, f"{name}_padded")
        if starts is None or starts.device.type != "cpu":
            continue
        ends: list[int] = starts.tolist()
        if ends[0] != 0 or ends != sorted(ends) or ends[-1] != t.shape[0] * cp.size:
            raise InvalidInput(
                of, ends, f"must rise from 0 to the tokens of all ranks, {t.shape[0] * cp.size}"
            )
        for a, b in pairwise(ends):
            if (b - a) % (2 * cp.size):
                raise InvalidInput(
                    of, ends, f"must hold sequences of multiples of {2 * cp.size} rows: pad between them"
                )
        lengths: list[int] = lengths_of(real).tolist()
        if any(not 0 <= n <= b - a for n, (a, b) in zip(lengths, pairwise(ends), strict=True)):
            raise InvalidInput(name, real.tolist(), f"must fit into the room that {of} gives, {ends}")
