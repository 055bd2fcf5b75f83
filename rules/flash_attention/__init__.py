"""FlashAttention's own packages: flash-attn (2), the hopper/ build (3) and flash-attn-4.

``common`` holds what all three want of a call, ``rocm`` what flash-attn (2) is on AMD's GPUs, the others what
one generation refuses, by release. What attnsel passes to them, and how, stands in backends/flash_attention.
Lines in the sources are of the tag or wheel that is named.
"""

# In the order in which reports give reasons.
from attnsel.rules.flash_attention import common, two, rocm, three, four  # noqa: I001

__all__ = ["common", "four", "rocm", "three", "two"]
