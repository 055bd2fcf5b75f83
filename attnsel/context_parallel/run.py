"""A call over ranks: all choose and check alike, as any call does (``runtime/dispatch.py``), then run it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.checks import default_slopes
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.registry import CANDIDATES
from attnsel.context_parallel.group import (
    BACKEND,
    FIGURES,
    ContextParallel,
    Fields,
    RanksRefused,
    exchanging,
    reach_consensus,
    sequence_order,
)
from attnsel.context_parallel.parts import Batch, slots_of
from attnsel.context_parallel.passes import OverRanks, RankCall, anchor_of
from attnsel.decision import Selection, select
from attnsel.environment import Environment
from attnsel.errors import ContextParallelError, InvalidInput
from attnsel.params import AttentionParams, Tensors
from attnsel.runtime import selfcheck
from attnsel.runtime.bind import Bound, draw_seed, make_spec, to_caller, to_contract
from attnsel.runtime.call import Call, Config, Extras
from attnsel.runtime.dispatch import (
    CallMode,
    any_autocast,
    autocast,
    environment_of,
    kept,
    make_call,
    policy_of,
)
from attnsel.runtime.inputs import lengths_of, params_of, real_lengths
from attnsel.runtime.kernels import Kernel, kernel_of, prepare_kernel
from attnsel.runtime.refusals import evidence, record_refusals
from attnsel.selection.inquiry import Inquiry
from attnsel.selection.steps import refused_step, sizes_of
from attnsel.settings import current
from attnsel.verdicts.reasons import NO_EVIDENCE, Candidate, Evidence, Refusal

# ---- What a call over ranks asks: the question about the whole sequence, and its selection -------------


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
    return answer.with_candidates(tuple(candidates))


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


@torch.compiler.disable
def attend(
    cp: ContextParallel,
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    holder: dict[str, Any],
) -> Any:
    """Attention of this rank's rows to the keys of all ranks, in ``config.qkv_format``.

    q, k and v hold this rank's head and tail chunk (``attnsel.context_parallel.shard_sequence``). Lengths,
    padding masks and ALiBi slopes are those of whole sequences; a bias has this rank's rows and all columns.
    The output has q's rows. Gradients of what all ranks share (sinks, a bias without rows) are this rank's
    part: their sum over ranks is the whole.

    Raises on all ranks: InvalidInput or NoBackendError where all have the same reason, ContextParallelError
    naming rank and field where they differ or one is gone. An error on one rank, a kernel's too, is raised
    there as it is, and by the others as a ContextParallelError with its text.
    """
    begun = cp.begin()
    for _ in range(len(CANDIDATES) + 1):
        agreed = _agreed(cp, begun, config, q, k, v, extras)
        if agreed is not None:
            selection, ready = agreed
            holder["_last"] = selection
            return _run(ready)
    raise ContextParallelError("the ranks' kernels refuse one after the other, and never alike")


@torch.compiler.disable
def fail(cp: ContextParallel, error: Exception, q: Any) -> None:
    """Raise the ``error`` that kept a call from :func:`attend`, where the other ranks wait to hear of it."""
    reach_consensus(cp, cp.begin(), error, _device_of(q))


def explain(
    cp: ContextParallel,
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    environment: Environment | None = None,
) -> Selection:
    """The selection this call would get on this rank, or in ``environment``; nothing is exchanged."""
    if any_autocast():
        q, k, v = autocast(q, k, v)
    call = make_call(config, q, k, v, extras, current())
    if environment is not None:
        return select_for_ranks(cp, call, NO_EVIDENCE, environment)
    return select_for_ranks(cp, call, evidence())


class Ready(NamedTuple):
    """A call of which nothing is left to do that another rank would not know to have failed."""

    call: Call
    rank_call: RankCall
    tensors: list[Tensor | None]  # q, k, v, bias and sinks as in the contract


def _agreed(
    cp: ContextParallel, begun: Fields, config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> tuple[Selection, Ready] | None:
    """What this rank will do, once all ranks are known to do the same.

    None: some rank's kernel refused what others' did not; every rank has heard of it and chooses again.
    """
    failure: Exception | None = None
    fields = Fields(begun)
    try:
        if any_autocast():
            q, k, v = autocast(q, k, v)
        call = make_call(config, q, k, v, extras, current())
        bound = kept(cp.chosen, OnRanks(cp), call, evidence())[0]
        check_packed(cp, call)
        _add_fields(fields, cp, call, bound.selection)
        ready = bound.run(cp, call, fields)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        failure = error
    try:
        reach_consensus(cp, fields, failure, _device_of(q))
    except RanksRefused as refused:
        params = bound.selection.params
        record_refusals((Refusal(name, params, text, (), code) for name, text, code in refused.by), current())
        return None
    return bound.selection, ready


def _device_of(q: Any) -> torch.device:
    return q.device if isinstance(q, Tensor) else torch.device("cpu")


class OnRanks(CallMode):
    """The calls that this rank makes, with whichever keys arrive."""

    def __init__(self, cp: ContextParallel) -> None:
        self.cp = cp

    def select(self, call: Call, evidence: Evidence) -> Selection:
        return select_for_ranks(self.cp, call, evidence)

    def bind(self, selection: Selection, call: Call) -> Bound:
        assert selection.backend is not None
        kernel = kernel_of(selection.backend)
        if kernel.prepare is not None:
            for spec, inputs in self._steps(selection, call):
                prepare_kernel(kernel, spec, inputs)

        # Without ``self``: ``cp`` keeps what is bound, and a group in a circle of references lives until the
        # interpreter shuts down, where its threads end the process (SIGABRT).
        return Bound(partial(_ready, selection), None, selection, call.settings)

    def check(self, bound: Bound, call: Call) -> bool:
        """Every kernel call of this rank, with its own keys in the place of others'."""
        selection = bound.selection
        assert selection.backend is not None
        kernel = kernel_of(selection.backend)
        if not selfcheck.is_wanted(selection, call.settings):
            if kernel.prepare is None and not CANDIDATES[selection.backend].last_resort:
                self._rehearse(kernel, selection, call)
            return True
        checked = [
            selfcheck.check_kernel(kernel, spec, inputs, selection, call.settings)
            for spec, inputs in self._steps(selection, call)
        ]
        return all(checked)

    def _rehearse(self, kernel: Kernel, selection: Selection, call: Call) -> None:
        """Each kernel call once, before anything is exchanged: a kernel that can say nothing in advance must
        refuse while the ranks can still agree on another."""
        with torch.no_grad():
            for spec, inputs in self._steps(selection, call):
                result = kernel.forward(spec, inputs)
                if spec.need_grad:
                    kernel.backward(spec, inputs, result, torch.zeros_like(result.out))

    def run(self, bound: Bound, call: Call) -> Any:
        return None  # other ranks take part in that: first all agree

    def _steps(self, selection: Selection, call: Call) -> Iterator[tuple[Spec, Inputs]]:
        """The different kernel calls, before anything is exchanged."""
        cp = self.cp
        spec = make_spec(call.config, selection.params, call.need_grad)
        seed = torch.zeros((), dtype=torch.int64, device=call.q.device) if spec.dropout_p else None
        rank_call = _rank_call(cp, selection, call, Fields()).with_seed(seed)
        bias = _bias(call, spec)
        q, k, v = (_as_exchanged(rank_call, to_contract(call.config, t)) for t in (call.q, call.k, call.v))
        if rank_call.gathers:
            k, v = (torch.cat([t] * cp.ring.size, rank_call.row_dim) for t in (k, v))
        done: set[tuple[Spec, Any]] = set()
        for shift in rank_call.shifts:
            for slot, part in rank_call.parts(shift, q, k):
                spec = rank_call.batch.spec_of(slot, part)
                inputs = rank_call.batch.inputs(slot, part, (q, k, v), bias, gathered=rank_call.gathers)
                seen = (spec, (inputs.q.shape, inputs.k.shape))
                if seen not in done:
                    done.add(seen)
                    yield spec, inputs


