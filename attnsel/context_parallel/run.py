"""The way of a call over ranks: check, choose, agree, then run."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attnsel import debug
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.slopes import default_slopes
from attnsel.context_parallel.agree import ERROR, Fields, agree
from attnsel.context_parallel.choose import ROW_DIM, Chosen, choose, question, sizes_of
from attnsel.context_parallel.comm import sequence_order
from attnsel.context_parallel.group import ContextParallel
from attnsel.context_parallel.parts import Batch, slots_of
from attnsel.context_parallel.passes import Call, OverRanks
from attnsel.errors import InvalidInput, NoBackendError
from attnsel.params import AttentionParams
from attnsel.runtime.bind import CannotPrepare, kernel_of, real_lengths, to_contract
from attnsel.runtime.call import Config, Extras, signature
from attnsel.runtime.refusals import refusal_of
from attnsel.runtime.run import any_autocast, autocast, evidence, learn
from attnsel.runtime.sizes import lengths_of
from attnsel.select import Selection
from attnsel.settings import Settings, current

_MOST_CHOICES = 256


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

    Raises on all ranks alike: InvalidInput or NoBackendError where all have the same reason,
    ContextParallelError naming rank and field where they differ or one is gone.
    """
    if any_autocast():
        q, k, v = autocast(q, k, v)
    failure: Exception | None = None
    chosen: Chosen | None = None
    try:
        chosen, fields = _prepared(cp, config, q, k, v, extras, current())
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        failure, fields = error, Fields({ERROR: _told(error)})
    try:
        agree(cp.members, fields, q.device if isinstance(q, Tensor) else torch.device("cpu"))
    finally:
        if failure is not None:
            raise failure
    assert chosen is not None
    holder["_last"] = chosen.selection
    return _run(cp, chosen, config, fields, q, k, v, extras)


