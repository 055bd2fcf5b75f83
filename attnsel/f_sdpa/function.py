"""``attnsel.scaled_dot_product_attention``: PyTorch's function, attnsel's choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from attnsel import debug
from attnsel.backends.checks import is_transformed
from attnsel.errors import InvalidInput, NoBackendError
from attnsel.policy import Policy
from attnsel.runtime.call import (
    NO_EXTRAS,
    Config,
    Extras,
    config,
    constant_when_traced,
    is_causal_bias,
)
from attnsel.runtime.dispatch import any_autocast, attend, attend_again, autocast
from attnsel.settings import current

# --------------------------------------------------------------------------------------------------------
# What an ``attn_mask`` of F.sdpa becomes: bool with True = takes part, or floating and added to the scores.
#
# attnsel means the opposite by True. Masks on the CPU are read, at every call, as their contents may
# change: a causal one is said as such, and one that changes nothing is left out. A mask on a GPU is never
# read, since that would wait; one of ``torch.nn.attention.bias`` says what it is without.


class Mask(NamedTuple):
    """A mask as attnsel's arguments say it."""

    attn_mask_type: str = "no_mask"
    bias_type: str = "no_bias"
    extras: Extras = NO_EXTRAS


NO_MASK, CAUSAL = Mask(), Mask("causal")


def read_mask(mask: Tensor, rows: int, keys: int) -> Mask:
    """``mask`` broadcasts to [b, h, rows, keys], and is bool or of a floating-point type."""
    once = _once(mask)
    readable = mask.device.type == "cpu" and not torch.compiler.is_compiling() and not mask.requires_grad
    if mask.dtype == torch.bool:
        hidden = ~once
        kind = _kind(hidden, rows, keys) if readable else None
        return kind or Mask("arbitrary", extras=Extras(attention_mask=hidden))
    if readable:
        kind = _kind_of_scores(once.detach(), rows, keys)
        if kind is not None:
            return kind
    return Mask(bias_type="post_scale_bias", extras=Extras(core_attention_bias=mask))


def read_causal_bias(mask: Any, rows: int, keys: int) -> Mask | None:
    """What a mask of torch.nn.attention.bias says; None where PyTorch has words or NaN of its own for it."""
    if (mask.seq_len_q, mask.seq_len_kv) != (rows, keys) or rows > keys:
        return None
    return CAUSAL if mask.variant.name == "UPPER_LEFT" else _from_the_bottom_right(rows, keys)


def _once(mask: Tensor) -> Tensor:
    """What an expanded mask is made of."""
    if torch.compiler.is_compiling() or 0 not in mask.stride():
        return mask
    return mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())]


def _kind(hidden: Tensor, rows: int, keys: int) -> Mask | None:
    """Causal, or nothing at all; None for any other pattern. Most are told by their first row."""
    if hidden.dim() < 2 or hidden.shape[-2:] != (rows, keys):
        return None if hidden.any() else NO_MASK
    if rows == 1 or keys == 1:
        return None if hidden.any() else NO_MASK
    seen = keys - int(hidden[(0,) * (hidden.dim() - 2)][0].sum())
    if seen == keys:
        return None if hidden.any() else NO_MASK
    shift = seen - 1
    if shift not in (0, keys - rows):
        return None
    pattern = torch.ones(rows, keys, dtype=torch.bool).triu_(shift + 1)
    if not (hidden == pattern).all():
        return None
    return CAUSAL if shift == 0 else _from_the_bottom_right(rows, keys)


def _kind_of_scores(bias: Tensor, rows: int, keys: int) -> Mask | None:
    """``_kind`` of a mask that is added, where all that it adds is 0 or minus infinity."""
    corner = bias[(0,) * (bias.dim() - 1)][-1].item() if bias.dim() else bias.item()
    if corner == 0.0:
        return None if bias.any() else NO_MASK
    if corner != -torch.inf:
        return None
    hidden = bias == -torch.inf
    if not ((bias == 0) | hidden).all():
        return None
    return _kind(hidden, rows, keys)


def _from_the_bottom_right(rows: int, keys: int) -> Mask:
    return CAUSAL if rows == keys else Mask("causal_bottom_right")


# ---- [..., s, d] as [b, h, s, d]: what stands before the last two dimensions, as F.sdpa reads it -------
# The third dimension from the end counts heads, what stands before it counts sequences, and both broadcast.


class Heads(NamedTuple):
    """q, k, v as [b, h, s, d] and [b, g, s, d], g dividing h; ``lead``: what [b, h] of the output becomes."""

    q: Tensor
    k: Tensor
    v: Tensor
    lead: tuple[int, ...] | None  # None: [b, h] as it is


def heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> Heads | str:
    """The three in four dimensions, or why they do not fit together."""
    rank = q.dim()
    if not rank == k.dim() == v.dim():
        return f"query, key and value of {rank}, {k.dim()} and {v.dim()} dimensions"
    if rank < (3 if enable_gqa else 2):
        return f"{rank} dimensions"
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return "sizes that do not fit together"
    if rank == 4 and q.shape[0] == k.shape[0] == v.shape[0] and _share_heads(q, k, v, enable_gqa):
        return Heads(q, k, v, None)
    if rank == 2:
        return Heads(*_each(lambda t: t[None, None], q, k, v), ())
    batch = _common(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    if batch is None:
        return "leading dimensions that do not broadcast"
    if not _share_heads(q, k, v, enable_gqa):
        shared = None if enable_gqa else _common(*(t.shape[-3:-2] for t in (q, k, v)))
        if shared is None:
            return "numbers of heads that do not fit together"
        q, k, v = _each(lambda t: t.expand(*t.shape[:-3], *shared, *t.shape[-2:]), q, k, v)
    lead = (*batch, q.shape[-3])
    q, k, v = _each(lambda t: t.expand(*batch, *t.shape[-3:]), q, k, v)
    return Heads(*_each(_flat, q, k, v), lead)


def mask_beside(mask: Tensor, lead: tuple[int, ...] | None) -> Tensor:
    """A mask of any number of dimensions, as one that broadcasts to [b, h, s_q, s_kv]."""
    if lead is None or mask.dim() <= 3:
        return mask
    return mask.expand(*lead[:-1], *mask.shape[-3:]).flatten(0, -4)


def _share_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    h, g = q.shape[-3], k.shape[-3]
    return g == v.shape[-3] and (g == h or g == 1 or (enable_gqa and h % g == 0))


def _flat(t: Tensor) -> Tensor:
    return t.flatten(0, -4) if t.dim() > 3 else t[None]


def _each(change: Any, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (change(t) for t in tensors)
    return q, k, v


def _common(*shapes: Any) -> tuple[int, ...] | None:
    """What they broadcast to; None where they do not."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None


# --------------------------------------------------------------------------------------------------------
# Calls that go to PyTorch's own function: what attnsel cannot express, and what is not its to decide.


ORIGINAL: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention

_PLAIN = (Tensor, torch.nn.Parameter)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DEVICES = ("cpu", "cuda")
_FINITE = torch.finfo(torch.float64).max

# The context managers and flags by which a program chooses among PyTorch's kernels.
_FLAGS: tuple[Callable[[], bool], ...] = tuple(
    getattr(torch._C, f"_get_{name}_sdp_enabled", getattr(torch.backends.cuda, f"{name}_sdp_enabled"))
    for name in ("flash", "mem_efficient", "math", "cudnn")
)
_flash, _efficient, _math, _cudnn = _FLAGS
_order: Callable[[], list[int]] = getattr(torch._C, "_get_sdp_priority_order", list)
_USUAL_ORDER = _order()
_BY_THE_PROGRAM = (
    "the program chooses among PyTorch's kernels (sdpa_kernel, torch.backends.cuda.enable_*_sdp)"
)


def surroundings() -> str:
    """Why no eager call is one for attnsel now, whatever its tensors; "" where nothing speaks against it."""
    if is_transformed():
        return "a transform of torch.func or forward-mode differentiation is active"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace is tracing"
    return _BY_THE_PROGRAM if _chosen_by_the_program() else ""


def _surroundings_while_tracing() -> str:
    if torch.compiler.is_exporting():
        return "torch.export is tracing"
    return _BY_THE_PROGRAM if _chosen_while_tracing() else ""


def _chosen_by_the_program() -> bool:
    return not (_flash() and _efficient() and _math() and _cudnn() and _order() == _USUAL_ORDER)


_chosen_while_tracing = constant_when_traced(_chosen_by_the_program)


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
    if mask.dim() < 2:  # PyTorch takes some of them and raises IndexError for others
        return f"an attn_mask of {mask.dim()} dimensions"
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
    if scale is not None and (not isinstance(scale, (int, float)) or not -_FINITE <= scale <= _FINITE):
        return "a scale that is no finite number"
    return ""


def hand_over(reason: str, *args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's answer, and its errors. The reason is said once, under ATTNSEL_DEBUG."""
    # By name, as most programs have them: PyTorch's errors say the position of what came without one.
    mask = args[3]
    kwargs |= {"attn_mask": mask, "dropout_p": args[4], "is_causal": args[5]}
    args = args[:3]
    if torch.compiler.is_compiling():
        return ORIGINAL(*args, **kwargs)
    settings = current()
    if settings.debug:
        debug.announce_handed_over("scaled_dot_product_attention", reason, settings)
    if is_causal_bias(mask):
        # It compares the function that is called with the one that F has now.
        theirs = torch.nn.functional.scaled_dot_product_attention
        answer: Tensor = handle_torch_function(theirs, (mask,), *args, **kwargs)
        return answer
    return ORIGINAL(*args, **kwargs)


_ANYTHING = Policy()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` by the best kernel that can run the call.

    Arguments, shapes, broadcasting, polarity and errors are PyTorch's: query [..., h, s_q, d], key
    [..., g, s_kv, d], value [..., g, s_kv, e], any number of leading dimensions; attn_mask broadcasts to
    [..., h, s_q, s_kv], bool with **True = takes part** (unlike ``attnsel.attention``) or floating and added
    to the scores; is_causal from the top left corner; enable_gqa: g divides h.

    What attnsel cannot express goes to PyTorch's own function, and so does what is not its to decide: a call
    under ``sdpa_kernel`` or a transform of torch.func, tensor subclasses, devices other than CPU and CUDA.
    ATTNSEL_DEBUG=1 says which and why, once. Raises what PyTorch raises, and NoBackendError where a policy
    (ATTNSEL_BACKENDS, ``override``) allows no kernel that can run the call.
    """
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if torch.compiler.is_compiling():
        reason = _surroundings_while_tracing()
    elif torch._C._is_torch_function_mode_enabled():
        mine = scaled_dot_product_attention
        seen: Tensor = handle_torch_function(mine, (), *given, scale=scale, enable_gqa=enable_gqa)
        return seen
    else:
        reason = surroundings()
        if not reason and attn_mask is None:
            try:
                asked = _without_mask(dropout_p, is_causal, scale, enable_gqa)
            except (TypeError, ValueError):  # none for attnsel, as is said below
                pass
            else:
                # What is remembered under this Config was found fit, and has its tensors as they came.
                again: Tensor | None = attend_again(asked, query, key, value, grouped=enable_gqa)
                if again is not None:
                    return again
    reason, made = (reason, None) if reason else _read(*given, scale, enable_gqa)
    if made is not None:
        shape, mask = made
        asked = _asked(mask.attn_mask_type, mask.bias_type, dropout_p, scale, folded=shape.lead is not None)
        try:
            out: Tensor = attend(asked, shape.q, shape.k, shape.v, mask.extras)
        except InvalidInput as error:
            reason = str(error)
        except NoBackendError:
            if current().policy.replace(figures=None) != _ANYTHING:
                raise
            reason = "no kernel of attnsel's can run it"
        else:
            return out if shape.lead is None else out.reshape(*shape.lead, *out.shape[-2:])
    return hand_over(reason, *given, scale=scale, enable_gqa=enable_gqa)


@lru_cache(maxsize=1024, typed=True)
def _without_mask(dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> Config:
    """Raises ValueError for numbers that are none for attnsel."""
    unfit = unfit_numbers(dropout_p, is_causal, scale, enable_gqa)
    if unfit:
        raise ValueError(unfit)
    return _asked((CAUSAL if is_causal else NO_MASK).attn_mask_type, "no_bias", dropout_p, scale)


def _asked(
    attn_mask_type: str, bias_type: str, dropout_p: float, scale: float | None, folded: bool = False
) -> Config:
    """``folded``: leading dimensions were made one, so that heads may be those of a whole batch."""
    return config(
        qkv_format="bhsd",
        attn_mask_type=attn_mask_type,
        bias_type=bias_type,
        softmax_scale=scale,
        attention_dropout=dropout_p,
        is_training=dropout_p > 0.0,
        label="scaled_dot_product_attention",
        said="mask diagonal layout" if folded else "mask diagonal",  # what torch means by them
    )


def _read(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> tuple[str, tuple[Heads, Mask] | None]:
    """The call as attnsel's arguments; or why it is none of attnsel's, and None."""
    reason = unfit_numbers(dropout_p, is_causal, scale, gqa)
    if reason:
        return reason, None
    if any_autocast():
        query, key, value = autocast(query, key, value)
    reason = unfit(query, key, value)
    if reason:
        return reason, None
    shape = heads(query, key, value, gqa)
    if isinstance(shape, str):
        return shape, None
    if attn_mask is None:
        return "", (shape, CAUSAL if is_causal else NO_MASK)
    if is_causal:
        return "an attn_mask beside is_causal", None
    return _with_mask(attn_mask, shape)


def _with_mask(attn_mask: Any, shape: Heads) -> tuple[str, tuple[Heads, Mask] | None]:
    rows, keys = shape.q.shape[-2], shape.k.shape[-2]
    if is_causal_bias(attn_mask):
        known = read_causal_bias(attn_mask, rows, keys)
        return ("", (shape, known)) if known is not None else ("a CausalBias of other lengths", None)
    if any_autocast():
        attn_mask = autocast(attn_mask, attn_mask, attn_mask)[0]
    reason = unfit_mask(attn_mask, shape.q)
    if reason:
        return reason, None
    lead = shape.lead if shape.lead is not None else shape.q.shape[:2]
    if not _fits(attn_mask, (*lead, rows, keys)):
        return "an attn_mask that does not broadcast to the scores", None
    return "", (shape, read_mask(mask_beside(attn_mask, shape.lead), rows, keys))


def _fits(mask: Tensor, full: tuple[int, ...]) -> bool:
    """Whether a mask broadcasts to the scores, and does not widen them."""
    if mask.dim() > len(full):
        return False
    return all(n in (1, m) for n, m in zip(reversed(mask.shape), reversed(full), strict=False))
