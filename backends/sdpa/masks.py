"""Folding: one additive mask that says what a kernel cannot say itself.

Window, bottom-right causal, padding by lengths, ALiBi, post-scale bias and boolean masks become one tensor
added to the scaled scores, in the smallest broadcastable shape [1|b, 1|h, 1|s_q, s_kv] and q's dtype
(float32 beside float16 and bfloat16 where the kernel takes it and the mask holds real scores: ALiBi at
distance 4096 is off by 0.03 in bfloat16). attnsel's boolean masks are True = masked OUT, SDPA's are
True = keep: only additive masks leave this module, so the two never meet.

Masked entries are -inf where the kernel is known to give 0 for a row that sees nothing, else a large finite
number (``hidden_score``). Tested on CPU, torch 2.13, forward and backward, float64 to float16: flash and math
give 0 and zero gradients for rows of -inf, no NaN anywhere, but flash reports an LSE of 0 for them. cuDNN
mishandles -inf (``convert_boolean_attn_mask_cudnn`` in attention.cpp folds to -65504 for it) and nothing
committed shows what the memory-efficient backward does, so both get the finite number, and their dead rows
are zeroed after the kernel: the zeroed output also zeroes those rows' gradients exactly.

Gradient of the mask: math and efficient give one; flash on CPU raises when the mask requires it, cuDNN has no
formula for it; flash on CUDA takes no mask. Masking is by addition, and 0 * NaN is NaN: what lies in padded
rows would reach real ones (as with F.sdpa), so these rows are zeroed before the kernel (``without_padding``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attnsel.backends.checks import capturing, is_default
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.tiled.tiles import four_dims

from .plan import MASK_ALIGNMENT, MaskPlan, Traits, mask_itemsize


class FoldedMask(NamedTuple):
    """``mask`` goes to the kernel; rows where ``dead_rows`` is True must be zero in its output."""

    mask: Tensor | None  # [1|b, 1|h, 1|s_q, s_kv]; efficient: a view expanded to [b, h, s_q, s_kv]
    dead_rows: Tensor | None  # bool [1|b, 1|h, s_q, 1]


def hidden_score(dtype: torch.dtype) -> float:
    """The finite stand-in for -inf: no kernel overflows when it multiplies scores by log2(e) = 1.44."""
    return -65504.0 if dtype == torch.float16 else -0.25 * torch.finfo(torch.float32).max


def fold(traits: Traits, plan: MaskPlan, spec: Spec, inputs: Inputs, *, want_lse: bool = False) -> FoldedMask:
    """The folded mask of one call and the rows that see nothing.

    Differentiable in ``inputs.bias``. ``want_lse`` asks for the dead rows also of a kernel that zeroes its
    output itself, because their LSE must become -inf.

    A mask that follows from sizes alone is made once, for all calls and layers that use it: see ``kept``.
    """
    traced = torch.compiler.is_compiling()  # the graph then makes it, and its compiler keeps one of several
    if traced or plan.shape is None or plan.q_lengths or not _follows_from_sizes(plan, inputs):
        return _fold(traits, plan, spec, inputs, want_lse)
    return kept(
        (traits, plan, want_lse, inputs.q.shape, inputs.k.shape[2], inputs.q.dtype),
        inputs.q.device,
        lambda: _fold(traits, plan, spec, inputs, want_lse),
    )


def _follows_from_sizes(plan: MaskPlan, inputs: Inputs) -> bool:
    """Nothing in it is read from a tensor: windows, diagonals and ALiBi's own slopes."""
    if type(inputs.q) not in (Tensor, torch.nn.Parameter) or plan.kv_lengths or plan.per_row:
        return False
    slopes = inputs.alibi_slopes
    given = inputs.attn_mask is not None or inputs.bias is not None
    return not given and (slopes is None or is_default(slopes))


KEPT_BYTES = 256 << 20
"""The largest mask that is held between calls. A larger one lives as long as some backward holds it."""

_held: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()
_last: dict[torch.device, Tensor] = {}  # one of each device
_DEAD_ROWS = "_attnsel_dead_rows"


