"""The contract's functions on cuDNN: look up the plans, hand over the buffers, tidy what comes back.

Not run on a GPU yet. tests/backends/cudnn/test_run.py carries the graphs out on a CPU, as the frontend's
documentation defines them, and holds the results against the contract's reference.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.cudnn import session as _session
from attnsel.backends.cudnn import tensors as _tensors
from attnsel.backends.cudnn.call import GraphCall
from attnsel.backends.cudnn.graph import Graph
from attnsel.backends.cudnn.plans import plan_of
from attnsel.backends.cudnn.tensors import buffer_of, problem
from attnsel.backends.strides import Strided
from attnsel.backends.tiled.sequences import four_dims

INF = float("inf")


def prepare(spec: Spec, inputs: Inputs) -> None:
    """Build the forward plan and, with ``spec.need_grad``, the backward's: one that does not build after the
    forward has run is too late for another kernel. Raises ValueError, and RuntimeError in cuDNN's words."""
    _tensors.check(spec, inputs)
    session = _session.current(inputs.q.device)
    found = problem(spec, inputs)
    with _on(session.device):
        plan_of(found.forward, found.forward_digest, session)
        if found.backward is not None:
            plan_of(found.backward, found.backward_digest, session)


def forward(spec: Spec, inputs: Inputs) -> Result:
    """Attention as the contract states it. Dropout keeps other entries than the contract's generator would,
    the same ones for the same seed and offset.

    ``out`` has q's dtype and memory order. Of packed calls ``lse`` is made only with ``spec.need_lse``:
    cuDNN's own, padded to [b, h, s_q, 1], is what the backward reads.

    Raises ValueError for what no graph expresses, RuntimeError in cuDNN's words when it builds no plan.
    """
    _tensors.check(spec, inputs)
    session = _session.current(inputs.q.device)
    found = problem(spec, inputs)
    call, graph = found.call, found.forward
    with torch.no_grad(), _on(session.device):
        plan = plan_of(graph, found.forward_digest, session)
        buffers = _shared(call, graph, inputs)
        out = buffers["o"] = buffer_of(call.out, inputs.q)
        if spec.packed:
            out.zero_()  # rows of no sequence are nobody's to write
        b, h, s_q, _ = call.q.dims
        for name in found.per_row:
            buffers[name] = torch.empty((b, h, s_q, 1), dtype=torch.float32, device=session.device)
        plan.run(session, buffers)
        return _result(spec, call, inputs, out, buffers)


def backward(spec: Spec, inputs: Inputs, result: Result, dout: Tensor, dlse: Tensor | None = None) -> Grads:
    """Gradients of ``(out * dout).sum()``. ``result`` may hold an ``out`` and ``lse`` merged from several
    parts of the keys; without ``lse`` its ``saved`` must be a forward's own.

    Raises ValueError with ``dlse``: cuDNN's backward takes no gradient of the log-sum-exp.
    """
    if dlse is not None:
        raise ValueError("dlse: cuDNN's backward takes no gradient of the log-sum-exp")
    if not spec.need_grad:
        raise ValueError("spec.need_grad: a backward is planned before its forward runs")
    session = _session.current(inputs.q.device)
    found = problem(spec, inputs)
    call, graph = found.call, found.backward
    assert graph is not None
    with torch.no_grad(), _on(session.device):
        plan = plan_of(graph, found.backward_digest, session)
        buffers = _shared(call, graph, inputs)
        buffers["o"] = _as_declared(result.out, call.out, inputs.q)
        buffers["dO"] = _as_declared(dout, call.out, inputs.q)
        buffers["stats"] = _stats(call, inputs, result, buffers)
        for name, shape, like in _gradients(call, inputs):
            buffers[name] = buffer_of(shape, like)
            if like.dim() == 3:
                buffers[name].zero_()
        if call.bias_grad and call.bias is not None:
            buffers["dBias"] = torch.zeros_like(buffers["bias"])
        if call.sink_grad:
            buffers["dSink_token"] = torch.zeros_like(buffers["sink_token"])
        plan.run(session, buffers)
        return _grads(call, inputs, buffers)


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# ---- on the way in ----------------------------------------------------------------------------------


