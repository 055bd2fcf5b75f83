"""The contract's functions on cuDNN: look up the plans, hand over the buffers, tidy what comes back.

tests/gpu runs it on a card; tests/backends/cudnn/test_run.py carries the graphs out on a CPU, as the
frontend's documentation defines them, and holds the results against the contract's reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.checks import (
    ALIGNMENT,
    is_default,
    is_transformed,
    made_current,
    raise_if_transformed,
)
from attnsel.backends.contract import Grads, Inputs, Result, Spec, Steps
from attnsel.backends.cudnn import graph as graphs
from attnsel.backends.cudnn import plans as _session
from attnsel.backends.cudnn.graph import Four, Graph, GraphCall, Pages, Strided, dense
from attnsel.backends.cudnn.plans import plan_of
from attnsel.backends.rows import check_rows_given
from attnsel.backends.tiled.tiles import four_dims

# --------------------------------------------------------------------------------------------------------
# From the contract's tensors to a cuDNN graph's: which call it is, and what it is worked out from.
#
# ``problem`` turns a ``Spec`` and ``Inputs`` into a :class:`Problem`, memoised by everything it depends on,
# so a repeated call looks it up. Data is never read.
#
# Packed sequences (thd) have neither their number nor their longest length in common from one step to the
# next, and both are baked into a plan. They are rounded up (:func:`bucket`); the sequences added are empty.


_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


class Problem(NamedTuple):
    """One call without its data: its graphs, and their digests. ``backward`` is None for inference."""

    call: GraphCall
    forward: Graph
    forward_digest: str
    backward: Graph | None
    backward_digest: str
    per_row: tuple[str, ...]  # outputs of the forward with one number for each query row


def check(spec: Spec, inputs: Inputs) -> None:
    """ValueError for what no cuDNN graph can express, before anything is built or launched."""
    i = inputs
    wrong = {
        "attn_mask": i.attn_mask is not None and "cuDNN attention has no mask tensor",
        "softcap": spec.softcap and "cuDNN attention has no soft-capped scores here",
        "q_offset": (spec.q_offset or spec.kv_offset) and "cuDNN attention knows no position offsets",
        "dropout_seed": spec.dropout_p and i.dropout_seed is None and "dropout needs an int64 scalar tensor",
        "alibi_slopes": i.alibi_slopes is not None
        and not is_default(i.alibi_slopes)
        and "cuDNN computes its own slopes; only backends.checks.default_slopes may be given",
        "softmax_offset": spec.softmax_type == "learnable"
        and i.softmax_offset is None
        and "softmax_type 'learnable' needs a tensor [h]",
    }
    for name, words in wrong.items():
        if words:
            raise ValueError(f"{name}: {words}")
    if i.q.dtype not in _NAMES or i.k.dtype != i.q.dtype or i.v.dtype != i.q.dtype:
        allowed = ", ".join(str(dtype) for dtype in _NAMES)
        raise ValueError(f"dtype: q, k and v are {i.q.dtype}, {i.k.dtype} and {i.v.dtype}; one of {allowed}")
    check_rows_given(spec, inputs)
    if i.block_table is not None and i.bias is not None:
        raise ValueError("bias: cuDNN takes none beside keys and values in pages")
    for name in ("q", "k", "v", "bias"):
        tensor = getattr(i, name)
        if tensor is None:
            continue
        if tensor.numel() == 0:
            raise ValueError(f"{name}: cuDNN takes no empty tensor, its shape is {tuple(tensor.shape)}")
        if tensor.data_ptr() % ALIGNMENT:
            raise ValueError(f"{name}: its first element must lie on a multiple of {ALIGNMENT} bytes")


def bucket(length: int) -> int:
    """The length a plan is built for: exact up to 16, then 128, then four steps to each doubling, in whole
    128s. At most a quarter more, so 20 lengths of a training run are a handful of plans."""
    if length <= 16:
        return length
    if length <= 128:
        return 128
    step = max(1 << (length - 1).bit_length() - 3, 128)
    return -(-length // step) * step


def sequences(count: int) -> int:
    """The number of packed sequences a plan is built for: exact up to 8, then four steps to a doubling."""
    step = max(1, 1 << max(0, (count - 1).bit_length() - 3)) if count > 8 else 1
    return -(-count // step) * step


def problem(spec: Spec, inputs: Inputs) -> Problem:
    """The call's graphs. Raises ValueError as ``check`` does."""
    i = inputs
    return _problem(
        spec,
        *[(_NAMES[t.dtype], tuple(t.shape), t.stride()) for t in (i.q, i.k, i.v)],
        None if i.bias is None else _bias_facts(i.bias),
        (
            i.alibi_slopes is not None,
            i.seqlens_q is not None or i.seqlens_kv is not None,
            None if i.cu_seqlens_q is None else i.cu_seqlens_q.shape[0] - 1,
            i.max_seqlen_q,
            i.max_seqlen_kv,
            None if i.block_table is None else tuple(i.block_table.shape),
        ),
    )