def kept(key: Any, device: torch.device, make: Callable[[], FoldedMask]) -> FoldedMask:
    """What ``make`` gives, made once: autograd holds it for every layer of a step, and the last one stays.

    Not for what is made while a CUDA graph is captured, whose memory is the graph's. On CUDA each stream has
    its own, so that none reads what another has not written yet.
    """
    if capturing(device):
        return make()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (*key, device, stream)
    mask = _held.get(key)
    if mask is not None:
        return FoldedMask(mask, getattr(mask, _DEAD_ROWS))
    with torch.inference_mode(False):  # autograd could not save an inference tensor later
        made = make()
    mask = made.mask
    if type(mask) is Tensor:
        setattr(mask, _DEAD_ROWS, made.dead_rows)
        _held[key] = mask
        if mask.untyped_storage().nbytes() <= KEPT_BYTES:
            _last[device] = mask
    return made


def _fold(traits: Traits, plan: MaskPlan, spec: Spec, inputs: Inputs, want_lse: bool) -> FoldedMask:
    mask = None if plan.shape is None else _additive(traits, plan, spec, inputs)
    dead = None
    if mask is not None and plan.may_be_dead and (want_lse or not traits.dead_rows_zero):
        dead = _dead_rows(plan, mask.detach(), inputs.q.shape[2])
    if mask is not None and not traits.dead_rows_zero:
        # Contiguous: the CUDA kernels read columns with stride 1, and a bias may have any strides.
        mask = mask.clamp(min=hidden_score(mask.dtype)).contiguous()
    if plan.q_lengths:
        assert inputs.seqlens_q is not None
        beyond = _beyond(inputs.q, inputs.seqlens_q)
        dead = beyond if dead is None else dead | beyond
    if mask is not None and traits.kernel == "sdpa.efficient":
        mask = align(mask).expand(*inputs.q.shape[:3], inputs.k.shape[2])
    return FoldedMask(mask, dead)


def alone(traits: Traits, plan: MaskPlan, inputs: Inputs) -> str:
    """The one tensor that the folded mask of such calls follows from, where no row is to be zeroed:
    ``bias``, which it then is as it stands, or ``attn_mask``; empty where there is more to fold."""
    drawn = plan.kv_lengths or plan.q_lengths or plan.lo is not None or plan.hi is not None
    if drawn or inputs.alibi_slopes is not None or not traits.dead_rows_zero:
        return ""
    bias, mask = inputs.bias, inputs.attn_mask
    if bias is None or mask is not None:
        return "attn_mask" if bias is None and mask is not None else ""
    fits = bias.dim() > 0 and bias.shape[-1] == inputs.k.shape[2]
    return "bias" if fits and bias.dtype == _dtype(traits, inputs) else ""


def without_padding(inputs: Inputs) -> Inputs:
    """The call with zeros in the padded rows of q, k and v, whose gradients are zero with them."""
    q, k, v = inputs[:3]
    if inputs.seqlens_q is not None:
        q = q.masked_fill(_beyond(q, inputs.seqlens_q), 0.0)
    if inputs.seqlens_kv is not None:
        beyond = _beyond(k, inputs.seqlens_kv)
        k, v = k.masked_fill(beyond, 0.0), v.masked_fill(beyond, 0.0)
    return inputs._replace(q=q, k=k, v=v)


def _beyond(t: Tensor, seqlens: Tensor) -> Tensor:
    """[b, 1, s, 1], True in rows of ``t`` at and after a sequence's length."""
    rows = torch.arange(t.shape[2], device=t.device)
    return (rows >= seqlens.view(-1, 1)).unsqueeze(1).unsqueeze(3)  # rows may be 0, which view(-1, ..) cannot


def _additive(traits: Traits, plan: MaskPlan, spec: Spec, inputs: Inputs) -> Tensor:
    """The mask with -inf at hidden entries, [1|b, 1|h, 1|s_q, s_kv]."""
    hidden = _hidden(plan, inputs)
    dtype = _dtype(traits, inputs)
    score = None
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes.detach()
        slopes = slopes.reshape(-1, slopes.shape[-1], 1, 1)
        score = _distance(plan, inputs) * -slopes.to(torch.promote_types(inputs.q.dtype, torch.float32))
    if inputs.bias is not None:
        bias = four_dims(inputs.bias)
        score = bias if score is None else score + bias
    if score is None:
        assert hidden is not None
        assert plan.shape is not None
        zeros = torch.zeros(plan.shape, dtype=dtype, device=inputs.q.device)
        return zeros.masked_fill_(hidden, -torch.inf)
    if score.dtype != dtype:
        score = score.to(dtype)
    if hidden is not None:
        score = torch.where(hidden, -torch.inf, score)
    keys = inputs.k.shape[2]
    return score if score.shape[3] == keys else score.expand(*score.shape[:3], keys)


