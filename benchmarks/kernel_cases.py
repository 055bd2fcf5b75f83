"""The calls that ``kernel_speed.py`` times: shapes, work, tensors, and whether a kernel gets them right."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from attnsel import AttentionParams
from attnsel.backends.contract import Inputs, Spec
from attnsel.runtime.kernels import Kernel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("forward", "backward", "decode")

# Speed over sdpa.flash on Hopper that is aimed at: (kind, head_dim, causal) -> ratio. None: both.
TARGETS: dict[tuple[str, int, bool | None], float] = {
    ("forward", 64, False): 1.2,
    ("forward", 128, False): 1.2,
    ("forward", 128, True): 1.1,
    ("backward", 64, None): 1.0,
    ("backward", 128, None): 0.9,
}


class Case(NamedTuple):
    """One call: ``kind`` forward, backward or decode (a forward of one query row per sequence)."""

    kind: str
    dtype: str
    head_dim: int
    causal: bool
    batch: int
    heads: int
    groups: int
    seqlen_q: int
    seqlen_kv: int

    @property
    def flops(self) -> float:
        """Multiplications and additions of the matrix products; a causal mask halves them.

        Two products forward, five backward (the scores again, dV, dP, dQ, dK): FlashAttention's convention.
        """
        one = 2.0 * self.batch * self.heads * self.seqlen_q * self.seqlen_kv * self.head_dim
        return one * (5 if self.kind == "backward" else 2) * (0.5 if self.causal else 1.0)

    @property
    def bytes(self) -> float:
        """What must move: q, k and v once in, out once out."""
        rows = 2 * self.heads * self.seqlen_q + 2 * self.groups * self.seqlen_kv
        return float(rows * self.batch * self.head_dim * DTYPES[self.dtype].itemsize)

    def rate(self, milliseconds: float) -> float:
        """TFLOP/s; GB/s for decode."""
        if self.kind == "decode":
            return self.bytes / milliseconds / 1e6
        return self.flops / milliseconds / 1e9

    @property
    def unit(self) -> str:
        return "GB/s" if self.kind == "decode" else "TFLOP/s"

    @property
    def target(self) -> float | None:
        either = TARGETS.get((self.kind, self.head_dim, None))
        return TARGETS.get((self.kind, self.head_dim, self.causal), either)

    @property
    def params(self) -> AttentionParams:
        """The question the rules are asked."""
        return AttentionParams(
            dtype=self.dtype,
            batch_size=self.batch,
            num_heads=self.heads,
            num_gqa_groups=self.groups,
            max_seqlen_q=self.seqlen_q,
            max_seqlen_kv=self.seqlen_kv,
            head_dim_qk=self.head_dim,
            head_dim_v=self.head_dim,
            attn_mask_type="causal" if self.causal else "no_mask",
            is_training=self.kind == "backward",
        )

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        shape = f"b{self.batch} s{self.seqlen_q}" if self.kind != "decode" else f"b{self.batch}"
        return f"{self.kind} {self.dtype} d{self.head_dim} {mask} {shape} kv{self.seqlen_kv}"


class Grid(NamedTuple):
    """Which cases. ``tokens`` = batch x sequence and ``hidden`` = heads x head_dim stay the same."""

    tokens: int
    hidden: int
    head_dims: tuple[int, ...]
    seqlens: tuple[int, ...]
    dtypes: tuple[str, ...]
    decode_heads: tuple[int, int, int]  # query heads, kv heads, head_dim
    decode_seqlens: tuple[int, ...]
    decode_batches: tuple[int, ...]
    samples: int


FULL = Grid(
    16384, 2048, (64, 128, 256), (1024, 2048, 4096, 8192, 16384), ("bf16", "fp16"),
    (32, 8, 128), (1024, 4096, 16384, 65536), (1, 4, 16, 64), 21,
)  # fmt: skip
QUICK = FULL._replace(
    head_dims=(64, 128), seqlens=(2048, 8192), dtypes=("bf16",),
    decode_seqlens=(4096, 65536), decode_batches=(1, 16), samples=7,
)  # fmt: skip
# On the interpreter: whether the program runs.
REHEARSAL = Grid(32, 128, (64,), (32,), ("fp16",), (4, 2, 16), (64,), (1, 2), 2)


def cases(grid: Grid, kinds: tuple[str, ...] = KINDS) -> list[Case]:
    """All of them, those that say most first: with a target, bf16, lengths from the middle outwards."""
    made = [
        Case(kind, dtype, d, causal, max(1, grid.tokens // s), grid.hidden // d, grid.hidden // d, s, s)
        for kind in ("forward", "backward")
        for dtype in grid.dtypes
        for d in grid.head_dims
        for causal in (False, True)
        for s in grid.seqlens
    ]
    heads, groups, d = grid.decode_heads
    made += [
        Case("decode", dtype, d, False, b, heads, groups, 1, s)
        for dtype in grid.dtypes[:1]
        for s in grid.decode_seqlens
        for b in grid.decode_batches
    ]
    middle = grid.seqlens[len(grid.seqlens) // 2]

    def order(case: Case) -> tuple[object, ...]:
        distance = max(case.seqlen_kv, middle) // min(case.seqlen_kv, middle)
        untargeted = case.target is None and case.kind != "decode"
        return case.dtype != grid.dtypes[0], untargeted, distance

    return sorted((case for case in made if case.kind in kinds), key=order)


@dataclass(frozen=True)
class Call:
    """A case with tensors, in bshd memory as models have it."""

    case: Case
    spec: Spec
    inputs: Inputs
    dout: Tensor

    @classmethod
    def of(cls, case: Case, device: torch.device) -> Call:
        gen = torch.Generator(device).manual_seed(0)

        def normal(rows: int, heads: int) -> Tensor:
            shape = (case.batch, rows, heads, case.head_dim)
            return torch.randn(shape, generator=gen, device=device, dtype=DTYPES[case.dtype]).transpose(1, 2)

        q, dout = (normal(case.seqlen_q, case.heads) for _ in range(2))
        k, v = (normal(case.seqlen_kv, case.groups) for _ in range(2))
        spec = Spec(
            softmax_scale=case.head_dim**-0.5,
            window_right=0 if case.causal else -1,
            need_lse=True,
            need_grad=case.kind == "backward",
        )
        return cls(case, spec, Inputs(q, k, v), dout)

    @cached_property
    def wanted(self) -> list[dict[str, tuple[Tensor, float]]]:
        """For each group looked at, by name: the float64 result and plain PyTorch's error at this dtype."""
        found = []
        for group in self.groups_looked_at:
            exact = self._reference(group, torch.float64, rows=1024)
            plain = self._reference(group, DTYPES[self.case.dtype], rows=self.case.seqlen_q)
            found.append({name: (t, _apart(plain[name], t)) for name, t in exact.items()})
        return found

    @property
    def groups_looked_at(self) -> list[tuple[int, int]]:
        """(sequence, kv head) with its query heads: the first and the last."""
        return [(0, 0), (self.case.batch - 1, self.case.groups - 1)]

    def _part(self, name: str, t: Tensor, at: tuple[int, int]) -> Tensor:
        """One group's part of q, out and their gradients [heads, s, d], or of k, v and theirs [s, d]."""
        n, group = at
        if name in ("k", "v", "dk", "dv"):
            return t[n, group]
        shared = self.case.heads // self.case.groups
        return t[n, group * shared : (group + 1) * shared]

    def _reference(self, at: tuple[int, int], dtype: torch.dtype, rows: int) -> dict[str, Tensor]:
        """One group, ``rows`` query rows at a time, by the definition and autograd."""
        q, k, v = (
            self._part(name, t, at).detach().to(dtype).requires_grad_(self.spec.need_grad)
            for name, t in zip("qkv", self.inputs[:3], strict=True)
        )
        dout = self._part("out", self.dout, at)
        outs = []
        for begin in range(0, q.shape[1], rows):
            x = (q[:, begin : begin + rows] @ k.T) * self.spec.softmax_scale
            if self.case.causal:
                hidden = torch.ones(x.shape[1:], dtype=torch.bool, device=x.device).triu(begin + 1)
                x = x.masked_fill(hidden, -torch.inf)
            out = torch.softmax(x, dim=-1) @ v
            if self.spec.need_grad:
                out.backward(dout[:, begin : begin + rows].to(dtype))
            outs.append(out.detach())
        named = {"out": torch.cat(outs, dim=1)}
        grads = {name: leaf.grad for name, leaf in (("dq", q), ("dk", k), ("dv", v))}
        return named | {name: grad for name, grad in grads.items() if grad is not None}

    def complaint(self, kernel: Kernel) -> str:
        """What is wrong with a kernel's results, in words; empty where nothing is.

        An error may be twice that of plain PyTorch at this dtype (gradients: thrice), and two ulp.
        """
        result = kernel.forward(self.spec, self.inputs)
        named = {"out": result.out}
        if self.spec.need_grad:
            grads = kernel.backward(self.spec, self.inputs, result, self.dout)
            named |= {"dq": grads.q, "dk": grads.k, "dv": grads.v}
        for name, t in named.items():
            if not t.isfinite().all():
                return f"{name} is not finite everywhere"
            for at, wanted in zip(self.groups_looked_at, self.wanted, strict=True):
                exact, plain = wanted[name]
                unit = torch.finfo(t.dtype).eps * exact.abs().max().item()
                allowed = (2 if name == "out" else 3) * plain + 2 * unit
                wrong = _apart(self._part(name, t, at), exact)
                if not wrong <= allowed:
                    return (
                        f"{name} is off by {wrong:.2g}, plain PyTorch by {plain:.2g}, allowed {allowed:.2g}"
                    )
        return ""


def _apart(t: Tensor, exact: Tensor) -> float:
    return (t.double() - exact).abs().max().item()