Facts = tuple[str, tuple[int, ...], tuple[int, ...]]  # dtype, shape, strides


def _bias_facts(bias: Tensor) -> Any:
    return (_NAMES.get(bias.dtype, str(bias.dtype)), tuple(bias.shape), bias.requires_grad)


@lru_cache(maxsize=4096)
def _problem(spec: Spec, q: Facts, k: Facts, v: Facts, bias: Any, others: Any) -> Problem:
    call = _call(spec, q, k, v, bias, others)
    there = graphs.forward(call)
    back = graphs.backward(call) if spec.need_grad else None
    per_row = tuple([t.name for t in there.outputs if t.name in ("stats", "score_max", "score_sum_exp")])
    return Problem(call, there, there.key(), back, "" if back is None else back.key(), per_row)


def _call(spec: Spec, q: Facts, k: Facts, v: Facts, bias: Any, others: Any) -> GraphCall:
    alibi, padded, count, longest_q, longest_kv, table = others
    packed_kv = spec.packed and table is None
    # A bias has as many sequences, rows and columns as it has: those are not rounded up.
    there = (1, 1, 1, 1) if bias is None else _four((*(1,) * (4 - len(bias[1])), *bias[1]))
    dims_q = _packed_dims(q, count, longest_q, there[0], there[2]) if spec.packed else _four(q[1])
    dims_k = _packed_dims(k, count, longest_kv, there[0], there[3]) if packed_kv else _four(k[1])
    dims_v = (*dims_k[:3], v[1][-1])
    out = _laid_out(q, v[1][-1])
    windowed = spec.window_left >= 0 or spec.window_right >= 0
    return GraphCall(
        dtype=q[0],
        q=_strides(q, dims_q, spec.packed),
        k=_strides(k, dims_k, packed_kv),
        v=_strides(v, dims_v, packed_kv),
        out=_new(q, v[1][-1], dims_q, spec.packed),
        softmax_scale=spec.softmax_scale,
        packed_q=spec.packed,
        packed_kv=packed_kv,
        offset_dtype=graphs.offset_dtype(q[1:], k[1:], v[1:], out[1:]),
        padding=padded or spec.packed,
        window_left=spec.window_left,
        window_right=spec.window_right,
        bottom_right=spec.bottom_right and windowed,
        bias=None if bias is None else dense((*there[:3], dims_k[2]), "bhsd"),
        bias_dtype="" if bias is None else bias[0],
        bias_grad=bias is not None and bias[2] and spec.need_grad,
        alibi=alibi,
        dropout=spec.dropout_p,
        sink=spec.softmax_type != "vanilla",
        sink_grad=spec.softmax_type == "learnable" and spec.need_grad,
        pages=None if table is None else Pages(table[1], table[1] * k[1][2]),
        need_lse=spec.need_lse,
        need_grad=spec.need_grad,
        max_logit=spec.return_max_logit,
        deterministic=spec.deterministic,
        dq=_new(q, q[1][-1], dims_q, spec.packed),
        dk=_new(k, k[1][-1], dims_k, packed_kv),
        dv=_new(v, v[1][-1], dims_v, packed_kv),
    )


def _four(shape: tuple[int, ...]) -> Four:
    b, h, s, d = shape
    return b, h, s, d


