"""Attention by its definition in float64, one sequence at a time, in torch alone.

The program that ``script.py`` writes holds the source of these functions: they use nothing but ``torch``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    scale: float,
    left: int = -1,
    right: int = -1,
    bottom_right: bool = False,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    hidden: Tensor | None = None,
    sinks: Tensor | None = None,
    slip: float = 0.0,
) -> dict[str, Tensor]:
    """out [h, m, e] and lse [h, m]; with dout [h, m, e] also dq, dk and dv.

    q [h, m, d], k [g, n, d], v [g, n, e]; bias and hidden broadcast to [h, m, n]; slopes and sinks [h]. A key
    j is seen by a query i if -left <= j - i - shift <= right, a bound of -1 being none, shift n - m where
    bottom_right, else 0. A row that sees nothing gives 0. ``slip``: how far dout.v and dout.out may be
    rounded apart; where one key has all the weight, the gradient is their difference.
    """
    q, k, v = (t.detach().double() for t in (q, k, v))
    (h, m, _), (g, n, _) = q.shape, k.shape
    out, lse = q.new_zeros(h, m, v.shape[-1]), q.new_zeros(h, m)
    grads = [torch.zeros_like(t) for t in (q, k, v)] if dout is not None else []
    columns = torch.arange(n, device=q.device)
    for head in range(h):
        for first in range(0, m, 512):  # so that the scores stay small
            rows = slice(first, min(first + 512, m))
            kv = head // (h // g)
            with torch.enable_grad():
                mine = [t.clone().requires_grad_(dout is not None) for t in (q[head, rows], k[kv], v[kv])]
                x = mine[0] @ mine[1].T * scale
                if softcap:
                    x = softcap * torch.tanh(x / softcap)
                shift = n - m if bottom_right else 0
                away = columns - torch.arange(m, device=q.device)[rows, None] - shift
                if bias is not None:
                    x = x + bias.detach().double().expand(h, m, n)[head, rows]
                if slopes is not None:
                    x = x - slopes[head].double() * away.abs()
                unseen = torch.zeros_like(away, dtype=torch.bool)
                if left >= 0:
                    unseen = unseen | (away < -left)
                if right >= 0:
                    unseen = unseen | (away > right)
                if hidden is not None:
                    unseen = unseen | hidden.expand(h, m, n)[head, rows]
                x = x.masked_fill(unseen, -torch.inf)
                if sinks is not None:
                    x = torch.cat([x, sinks[head].detach().double().expand(len(x), 1)], 1)
                top = x.detach().amax(1, keepdim=True).clamp(min=-1e300)
                weights = torch.exp(x - top)
                total = weights.sum(1, keepdim=True)
                p = weights / torch.where(total > 0, total, 1.0)
                made = p[:, :n] @ mine[2]
                sums = torch.where(total > 0, torch.log(torch.where(total > 0, total, 1.0)) + top, -torch.inf)
            out[head, rows] = made.detach()
            lse[head, rows] = sums.detach()[:, 0]
            if dout is not None:
                flow = dout[head, rows].double()
                apart = slip * (flow * made.detach()).abs().sum(1, keepdim=True)
                dq, dk, dv = torch.autograd.grad([made, sums], mine, [flow, apart])
                grads[0][head, rows] += dq
                grads[1][kv] += dk
                grads[2][kv] += dv
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=False))}


def moved(t: Tensor, unit: float, seed: int) -> Tensor:
    """The same numbers in float64, each off by up to one ``unit`` of itself, at random."""
    noise = torch.rand(t.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return t.detach().double() * (1.0 + unit * (2.0 * noise.to(t.device) - 1.0))


def worst_row(
    actual: Tensor, exact: Tensor, changed: list[Tensor], seen: Tensor | None, unit: float
) -> tuple[float, float]:
    """(error, what rounding explains) of the worst row, both against the row's size.

    ``changed``: the exact result for inputs that are off by up to one ``unit`` of rounding. A right kernel is
    about as far off as these (backward stability); twice that is allowed, and a unit of the row itself.
    ``seen``: rows that see a key, which alone are judged.
    """
    error = torch.nan_to_num(actual.double() - exact, nan=torch.inf).norm(dim=-1)
    size = exact.norm(dim=-1)
    moved = torch.stack([(other - exact).norm(dim=-1) for other in changed]).amax(0)
    largest = size.max() if size.numel() else size.sum()
    allowed = 2.0 * moved + unit * (size + largest / 32) + 1e-30
    ratio = error / allowed
    if seen is not None:
        ratio = torch.where(seen, ratio, 0.0)
    if not ratio.numel():
        return 0.0, 0.0
    at = int(ratio.argmax())
    scale = max(float(size.flatten()[at]), float(largest) / 32, 1e-30)
    return float(error.flatten()[at]) / scale, float(allowed.flatten()[at]) / scale
