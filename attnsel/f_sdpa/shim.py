"""``torch.nn.functional.scaled_dot_product_attention`` in this process, for programs that are not changed.

What is replaced is the attribute of ``torch.nn.functional``: whoever looks it up there gets attnsel's, also
PyTorch's own modules (nn.MultiheadAttention). Whoever holds the function under another name keeps PyTorch's:
``torch._C._nn.scaled_dot_product_attention``, ``torch.ops.aten.scaled_dot_product_attention``, a ``from
torch.nn.functional import …`` that ran before, C++ and scripted code.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins

from attnsel.base.processes import first_in_children, no_longer_in_children
from attnsel.f_sdpa.function import scaled_dot_product_attention

logger = logging.getLogger("attnsel")

NAME = "scaled_dot_product_attention"

_lock = threading.RLock()
_before: Callable[..., Any] | None = None


def install() -> bool:
    """From now on F.scaled_dot_product_attention is ``attnsel.scaled_dot_product_attention``.

    Returns whether there was anything to do. Processes that multiprocessing spawns have it from their start.
    """
    global _before
    functional: Any = torch.nn.functional
    with _lock:
        if getattr(functional, NAME) is scaled_dot_product_attention:
            return False
        _before = getattr(functional, NAME)
        setattr(functional, NAME, scaled_dot_product_attention)
        # torch.jit.script finds PyTorch's own operator behind it: it cannot compile this function.
        _builtins._register_builtin(scaled_dot_product_attention, f"aten::{NAME}")
        first_in_children(__name__, f"from {__name__} import install; install()")
        logger.info("F.%s is attnsel's in this process", NAME)
        return True


def uninstall() -> bool:
    """Restore the function that was there. Returns whether there was anything to undo."""
    global _before
    functional: Any = torch.nn.functional
    with _lock:
        if _before is None:
            return False
        if getattr(functional, NAME) is scaled_dot_product_attention:  # else replaced by other code since
            setattr(functional, NAME, _before)
        _before = None
        _builtins._get_builtin_table().pop(id(scaled_dot_product_attention), None)
        no_longer_in_children(__name__)
        logger.info("F.%s is no longer attnsel's in this process", NAME)
        return True
