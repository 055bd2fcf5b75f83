"""What is recognised: a module per library, or for some that belong together, each with ``LIBRARIES``.

A new module is a line in ``_MODULES``. Where two messages of one library are in one line both count; a text
that two libraries print belongs to the first module that knows it.
"""

from __future__ import annotations

import importlib
from functools import lru_cache

from attnsel.diagnose.logs.message import Library

_MODULES = (
    "transformer_engine",
    "cudnn",
    "torch_sdpa",
    "machine",
    "flash_attn",
    "serving",
    "transformers",
    "image_models",
    "flex_attention",
    "megatron",
    "trainers",
    "jax",
)


@lru_cache(maxsize=1)
def libraries() -> tuple[Library, ...]:
    """Every library whose messages are known."""
    modules = (importlib.import_module(f"attnsel.diagnose.logs.parsers.{name}") for name in _MODULES)
    return tuple(library for module in modules for library in module.LIBRARIES)
