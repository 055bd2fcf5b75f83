"""attnsel's own flash attention in Triton, forward and backward: every feature of the contract, GPU and CPU.

On CUDA tensors the kernels are compiled; on CPU tensors the same kernels go through Triton's interpreter,
which is slow and for tests and curiosity. Deterministic: no atomics anywhere. Memory is O(s_q + s_kv).

Importing this needs triton; no driver is touched before the first launch.
"""

from __future__ import annotations

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "attnsel.backends.triton needs Triton: pip install 'attnsel[triton]' (PyPI has it for Linux only)"
    ) from error

from .blocks import Block, Tiles
from .run import backward, forward, prepare

__all__ = ["Block", "Tiles", "backward", "forward", "prepare"]
