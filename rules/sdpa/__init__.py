"""PyTorch's scaled-dot-product kernels, as attnsel calls them: the aten op of one kernel, no dispatcher.

``common`` holds what no SDPA kernel can express, or only through a mask tensor; the other modules hold
one kernel each. The bodies describe the native call. What a folded mask, a copy or expanded heads would
make possible is the engine's business: it asks the same rules again about the changed question.

"A" to "D" in the sources: sdp_utils.cpp of PyTorch as stored about 2.6 (A, commit 21c3369e), about 2.9 (B),
after 2.13 (C, commit 001f694a), and the headers of the 2.13.0 and 2.14.1 wheels (D). Before 2.5: ``old``.
"""

# In the order in which reports give reasons.
from attnsel.rules.sdpa import common, cpu, flash, varlen, cudnn, cudnn_heads, efficient, math  # noqa: I001
from attnsel.rules.sdpa import old, platforms

__all__ = [
    "common",
    "cpu",
    "cudnn",
    "cudnn_heads",
    "efficient",
    "flash",
    "math",
    "old",
    "platforms",
    "varlen",
]
