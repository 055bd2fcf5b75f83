"""Calls that go to PyTorch's own function: what attnsel cannot express, and what is not its to decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import handle_torch_function

from attnsel import debug
from attnsel.runtime.refusals import is_transformed
from attnsel.runtime.tracing import constant_when_traced
from attnsel.settings import current

ORIGINAL: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention

_PLAIN = (Tensor, torch.nn.Parameter)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DEVICES = ("cpu", "cuda")

# The context managers and flags by which a program chooses among PyTorch's kernels.
_FLAGS: tuple[Callable[[], bool], ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)
_order: Callable[[], list[int]] = getattr(torch._C, "_get_sdp_priority_order", list)
_USUAL_ORDER = _order()
_BY_THE_PROGRAM = (
    "the program chooses among PyTorch's kernels (sdpa_kernel, torch.backends.cuda.enable_*_sdp)"
)


def surroundings() -> str:
    """Why this is not a call for attnsel, whatever its tensors are; "" where nothing speaks against it."""
    if torch.compiler.is_compiling():
        if torch.compiler.is_exporting():
            return "torch.export is tracing"
        return _BY_THE_PROGRAM if _chosen_while_tracing() else ""
    if is_transformed():
        return "a transform of torch.func or forward-mode differentiation is active"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace is tracing"
    return _BY_THE_PROGRAM if _chosen_by_the_program() else ""


def _chosen_by_the_program() -> bool:
    return not all(enabled() for enabled in _FLAGS) or _order() != _USUAL_ORDER


@constant_when_traced
def _chosen_while_tracing() -> bool:
    return _chosen_by_the_program()


def unfit(q: Any, k: Any, v: Any) -> str:
    """Why q, k and v are none for attnsel; "" where they are."""
    for t in (q, k, v):
        if type(t) not in _PLAIN:
            return f"a {type(t).__name__}"
        if t.is_nested or t.layout is not torch.strided:
            return "a nested or sparse tensor"
    if q.device.type not in _DEVICES:
        return f"a tensor on {q.device.type}"
    if not q.device == k.device == v.device:
        return "tensors on several devices"
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"tensors of {', '.join(dict.fromkeys(str(t.dtype) for t in (q, k, v)))}"
    if not (q.numel() and k.numel() and v.numel()):
        return "an empty tensor"
    if not torch.compiler.is_compiling() and (q.is_neg() or k.is_neg() or v.is_neg()):
        return "a view that is negated when it is read"
    return ""


def unfit_mask(mask: Any, q: Tensor) -> str:
    """Why a mask is none for attnsel; "" where it is."""
    if type(mask) not in _PLAIN:
        return f"an attn_mask that is a {type(mask).__name__}"
    if mask.is_nested or mask.layout is not torch.strided or mask.device != q.device or not mask.numel():
        return "an attn_mask that is not dense, is empty or on another device"
    if mask.dtype not in (torch.bool, q.dtype, torch.float32):
        return f"an attn_mask of {mask.dtype}"
    return ""


def unfit_numbers(dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> str:
    """Why the other arguments are none for attnsel; "" where they are."""
    if not isinstance(is_causal, bool) or not isinstance(enable_gqa, bool):
        return "a flag that is no bool"
    if not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p < 1.0:
        return "a dropout_p that is no number below 1"
    if scale is not None and (not isinstance(scale, (int, float)) or not -torch.inf < scale < torch.inf):
        return "a scale that is no finite number"
    return ""


def hand_over(reason: str, *args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's answer, and its errors. The reason is said once, under ATTNSEL_DEBUG."""
    if torch.compiler.is_compiling():
        return ORIGINAL(*args, **kwargs)
    settings = current()
    if settings.debug:
        debug.announce_handed_over("scaled_dot_product_attention", reason, settings)
    if type(args[3]) is CausalBias:
        # It compares the function that is called with the one that F has now.
        theirs = torch.nn.functional.scaled_dot_product_attention
        answer: Tensor = handle_torch_function(theirs, (args[3],), *args, **kwargs)
        return answer
    return ORIGINAL(*args, **kwargs)