def _as_exchanged(call: RankCall, t: Tensor) -> Tensor:
    """A tensor of the shape that ``t`` has after heads were exchanged."""
    n = call.cp.a2a.size
    return t if n == 1 else torch.cat([t.chunk(n, 1)[0]] * n, call.row_dim)


# ---- what ranks tell each other ---------------------------------------------------------------------


def _add_fields(fields: Fields, cp: ContextParallel, call: Call, selection: Selection) -> None:
    """What this rank is about to do, and what its kernels refused of it."""
    figures = selection.policy.figures
    fields.update({"cp_comm_type": cp.comm_type, FIGURES: "none" if figures is None else figures.digest})
    fields[BACKEND] = str(selection.backend)
    for name, t in (("query_layer", call.q), ("key_layer", call.k), ("value_layer", call.v)):
        fields[f"{name}.shape"], fields[f"{name}.dtype"] = str(tuple(t.shape)), str(t.dtype)
    for name, value in json.loads(call.config.text).items():
        if name != "label":
            fields[name] = str(value)
    for name, value in call.extras._asdict().items():
        fields[name] = str(tuple(value.shape)) if isinstance(value, Tensor) else str(type(value).__name__)
    fields["requires_grad"] = str(call.need_grad)
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        t = getattr(call.extras, name)
        if t is not None and t.device.type == "cpu":  # where reading waits for nothing
            fields[f"{name} (contents)"] = str(t.tolist())
    fields.refused = [
        (refusal.candidate, refusal.message, refusal.code)
        for refusal in evidence().refusals
        if refusal.params == selection.params
    ]


# ---- running ----------------------------------------------------------------------------------------