def _packed_dims(facts: Facts, count: int, longest: int | None, exact_count: int, exact_rows: int) -> Four:
    """A packed tensor [t, h, d] as cuDNN sees it: every sequence as long as the longest. What is exactly so
    many is given, else 1."""
    tokens, heads, width = facts[1]
    rows = exact_rows if exact_rows > 1 else bucket(tokens if longest is None else longest)
    return count if exact_count > 1 else sequences(count), heads, rows, width


def _strides(facts: Facts, dims: Four, packed: bool) -> Strided:
    if not packed:
        return Strided(dims, _four(facts[2]))
    token, head, inner = facts[2]
    return Strided(dims, (dims[2] * token, head, token, inner))  # nobody reads the batch's


def _laid_out(like: Facts, width: int) -> Facts:
    """New memory in the order of an existing tensor's dimensions, with rows of ``width``."""
    dtype, shape, stride = like
    outer = sorted(range(len(shape) - 1), key=stride.__getitem__, reverse=True)
    strides = [1] * len(shape)
    step = width
    for dim in reversed(outer):
        strides[dim] = step
        step *= shape[dim]
    return dtype, (*shape[:-1], width), tuple(strides)


def _new(like: Facts, width: int, dims: Four, packed: bool) -> Strided:
    return _strides(_laid_out(like, width), (*dims[:3], width), packed)


# ---- buffers ----------------------------------------------------------------------------------------


def buffer_of(shape: Strided, like: Tensor) -> Tensor:
    """Uninitialised memory for a result: as the graph declares it, or, for packed tensors, as many rows as
    ``like`` has."""
    if like.dim() == 4:
        return like.new_empty_strided(shape.dims, shape.strides)
    _, head, token, inner = shape.strides
    return like.new_empty_strided((like.shape[0], shape.dims[1], shape.dims[3]), (token, head, inner))


def length_buffers(call: GraphCall, graph: Graph, inputs: Inputs) -> dict[str, Tensor]:
    """seq_len_q and seq_len_kv [b], and the offsets [b + 1] at which packed sequences begin, in elements."""
    if not call.padding:
        return {}
    len_q = _lengths(call, inputs.seqlens_q, inputs.cu_seqlens_q if call.packed_q else None, call.q, inputs)
    if same_lengths(call, inputs):
        len_kv = len_q
    else:
        cu = inputs.cu_seqlens_kv if call.packed_kv else None
        len_kv = _lengths(call, inputs.seqlens_kv, cu, call.k, inputs)
    found = {"seq_len_q": len_q, "seq_len_kv": len_kv}
    for offsets in graph.ragged:
        starts = _starts(inputs, offsets.side)
        dtype = torch.int64 if offsets.dtype == "int64" else torch.int32
        found[offsets.name] = _repeat_last(starts.to(dtype), offsets.entries) * offsets.unit
    return found


def same_lengths(call: GraphCall, inputs: Inputs) -> bool:
    """Whether queries and keys are known to be equally long, without a look at the data."""
    return call.packed_kv and inputs.cu_seqlens_q is inputs.cu_seqlens_kv


def _lengths(
    call: GraphCall, given: Tensor | None, cu: Tensor | None, side: Strided, inputs: Inputs
) -> Tensor:
    """int32 [b], b as the graph has it: sequences added to a packed batch are empty."""
    b = call.q.dims[0]
    if cu is not None:
        return _repeat_last(cu, b + 1).diff()
    if given is None:
        return torch.full((b,), side.dims[2], dtype=torch.int32, device=inputs.q.device)
    if given.shape[0] < b:
        given = torch.nn.functional.pad(given, (0, b - given.shape[0]))
    return given.to(torch.int32)


def _starts(inputs: Inputs, side: str) -> Tensor:
    """Where each packed sequence begins in memory, and where the last one ends."""
    cu = inputs.cu_seqlens_q if side == "q" else inputs.cu_seqlens_kv
    padded = inputs.cu_seqlens_q_padded if side == "q" else inputs.cu_seqlens_kv_padded
    starts = cu if padded is None else padded
    assert starts is not None
    return starts


def _repeat_last(t: Tensor, entries: int) -> Tensor:
    missing = entries - t.shape[0]
    return t if missing == 0 else torch.cat((t, t[-1:].expand(missing)))


# ---- rows that stand for nothing --------------------------------------------------------------------


