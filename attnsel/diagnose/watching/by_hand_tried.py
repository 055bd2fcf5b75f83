"""Whether the call that would be told for attention written by hand gives its numbers: tried on a few heads.

What an operator means is read, and may be read wrongly: a softmax over queries, a bias before the scale. So
the very words that would be told are computed once, on the program's own numbers, and compared with what its
lines gave. A few heads are copied while the program runs; what is computed is bounded, each try and in all.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_WORK = 1 << 31
"""Multiply-adds of one try: of longer sequences the first queries alone are computed."""
MOST_TRIES = 200
"""Of a session; what comes later is not tried."""
MOST_COPIED = 1 << 21
"""Elements of one head of one tensor; a larger one is not copied."""

_WITHIN = {torch.float64: 1e-7, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def heads_of(tensor: Tensor, count: int) -> Tensor | None:
    """Copies of the first two and the last of ``count`` matrices [count, rows, columns], or of one matrix;
    None where they are too large, or cannot be read now."""
    if tensor.layout != torch.strided or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    each = tensor.reshape(-1, *tensor.shape[-2:])
    if each.dim() != 3 or each.shape[0] != count or each[0].numel() > MOST_COPIED:
        return None
    with torch.no_grad():
        return each.detach()[picked(count)]


def picked(count: int) -> list[int]:
    return sorted({0, min(1, count - 1), count - 1})


class Numbers(NamedTuple):
    """What was copied of a call: m products, each of r heads of the query with one of the keys.

    q [m, r, s_q, d], k [m, s_kv, d], v [m, s_kv, d_v], out [m, r, s_q, d_v]; masks, biases and temperatures
    [m, r, s_q, s_kv], where a dimension may be 1; sinks [m, r, 1, 1]. ``shared``: whether the first two have
    the same head of keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    hidden: Tensor | None = None
    bias: Tensor | None = None
    temperature: Tensor | None = None
    sinks: Tensor | None = None
    shared: bool = False


def differs(code: str, numbers: Numbers, *, folded: bool) -> str:
    """ "" where ``code`` gives the numbers that the lines gave; else by how much it does not. Raises what the
    code raises, and ValueError where it takes too long."""
    expression = code.split("  #")[0]
    for part in _parts(numbers, folded):
        work = part.q.numel() * part.k.shape[-2] * 2
        if work > MOST_WORK:
            if any(word in code for word in ("lower_right", "flex_attention", "attnsel.")):
                raise ValueError("it would take too long")
            part = _first_rows(part, max(1, part.q.shape[-2] * MOST_WORK // work))
        with torch.no_grad(), torch.autocast(part.q.device.type, enabled=False):
            got = eval(expression, _environment(part, folded))
        want, got = part.out.double(), got.double()
        if got.shape != want.shape:
            return "in another shape"
        apart, most = float((got - want).abs().max()), float(want.abs().max())
        if not apart <= _WITHIN.get(part.q.dtype, 0.0) * most:
            return f"by {apart:.2g}, of at most {most:.2g}"
    return ""


def _given(numbers: Numbers) -> dict[str, Any]:
    """Its tensors, all where q is."""
    every = numbers._asdict().items()
    return {name: one.to(numbers.q.device) for name, one in every if isinstance(one, Tensor)}


def _parts(numbers: Numbers, folded: bool) -> list[Numbers]:
    """As calls of [b, h, s, d], or of [n, s, d] where batch and heads are ``folded``."""
    keyed = {"k": numbers.k[:, None], "v": numbers.v[:, None]}
    whole = Numbers(**{**_given(numbers), **keyed})
    if folded:
        return [Numbers(**{name: one[:, 0] for name, one in _given(whole).items()})]
    if not numbers.shared:  # grouped heads are then of one head of keys, and a batch each
        return [whole]
    # Two heads of the query with one of the keys, as grouped heads are counted; and the last one.
    first = {name: one[:2].transpose(0, 1) for name, one in _given(whole).items()}
    first |= {"k": whole.k[:1], "v": whole.v[:1]}
    last = {name: one[-1:] for name, one in _given(whole).items()}
    return [Numbers(**first), Numbers(**last)]


def _first_rows(part: Numbers, rows: int) -> Numbers:
    cut = {name: getattr(part, name) for name in ("q", "out", "hidden", "bias", "temperature")}
    changes = {name: one[..., :rows, :] for name, one in cut.items() if one is not None and one.shape[-2] > 1}
    return part._replace(**changes)


def _environment(part: Numbers, folded: bool) -> dict[str, Any]:
    """The names that the words use."""
    dtype = part.q.dtype
    names: dict[str, Any] = {
        "F": torch.nn.functional,
        "torch": torch,
        "q": part.q,
        "k": part.k.to(dtype),
        "v": part.v.to(dtype),
        "temperature": part.temperature,
        "sinks": part.sinks,
        "self": SimpleNamespace(training=False),
        "flex_attention": _beyond_sdpa,
        "create_block_mask": _block_mask,
        "attnsel": SimpleNamespace(attention=_beyond_sdpa),
        "causal_lower_right": lambda s_q, s_kv: _lower(s_q, s_kv, s_kv - s_q),
    }
    hidden, bias = part.hidden, part.bias
    if hidden is not None:
        names["visible"] = ~hidden
    if bias is not None:
        names["bias"] = bias if hidden is None else bias.masked_fill(hidden, float("-inf"))
    if folded:  # [n, s_q, s_kv], or one for all
        for name in ("visible", "bias", "temperature"):
            if names.get(name) is not None and names[name].shape[0] == 1:
                names[name] = names[name][0]
    return names


def _beyond_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float = 0.0,
    softmax_scale: float = 0.0,
    score_mod: Any = None,
    block_mask: Tensor | None = None,
    attn_mask_type: str = "no_mask",
    softmax_offset: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """What flex_attention computes, without compiling anything, and attnsel.attention with sinks, but for
    q, k and v [b, h, s, d]."""
    scores = q @ k.mT * (scale or softmax_scale)
    if score_mod is not None:
        scores = score_mod(scores, None, None, None, None)
    if attn_mask_type != "no_mask":
        s_q, s_kv = scores.shape[-2:]
        corner = s_kv - s_q if attn_mask_type == "causal_bottom_right" else 0
        block_mask = _lower(s_q, s_kv, corner).to(q.device)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask, float("-inf"))
    if softmax_offset is None:
        return scores.softmax(-1) @ v
    sinks = softmax_offset.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


def _block_mask(visible: Any, b: None, h: None, s_q: int, s_kv: int, device: Any) -> Any:
    rows, columns = torch.arange(s_q, device=device), torch.arange(s_kv, device=device)
    return visible(0, 0, rows[:, None], columns[None, :])


def _lower(s_q: int, s_kv: int, corner: int) -> Tensor:
    return torch.ones(s_q, s_kv, dtype=torch.bool).tril(corner)


class Tries:
    """What was tried in a session: each way of writing at a place once, ``MOST_TRIES`` in all."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str | None] = {}

    def differs(self, where: str, code: str, numbers: Numbers | None, *, folded: bool) -> str | None:
        """As :func:`differs`; None where it could not be tried."""
        key = where, code
        if key not in self._known and numbers is not None and len(self._known) < MOST_TRIES:
            try:
                self._known[key] = differs(code, numbers, folded=folded)
            except (RuntimeError, ValueError, TypeError, NameError, AttributeError):
                self._known[key] = None
        return self._known.get(key)
