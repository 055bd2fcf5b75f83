"""cudnn-frontend's attention graphs, carried out on CPU tensors in float64 as its documentation defines them.

It stands where the ``cudnn`` module would, behind ``backends/cudnn``. It shares no code with attnsel: what a
bound, an offset or a stat means is written down a second time here. It is stricter than the library (every
buffer must fit what was declared for its uid) and as careless (rows that stand for nothing are left NaN).

Sources: cudnn-frontend docs/operations/Attention.md and its python bindings (1.23): the left bound counts the
diagonal, ragged offsets are in elements, stats are natural-log and [b, h, s_q, 1], sinks are part of them.
"""

from __future__ import annotations

import math
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

__version__ = "1.23.0"
DTYPES = {
    "BFLOAT16": torch.bfloat16,
    "HALF": torch.float16,
    "FLOAT": torch.float32,
    "DOUBLE": torch.float64,
    "INT32": torch.int32,
    "INT64": torch.int64,
}
data_type = SimpleNamespace(
    **{name: name for name in (*DTYPES, "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "NOT_SET")}
)
diagonal_alignment = Enum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT")
heur_mode = Enum("heur_mode", "A FALLBACK")
NAN = float("nan")


class cudnnGraphNotSupportedError(RuntimeError):
    pass


built: list[pygraph] = []
"""Every graph whose plans were built, in order."""
REASON = "head dimension too large"
refuse: list[str] = []
"""Nodes for which no plan is built, such as "sdpa_backward"."""


def backend_version() -> int:
    return 91300


def create_handle() -> object:
    return object()


def set_stream(handle: object, stream: int) -> None:
    pass


class Tensor:
    def __init__(self, **said: Any) -> None:
        self.ragged_offset: Tensor | None = None
        self.__dict__.update(said)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def setter(value: Any) -> Tensor:
            setattr(self, name.removeprefix("set_"), value)
            return self

        return setter


class pygraph:
    """One node. ``tensor`` declares, ``sdpa`` and ``sdpa_backward`` say what is to be done."""

    def __init__(self, **how: Any) -> None:
        self.how = how
        self.declared: dict[int, Tensor] = {}
        self.results: list[Tensor] = []
        self.node = ""
        self.given: dict[str, Any] = {}

    def tensor(self, **said: Any) -> Tensor:
        made = self.declared[said["uid"]] = Tensor(**said)
        return made

    def sdpa(self, **given: Any) -> tuple[Tensor, Tensor | None]:
        self.node, self.given = "sdpa", given
        self.results = [Tensor(), Tensor()]
        return self.results[0], self.results[1] if given["generate_stats"] else None

    def sdpa_backward(self, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.node, self.given = "sdpa_backward", given
        self.results = [Tensor(), Tensor(), Tensor()]
        return self.results[0], self.results[1], self.results[2]

    def validate(self) -> None:
        assert self.how["handle"] is not None

    def build_operation_graph(self) -> None:
        pass

    def create_execution_plans(self, modes: Any) -> None:
        pass

    def check_support(self) -> None:
        if self.node in refuse:
            raise cudnnGraphNotSupportedError(
                "No valid engine configs for Matmul_\n"
                '{"engineId":8,"smVersion":900,"knobChoices":{}}\n'
                f"Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: {REASON} at: d > 128\n"
            )

    def build_plans(self) -> None:
        built.append(self)

    def get_workspace_size(self) -> int:
        return 16

    def execute(self, pack: dict[int, torch.Tensor], workspace: torch.Tensor, handle: object) -> None:
        assert workspace.numel() >= 16
        assert handle is not None
        names = {id(value): name for name, value in self.given.items() if isinstance(value, Tensor)}
        returned = ("o", "stats") if self.node == "sdpa" else ("dQ", "dK", "dV")
        buffers: dict[str, Buffer] = {}
        for tensor in (*self.declared.values(), *self.results):
            if not hasattr(tensor, "uid"):
                continue
            name = names.get(id(tensor))
            if name is None and tensor in self.results:
                name = returned[self.results.index(tensor)]
            offsets = tensor.ragged_offset
            starts = None if offsets is None else pack[offsets.uid].flatten().tolist()
            buffers[name or tensor.name] = Buffer(tensor, pack[tensor.uid], starts)
        dropout = self.given.get("dropout")
        if dropout is not None:
            buffers["seed"] = Buffer(dropout[1], pack[dropout[1].uid], None)
            buffers["offset"] = Buffer(dropout[2], pack[dropout[2].uid], None)
        Attention(self.given, buffers).run(self.node)


class Buffer:
    """A declared tensor and the memory handed over for it; ``entry(n)`` is sequence n as [h, s, d]."""

    def __init__(self, declared: Tensor, data: torch.Tensor, starts: list[int] | None) -> None:
        assert data.dtype == DTYPES[declared.data_type], f"{declared.data_type} declared, {data.dtype} given"
        self.dims, self.strides = list(declared.dim), list(declared.stride)
        self.data, self.starts = data, starts
        if starts is None:
            self.all = data.as_strided(self.dims, self.strides)  # raises beyond the storage
            assert data.numel() >= math.prod(n for n, s in zip(self.dims, self.strides, strict=True) if s)
        else:
            assert len(starts) == self.dims[0] + 1

    def entry(self, n: int, length: int | None = None) -> torch.Tensor:
        if self.starts is None:
            return self.all[n if self.dims[0] > 1 else 0]
        _, h, _, d = self.dims
        assert length is not None
        offset = self.data.storage_offset() + self.starts[n]
        return self.data.as_strided([h, length, d], self.strides[1:], offset)


class Attention:
    def __init__(self, given: dict[str, Any], buffers: dict[str, Buffer]) -> None:
        self.given, self.buffers = given, buffers
        self.b, self.h = buffers["q"].dims[:2]
        paged = "paged_attention_k_table" in buffers
        self.s_q = buffers["q"].dims[2]
        self.s_kv = given["paged_attention_max_seq_len_kv"] if paged else buffers["k"].dims[2]
        self.paged = paged

    def lengths(self, n: int) -> tuple[int, int]:
        if not self.given.get("use_padding_mask"):
            return self.s_q, self.s_kv
        found = [int(self.buffers[f"seq_len_{side}"].data.flatten()[n]) for side in ("q", "kv")]
        assert found[0] <= self.s_q
        assert found[1] <= self.s_kv
        return found[0], found[1]

    def keys(self, name: str, n: int, length: int) -> torch.Tensor:
        if not self.paged:
            return self.buffers[name].entry(n, length)[:, :length].double()
        table = self.buffers[f"paged_attention_{name}_table"].all[n, 0, :, 0]
        pool = self.buffers[name].all
        assert table.min() >= 0
        assert table.max() < pool.shape[0]
        return torch.cat([pool[page] for page in table.tolist()], dim=1)[:, :length].double()

    def visible(self, len_q: int, len_kv: int) -> torch.Tensor:
        row, column = torch.arange(len_q)[:, None], torch.arange(len_kv)[None]
        if self.given.get("diagonal_alignment") is diagonal_alignment.BOTTOM_RIGHT:
            row = row + len_kv - len_q
        seen = torch.ones(len_q, len_kv, dtype=torch.bool)
        if "diagonal_band_right_bound" in self.given:
            seen &= column - row <= self.given["diagonal_band_right_bound"]
        if "diagonal_band_left_bound" in self.given:
            seen &= row - column < self.given["diagonal_band_left_bound"]
        return seen

    def scores(self, n: int, len_q: int, len_kv: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = self.buffers["q"].entry(n, len_q)[:, :len_q].double()
        k = self.keys("k", n, len_kv)
        k = k.repeat_interleave(self.h // k.shape[0], 0)
        x = q @ k.transpose(1, 2) * self.given["attn_scale"]
        if "bias" in self.buffers:
            bias = self.buffers["bias"].entry(n)
            x = x + (bias if bias.shape[1] == 1 else bias[:, :len_q])[..., :len_kv].double()
        if self.given.get("use_alibi_mask"):
            power = 2 ** int(math.log2(self.h))
            slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
            slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(self.h - power)]
            distance = torch.arange(len_kv)[None] - torch.arange(len_q)[:, None]
            x = x + torch.tensor(slopes).double()[:, None, None] * distance
        return x.masked_fill(~self.visible(len_q, len_kv), -math.inf), q, k

    def kept(self, n: int, len_q: int, len_kv: int) -> torch.Tensor:
        """1 / (1 - p) where an entry stays."""
        if self.given.get("dropout") is None:
            return torch.ones(self.h, len_q, len_kv, dtype=torch.float64)
        p = self.given["dropout"][0]
        seed, offset = (int(self.buffers[name].data) for name in ("seed", "offset"))
        generator = torch.Generator().manual_seed((seed + 7919 * offset + 31 * n) % 2**62)
        drawn = torch.rand(self.h, self.s_q, self.s_kv, generator=generator)[:, :len_q, :len_kv]
        return (drawn >= p).double() / (1 - p)

    def run(self, node: str) -> None:
        if node == "sdpa":
            for name in ("o", "stats", "score_max", "score_sum_exp"):
                if name in self.buffers and self.buffers[name].starts is None:
                    self.buffers[name].all.fill_(NAN)
        else:
            for name in ("dQ", "dK", "dV"):
                if self.buffers[name].starts is None:
                    self.buffers[name].all.fill_(NAN)
            for name in ("dBias", "dSink_token"):
                if name in self.buffers:
                    self.buffers[name].all.zero_()
        for n in range(self.b):
            len_q, len_kv = self.lengths(n)
            if len_q:
                (self.forward if node == "sdpa" else self.backward)(n, len_q, len_kv)

    def forward(self, n: int, len_q: int, len_kv: int) -> None:
        x, _, _ = self.scores(n, len_q, len_kv)
        v = self.keys("v", n, len_kv)
        v = v.repeat_interleave(self.h // v.shape[0], 0)
        with_sink = x
        if "sink_token" in self.buffers:
            sink = self.buffers["sink_token"].all.view(-1, 1, 1).double().expand(-1, len_q, 1)
            with_sink = torch.cat((x, sink), 2)
        stats = with_sink.logsumexp(2, keepdim=True)
        p = (x - stats).exp()  # NaN in rows that see nothing
        self.put("o", n, len_q, (p * self.kept(n, len_q, len_kv)) @ v)
        if "score_max" in self.buffers:
            top = x.amax(2, keepdim=True) if len_kv else x.new_full((*x.shape[:2], 1), -math.inf)
            self.put("score_max", n, len_q, top)
            self.put("score_sum_exp", n, len_q, (stats - top).exp())
        elif "stats" in self.buffers:
            self.put("stats", n, len_q, stats)

    def put(self, name: str, n: int, length: int, value: torch.Tensor) -> None:
        self.buffers[name].entry(n, length)[:, :length].copy_(value)

    def backward(self, n: int, len_q: int, len_kv: int) -> None:
        x, q, k = self.scores(n, len_q, len_kv)
        g = self.buffers["k"].dims[1]
        v = self.keys("v", n, len_kv).repeat_interleave(self.h // g, 0)
        dout = self.buffers["dO"].entry(n, len_q)[:, :len_q].double()
        out = self.buffers["o"].entry(n, len_q)[:, :len_q].double()
        stats = self.buffers["stats"].entry(n, len_q)[:, :len_q].double()
        p, keep = (x - stats).exp(), self.kept(n, len_q, len_kv)
        delta = (dout * out).sum(2, keepdim=True)
        ds = p * ((dout @ v.transpose(1, 2)) * keep - delta)
        self.put("dQ", n, len_q, ds @ k * self.given["attn_scale"])
        dk = ds.transpose(1, 2) @ q * self.given["attn_scale"]
        dv = (p * keep).transpose(1, 2) @ dout
        for name, grad in (("dK", dk), ("dV", dv)):
            self.put(name, n, len_kv, grad.unflatten(0, (g, self.h // g)).sum(1))
        if "dBias" in self.buffers:
            where = self.buffers["dBias"].entry(n)
            grad = ds if where.shape[0] == self.h else ds.sum(0, keepdim=True)
            grad = grad if where.shape[1] > 1 else grad.sum(1, keepdim=True)
            where[:, : grad.shape[1], :len_kv] += grad.to(where.dtype)
        if "dSink_token" in self.buffers:
            sink = self.buffers["sink_token"].all.view(-1, 1, 1).double()
            grad = -((sink - stats).exp() * delta).sum((1, 2))
            self.buffers["dSink_token"].all[0, :, 0, 0] += grad.float()
