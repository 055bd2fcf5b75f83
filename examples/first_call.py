"""Attention on this machine: computed, checked and explained. Any CPU will do.

    python examples/first_call.py

1. Causal attention of 2 sequences: 8 query heads share 2 key heads, as in Llama.
2. The same in float64 by PyTorch's own function, to see that the numbers are right.
3. What ran, and every reason why the other kernels did not.
"""

from __future__ import annotations

import argparse
import signal

try:
    import torch

    from attnsel import DotProductAttention
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs {missing.name}: pip install -e '.[examples]'") from None

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 8, 2, 64

# ---- 1. the call --------------------------------------------------------------------------------------

torch.manual_seed(0)
q = torch.randn(BATCH, LENGTH, HEADS, HEAD_DIM, requires_grad=True)
k, v = (torch.randn(BATCH, LENGTH, KV_HEADS, HEAD_DIM, requires_grad=True) for _ in range(2))

core = DotProductAttention(
    HEADS, HEAD_DIM, num_gqa_groups=KV_HEADS, qkv_format="bshd", attn_mask_type="causal"
)
out = core(q, k, v)  # [b, s, h * d]
out.sum().backward()

# ---- 2. the same in float64 -----------------------------------------------------------------------------

wide_q, wide_k, wide_v = (t.detach().double().transpose(1, 2) for t in (q, k, v))  # [b, h, s, d]
right = torch.nn.functional.scaled_dot_product_attention(
    wide_q, wide_k, wide_v, is_causal=True, enable_gqa=True
)
error = (out.detach() - right.transpose(1, 2).flatten(2)).abs().max().item()

# ---- 3. what ran, and why ---------------------------------------------------------------------------------

answer = core.last_selection
assert answer is not None, "a call was made"
print(f"attention of {BATCH} sequences of {LENGTH} tokens, forward and backward: {answer.backend} ran")
print(f"out {list(out.shape)}; largest difference from float64: {error:.0e}")
print("\nThe whole answer (ATTNSEL_DEBUG=2 prints it too; core.explain(q, k, v) gives it without running):\n")
print(answer.report())