def _shared(call: GraphCall, graph: Graph, inputs: Inputs) -> dict[str, Tensor]:
    """What both directions read."""
    i, device = inputs, inputs.q.device
    buffers = {"q": i.q, "k": i.k, "v": i.v, **_tensors.length_buffers(call, graph, inputs)}
    if i.bias is not None and call.bias is not None:
        bias = four_dims(i.bias)
        buffers["bias"] = bias.expand(*bias.shape[:3], call.bias.dims[3]).contiguous()
    if call.dropout and i.dropout_seed is not None:
        offset = i.dropout_offset
        buffers["seed"] = i.dropout_seed.to(device).reshape(1, 1, 1, 1)
        buffers["offset"] = (
            torch.zeros_like(buffers["seed"]) if offset is None else offset.reshape(1, 1, 1, 1)
        )
    if call.sink:
        heads = call.q.dims[1]
        given = torch.zeros(heads, device=device) if i.softmax_offset is None else i.softmax_offset
        buffers["sink_token"] = given.to(torch.float32).reshape(1, heads, 1, 1)
    if i.block_table is not None:
        # Entries past a length name no page; cuDNN need not know that.
        table = i.block_table.clamp(0, i.k.shape[0] - 1)
        table = torch.nn.functional.pad(table, (0, 0, 0, call.q.dims[0] - table.shape[0]))
        table = table.reshape(*table.shape[:1], 1, table.shape[1], 1)
        buffers["paged_attention_k_table"] = buffers["paged_attention_v_table"] = table
    return buffers


def _as_declared(t: Tensor, shape: Strided, like: Tensor) -> Tensor:
    """``t`` where it already lies as the plan was built for, else a copy that does: a plan for every way a
    gradient may lie would be built after its forward ran."""
    wanted = shape.strides if like.dim() == 4 else shape.strides[2:0:-1] + shape.strides[3:]
    aligned = t.data_ptr() % 16 == 0
    if t.dtype == like.dtype and t.stride() == wanted and aligned:
        return t
    return buffer_of(shape, like).copy_(t)


def _stats(call: GraphCall, inputs: Inputs, result: Result, buffers: dict[str, Tensor]) -> Tensor:
    """The log-sum-exp as cuDNN reads it, [b, h, s_q, 1]. Rows that stand for nothing get +inf: exp(x - lse)
    is 0 there, where -inf would make it NaN."""
    if result.lse is None:
        stats: Tensor = result.saved[0]
        return stats
    if result.lse.dim() == 3:
        return _harmless(result.lse).contiguous().unsqueeze(3)
    b, h, s_q, _ = call.q.dims
    tokens = _tensors.tokens_of(call, inputs, buffers["seq_len_q"])
    place = (tokens.sequence * s_q + tokens.row).masked_fill(tokens.outside, b * s_q)
    flat = result.lse.new_full((b * s_q + 1, h), INF)
    flat[place] = _harmless(result.lse).t()
    return flat[:-1].view(b, s_q, h).transpose(1, 2).contiguous().unsqueeze(3)


def _harmless(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -INF, INF)


def _gradients(call: GraphCall, inputs: Inputs) -> tuple[tuple[str, Strided, Tensor], ...]:
    assert call.dq is not None
    assert call.dk is not None
    assert call.dv is not None
    return ("dQ", call.dq, inputs.q), ("dK", call.dk, inputs.k), ("dV", call.dv, inputs.v)


# ---- on the way out ---------------------------------------------------------------------------------


