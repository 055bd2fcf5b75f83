"""Rows of a call, computed again by ``tiled``: what self-check holds a kernel's numbers against.

Rows are taken where kernels go wrong: at the start, in the middle, where the diagonal enters or leaves, and
at the end, of the first, the last and the shortest sequence, for all heads and over all keys. The gradient
that flows into the output is zero in every other row, so that the gradients of all keys and values follow
from these rows alone, exactly, while the kernel runs the caller's own shapes and strides.

How far a right kernel may be off is measured, not guessed: the same rows are computed once more from inputs
that are changed at random by up to one unit of rounding. A kernel that rounds at every step is about as good
as the exact result for inputs so changed (backward stability), and a few times that difference is allowed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.tiled import kernel as tiled
from attnsel.backends.tiled.tiles import four_dims

RUN = 8  # rows taken together at each place
# One unit of rounding. float32 is 2**-10 on a GPU, where a kernel may multiply in TF32 (10 bits of mantissa,
# NVIDIA A100 whitepaper), and 2**-18 on a CPU, where PyTorch's own kernels take exp to 20 bits.
UNITS = {
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
    torch.float32: 2.0**-18,
    torch.float64: 2.0**-40,
}
_TF32 = 2.0**-10
TIMES_CHANGED = 2.0  # times the difference that one unit in the inputs makes
OF_ITSELF = 1.0  # units of a row's own size
OF_LARGEST = 1.0 / 32.0  # units of the largest row: 16-bit gradients of far keys vanish

Numbers = dict[str, list[Tensor]]
"""Results by name: out, lse and dq per piece of rows, dk and dv per sequence, dbias, dsoftmax_offset once."""


class SequenceSpan(NamedTuple):
    """Where one sequence lies: its place in the batch, first rows and lengths."""

    number: int
    start_q: int
    len_q: int
    start_kv: int
    len_kv: int


class RowBlock(NamedTuple):
    """A run of one sequence's query rows."""

    sequence: SequenceSpan
    rows: range

    def of_q(self, t: Tensor, packed: bool) -> Tensor:
        """These rows of ``[b, h, s_q, ...]`` or ``[t_q, h, ...]``, a view ``[1, h, rows, ...]``."""
        s, at = self.sequence, self.rows
        if not packed:
            return t[s.number : s.number + 1, :, at.start : at.stop]
        return t[s.start_q + at.start : s.start_q + at.stop].transpose(0, 1).unsqueeze(0)

    def of_pairs(self, t: Tensor) -> Tensor:
        """Their part of a 4-dimensional mask or bias, a view; dimensions of size 1 broadcast."""
        n = self.sequence.number
        t = t if t.shape[0] == 1 else t[n : n + 1]
        t = t if t.shape[2] == 1 else t[:, :, self.rows.start : self.rows.stop]
        return t if t.shape[3] == 1 else t[..., : self.sequence.len_kv]


class Difference(NamedTuple):
    """The worst row of one result: its error and what is allowed, both against the row's own size."""

    name: str
    ratio: float  # error / allowed
    error: float
    allowed: float
    where: str


def choose_rows(spec: Spec, inputs: Inputs) -> list[RowBlock]:
    """Reads lengths, where there are any, on the host. Empty when no sequence has a query."""
    sequences = [s for s in sequences_of(spec, inputs) if s.len_q > 0]
    if spec.dropout_p:  # entries are numbered by their place in the batch: only the first can stand alone
        sequences = [s for s in sequences if s.number == 0]
    if not sequences:
        return []
    shortest = min(sequences, key=lambda s: (s.len_kv == 0, s.len_kv))
    chosen = sorted({sequences[0], sequences[-1], shortest})
    return [RowBlock(s, rows) for s in chosen for rows in _runs(spec, s)]


def sequences_of(spec: Spec, i: Inputs) -> list[SequenceSpan]:
    """Where every sequence lies. Reads lengths, where there are any, on the host."""
    if not spec.packed:
        b = i.q.shape[0]
        room = i.k.shape[2] if i.block_table is None else 0
        len_q = [i.q.shape[2]] * b if i.seqlens_q is None else i.seqlens_q.tolist()
        len_kv = [room] * b if i.seqlens_kv is None else i.seqlens_kv.tolist()
        return [SequenceSpan(n, 0, len_q[n], 0, len_kv[n]) for n in range(b)]
    assert i.cu_seqlens_q is not None
    cu_q = i.cu_seqlens_q.tolist()
    starts_q = cu_q if i.cu_seqlens_q_padded is None else i.cu_seqlens_q_padded.tolist()
    if i.block_table is not None:
        assert i.seqlens_kv is not None
        starts_kv, len_kv = [0] * len(cu_q), i.seqlens_kv.tolist()
    else:
        assert i.cu_seqlens_kv is not None
        cu_kv = i.cu_seqlens_kv.tolist()
        starts_kv = cu_kv if i.cu_seqlens_kv_padded is None else i.cu_seqlens_kv_padded.tolist()
        len_kv = [b - a for a, b in pairwise(cu_kv)]
    return [
        SequenceSpan(n, starts_q[n], cu_q[n + 1] - cu_q[n], starts_kv[n], len_kv[n])
        for n in range(len(cu_q) - 1)
    ]