class Tokens(NamedTuple):
    """Where each row [t] of a packed tensor belongs; ``outside`` lie in no sequence."""

    sequence: Tensor
    row: Tensor
    outside: Tensor


class Rows(NamedTuple):
    """Query rows whose results are not cuDNN's to say: bool [b, s_q], None where there are none.

    ``absent`` lie beyond their sequence, ``blind`` are there and see no key.
    """

    absent: Tensor | None
    blind: Tensor | None

    @property
    def dead(self) -> Tensor | None:
        if self.absent is None or self.blind is None:
            return self.blind if self.absent is None else self.absent
        return self.absent | self.blind


def tokens_of(call: GraphCall, inputs: Inputs, len_q: Tensor) -> Tokens:
    """For packed queries of these lengths [b]."""
    starts = _starts(inputs, "q")
    token = torch.arange(inputs.q.shape[0], device=inputs.q.device, dtype=starts.dtype)
    sequence = torch.searchsorted(starts[1:], token, right=True).clamp_(max=starts.shape[0] - 2)
    row = token - starts[sequence]
    outside = (row < 0) | (row >= len_q[sequence])
    return Tokens(sequence, row.clamp_(0, call.q.dims[2] - 1), outside)


def rows_of(call: GraphCall, inputs: Inputs, buffers: dict[str, Tensor]) -> Rows:
    """Told from lengths and bounds alone. What cuDNN leaves in such rows is not documented."""
    if not call.padding and not _may_be_blind(call):
        return _ALL_ROWS
    b, _, s_q, _ = call.q.dims
    row = torch.arange(s_q, device=inputs.q.device)[None]
    if not call.padding:
        return Rows(None, _blind(call, row, s_q, call.k.dims[2]).expand(b, s_q))
    len_q, len_kv = buffers["seq_len_q"][:, None], buffers["seq_len_kv"][:, None]
    absent = row >= len_q
    if same_lengths(call, inputs):
        return Rows(absent, None)  # every row sees itself
    return Rows(absent, _blind(call, row, len_q, len_kv) & ~absent)


_ALL_ROWS = Rows(None, None)


def absent_keys(call: GraphCall, buffers: dict[str, Tensor]) -> Tensor | None:
    """bool [b, s_kv]: keys beyond their sequence, of a dense padded batch."""
    if not call.padding or call.packed_kv or call.pages is not None:
        return None
    len_kv = buffers["seq_len_kv"]
    return torch.arange(call.k.dims[2], device=len_kv.device) >= len_kv[:, None]


def _may_be_blind(call: GraphCall) -> bool:
    s_q, s_kv = call.q.dims[2], call.k.dims[2]
    shift = s_kv - s_q if call.bottom_right else 0
    above = call.window_right >= 0 and shift + call.window_right < 0
    return above or (call.window_left >= 0 and s_q - 1 + shift - call.window_left >= s_kv)


def _blind(call: GraphCall, row: Tensor, len_q: Any, len_kv: Any) -> Tensor:
    """Rows whose window [row + shift - left, row + shift + right] misses the keys [0, len_kv)."""
    center = row + (len_kv - len_q) if call.bottom_right else row + 0 * len_kv
    blind = 0 * center + len_kv <= 0
    if call.window_right >= 0:
        blind = blind | (center + call.window_right < 0)
    if call.window_left >= 0:
        blind = blind | (center - call.window_left >= len_kv)
    return blind


INF = float("inf")


def prepare(spec: Spec, inputs: Inputs) -> None:
    """Build the forward plan and, with ``spec.need_grad``, the backward's: one that does not build after the
    forward has run is too late for another kernel. Raises ValueError, and RuntimeError in cuDNN's words."""
    check(spec, inputs)
    session = _session.current(inputs.q.device)
    found = problem(spec, inputs)
    with made_current(session.device):
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
    check(spec, inputs)
    session = _session.current(inputs.q.device)
    with torch.no_grad():
        return _attended(spec, problem(spec, inputs), inputs, session)


def _attended(spec: Spec, found: Problem, inputs: Inputs, session: _session.Session) -> Result:
    call, graph = found.call, found.forward
    with made_current(session.device):
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


