"""What ranks compute together, and the same computed by one process. No test here: see test_numbers.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnsel import DotProductAttention

COMMS = ("p2p", "all_gather", "a2a", "a2a+p2p")
ROWS = {"bshd": 1, "sbhd": 0, "thd": 0}


@dataclass(frozen=True)
class Case:
    """``module``: arguments of DotProductAttention. ``call``: which other tensors are made.

    packed: (real lengths of q, rows they have room in), and kv's if they differ.
    lengths: real rows of q and kv of a padded batch.
    """

    name: str
    module: dict[str, Any] = field(default_factory=dict)
    b: int = 2
    h: int = 4
    g: int = 4
    s_q: int = 32
    s_kv: int = 32
    d: int = 8
    e: int = 8
    fmt: str = "bshd"
    dtype: torch.dtype = torch.float64
    packed: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    lengths: tuple[tuple[int, ...], ...] = ()
    bias: tuple[int, int, int, int] | None = None
    slopes: bool = False
    backend: str | None = "tiled"
    comms: tuple[str, ...] = COMMS
    recompute: bool = False
    chosen: str = ""  # the backend that must have run; "" for ``backend``

    def make_module(self, **cp: Any) -> DotProductAttention:
        arguments = {"attn_mask_type": "causal", "backend": self.backend} | self.module
        made = DotProductAttention(self.h, (self.d, self.e), self.g, qkv_format=self.fmt, **arguments, **cp)
        if made.softmax_offset is not None:
            with torch.no_grad():
                made.softmax_offset.copy_(torch.linspace(-1, 1, self.h).view(1, -1, 1, 1))
        return made.to(self.dtype)


@dataclass
class Whole:
    """The tensors of the whole sequence: q, k, v, dout, and what a call takes besides."""

    tensors: dict[str, Tensor]
    arguments: dict[str, Any]
    bias: Tensor | None


def cumulated(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make(case: Case) -> Whole:
    seed = sum(ord(c) * (i + 1) for i, c in enumerate(case.name))
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(case.dtype)

    arguments: dict[str, Any] = {"checkpoint_core_attention": True} if case.recompute else {}
    if case.packed:
        sides = [(cumulated(real), cumulated(room)) for real, room in case.packed]
        sides *= 3 - len(sides)
        leads = [(int(room[-1]),) for _, room in sides]
        for name, (real, room) in zip(("q", "kv"), sides, strict=True):
            arguments[f"cu_seqlens_{name}"], arguments[f"cu_seqlens_{name}_padded"] = real, room
    else:
        leads = [(case.b, s) if case.fmt == "bshd" else (s, case.b) for s in (case.s_q, case.s_kv)]
    tensors = {
        "q": normal(*leads[0], case.h, case.d),
        "k": normal(*leads[1], case.g, case.d),
        "v": normal(*leads[1], case.g, case.e),
        "dout": normal(*leads[0], case.h * case.e),
    }
    for name, lengths in zip(("q", "kv"), case.lengths, strict=False):
        arguments[f"cu_seqlens_{name}"] = cumulated(lengths)
    if case.slopes:
        arguments["alibi_slopes"] = torch.linspace(0.1, 0.7, case.h)
        arguments["core_attention_bias_type"] = "alibi"
    bias = None
    if case.bias is not None:
        arguments["core_attention_bias_type"] = "post_scale_bias"
        bias = normal(*case.bias)
    return Whole(tensors, arguments, bias)


def positions(case: Case, kv: bool, rank: int, size: int) -> Tensor:
    """Which rows of the whole tensor a rank holds: head and tail chunk of each sequence."""
    if not case.packed:
        return _of_one(case.s_kv if kv else case.s_q, rank, size)
    _, rooms = case.packed[-1 if kv else 0]
    starts = cumulated(rooms).tolist()
    return torch.cat([start + _of_one(n, rank, size) for start, n in zip(starts, rooms, strict=False)])


def _of_one(rows: int, rank: int, size: int) -> Tensor:
    if rows % (2 * size):
        local = rows // size
        return torch.arange(rank * local, (rank + 1) * local)
    chunk = rows // (2 * size)
    tail = 2 * size - 1 - rank
    return torch.cat([torch.arange(n * chunk, (n + 1) * chunk) for n in (rank, tail)])


@dataclass
class Ran:
    """What a rank's forward was given and returned; ``backward`` adds the gradients."""

    module: DotProductAttention
    local: dict[str, Tensor]
    bias: Tensor | None
    out: Tensor
    largest: Tensor | None

    def found(self) -> dict[str, Tensor]:
        found = {"out": self.out.detach()} | {f"d{name}": self.local[name].grad for name in "qkv"}
        if self.bias is not None:
            found["dbias"] = self.bias.grad
        if self.module.softmax_offset is not None:
            found["dsink"] = self.module.softmax_offset.grad
        if self.largest is not None:
            found["max_logit"] = self.largest
        return {name: t for name, t in found.items() if t is not None}

    def backward(self) -> None:
        (self.out * self.local["dout"]).sum().backward()


