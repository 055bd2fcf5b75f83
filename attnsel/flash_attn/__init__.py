"""FlashAttention-2's API on any GPU and on the CPU; each call runs on the best kernel that can take it.

``from attnsel.flash_attn import flash_attn_func`` in place of ``from flash_attn import flash_attn_func``, or
``install()`` before a program imports ``flash_attn``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from attnsel.flash_attn.interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from attnsel.flash_attn.options import FlashAttentionError

__version__ = "2.8.4"
"""The release of FlashAttention-2 whose signatures and semantics these are; programs check it."""


def install(*args: Any, **kwargs: Any) -> Any:
    """Put these names under ``flash_attn`` in this process; see ``attnsel.flash_attn.shim.install``."""
    # Late: the shim takes over a name of the process, which few want of this module.
    return import_module("attnsel.flash_attn.shim").install(*args, **kwargs)


__all__ = [
    "FlashAttentionError",
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]
