"""Flash attention in plain PyTorch operations: every feature, every device, slow and never wrong.

Blocks over queries and keys, online softmax in float32 (float64 for float64 inputs), a backward that
recomputes the scores; memory is O(s_q + s_kv). The last resort, and the yardstick for the others.

Dense calls read no tensor on the host. Packed (thd) calls read the ``cu_seqlens`` once.
"""

from __future__ import annotations

from .backward import backward
from .forward import forward
from .tiles import Blocks

__all__ = ["Blocks", "backward", "forward"]