def _ready(selection: Selection, cp: ContextParallel, call: Call, fields: Fields) -> Ready:
    rank_call, sink = _rank_call(cp, selection, call, fields), call.extras.softmax_offset
    tensors: list[Tensor | None] = [to_contract(call.config, t) for t in (call.q, call.k, call.v)]
    tensors += [_bias(call, rank_call.batch.spec), None if sink is None else sink.reshape(-1)]
    return Ready(call, rank_call, tensors)


def _run(ready: Ready) -> Any:
    call, rank_call, tensors = ready
    config = call.config
    with exchanging(rank_call.cp, rank_call.fields):
        rank_call = rank_call.with_seed(_seed(rank_call.cp, rank_call.batch.spec, call))
    out, max_logit = OverRanks.apply(rank_call, anchor_of(tensors) if call.need_grad else None, *tensors)
    out = to_caller(config, out)
    if config.flatten_heads:
        out = out.flatten(-2)
    return (out, max_logit) if config.return_max_logit else out


def _rank_call(cp: ContextParallel, selection: Selection, call: Call, fields: Fields) -> RankCall:
    """This rank's part: lengths, orders of rows and heads, all without reading tensors of a GPU where parts
    do not depend on them."""
    p, name, extras, device = selection.params, selection.backend, call.extras, call.q.device
    assert name is not None
    spec, n = make_spec(call.config, p, call.need_grad), cp.ring.size
    lengths, starts = _lengths_and_starts(call)
    rooms = [None if t is None else t.diff() for t in starts]
    alike = extras.cu_seqlens_q is extras.cu_seqlens_kv and starts[0] is starts[1]
    if not alike and device.type == "cpu" and starts[0] is not None and starts[1] is not None:
        alike = torch.equal(starts[0], starts[1])
    sizes = sizes_of(p, cp.layout, CANDIDATES[name].offsets)
    batch = Batch(
        spec,
        n,
        slots_of(sizes, spec, alike, lengths, (rooms[0], rooms[1])),
        lengths_q=lengths[0],
        lengths_kv=lengths[1],
        starts_q=None if starts[0] is None else starts[0] // n,
        starts_kv=None if starts[1] is None else starts[1] // n,
        starts_all=starts[1],
        head_offset=cp.a2a.rank * (p.num_heads // cp.a2a.size),
        alibi_slopes=_slopes(cp, p, call),
        bounds=(extras.max_seqlen_q, extras.max_seqlen_kv),
    )
    orders: dict[str, Tensor] = {}
    rows = call.config.form.rows
    if cp.a2a.size > 1:
        for field, t, at in (("order_q", call.q, starts[0]), ("order_kv", call.k, starts[1])):
            local = None if at is None else at // cp.size
            orders[field] = sequence_order(t.shape[rows], cp.a2a.size, device, local)
    if cp.layout.gathers:
        local = None if starts[1] is None else starts[1] // n
        orders["order_all"] = sequence_order(call.k.shape[rows] * cp.a2a.size, n, device, local)
    return RankCall(cp, kernel_of(name), batch, fields, **orders)


def _lengths_and_starts(
    call: Call,
) -> tuple[tuple[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]:
    """int32 [b] real rows of q and kv, where they are known, and int32 [b + 1] where packed ones start."""
    extras = call.extras
    if call.config.form.packed:
        assert extras.cu_seqlens_q is not None
        assert extras.cu_seqlens_kv is not None
        lengths = real_lengths(extras)
        if extras.cu_seqlens_q_padded is not None:
            return lengths, (extras.cu_seqlens_q_padded, extras.cu_seqlens_kv_padded)
        return lengths, (extras.cu_seqlens_q, extras.cu_seqlens_kv)
    return (real_lengths(extras) if call.config.has_padding else (None, None)), (None, None)


def _seed(cp: ContextParallel, spec: Spec, call: Call) -> Tensor | None:
    """The first rank's seed. Every rank draws one, so that their generators go on alike."""
    if not spec.dropout_p:
        return None
    seed = call.extras.dropout_seed
    seeds = (draw_seed(call.q.device) if seed is None else seed)[None]
    for member in cp.members:
        seeds = member.gather(seeds).flatten(0, 1)
    return seeds[0]


def _slopes(cp: ContextParallel, p: AttentionParams, call: Call) -> Tensor | None:
    """The slopes of this rank's heads."""
    if p.core_attention_bias_type != "alibi":
        return None
    slopes = call.extras.alibi_slopes
    if slopes is None:
        slopes = default_slopes(p.num_heads, call.q.device)
    return slopes.chunk(cp.a2a.size, -1)[cp.a2a.rank].contiguous()


def _bias(call: Call, spec: Spec) -> Tensor | None:
    """[b | 1, h | 1, rows of this rank | 1, all columns | 1]."""
    bias = call.extras.core_attention_bias
    if bias is None:
        return None
    if call.config.bias_type == "pre_scale_bias":
        bias = bias * spec.softmax_scale  # (x + bias) * scale = x * scale + bias * scale
    return bias[(None,) * (4 - bias.dim())]
