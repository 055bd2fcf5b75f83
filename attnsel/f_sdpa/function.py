"""``attnsel.scaled_dot_product_attention``: PyTorch's function, attnsel's choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import handle_torch_function

from attnsel.errors import InvalidInput, NoBackendError
from attnsel.f_sdpa.masks import CAUSAL, NO_MASK, Mask, read_causal_bias, read_mask
from attnsel.f_sdpa.shapes import Heads, heads, mask_beside
from attnsel.f_sdpa.theirs import hand_over, surroundings, unfit, unfit_mask, unfit_numbers
from attnsel.policy import Policy
from attnsel.runtime.call import config
from attnsel.runtime.dispatch import any_autocast, attend, autocast
from attnsel.settings import current

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
    if not torch.compiler.is_compiling() and torch._C._is_torch_function_mode_enabled():
        mine = scaled_dot_product_attention
        seen: Tensor = handle_torch_function(mine, (), *given, scale=scale, enable_gqa=enable_gqa)
        return seen
    reason, made = _read(*given, scale, enable_gqa)
    if made is not None:
        shape, mask = made
        asked = config(
            qkv_format="bhsd",
            attn_mask_type=mask.attn_mask_type,
            bias_type=mask.bias_type,
            softmax_scale=scale,
            attention_dropout=dropout_p,
            is_training=dropout_p > 0.0,
            label="scaled_dot_product_attention",
        )
        try:
            out: Tensor = attend(asked, shape.q, shape.k, shape.v, mask.extras)
        except InvalidInput as error:
            reason = str(error)
        except NoBackendError:
            if current().policy != _ANYTHING:
                raise
            reason = "no kernel of attnsel's can run it"
        else:
            return out if shape.lead is None else out.reshape(*shape.lead, *out.shape[-2:])
    return hand_over(reason, *given, scale=scale, enable_gqa=enable_gqa)


def _read(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> tuple[str, tuple[Heads, Mask] | None]:
    """The call as attnsel's arguments; or why it is none of attnsel's, and None."""
    reason = surroundings() or unfit_numbers(dropout_p, is_causal, scale, gqa)
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
    if type(attn_mask) is CausalBias:
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
