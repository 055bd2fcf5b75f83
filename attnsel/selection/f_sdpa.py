"""What F.sdpa chooses by itself, for releases of PyTorch that attnsel plans for and does not run on."""

from __future__ import annotations

from attnsel.candidates import OLDEST_TORCH
from attnsel.environment import Environment
from attnsel.params import AttentionParams

OLDEST = ".".join(map(str, OLDEST_TORCH))
BY_F_SDPA = f"F.sdpa runs it; attnsel itself runs on torch {OLDEST} or newer"
"""Why a kernel is planned only, where it needs no attnsel to be run."""

_FLASH_FIRST = ("sdpa.flash", "sdpa.efficient", "sdpa.math", "sdpa.cudnn")
_EFFICIENT_FIRST = ("sdpa.efficient", "sdpa.flash", "sdpa.math")
_FEW = 60  # sequences times heads: fewer leave an A100 idle under FlashAttention 1


def f_sdpa_order(p: AttentionParams, env: Environment) -> tuple[str, ...]:
    """Kernels in the order in which F.sdpa tries them; none for a torch that attnsel runs on, or that
    nobody stated.

    Source: priority_order in v2.0.0 sdp_utils.h, lines 41 to 77, for 2.1 with the training heuristic of
    pytorch#99644; constant from 2.2 on (v2.4.0 sdp_utils.cpp); pytorch#125343 for 2.5.0, which prefers cuDNN
    on sm90 and puts it second elsewhere, undone in 2.5.1 (pytorch#138649).
    """
    if env.torch is None or env.torch >= OLDEST_TORCH or "torch" in env.assumed:
        return ()
    if env.device.type != "cuda" or (2, 2) <= env.torch < (2, 5):
        return _FLASH_FIRST
    if env.torch < (2, 2):
        return _EFFICIENT_FIRST if _prefers_efficient(p, env) else _FLASH_FIRST
    if env.torch >= (2, 5, 1):
        return _FLASH_FIRST
    if env.arch == 90:
        return ("sdpa.cudnn", "sdpa.flash", "sdpa.efficient", "sdpa.math")
    return ("sdpa.flash", "sdpa.cudnn", "sdpa.efficient", "sdpa.math")


def _prefers_efficient(p: AttentionParams, env: Environment) -> bool:
    flash = p.batch_size * p.num_heads
    if p.is_training and env.torch is not None and env.torch >= (2, 1):
        return 6 * flash > p.max_seqlen_q
    cutlass = flash * (p.max_seqlen_q // 64)
    return (flash < _FEW and cutlass // 2 >= flash) or p.head_dim_qk == 128