def bind(spec: Spec, inputs: Inputs) -> Callable[..., Tensor] | Steps | None:
    """``forward`` for inference on a dense batch, and both directions of a call of q, k and v alone, with all
    that calls like this one have in common found out once; None for other calls, and for slopes, which each
    call has to show anew. Raises as ``prepare`` does.

    Plans are looked up at every call all the same: a thread has a handle of its own, and a CUDA graph pins
    the plans that it captures.
    """
    told = inputs.alibi_slopes, inputs.softmax_offset, inputs.block_table
    if spec.packed or spec.dropout_p or is_transformed() or any(t is not None for t in told):
        return None
    prepare(spec, inputs)
    found = problem(spec, inputs)
    call, graph, digest = found.call, found.forward, found.forward_digest
    names = {t.name for t in (*graph.inputs, *graph.outputs)}
    alone = names - {"stats"} == {"q", "k", "v", "o"} and not _may_be_blind(call)
    if spec.need_grad:
        return _steps(spec, found, tuple(t.stride() for t in inputs[:3])) if alone else None

    def bound(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Tensor:
        raise_if_transformed()
        session = _session.current(q.device)
        if not alone:
            _, bias, _, seqlens_q, seqlens_kv = others or (None,) * 5
            given = Inputs(q, k, v, bias=bias, seqlens_q=seqlens_q, seqlens_kv=seqlens_kv)
            return _attended(spec, found, given, session).out
        with made_current(session.device):
            out = buffer_of(call.out, q)
            plan_of(graph, digest, session).run(session, {"q": q, "k": k, "v": v, "o": out})
        return out

    return bound


def _steps(spec: Spec, found: Problem, strides: tuple[Any, ...]) -> Steps:
    """Both directions where every row sees a key: nothing is tidied, and no log-sum-exp is -inf."""
    call, back = found.call, found.backward
    assert back is not None
    rows = (*call.q.dims[:3], 1)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise_if_transformed()
        session = _session.current(q.device)
        with made_current(session.device):
            out, stats = buffer_of(call.out, q), torch.empty(rows, dtype=torch.float32, device=session.device)
            plan = plan_of(found.forward, found.forward_digest, session)
            plan.run(session, {"q": q, "k": k, "v": v, "o": out, "stats": stats})
        return out, stats.squeeze(3)

    def backward_again(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
    ) -> tuple[Tensor, ...]:
        if (q.stride(), k.stride(), v.stride()) != strides or not lse.is_contiguous():
            return backward(spec, Inputs(q, k, v), Result(out, lse), dout)[:3]
        session = _session.current(q.device)
        with made_current(session.device):
            buffers = {"q": q, "k": k, "v": v, "stats": lse.unsqueeze(3)}
            buffers["o"], buffers["dO"] = (_as_declared(t, call.out, q) for t in (out, dout))
            grads = {name: buffer_of(shape, t) for name, shape, t in _gradients(call, Inputs(q, k, v))}
            plan_of(back, found.backward_digest, session).run(session, {**buffers, **grads})
        return grads["dQ"], grads["dK"], grads["dV"]

    return Steps(forward, backward_again)


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
    with torch.no_grad(), made_current(session.device):
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


# ---- on the way in ----------------------------------------------------------------------------------


def _shared(call: GraphCall, graph: Graph, inputs: Inputs) -> dict[str, Tensor]:
    """What both directions read."""
    i, device = inputs, inputs.q.device
    buffers = {"q": i.q, "k": i.k, "v": i.v, **length_buffers(call, graph, inputs)}
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
    tokens = tokens_of(call, inputs, buffers["seq_len_q"])
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
    rows = rows_of(call, inputs, buffers)
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
    if same_lengths(call, inputs) and not spec.need_lse and not call.max_logit:
        return Result(out, None, None, () if stats is None else (stats,))
    rows = rows_of(call, inputs, buffers)
    tokens = tokens_of(call, inputs, buffers["seq_len_q"])
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


def _with_dead_rows(stats: Tensor, dead: Rows, sinks: Tensor | None) -> Tensor:
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
        dead = rows_of(call, inputs, buffers).dead
        if dead is not None:
            dq.masked_fill_(dead[:, None, :, None], 0.0)
        absent = absent_keys(call, buffers)
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
