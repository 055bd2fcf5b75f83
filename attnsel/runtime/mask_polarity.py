"""Whether a bool mask looks inverted: True means masked out here, and visible in F.sdpa (HINT009).

Looked up for the first call of a signature and under ATTNSEL_DEBUG alone. A mask on a GPU is read, which
waits for it, with ATTNSEL_DEBUG=2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnsel import debug
from attnsel.runtime.call import Call

_MOST = 1 << 26  # elements that are read
_INVERTED = "True means masked out here, as in TransformerEngine, and visible in F.sdpa: attention_mask=~mask"


def warn_of_polarity(call: Call) -> None:
    """A HintWarning where the call's mask looks inverted."""
    given: Any = call.extras.attention_mask
    for mask in given if isinstance(given, (tuple, list)) else (given,):
        looks = None if mask is None else inverted(mask, read_gpu=call.settings.debug > 1)
        if looks is not None:
            debug.warn_hint("HINT009", f"{looks}. {_INVERTED}", call.settings, call.config.label)
            return


def inverted(mask: Any, *, read_gpu: bool) -> str | None:
    """What about a mask [..., s_q, s_kv] looks as if True meant visible; None where nothing does."""
    if type(mask) is not Tensor or mask.dtype != torch.bool or mask.dim() < 2 or not mask.numel():
        return None
    if mask.device.type != "cpu" and not (read_gpu and mask.device.type == "cuda"):
        return None
    mask = mask.detach()[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())]
    rows, keys = mask.shape[-2:]
    if mask.numel() > _MOST:
        return None
    if rows > 1 and keys > 1:
        full = torch.ones(rows, keys, dtype=torch.bool, device=mask.device)
        if any(bool((mask == full.tril(shift)).all()) for shift in dict.fromkeys((0, keys - rows))):
            return "the mask hides the lower triangle and shows the keys after each query"
    hidden = int(mask.all(-1).sum())
    if hidden:
        return f"the mask hides every key from {hidden} of {mask.numel() // keys} rows"
    return None
