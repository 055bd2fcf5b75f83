"""PyTorch's scaled-dot-product kernels, as attnsel calls them: the aten op of one kernel, no dispatcher.

``common`` holds what no SDPA kernel can express, or only through a mask tensor; the other modules hold
one kernel each. The bodies describe the native call. What a folded mask, a copy or expanded heads would
make possible is the engine's business: it asks the same rules again about the changed question.

What "A" to "D" are in the sources is said in ``SOURCES``, which their pages show. Before 2.5: ``old``.
"Machine code of a wheel" is that of its libtorch_cuda.so, whose symbols name the chooser's checks. What
F.sdpa checks before it takes a kernel, and these rules do not, is in attnsel/dispatchers/torch/checks.py.
"""

# In the order in which reports give reasons.
from attnsel.rules.sdpa import common, flash, cudnn, others, old, platforms  # noqa: I001

SOURCES = (
    "A to D: sdp_utils.cpp of PyTorch as stored about 2.6 (A, commit 21c3369e), about 2.9 (B), after 2.13 "
    "(C, commit 001f694a), and the headers of the 2.13.0 and 2.14.1 wheels (D)."
)
"""Abbreviations in the sources of this folder's rules."""

__all__ = ["SOURCES", "common", "cudnn", "flash", "old", "others", "platforms"]