def _result(spec: Spec, call: GraphCall, inputs: Inputs, out: Tensor, buffers: dict[str, Tensor]) -> Result:
    """Rows that stand for nothing are set here, whatever cuDNN left in them."""
    if spec.packed:
        return _packed_result(spec, call, inputs, out, buffers)
    rows = _tensors.rows_of(call, inputs, buffers)
    dead = rows.dead
    if dead is not None:
        out.masked_fill_(dead[:, None, :, None], 0.0)
    max_logit = _largest(buffers, dead) if call.max_logit else None
    stats = _log_sum_exp(buffers)
    if stats is not None:
        stats = _with_dead_rows(stats, rows, buffers.get("sink_token")).squeeze(3)
    return Result(out, stats, max_logit)


def _packed_result(
    spec: Spec, call: GraphCall, inputs: Inputs, out: Tensor, buffers: dict[str, Tensor]
) -> Result:
    """``out`` is 0 where cuDNN wrote nothing, so only rows that see no key are left to set."""
    stats = _log_sum_exp(buffers)
    if _tensors.same_lengths(call, inputs) and not spec.need_lse and not call.max_logit:
        return Result(out, None, None, () if stats is None else (stats,))
    rows = _tensors.rows_of(call, inputs, buffers)
    tokens = _tensors.tokens_of(call, inputs, buffers["seq_len_q"])
    if rows.blind is not None:
        out.masked_fill_(rows.blind[tokens.sequence, tokens.row][:, None, None], 0.0)
    max_logit = _largest(buffers, rows.dead) if call.max_logit else None
    if stats is None:
        return Result(out, None, max_logit)
    stats = _with_dead_rows(stats, rows, buffers.get("sink_token"))
    if not spec.need_lse:
        return Result(out, None, max_logit, (_harmless(stats),))
    lse = stats.squeeze(3).transpose(1, 2)[tokens.sequence, tokens.row]
    return Result(out, lse.masked_fill(tokens.outside[:, None], -INF).t().contiguous(), max_logit)


def _log_sum_exp(buffers: dict[str, Tensor]) -> Tensor | None:
    """Stats, or the two numbers that come in their place beside the largest score."""
    if "score_max" in buffers:
        return buffers["score_max"] + buffers["score_sum_exp"].log()
    return buffers.get("stats")


def _largest(buffers: dict[str, Tensor], dead: Tensor | None) -> Tensor:
    """[h], -inf where no pair is visible."""
    largest = buffers["score_max"]
    if dead is not None:
        largest = largest.masked_fill(dead[:, None, :, None], -INF)
    return largest.amax((0, 2, 3))


def _with_dead_rows(stats: Tensor, dead: _tensors.Rows, sinks: Tensor | None) -> Tensor:
    """-inf for what is absent, and for rows that see no key, unless there are sinks: they see those."""
    if dead.blind is not None:
        blind = dead.blind[:, None, :, None]
        stats = stats.masked_fill(blind, -INF) if sinks is None else torch.where(blind, sinks, stats)
    if dead.absent is not None:
        stats = stats.masked_fill(dead.absent[:, None, :, None], -INF)
    return stats


def _grads(call: GraphCall, inputs: Inputs, buffers: dict[str, Tensor]) -> Grads:
    dq, dk, dv = buffers["dQ"], buffers["dK"], buffers["dV"]
    if not call.packed_q:
        dead = _tensors.rows_of(call, inputs, buffers).dead
        if dead is not None:
            dq.masked_fill_(dead[:, None, :, None], 0.0)
        absent = _tensors.absent_keys(call, buffers)
        if absent is not None:
            for grad in (dk, dv):
                grad.masked_fill_(absent[:, None, :, None], 0.0)
    dbias = dsinks = None
    if "dBias" in buffers and inputs.bias is not None:
        dbias = buffers["dBias"]
        if inputs.bias.shape[-1] != dbias.shape[-1]:
            dbias = dbias.sum(3, keepdim=True)
        dbias = dbias.view(inputs.bias.shape)
    if "dSink_token" in buffers and inputs.softmax_offset is not None:
        dsinks = buffers["dSink_token"].view(-1).to(inputs.softmax_offset.dtype)
    return Grads(dq, dk, dv, dbias, dsinks)