def explain(
    cp: ContextParallel, config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> Selection:
    """The selection this call would get on this rank; nothing is exchanged."""
    if any_autocast():
        q, k, v = autocast(q, k, v)
    p, need_grad = question(cp, config, q, k, v, extras)
    return choose(cp, config, p, need_grad, q, current(), evidence()).selection


# ---- choosing ---------------------------------------------------------------------------------------


def _prepared(
    cp: ContextParallel,
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    settings: Settings,
) -> tuple[Chosen, Fields]:
    """The choice for this signature, and what this rank tells the others. Raises what speaks against it."""
    described = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in (q, k, v))
    key = (
        config,
        settings,
        evidence(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        described,
        signature(extras),
    )
    found = cp.chosen.get(key)
    if found is None:
        found = _first(cp, config, q, k, v, extras, settings)
        if len(cp.chosen) >= _MOST_CHOICES:
            cp.chosen.clear()
        cp.chosen[key] = found
    chosen, fields = found
    contents = _lengths_held(extras)
    _check_packed(cp, config, q, k, extras)
    return chosen, Fields(fields, **contents) if contents else fields


def _first(
    cp: ContextParallel, config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, settings: Settings
) -> tuple[Chosen, Fields]:
    """A kernel that refuses when it is prepared is evidence, and the next candidate is tried."""
    p, need_grad = question(cp, config, q, k, v, extras)
    _check_packed(cp, config, q, k, extras)
    learnt = evidence()
    cause: Exception | None = None
    while True:
        chosen = choose(cp, config, p, need_grad, q, settings, learnt)
        try:
            chosen.selection.require()
        except NoBackendError as error:
            raise error from cause
        debug.announce(chosen.selection, settings, config.label)
        try:
            _prove(cp, config, chosen, q, k, v, extras)
        except CannotPrepare as error:
            cause = error
            refusal = refusal_of(chosen.selection, error)
            learn([refusal], settings)
            learnt = learnt.plus(refusal)
            continue
        return chosen, _fields(cp, config, chosen, q, k, v, extras)


def _prove(
    cp: ContextParallel, config: Config, chosen: Chosen, q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> None:
    """Every kernel call of this rank gets ready before anything is exchanged; own keys stand for others'."""
    assert chosen.selection.backend is not None
    kernel = kernel_of(chosen.selection.backend)
    if kernel.prepare is None:
        return
    seed = torch.zeros((), dtype=torch.int64, device=q.device) if chosen.spec.dropout_p else None
    call = _call(cp, chosen, config, Fields(), q, k, v, extras, seed)
    bias = _bias(config, chosen.spec, extras)
    q, k, v = (_as_exchanged(call, to_contract(config, t)) for t in (q, k, v))
    if call.gathers:
        k, v = (torch.cat([t] * cp.ring.size, call.row_dim) for t in (k, v))
    done: set[tuple[Spec, Any]] = set()
    for shift in call.shifts:
        for slot, part in call.parts(shift, q, k):
            spec = call.batch.spec_of(slot, part)
            inputs: Inputs = call.batch.inputs(slot, part, q, k, v, bias, call.gathers)
            seen = (spec, (inputs.q.shape, inputs.k.shape))
            if seen in done:
                continue
            done.add(seen)
            try:
                kernel.prepare(spec, inputs)
            except (ValueError, RuntimeError, NotImplementedError) as error:
                raise CannotPrepare(str(error)) from error


def _as_exchanged(call: Call, t: Tensor) -> Tensor:
    """A tensor of the shape that ``t`` has after heads were exchanged."""
    n = call.cp.a2a.size
    return t if n == 1 else torch.cat([t.chunk(n, 1)[0]] * n, call.row_dim)


def _fields(
    cp: ContextParallel, config: Config, chosen: Chosen, q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> Fields:
    fields = Fields({"cp_comm_type": cp.comm_type, "chosen backend": str(chosen.selection.backend)})
    for name, t in (("query_layer", q), ("key_layer", k), ("value_layer", v)):
        fields[f"{name}.shape"], fields[f"{name}.dtype"] = str(tuple(t.shape)), str(t.dtype)
    for name, value in json.loads(config.text).items():
        if name not in ("label", "text"):
            fields[name] = str(value)
    for name, value in extras._asdict().items():
        fields[name] = str(tuple(value.shape)) if isinstance(value, Tensor) else str(type(value).__name__)
    fields["requires_grad"] = str(chosen.need_grad)
    return fields


def _lengths_held(extras: Extras) -> dict[str, str]:
    """What the length tensors say, where reading them waits for nothing."""
    held = {}
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        t = getattr(extras, name)
        if t is not None and t.device.type == "cpu":
            held[f"{name} (contents)"] = str(t.tolist())
    return held


def _told(error: Exception) -> str:
    """The error for other ranks: its type and its text up to the first empty line."""
    return f"{type(error).__name__}: " + str(error).split("\n\n")[0]


def _check_packed(cp: ContextParallel, config: Config, q: Tensor, k: Tensor, extras: Extras) -> None:
    """Packed sequences are cut one by one, so each needs a length that divides. Read on the CPU only."""
    if config.qkv_format != "thd":
        return
    for name, t in (("cu_seqlens_q", q), ("cu_seqlens_kv", k)):
        padded, real = getattr(extras, f"{name}_padded"), getattr(extras, name)
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


# ---- running ----------------------------------------------------------------------------------------


def _run(
    cp: ContextParallel,
    chosen: Chosen,
    config: Config,
    fields: Fields,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
) -> Any:
    seed = _seed(cp, chosen.spec, q, extras)
    call = _call(cp, chosen, config, fields, q, k, v, extras, seed)
    sink = extras.softmax_offset
    out, max_logit = OverRanks.apply(
        call,
        *(to_contract(config, t) for t in (q, k, v)),
        _bias(config, chosen.spec, extras),
        None if sink is None else sink.reshape(-1),
    )
    if config.qkv_format == "bshd":
        out = out.transpose(1, 2)
    elif config.qkv_format == "sbhd":
        out = out.permute(2, 0, 1, 3)
    if config.flatten_heads:
        out = out.flatten(-2)
    return (out, max_logit) if config.return_max_logit else out


def _call(
    cp: ContextParallel,
    chosen: Chosen,
    config: Config,
    fields: Fields,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    seed: Tensor | None,
) -> Call:
    """This rank's call: lengths, orders of rows and heads, all without reading tensors of a GPU where parts
    do not depend on them."""
    p, spec, name = chosen.selection.params, chosen.spec, chosen.selection.backend
    assert name is not None
    packed, n, device = spec.packed, cp.ring.size, q.device
    lengths: tuple[Tensor | None, Tensor | None] = (None, None)
    starts: list[Tensor | None] = [None, None]
    if packed:
        assert extras.cu_seqlens_q is not None
        assert extras.cu_seqlens_kv is not None
        lengths = lengths_of(extras.cu_seqlens_q), lengths_of(extras.cu_seqlens_kv)
        padded = (extras.cu_seqlens_q_padded, extras.cu_seqlens_kv_padded)
        starts = (
            [padded[0], padded[1]] if padded[0] is not None else [extras.cu_seqlens_q, extras.cu_seqlens_kv]
        )
    elif "padding" in config.attn_mask_type:
        lengths = real_lengths(extras)
    rooms = tuple(None if t is None else t.diff() for t in starts)
    alike = extras.cu_seqlens_q is extras.cu_seqlens_kv and starts[0] is starts[1]
    if not alike and packed and device.type == "cpu" and starts[0] is not None and starts[1] is not None:
        alike = torch.equal(starts[0], starts[1])
    slots = slots_of(sizes_of(cp, p, spec, name), spec, packed, alike, lengths, (rooms[0], rooms[1]))
    batch = Batch(
        spec,
        n,
        slots,
        lengths_q=lengths[0],
        lengths_kv=lengths[1],
        starts_q=None if starts[0] is None else starts[0] // n,
        starts_kv=None if starts[1] is None else starts[1] // n,
        starts_all=starts[1],
        head_offset=cp.a2a.rank * (p.num_heads // cp.a2a.size),
        alibi_slopes=_slopes(cp, p, extras, device),
        dropout_seed=seed,
        bounds=(extras.max_seqlen_q, extras.max_seqlen_kv),
    )
    orders: dict[str, Tensor] = {}
    dim = ROW_DIM[config.qkv_format]
    if cp.a2a.size > 1:
        for field, t, at in (("order_q", q, starts[0]), ("order_kv", k, starts[1])):
            local = None if at is None else at // cp.size
            orders[field] = sequence_order(t.shape[dim], cp.a2a.size, device, local)
    if cp.comm_type == "all_gather":
        local = None if starts[1] is None else starts[1] // n
        orders["order_all"] = sequence_order(k.shape[dim], n, device, local)
    return Call(cp, kernel_of(name), batch, fields, **orders)


def _seed(cp: ContextParallel, spec: Spec, q: Tensor, extras: Extras) -> Tensor | None:
    """The first rank's seed. Every rank draws one, so that their generators go on alike."""
    if not spec.dropout_p:
        return None
    seed = extras.dropout_seed
    if seed is None:
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device=q.device)
    told = seed[None]
    for member in cp.members:
        told = member.gather(told).flatten(0, 1)
    return told[0]


def _slopes(cp: ContextParallel, p: AttentionParams, extras: Extras, device: torch.device) -> Tensor | None:
    """The slopes of this rank's heads."""
    if p.core_attention_bias_type != "alibi":
        return None
    slopes = extras.alibi_slopes
    if slopes is None:
        slopes = default_slopes(p.num_heads, device)
    return slopes.chunk(cp.a2a.size, -1)[cp.a2a.rank].contiguous()


def _bias(config: Config, spec: Spec, extras: Extras) -> Tensor | None:
    """[b | 1, h | 1, rows of this rank | 1, all columns | 1]."""
    bias = extras.core_attention_bias
    if bias is None:
        return None
    if config.bias_type == "pre_scale_bias":
        bias = bias * spec.softmax_scale  # (x + bias) * scale = x * scale + bias * scale
    return bias[(None,) * (4 - bias.dim())]
