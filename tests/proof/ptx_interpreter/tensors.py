"""The tensors of a case: normally distributed, always the same, and NaN wherever no kernel may look."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Result, Spec

if TYPE_CHECKING:
    from ptx_interpreter.grid import Case

_APART = 16  # elements between two rows: as many keep rows aligned


def make(case: Case, dtype: torch.dtype) -> tuple[Spec, Inputs]:
    torch.manual_seed(0)
    s_q, s_kv = case.lengths
    h, g = case.heads
    size = {"b": 2, "h": h, "g": g, "s_q": s_q, "s_kv": s_kv, "1": 1}
    # Softmax scale comes first: a case may have another.
    spec = Spec(**{"softmax_scale": case.head_dims[0] ** -0.5, "need_lse": True, **case.spec})
    made = _packed(case, size, dtype) if spec.packed else _dense(case, size, dtype)
    for name, letters in case.tensors.items():
        shape = [size[letter] for letter in letters.split()]
        if name == "bias":
            made[name] = _rows_apart(tuple(shape), dtype, case)
        elif name == "softmax_offset":
            made[name] = torch.randn(shape, dtype=dtype)
        elif name == "alibi_slopes":
            made[name] = torch.randn(shape).abs() / 40
        elif name == "attn_mask":
            hidden = _rows_apart(tuple(shape), torch.bool, case)
            made[name] = hidden.copy_(torch.randn(shape) > 0.3)
        elif name.startswith("seqlens"):
            full = size["s_q" if name == "seqlens_q" else "s_kv"]
            made[name] = torch.tensor([full - 70 if full > 70 else full // 2, full], dtype=torch.int32)
    if spec.dropout_p:
        made |= {"dropout_seed": torch.tensor([1234]), "dropout_offset": torch.tensor([5678])}
    inputs = Inputs(**made)
    for side, names in (("q", "q"), ("kv", "kv")):
        hidden = _nobodys(spec, inputs, side)
        for t in (getattr(inputs, name) for name in names):
            _poison(t, hidden, spec.packed)
    return spec, inputs


def _dense(case: Case, size: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    """In memory [b, s, h, d], as most models have them."""
    d, e = case.head_dims
    made = {}
    for name, heads, length, width in (("q", "h", "s_q", d), ("k", "g", "s_kv", d), ("v", "g", "s_kv", e)):
        shape = (size["b"], size[length], size[heads], width)
        made[name] = _rows_apart(shape, dtype, case).transpose(1, 2)
    return made


def _packed(case: Case, size: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    """Three sequences, one of them without queries."""
    made: dict[str, Any] = {}
    gap = 3 if "padded" in case.tensors else 0
    size["b"] = 3
    s_q, s_kv = size["s_q"], size["s_kv"]
    lengths = {"q": [s_q // 3, 0, s_q], "kv": [s_kv // 2, 9, s_kv]}
    # Masks and biases are as large as the longest sequence, which the one of 9 keys may be.
    size["s_kv"] = max(lengths["kv"])
    rows = {}
    for side, of_side in lengths.items():
        made[f"cu_seqlens_{side}"] = _starts(of_side, 0)
        if gap:
            made[f"cu_seqlens_{side}_padded"] = _starts(of_side, gap)
        # Two rows more than the sequences take, which are nobody's; or the tensor ends with the last of them.
        rows[side] = sum(of_side) + gap * len(of_side) + (0 if s_q % 2 else 2)
    d, e = case.head_dims
    shapes = {"q": ("q", "h", d), "k": ("kv", "g", d), "v": ("kv", "g", e)}
    for name, (side, heads, width) in shapes.items():
        made[name] = _rows_apart((rows[side], size[heads], width), dtype, case)
    return made


def _rows_apart(shape: tuple[int, ...], dtype: torch.dtype, case: Case) -> Tensor:
    """Rows with bytes between them that are no element's."""
    filler = True if dtype == torch.bool else math.nan
    memory = torch.full((*shape[:-1], shape[-1] + _APART), filler, dtype=dtype)
    t = memory[..., : shape[-1]]
    return t if dtype == torch.bool else t.copy_(torch.randn(shape, dtype=dtype))


def _starts(lengths: list[int], gap: int) -> Tensor:
    """cu_seqlens; with a gap before each sequence, where it starts in memory."""
    sums, total = [gap], gap
    for length in lengths:
        total += length + gap
        sums.append(total)
    return torch.tensor(sums, dtype=torch.int32)


def _nobodys(spec: Spec, inputs: Inputs, side: str) -> Tensor:
    """Rows that no sequence has: bool [b, s], packed [t]."""
    of_side = inputs.q if side == "q" else inputs.k
    if not spec.packed:
        lengths = getattr(inputs, f"seqlens_{side}")
        hidden = torch.zeros(of_side.shape[0], of_side.shape[2], dtype=torch.bool)
        if lengths is None:
            return hidden
        return torch.arange(of_side.shape[2])[None] >= lengths[:, None]
    hidden = torch.ones(of_side.shape[0], dtype=torch.bool)
    sums = getattr(inputs, f"cu_seqlens_{side}")
    starts = getattr(inputs, f"cu_seqlens_{side}_padded")
    for number, length in enumerate(sums.diff().tolist()):
        begin = int((sums if starts is None else starts)[number])
        hidden[begin : begin + length] = False
    return hidden


def _poison(t: Tensor, hidden: Tensor, packed: bool) -> None:
    """NaN in the rows [b, h, s, ...], packed [t, h, ...], that are nobody's."""
    if hidden.any():
        (t if packed else t.transpose(1, 2))[hidden] = math.nan


def upstream(spec: Spec, inputs: Inputs, result: Result) -> tuple[Tensor, Tensor]:
    """Gradients of out and lse, NaN in rows that are nobody's."""
    assert result.lse is not None
    dout, dlse = torch.randn_like(result.out), torch.randn_like(result.lse)
    hidden = _nobodys(spec, inputs, "q")
    _poison(dout, hidden, spec.packed)
    _poison(dlse.transpose(0, 1) if spec.packed else dlse, hidden, spec.packed)
    return dout, dlse


@contextlib.contextmanager
def empty_is_nan() -> Iterator[None]:
    """``torch.empty`` gives NaN (integers: the largest), so that what a kernel leaves out is seen."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(1)  # memory is filled then; use_deterministic_algorithms imports a lot
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def in_pages(inputs: Inputs, size: int) -> Inputs:
    """The keys in shuffled pages, NaN where no row lies; a table with entries past its sequence's end."""
    k, v = inputs.k, inputs.v
    batch, groups, length = k.shape[:3]
    each = -(-length // size)
    order = torch.randperm(batch * each + 2)  # two pages are nobody's
    table = torch.full((batch, each + 2), -1, dtype=torch.int32)
    table[:, :each] = order[: batch * each].view(batch, each)
    pools = []
    for t in (k, v):
        pool = torch.full((len(order), groups, size, t.shape[-1]), math.nan, dtype=t.dtype)
        for number in range(batch):
            for entry in range(each):
                part = t[number, :, entry * size : (entry + 1) * size]
                pool[table[number, entry], :, : part.shape[1]] = part
        pools.append(pool)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    if inputs.seqlens_kv is not None:
        lengths = inputs.seqlens_kv
    return inputs._replace(k=pools[0], v=pools[1], block_table=table, seqlens_kv=lengths)
