"""FlashAttention-2's definition in plain PyTorch, one sequence at a time, and its functions under one face.

Written from the package's documentation, not from attnsel: the reference of tests/attnsel/flash_attn. In
float64 it is the truth; at the inputs' own precision it is plain PyTorch, whose error an implementation may
at most double (forward) or triple (gradients).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attention_cases import assert_errs_little_more
from attnsel import flash_attn

DENSE = ("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func")
VARLEN = ("flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func")


def one_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """q [s_q, h, d], k, v [s_k, g, d], slopes [h], keep bool [h, s_q, s_k] -> (out like q, lse [h, s_q])."""
    s_q, h, d = q.shape
    s_k, g = k.shape[:2]
    k, v = (t.repeat_interleave(h // g, dim=1).transpose(0, 1) for t in (k, v))
    x = torch.einsum("ihd,hjd->hij", q, k) * (d**-0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        x = torch.tanh(x / softcap) * softcap
    i, j = torch.arange(s_q)[:, None], torch.arange(s_k)[None, :]
    if slopes is not None:
        x = x - slopes.to(x.dtype)[:, None, None] * (i + s_k - s_q - j).abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros(s_q, s_k, dtype=torch.bool)
    if left >= 0:
        hidden |= j < i + s_k - s_q - left
    if right >= 0:
        hidden |= j > i + s_k - s_q + right
    dead = hidden.all(1) if s_k else torch.ones(s_q, dtype=torch.bool)
    x = x.masked_fill(hidden & ~dead[:, None], -torch.inf)
    if s_k == 0:
        return q * 0, torch.full((h, s_q), torch.inf, dtype=q.dtype)
    lse = torch.logsumexp(x, dim=-1)
    p = torch.softmax(x, dim=-1).masked_fill(dead[:, None], 0.0)
    if keep is not None:
        p = (p * keep) / (1 - dropout_p)
    return torch.einsum("hij,hjd->ihd", p, v), lse.masked_fill(dead, torch.inf)


@dataclass
class Problem:
    """Sequences to attend to, with every argument that FlashAttention-2 has."""

    lengths_q: list[int]
    lengths_k: list[int]
    heads: int = 4
    groups: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float16
    seed: int = 0
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.q, self.k, self.v, self.dout = (
            torch.randn(sum(lengths), heads, self.head_dim, generator=generator).to(self.dtype)
            for lengths, heads in (
                (self.lengths_q, self.heads),
                (self.lengths_k, self.groups),
                (self.lengths_k, self.groups),
                (self.lengths_q, self.heads),
            )
        )

    def slopes(self, sequence: int) -> Tensor | None:
        slopes = self.args.get("alibi_slopes")
        return slopes if slopes is None or slopes.dim() == 1 else slopes[sequence]

    def expected(self, dtype: torch.dtype, keep: Tensor | None = None) -> dict[str, Tensor]:
        """out [t_q, h, d], lse [h, t_q] and gradients by the definition. ``keep``: bool [b, h, s_q, s_k]."""
        q, k, v = (t.to(dtype).requires_grad_() for t in (self.q, self.k, self.v))
        known = {
            name: self.args[name]
            for name in ("softmax_scale", "causal", "window_size", "softcap", "dropout_p")
            if name in self.args
        }
        outs, lses, at_q, at_k = [], [], 0, 0
        for n, (s_q, s_k) in enumerate(zip(self.lengths_q, self.lengths_k, strict=True)):
            out, lse = one_sequence(
                q[at_q : at_q + s_q],
                k[at_k : at_k + s_k],
                v[at_k : at_k + s_k],
                slopes=self.slopes(n),
                keep=None if keep is None else keep[n, :, :s_q, :s_k],
                **known,
            )
            outs.append(out)
            lses.append(lse)
            at_q, at_k = at_q + s_q, at_k + s_k
        out, lse = torch.cat(outs), torch.cat(lses, dim=1)
        grads = torch.autograd.grad(out, (q, k, v), self.dout.to(dtype))
        return {"out": out.detach(), "lse": lse.detach()} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

    def run(self, function: str, **more: Any) -> tuple[dict[str, Tensor], Tensor]:
        """The same from one of the six functions, and its S_dmask."""
        leaves, arguments, parts = self._arguments(function)
        call = getattr(flash_attn, function)
        out, lse, s_dmask = call(*arguments, return_attn_probs=True, **self.args, **more)
        dense = function in DENSE
        assert out.shape == arguments[0][..., -3, :, :].shape if "qkv" in function else arguments[0].shape
        assert lse.dtype == torch.float32
        batch, longest = len(self.lengths_q), self.lengths_q[0]
        assert lse.shape == ((batch, self.heads, longest) if dense else (self.heads, len(self.q)))
        dout = self.dout.unflatten(0, (batch, longest)) if dense else self.dout
        grads = torch.autograd.grad(out, leaves, dout)
        if len(parts) == 1:
            grads = grads[0].unbind(-3)
        elif len(parts) == 2:
            grads = (grads[0], *grads[1].unbind(-3))
        flat = [t.flatten(0, 1) if dense else t for t in (out.detach(), *grads)]
        lse = lse.transpose(0, 1).flatten(1) if dense else lse
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (flat[0], lse, *flat[1:]), strict=True)), s_dmask

    def _arguments(self, function: str) -> tuple[list[Tensor], list[Any], list[int]]:
        q, k, v = self.q, self.k, self.v
        if function in DENSE:
            batch = len(self.lengths_q)
            q, k, v = (t.unflatten(0, (batch, -1)) for t in (q, k, v))
        if "qkvpacked" in function:
            leaves = [torch.stack((q, k, v), dim=-3)]
        elif "kvpacked" in function:
            leaves = [q.clone(), torch.stack((k, v), dim=-3)]
        else:
            leaves = [q.clone(), k.clone(), v.clone()]
        leaves = [t.requires_grad_() for t in leaves]
        arguments: list[Any] = list(leaves)
        if function in VARLEN:
            cu = [cumulative(self.lengths_q), cumulative(self.lengths_k)]
            longest = [max(self.lengths_q), max(self.lengths_k)]
            once = 1 if "qkvpacked" in function else 2
            arguments += [*cu[:once], *longest[:once]]
        return leaves, arguments, list(range(len(leaves)))

    def check(self, function: str, **more: Any) -> None:
        """At most twice (gradients: thrice) plain PyTorch's error, and a few ulps."""
        actual, s_dmask = self.run(function, **more)
        keep = None
        if self.args.get("dropout_p"):
            keep = ~torch.signbit(s_dmask)
        self.compare(actual, keep)

    def compare(self, actual: dict[str, Tensor], keep: Tensor | None = None) -> None:
        exact, plain = self.expected(torch.float64, keep), self.expected(self.dtype, keep)
        wanted = {name: exact[name] for name in actual}
        assert_errs_little_more(actual, wanted, {name: plain[name] for name in actual}, self.dtype, ulps=4)


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def rows_of(cu: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(cu.tolist())]
