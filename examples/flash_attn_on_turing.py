"""A program written for FlashAttention-2, on a GPU that the package refuses, or on none.

    python examples/flash_attn_on_turing.py

On a T4 or an RTX 20xx the package says "FlashAttention only supports Ampere GPUs or newer". Here the same
lines run there, on a CPU, and, through the real package, on the GPUs it knows.

1. The program: packed sequences are trained on, then a cache is decoded from. It imports flash_attn, and no
   line of it knows of attnsel. Without step 2 it runs as ``attnsel run program.py``.
2. install() puts the name flash_attn in place, unless the real package is there and works.
3. The program runs, and each sequence alone in plain PyTorch says the same.
4. What a T4 would run for these calls and why not another kernel: asked of the planner, which needs no T4.
"""

from __future__ import annotations

import argparse
import signal
from typing import Any

try:
    import torch
    from torch import Tensor

    from attnsel import AttentionParams, Environment, select
    from attnsel.flash_attn import install
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs {missing.name}: pip install -e '.[examples]'") from None

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (70, 19, 39)  # three sequences in one batch, no padding
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def heading(text: str) -> None:
    print(f"\n── {text} " + "─" * max(0, 74 - len(text)))


# ---- 1. the program, as one finds it ------------------------------------------------------------------


def train_step(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Causal attention of packed sequences: out [t, h, d], after a backward pass."""
    from flash_attn import flash_attn_varlen_func

    ends = torch.tensor([0, *lengths], device=q.device).cumsum(0).to(torch.int32)
    longest = max(lengths)
    out: Tensor = flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)
    out.float().square().mean().backward()
    return out


def decode(q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, filled: Tensor) -> Any:
    """One more token per sequence: the cache takes it in place, and the query sees what is filled."""
    from flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache(
        q, k_cache, v_cache, k_new, v_new, cache_seqlens=filled, causal=True, return_softmax_lse=True
    )


# ---- 2. the name --------------------------------------------------------------------------------------

installed = install()
heading("import flash_attn")
print(installed or "the real package works here and is used")

# ---- 3. run it, and check it ----------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence, [s, h, d], in plain PyTorch and float32; rows stand at the end."""
    q, k, v = q.float(), *(t.float().repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / HEAD_DIM**0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + k.shape[0] - q.shape[0])
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float16)


torch.manual_seed(0)
tokens = sum(LENGTHS)
q, k, v = (random(tokens, heads, HEAD_DIM).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS))
out = train_step(q, k, v, LENGTHS)
parts = zip(*(t.detach().split(LENGTHS) for t in (q, k, v)), strict=True)
expected = torch.cat([plain(*part) for part in parts])

heading("packed training, three sequences of different lengths")
print(f"out {tuple(out.shape)}, gradients of q, k, v: {all(t.grad is not None for t in (q, k, v))}")
print(f"largest difference from each sequence alone: {(out.detach() - expected).abs().max().item():.0e}")

filled = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
caches = [random(len(LENGTHS), 128, KV_HEADS, HEAD_DIM) for _ in range(2)]
new = [random(len(LENGTHS), 1, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
step, lse = decode(*new, *caches, filled)  # type: ignore[call-arg]
seen = [[cache[i, : n + 1] for cache in caches] for i, n in enumerate(LENGTHS)]  # now with the new token
expected = torch.stack([plain(new[0][i], *kv) for i, kv in enumerate(seen)])

heading("a step of decoding from a cache, in place")
print(f"out {tuple(step.shape)}, lse {tuple(lse.shape)} {lse.dtype}")
print(f"largest difference from each sequence alone: {(step - expected).abs().max().item():.0e}")

# ---- 4. on a T4 -----------------------------------------------------------------------------------------

T4 = Environment.describe(gpu="T4")
shared: dict[str, Any] = {
    "dtype": "fp16",
    "num_heads": HEADS,
    "num_gqa_groups": KV_HEADS,
    "head_dim_qk": HEAD_DIM,
}
CALLS = {
    "flash_attn_varlen_func, training": AttentionParams(
        qkv_layout="thd",
        batch_size=len(LENGTHS),
        max_seqlen_q=max(LENGTHS),
        attn_mask_type="padding_causal_bottom_right",
        is_training=True,
        **shared,
    ),
    "flash_attn_with_kvcache, one token": AttentionParams(
        batch_size=len(LENGTHS),
        max_seqlen_q=1,
        max_seqlen_kv=128,
        attn_mask_type="padding_causal_bottom_right",
        is_training=False,
        return_lse=True,
        **shared,
    ),
}

heading(f"what a {T4.device.name} would run (planned, not run)")
for what, call in CALLS.items():
    answer = select(call, T4)
    print(f"{what}: {answer.backend}")
    for candidate in answer:
        if candidate.eligible:
            said = "; ".join(adaptation.text for adaptation in candidate.adaptations) or "as it is"
            done = "executed off-GPU" if candidate.executed_off_gpu else "not run there yet"
            proof = f", unproven there: {done}" if candidate.unproven else ""
            print(f"    {candidate.name:<15}runs, {said}{proof}")
        for reason in candidate.reasons:
            print(f"    {candidate.name:<15}cannot: {reason.code}  {reason.rule.title}")