def _runs(spec: Spec, s: SequenceSpan) -> list[range]:
    """The first rows, the middle, the last, and where the diagonal meets the first or the last key."""
    shift = s.len_kv - s.len_q if spec.bottom_right else 0
    edges = []
    for bound in (spec.window_left, -spec.window_right if spec.window_right >= 0 else -1):
        if bound != -1:
            edges += [bound - shift, s.len_kv + bound - shift]
    if spec.window_right == 0 or edges:
        edges += [-shift, s.len_kv - shift]
    inside = [edge - RUN // 2 for edge in edges if 0 < edge < s.len_q]
    starts = [0, *inside, s.len_q // 2 - RUN // 2, s.len_q - RUN]
    runs: list[range] = []
    for start in sorted(starts):
        first = max(start, 0, runs[-1].stop if runs else 0)
        last = min(max(start, 0) + RUN, s.len_q)
        if first < last:
            runs.append(range(first, last))
    return runs


# ---- the same rows, by tiled ------------------------------------------------------------------------


def compute(
    spec: Spec,
    inputs: Inputs,
    pieces: list[RowBlock],
    douts: list[Tensor] | None,
    unit: float = 0.0,
    bias_scale: float = 1.0,
    seed: int = 1,
) -> Numbers:
    """What these rows give in float32 (float64 for float64); ``douts`` None: no gradients.

    ``unit``: first change every input by up to so much of itself, at random by ``seed``. Nothing is drawn
    from PyTorch's own generators. ``bias_scale``: what the caller's bias was multiplied by on its way into
    ``inputs``.
    """
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    generator = torch.Generator(inputs.q.device).manual_seed(seed)

    def widened(t: Tensor) -> Tensor:
        t = t.detach().to(wide)
        if not unit:
            return t
        noise = torch.rand(t.shape, generator=generator, dtype=wide, device=t.device)
        return t * (1.0 + unit * (2.0 * noise - 1.0))

    numbers: Numbers = {"out": [], "lse": []}
    totals: dict[str, Tensor] = {}
    kv: tuple[SequenceSpan, Tensor, Tensor] | None = None
    dkv: tuple[Tensor, Tensor] | None = None
    bias = None if inputs.bias is None else four_dims(inputs.bias.detach())
    sinks = None if inputs.softmax_offset is None else widened(inputs.softmax_offset)
    for number, piece in enumerate(pieces):
        s = piece.sequence
        if kv is None or kv[0] != s:
            k, v = (widened(keys_of(t, spec, inputs, s)) for t in (inputs.k, inputs.v))
            kv, dkv = (s, k, v), (torch.zeros_like(k), torch.zeros_like(v))
            if douts is not None:
                numbers.setdefault("dk", []).append(dkv[0])
                numbers.setdefault("dv", []).append(dkv[1])
        own_bias = None if bias is None else widened(piece.of_pairs(bias))
        one_spec, one = _alone(spec, inputs, piece, widened(piece.of_q(inputs.q, spec.packed)), kv[1:])
        one = one._replace(bias=own_bias, softmax_offset=sinks)
        result = tiled.forward(one_spec, one)
        assert result.lse is not None
        numbers["out"].append(result.out)
        numbers["lse"].append(result.lse)
        if douts is None:
            continue
        dout = widened(douts[number])
        dlse = None
        if unit:
            # A kernel rounds dout.v and dout.out apart from each other. Where one key has all the weight the
            # gradient is the difference of the two, equal but for that.
            one = one._replace(v=widened(one.v))
            dlse = unit * (dout * result.out).abs().sum(-1)
        grads = tiled.backward(one_spec, one, result, dout, dlse)
        numbers.setdefault("dq", []).append(grads.q)
        assert dkv is not None
        dkv[0].add_(grads.k)
        dkv[1].add_(grads.v)
        if bias is not None and grads.bias is not None:
            total = totals.setdefault("dbias", torch.zeros(bias.shape, dtype=wide, device=bias.device))
            piece.of_pairs(total).add_(grads.bias, alpha=bias_scale)
        if grads.softmax_offset is not None:
            total = totals.setdefault("dsoftmax_offset", torch.zeros_like(grads.softmax_offset))
            total.add_(grads.softmax_offset)
    return {**numbers, **{name: [total] for name, total in totals.items()}}


def _alone(
    spec: Spec, inputs: Inputs, piece: RowBlock, q: Tensor, kv: tuple[Tensor, Tensor]
) -> tuple[Spec, Inputs]:
    """The rows as a dense call of one sequence; its lengths keep the diagonal where the whole call has it."""
    s, slopes, mask = piece.sequence, inputs.alibi_slopes, inputs.attn_mask
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[s.number : s.number + 1]
    lengths = [torch.tensor([n], dtype=torch.int32, device=q.device) for n in (s.len_q, s.len_kv)]
    one = Inputs(
        q=q,
        k=kv[0],
        v=kv[1],
        attn_mask=None if mask is None else piece.of_pairs(four_dims(mask)),
        alibi_slopes=slopes,
        seqlens_q=lengths[0],
        seqlens_kv=lengths[1],
        dropout_seed=inputs.dropout_seed,
        dropout_offset=inputs.dropout_offset,
    )
    offset = spec.q_offset + piece.rows.start
    return dataclasses.replace(spec, packed=False, q_offset=offset, return_max_logit=False), one


def keys_of(t: Tensor, spec: Spec, i: Inputs, s: SequenceSpan) -> Tensor:
    """One sequence's keys or values, ``[1, g, len_kv, d]``."""
    if i.block_table is not None:
        size = t.shape[2]
        pages = i.block_table[s.number, : -(-s.len_kv // size)].long()
        return t[pages].transpose(0, 1).flatten(1, 2)[:, : s.len_kv].unsqueeze(0)
    return of_kv(t, spec.packed, s)


def of_kv(t: Tensor, packed: bool, s: SequenceSpan) -> Tensor:
    """A sequence's part of ``[b, g, s_kv, d]`` or ``[t_kv, g, d]``, a view ``[1, g, len_kv, d]``."""
    if not packed:
        return t[s.number : s.number + 1, :, : s.len_kv]
    return t[s.start_kv : s.start_kv + s.len_kv].transpose(0, 1).unsqueeze(0)


# ---- held against each other ------------------------------------------------------------------------


def unit_of(q: Tensor) -> float:
    """One unit of rounding for these inputs, where they lie."""
    if q.dtype == torch.float32 and q.device.type != "cpu":
        return _TF32
    return UNITS[q.dtype]


def differences(
    actual: Numbers,
    exact: Numbers,
    changed: Sequence[Numbers],
    unit: float,
    pieces: list[RowBlock],
    *,
    biased: bool,
) -> list[Difference]:
    """The worst row of everything the kernel gave, the worst result first.

    What is not finite in ``exact`` is not judged; what is not finite in ``actual`` alone is an error without
    bound. ``biased``: rows whose every score is -inf by a bias are not judged either: kernels differ in them.
    """
    places = list(dict.fromkeys(piece.sequence for piece in pieces))
    found = []
    for name, tensors in actual.items():
        per_piece = name in ("out", "lse", "dq")
        for number, tensor in enumerate(tensors):
            compared = [tensor, exact[name][number], *(other[name][number] for other in changed)]
            if name == "lse":
                compared = [t.unsqueeze(-1) for t in compared]
            if name in ("dbias", "dsoftmax_offset"):
                compared, where = [t.reshape(1, -1) for t in compared], name
            elif per_piece:
                where = f"sequence {pieces[number].sequence.number}, rows from {pieces[number].rows.start} on"
            else:
                where = f"sequence {places[number].number}, keys"
            judged = torch.ones(compared[1].shape[:-1], dtype=torch.bool, device=tensor.device)
            if biased and per_piece:
                judged = exact["lse"][number] > -math.inf
            worst = _worst_row(
                compared[0], compared[1], compared[2:], judged, unit, own=1.0 if name == "lse" else 0.0
            )
            if worst is not None:
                found.append(Difference(name, *worst, where))
    return sorted(found, key=lambda d: d.ratio, reverse=True)


def _worst_row(
    actual: Tensor, exact: Tensor, changed: Sequence[Tensor], judged: Tensor, unit: float, own: float
) -> tuple[float, float, float] | None:
    """(error / allowed, error, allowed) of the worst row, rows being the last dimension; None without any."""
    narrow = torch.finfo(actual.dtype)
    fits = exact.to(actual.dtype).to(exact.dtype)
    actual = actual.to(exact.dtype)
    same = (actual == exact) | (actual == fits)  # -inf is
    finite = torch.stack([t.isfinite() for t in changed]).all(0)
    judged = judged & (fits.isfinite() & finite | same).all(-1)
    if not judged.any():
        return None
    error = torch.where(same, 0.0, actual - exact).nan_to_num(math.inf, math.inf, math.inf).norm(dim=-1)
    exact, *changed = (t.nan_to_num(0.0, 0.0, 0.0) for t in (exact, *changed))
    size = exact.norm(dim=-1) + own
    moved = torch.stack([(t - exact).norm(dim=-1) for t in changed]).amax(0)
    allowed = TIMES_CHANGED * moved
    allowed += unit * (OF_ITSELF * size + OF_LARGEST * size[judged].max())
    allowed += 4.0 * narrow.eps * narrow.tiny * math.sqrt(exact.shape[-1])  # what lies between 0 and the next
    ratio = torch.where(judged, error / allowed, 0.0).flatten()
    at = int(ratio.argmax())
    scale = max(float(size.flatten()[at]), narrow.tiny)
    return float(ratio[at]), float(error.flatten()[at]) / scale, float(allowed.flatten()[at]) / scale
