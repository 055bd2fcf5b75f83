"""For the tests of decode and of pages: a forward held against the definition, and keys put in pages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from attention_cases import BOTTOM_RIGHT, Case, assert_errs_little_more, build, int32
from attnsel import attention
from attnsel.backends.contract import Inputs, Result, Spec
from reference import attention_reference

GARBAGE = (-1, 2**31 - 1, -(2**31))


def check_forward(result: Result, spec: Spec, inputs: Inputs) -> None:
    """At most twice the error of the same computation in plain PyTorch, and two ulp."""
    dtype = inputs.q.dtype
    assert result.lse is not None
    actual = {"out": result.out, "lse": result.lse}
    if result.max_logit is not None:
        actual["max_logit"] = result.max_logit
    wanted, plain = (
        dict(zip(actual, attention_reference(spec, inputs, at), strict=False))
        for at in (torch.float64, dtype)
    )
    assert_errs_little_more(actual, wanted, plain, dtype)


def check_hits(backend: str, device: torch.device, s: int, d: int) -> None:
    """Training calls that repeat, each with other tensors; the last one's lie on the CPU in between."""
    for seed in range(3):
        gen = torch.Generator().manual_seed(seed)
        q, k, v, dout = (
            torch.randn(2, s, n, d, generator=gen).to(device, torch.bfloat16) for n in (4, 2, 2, 4)
        )
        inputs, found = [t.requires_grad_() for t in (q, k, v)], []
        hooks = saved_tensors_hooks(Tensor.cpu, lambda t: t.to(device)) if seed == 2 else nullcontext()
        for name in (backend, "tiled"):
            with hooks:
                out = attention(*inputs, attn_mask_type="causal", backend=name)
            found.append([out, *torch.autograd.grad(out, inputs, dout)])
        torch.testing.assert_close(*found, atol=2e-2, rtol=2e-2)


def call_in_pages(s_q: int, scale: int, page_size: int) -> tuple[tuple[Spec, Inputs], tuple[Spec, Inputs]]:
    """A forward in fp16 over two sequences, q bshd, plain and with its keys in pages."""
    sizes = {"d": 64, "e": 64, "s_q": s_q, "s_kv": 40 * scale}
    case = Case("", {**BOTTOM_RIGHT, "need_grad": False}, {"seqlens_kv": "b"}, sizes)
    spec, inputs = build(case, torch.float16)
    spec = dataclasses.replace(spec, return_max_logit=False)
    inputs = inputs._replace(q=inputs.q.transpose(1, 2).contiguous().transpose(1, 2))
    return (spec, inputs), pages_of(spec, inputs, page_size)


def check_on_the_cpu(result: Result, spec: Spec, inputs: Inputs) -> None:
    """``check_forward`` of a result that lies on a GPU."""
    assert result.lse is not None
    check_forward(result._replace(out=result.out.cpu(), lse=result.lse.cpu()), spec, inputs)


def pages_of(
    spec: Spec, inputs: Inputs, page_size: int, layout: Callable[[Tensor], Tensor] = lambda pool: pool
) -> tuple[Spec, Inputs]:
    """The same call with its keys in shuffled pages; NaN wherever no row of a sequence lies.

    Two pages belong to nobody, every table is two entries wider than its sequence, and the entries that no
    sequence uses hold garbage. ``layout`` gives the pools other strides.
    """
    rows = _rows_of_each(spec, inputs)
    lengths = [k.shape[1] for k, _ in rows]
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(0)).tolist()
    pools = []
    for t in (inputs.k, inputs.v):
        shape = (len(order), t.shape[1], page_size, t.shape[-1])
        pools.append(torch.full(shape, math.nan, dtype=t.dtype))
    entries = max(counts, default=0) + 2
    table = int32([GARBAGE[n % 3] for n in range(len(lengths) * entries)]).view(-1, entries)
    for number, (k, v) in enumerate(rows):
        for entry in range(counts[number]):
            page = table[number, entry] = order.pop()
            part = slice(entry * page_size, min((entry + 1) * page_size, lengths[number]))
            pools[0][page, :, : part.stop - part.start] = k[:, part]
            pools[1][page, :, : part.stop - part.start] = v[:, part]
    return dataclasses.replace(spec, need_grad=False), inputs._replace(
        k=layout(pools[0]),
        v=layout(pools[1]),
        block_table=table,
        seqlens_kv=int32(lengths),
        cu_seqlens_kv=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_kv=_width(inputs),
    )


def _width(inputs: Inputs) -> int | None:
    """The columns of a mask or bias, which the table may be wider than; None where neither has any."""
    given = [t.shape[-1] for t in (inputs.attn_mask, inputs.bias) if t is not None]
    return max((columns for columns in given if columns > 1), default=None)


def _rows_of_each(spec: Spec, inputs: Inputs) -> list[tuple[Tensor, Tensor]]:
    """The keys and values [g, length, ...] of every sequence."""
    if not spec.packed:
        lengths = [inputs.k.shape[2]] * inputs.k.shape[0]
        if inputs.seqlens_kv is not None:
            lengths = inputs.seqlens_kv.tolist()
        return [(inputs.k[n, :, :m], inputs.v[n, :, :m]) for n, m in enumerate(lengths)]
    assert inputs.cu_seqlens_kv is not None
    cu = inputs.cu_seqlens_kv.tolist()
    padded = inputs.cu_seqlens_kv_padded
    starts = cu if padded is None else padded.tolist()
    parts = [slice(starts[n], starts[n] + cu[n + 1] - cu[n]) for n in range(len(cu) - 1)]
    return [(inputs.k[part].transpose(0, 1), inputs.v[part].transpose(0, 1)) for part in parts]