def forward(
    case: Case, module: DotProductAttention, whole: Whole, rank: int = 0, size: int = 1, *, grad: bool = True
) -> Ran:
    """A rank's forward; of one process with size 1."""
    dim = ROWS[case.fmt]
    rows_q, rows_kv = (positions(case, kv, rank, size) for kv in (False, True))
    local = {
        name: t.index_select(dim, rows_kv if name in "kv" else rows_q).requires_grad_(grad and name in "qkv")
        for name, t in whole.tensors.items()
    }
    arguments = dict(whole.arguments)
    bias = whole.bias
    if bias is not None:
        bias = bias if bias.shape[2] == 1 else bias[:, :, rows_q]
        arguments["core_attention_bias"] = bias = bias.detach().clone().requires_grad_(grad)
    torch.manual_seed(11)
    out = module(local["q"], local["k"], local["v"], **arguments)
    out, largest = out if isinstance(out, tuple) else (out, None)
    return Ran(module, local, bias, out, largest)


def compute(
    case: Case, module: DotProductAttention, whole: Whole, rank: int = 0, size: int = 1
) -> dict[str, Tensor]:
    """A rank's outputs and gradients; of one process with size 1."""
    ran = forward(case, module, whole, rank, size)
    ran.backward()
    return ran.found()


def together(case: Case, parts: list[dict[str, Tensor]], whole: Whole) -> dict[str, Tensor]:
    """What the ranks found, as one process would have it."""
    size, dim = len(parts), ROWS[case.fmt]
    found: dict[str, Tensor] = {}
    for name in parts[0]:
        every = [part[name] for part in parts]
        if name == "max_logit":
            assert all(torch.equal(t, every[0]) for t in every), "all ranks get the same"
            found[name] = every[0]
        elif name == "dsink" or (name == "dbias" and every[0].shape[2] == 1):
            found[name] = torch.stack(every).sum(0)
        else:
            kv, at = name in ("dk", "dv"), 2 if name == "dbias" else dim
            order = torch.cat([positions(case, kv, rank, size) for rank in range(size)])
            found[name] = torch.empty_like(torch.cat(every, at)).index_copy_(at, order, torch.cat(every, at))
    return found


TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def check(case: Case, parts: Sequence[dict[str, Tensor]], what: str = "", backend: str | None = "") -> None:
    """What the ranks found is what one process finds, with the case's backend or ``backend``."""
    whole = make(case)
    alone = case if backend == "" else replace(case, backend=backend)
    wanted, got = compute(alone, alone.make_module(), whole), together(case, list(parts), whole)
    assert got.keys() == wanted.keys(), what
    limit = TOLERANCE[case.dtype]
    for name, one in wanted.items():
        said = lambda text, name=name: f"{what} {name}: {text}"  # noqa: E731
        torch.testing.assert_close(got[name], one, rtol=limit, atol=limit, msg=said)


THD = ((13, 16, 5), (16, 16, 16)), ((13, 16, 5), (16, 16, 16))
UNLIKE = ((8, 16, 3), (16, 16, 16)), ((20, 16, 9), (32, 16, 16))
OPEN: dict[str, Any] = {"attn_mask_type": "no_mask"}
CORNER: dict[str, Any] = {"attn_mask_type": "causal_bottom_right"}
RAGGED: dict[str, Any] = {"attn_mask_type": "padding_causal"}
RAGGED_CORNER: dict[str, Any] = {"attn_mask_type": "padding_causal_bottom_right"}
DENSE = ("p2p", "all_gather")