def _dtype(traits: Traits, inputs: Inputs) -> torch.dtype:
    return torch.float32 if mask_itemsize(traits, inputs) == 4 else inputs.q.dtype


def _hidden(plan: MaskPlan, inputs: Inputs) -> Tensor | None:
    """Bool, broadcastable to [b, h, s_q, s_kv], True where a query must not see a key; None: sees all."""
    parts = [] if inputs.attn_mask is None else [four_dims(inputs.attn_mask)]
    bounded = plan.lo is not None or plan.hi is not None
    if plan.kv_lengths or bounded:
        columns = torch.arange(inputs.k.shape[2], device=inputs.q.device)
        if plan.kv_lengths:
            assert inputs.seqlens_kv is not None
            parts.append(columns >= inputs.seqlens_kv.view(-1, 1, 1, 1))
        if bounded:
            rows = torch.arange(inputs.q.shape[2], device=inputs.q.device).view(-1, 1) + _shift(plan, inputs)
            if plan.hi is not None:
                parts.append(columns > rows + plan.hi)
            if plan.lo is not None:
                parts.append(columns < rows + plan.lo)
    if not parts:
        return None
    hidden = parts[0]
    for part in parts[1:]:
        hidden = hidden | part
    return hidden


def _shift(plan: MaskPlan, inputs: Inputs) -> Tensor | int:
    """len_kv - len_q of each batch row, [b, 1, 1, 1], when the bounds are relative to it; else 0."""
    if not plan.per_row:
        return 0
    b, _, s_q, _ = inputs.q.shape
    every = torch.ones(b, dtype=torch.int64, device=inputs.q.device)
    len_q = every * s_q if inputs.seqlens_q is None else inputs.seqlens_q
    len_kv = every * inputs.k.shape[2] if inputs.seqlens_kv is None else inputs.seqlens_kv
    shift: Tensor = (len_kv.long() - len_q).view(-1, 1, 1, 1)
    return shift


def _distance(plan: MaskPlan, inputs: Inputs) -> Tensor:
    """|j - i - shift|, integer, [1|b, 1, s_q, s_kv]."""
    rows = torch.arange(inputs.q.shape[2], device=inputs.q.device).view(-1, 1) + _shift(plan, inputs)
    columns = torch.arange(inputs.k.shape[2], device=inputs.q.device)
    distance = (columns - rows - plan.diagonal).abs_()
    return four_dims(distance)


def _dead_rows(plan: MaskPlan, mask: Tensor, s_q: int) -> Tensor:
    """Bool [1|b, 1|h, s_q, 1]: rows whose every visible column is -inf in ``mask``."""
    if not plan.is_causal:
        return (mask == -torch.inf).all(-1, keepdim=True).expand(*mask.shape[:2], s_q, 1)
    # One mask row for all queries, the triangle drawn by the kernel: row r sees the columns up to r.
    alive = (mask != -torch.inf).cumsum(-1) > 0  # [1|b, 1|h, 1, s_kv]
    last = torch.arange(s_q, device=mask.device).clamp_(max=mask.shape[-1] - 1)
    return alive.squeeze(2).index_select(2, last).logical_not().unsqueeze(3)


def align(mask: Tensor) -> Tensor:
    """Rows of a contiguous mask on multiples of 8 elements, as the memory-efficient kernel asks.

    F.sdpa's ``pad_bias``: the last dimension is padded in memory and sliced off again, which autograd tracks.
    """
    width = mask.shape[-1]
    if width % MASK_ALIGNMENT == 0:
        return mask
    return torch.nn.functional.pad(mask, (0, -width % MASK_ALIGNMENT)).narrow(-1, 0, width)
