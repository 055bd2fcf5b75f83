"""Inputs for the emulated packages of FlashAttention, and what must come out by the definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import emulated_flash_attn as emulated
import emulated_flash_rest  # noqa: F401  they have caches then
from flash_reference import cumulative, one_sequence, rows_of

RELEASES = [(int(generation), version) for generation, held in emulated.VERSIONS.items() for version in held]
OF_TWO = [version for generation, version in RELEASES if generation == 2]
OF_THREE = [version for generation, version in RELEASES if generation == 3]
OF_FOUR = [version for generation, version in RELEASES if generation == 4]


def functions(generation: int, version: str, arch: int = 90) -> Any:
    """Every function of the release, half-private ones too."""
    modules = emulated.package(generation, version, arch)
    home = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface", 4: "flash_attn.cute.interface"}
    return modules[home[generation]]


def drawn(lengths_q: list[int], lengths_k: list[int], d: int = 16, e: int | None = None) -> SimpleNamespace:
    """q, k, v and dout of sequences one behind the other, 4 heads on 2."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(lengths_q), 4, d), (sum(lengths_k), 2, d), (sum(lengths_k), 2, e or d))
    q, k, v = (torch.randn(shape, generator=generator).half() for shape in shapes)
    dout = torch.randn((sum(lengths_q), 4, e or d), generator=generator).half()
    return SimpleNamespace(q=q, k=k, v=v, dout=dout, lengths=(lengths_q, lengths_k))


def expected(given: SimpleNamespace, how: dict[str, Any], keep: Any = None) -> dict[str, Tensor]:
    """out [t_q, h, e], lse [h, t_q] with +inf for rows without keys, and gradients, by the definition."""
    q, k, v = (t.double().requires_grad_() for t in (given.q, given.k, given.v))
    how = dict(how)
    slopes = how.pop("alibi_slopes", None)
    made = []
    for n, (rows, keys) in enumerate(zip(*(rows_of(cumulative(one)) for one in given.lengths), strict=True)):
        of_one = slopes if slopes is None or slopes.dim() == 1 else slopes[n]
        kept = None if keep is None else keep[n]
        made.append(one_sequence(q[rows], k[keys], v[keys], slopes=of_one, keep=kept, **how))
    out, lse = torch.cat([one for one, _ in made]), torch.cat([one for _, one in made], 1)
    grads = torch.autograd.grad(out, (q, k, v), given.dout.double())
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def near(actual: Any, wanted: Tensor) -> None:
    torch.testing.assert_close(actual.double(), wanted, rtol=4e-3, atol=4e-3)
