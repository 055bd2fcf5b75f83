"""What cudnn-frontend's attention graphs mean, in float64 on CPU tensors, as its documentation defines them.

It shares no code with attnsel: what a bound, an offset or a stat means is written down a second time here. It
is stricter than the library (every buffer must fit what was declared for its uid) and as careless (rows that
stand for nothing are left NaN).

Sources: cudnn-frontend docs/operations/Attention.md: the left bound counts the diagonal, ragged offsets are
in elements, stats are natural-log and [b, h, s_q, 1], sinks are part of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "BFLOAT16": torch.bfloat16,
    "HALF": torch.float16,
    "FLOAT": torch.float32,
    "DOUBLE": torch.float64,
    "INT32": torch.int32,
    "INT64": torch.int64,
}


def carry_out(graph: Any, results: tuple[str, ...], pack: dict[int, Tensor]) -> None:
    """Run an ``sdpa`` or ``sdpa_backward`` on the memory that ``pack`` hands over by uid."""
    keywords = {id(value): name for name, value in graph.given.items()}
    declared = {keywords.get(id(t), name): t for name, t in graph.tensors.items()}
    declared |= dict(zip(results, graph.results, strict=True))
    buffers = {}
    for name, tensor in declared.items():
        if hasattr(tensor, "uid"):
            offsets = tensor.ragged_offset
            starts = None if offsets is None else pack[offsets.uid].flatten().tolist()
            buffers[name] = Buffer(tensor, pack[tensor.uid], starts)
    if graph.given.get("dropout") is not None:
        for name, tensor in zip(("seed", "offset"), graph.given["dropout"][1:], strict=True):
            buffers[name] = Buffer(tensor, pack[tensor.uid], None)
    Attention(graph.given, buffers).run(graph.node)


class Buffer:
    """A declared tensor and the memory handed over for it; ``entry(n)`` is sequence n as [h, s, d]."""

    def __init__(self, declared: Any, data: Tensor, starts: list[int] | None) -> None:
        assert data.dtype == DTYPES[declared.data_type], f"{declared.data_type} declared, {data.dtype} given"
        self.dims, self.strides = list(declared.dim), list(declared.stride)
        self.data, self.starts = data, starts
        if starts is None:
            self.all = data.as_strided(self.dims, self.strides)  # raises beyond the storage
            assert data.numel() >= math.prod(n for n, s in zip(self.dims, self.strides, strict=True) if s)
        else:
            assert len(starts) == self.dims[0] + 1

    def entry(self, n: int, length: int | None = None) -> Tensor:
        if self.starts is None:
            return self.all[n if self.dims[0] > 1 else 0]
        _, h, _, d = self.dims
        assert length is not None
        offset = self.data.storage_offset() + self.starts[n]
        return self.data.as_strided([h, length, d], self.strides[1:], offset)


class Attention:
    def __init__(self, given: dict[str, Any], buffers: dict[str, Buffer]) -> None:
        self.given, self.buffers = given, buffers
        self.b, self.h, self.s_q, _ = buffers["q"].dims
        self.paged = "paged_attention_k_table" in buffers
        self.s_kv = given["paged_attention_max_seq_len_kv"] if self.paged else buffers["k"].dims[2]

    def run(self, node: str) -> None:
        written = ("o", "stats", "score_max", "score_sum_exp") if node == "sdpa" else ("dQ", "dK", "dV")
        for name in (*written, "dBias", "dSink_token"):
            if name in self.buffers and self.buffers[name].starts is None:
                self.buffers[name].all.fill_(math.nan if name in written else 0.0)
        for n in range(self.b):
            len_q, len_kv = self.s_q, self.s_kv
            if self.given.get("use_padding_mask"):
                len_q, len_kv = (int(self.buffers[f"seq_len_{s}"].data.flatten()[n]) for s in ("q", "kv"))
                assert len_q <= self.s_q
                assert len_kv <= self.s_kv
            if len_q:
                (self.forward if node == "sdpa" else self.backward)(n, len_q, len_kv)

    def rows(self, name: str, n: int, length: int) -> Tensor:
        """[h or g, length, d] in float64."""
        return self.buffers[name].entry(n, length)[:, :length].double()

    def keys(self, name: str, n: int, length: int) -> Tensor:
        """[h, length, d]: heads of keys or values repeated."""
        if self.paged:
            pool = self.buffers[name].all
            table = self.buffers[f"paged_attention_{name}_table"].all[n, 0, :, 0]
            assert table.min() >= 0
            assert table.max() < pool.shape[0]
            found = torch.cat([pool[page] for page in table.tolist()], dim=1)[:, :length].double()
        else:
            found = self.rows(name, n, length)
        return found.repeat_interleave(self.h // found.shape[0], 0)

    def put(self, name: str, n: int, value: Tensor) -> None:
        length = value.shape[1]
        self.buffers[name].entry(n, length)[:, :length].copy_(value)

    def scores(self, n: int, len_q: int, len_kv: int) -> Tensor:
        x = self.rows("q", n, len_q) @ self.keys("k", n, len_kv).mT * self.given["attn_scale"]
        if "bias" in self.buffers:
            bias = self.buffers["bias"].entry(n)
            x = x + (bias if bias.shape[1] == 1 else bias[:, :len_q])[..., :len_kv].double()
        row, column = torch.arange(len_q)[:, None], torch.arange(len_kv)[None]
        if self.given.get("use_alibi_mask"):
            power = 2 ** int(math.log2(self.h))
            slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
            slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(self.h - power)]
            x = x + torch.tensor(slopes).double()[:, None, None] * (column - row)
        alignment = self.given.get("diagonal_alignment")
        if alignment is not None and alignment.name == "BOTTOM_RIGHT":
            row = row + len_kv - len_q
        seen = torch.ones(len_q, len_kv, dtype=torch.bool)
        if "diagonal_band_right_bound" in self.given:
            seen &= column - row <= self.given["diagonal_band_right_bound"]
        if "diagonal_band_left_bound" in self.given:
            seen &= row - column < self.given["diagonal_band_left_bound"]
        return x.masked_fill(~seen, -math.inf)

    def kept(self, n: int, len_q: int, len_kv: int) -> Tensor:
        """1 / (1 - p) where an entry stays."""
        if self.given.get("dropout") is None:
            return torch.ones(self.h, len_q, len_kv, dtype=torch.float64)
        p = self.given["dropout"][0]
        seed, offset = (int(self.buffers[name].data) for name in ("seed", "offset"))
        generator = torch.Generator().manual_seed((seed + 7919 * offset + 31 * n) % 2**62)
        drawn = torch.rand(self.h, self.s_q, self.s_kv, generator=generator)[:, :len_q, :len_kv]
        return (drawn >= p).double() / (1 - p)

    def forward(self, n: int, len_q: int, len_kv: int) -> None:
        x = self.scores(n, len_q, len_kv)
        with_sink = x
        if "sink_token" in self.buffers:
            sink = self.buffers["sink_token"].all.view(-1, 1, 1).double().expand(-1, len_q, 1)
            with_sink = torch.cat((x, sink), 2)
        stats = with_sink.logsumexp(2, keepdim=True)
        p = (x - stats).exp()  # NaN in rows that see nothing
        self.put("o", n, (p * self.kept(n, len_q, len_kv)) @ self.keys("v", n, len_kv))
        if "score_max" in self.buffers:
            top = x.amax(2, keepdim=True) if len_kv else x.new_full((*x.shape[:2], 1), -math.inf)
            self.put("score_max", n, top)
            self.put("score_sum_exp", n, (stats - top).exp())
        elif "stats" in self.buffers:
            self.put("stats", n, stats)

    def backward(self, n: int, len_q: int, len_kv: int) -> None:
        x, scale, g = self.scores(n, len_q, len_kv), self.given["attn_scale"], self.buffers["k"].dims[1]
        q, dout, out, stats = (self.rows(name, n, len_q) for name in ("q", "dO", "o", "stats"))
        p, keep = (x - stats).exp(), self.kept(n, len_q, len_kv)
        delta = (dout * out).sum(2, keepdim=True)
        ds = p * ((dout @ self.keys("v", n, len_kv).mT) * keep - delta)
        self.put("dQ", n, ds @ self.keys("k", n, len_kv) * scale)
        for name, grad in (("dK", ds.mT @ q * scale), ("dV", (p * keep).mT @ dout)):
            self.put(name, n, grad.unflatten(0, (g, self.h // g)).sum(1))
        if "dBias" in self.buffers:
            where = self.buffers["dBias"].entry(n)
            grad = ds if where.shape[0] == self.h else ds.sum(0, keepdim=True)
            grad = grad if where.shape[1] > 1 else grad.sum(1, keepdim=True)
            where[:, : grad.shape[1], :len_kv] += grad.to(where.dtype)
        if "dSink_token" in self.buffers:
            sink = self.buffers["sink_token"].all.view(-1, 1, 1).double()
            self.buffers["dSink_token"].all[0, :, 0, 0] -= ((sink - stats).exp() * delta).sum((1, 2)).float()