LONGER: dict[str, Any] = {"s_q": 16, "s_kv": 48}
PACKED: dict[str, Any] = {"fmt": "thd", "packed": THD}
DROPOUT: dict[str, Any] = {"attention_dropout": 0.3}
SINKS: dict[str, Any] = {"softmax_type": "learnable"}
FLOAT: dict[str, Any] = {"dtype": torch.float32, "backend": None}
TRITON: dict[str, Any] = {"dtype": torch.float32, "backend": "triton", "comms": ("p2p",), "h": 2, "g": 2}

CASES = (
    Case("causal"),
    Case("causal sbhd", fmt="sbhd", b=3),
    Case("no mask", OPEN),
    Case("no mask, odd rows", OPEN, s_q=12, s_kv=20, comms=("p2p", "a2a")),
    Case("causal cross", **LONGER),
    Case("bottom right", CORNER, **LONGER),
    Case("bottom right, more queries", CORNER, s_q=48, s_kv=16),
    Case("window", {"window_size": (5, 0)}),
    Case("window to both sides", OPEN | {"window_size": (3, 7)}),
    Case("window, bottom right", CORNER | {"window_size": (9, 0)}, **LONGER),
    Case("grouped queries", h=8, g=4),
    Case("head dimensions", d=8, e=16),
    Case("softcap", {"softcap": 2.0}),
    Case("learnable sinks", SINKS),
    Case("sinks of zero", {"softmax_type": "off-by-one"}),
    Case("sinks, packed", SINKS | RAGGED, **PACKED),
    Case("max logit", {"return_max_logit": True}),
    Case("alibi", slopes=True),
    Case("alibi, bottom right", CORNER, slopes=True, **LONGER),
    Case("bias", bias=(2, 4, 32, 32), comms=DENSE),
    Case("bias of columns", bias=(1, 4, 1, 32), comms=DENSE),
    Case("dropout", DROPOUT),
    Case("dropout, bottom right", DROPOUT | CORNER, **LONGER),
    Case("dropout, packed", DROPOUT | RAGGED, **PACKED),
    Case("padding", {"attn_mask_type": "padding"}, lengths=((20, 32), (20, 32))),
    Case("padding, causal", RAGGED, lengths=((7, 30), (7, 30))),
    Case("padding, bottom right", RAGGED_CORNER, lengths=((7, 30), (20, 32))),
    Case("padding and a window", RAGGED | {"window_size": (6, 0)}, lengths=((20, 32),) * 2),
    Case("packed", {"attn_mask_type": "padding"}, **PACKED),
    Case("packed, causal", RAGGED, **PACKED),
    Case("packed, one set of lengths", RAGGED, fmt="thd", packed=THD[:1]),
    Case("packed, unlike lengths", RAGGED_CORNER, fmt="thd", packed=UNLIKE),
    Case("packed, window", RAGGED | {"window_size": (4, 0)}, fmt="thd", packed=(((13, 29), (16, 32)),)),
    Case("packed, alibi", RAGGED, slopes=True, **PACKED),
    Case("recomputed in backward", DROPOUT, recompute=True, comms=("p2p",)),
    # Interpreted: the same kernels as on a GPU, and the same offsets.
    Case("triton", b=1, **TRITON | {"comms": ("p2p", "all_gather")}),
    Case("triton, a window and sinks", SINKS | {"window_size": (9, 0)}, b=1, **TRITON | {"g": 1}),
    Case("triton, dropout and alibi", DROPOUT, slopes=True, b=1, **TRITON),
    Case("triton, packed", RAGGED, fmt="thd", packed=(((13, 16), (16, 16)),), **TRITON),
    # Kernels without offsets take the full and the diagonal steps.
    Case("flash", chosen="sdpa.flash", **FLOAT),
    Case("flash, bf16", dtype=torch.bfloat16, backend=None, chosen="sdpa.flash"),
    # What it cannot, tiled runs.
    Case("a window in float32", {"window_size": (5, 0)}, chosen="tiled", comms=("p2p", "a2a+p2p"), **FLOAT),
)
