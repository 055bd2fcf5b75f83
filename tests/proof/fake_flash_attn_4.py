"""A package that looks like flash-attn-4 from outside: the functions that attnsel calls, with a few checks.

Some numbers of heads, which no other call has, bring about what a release may do: it dies, never answers,
fails as torch does without a GPU, asserts without a word, has a mistake of its own.
"""

from __future__ import annotations

from pathlib import Path

from attnsel import AttentionParams

DIES, SILENT, NO_GPU, WORDLESS, CONSTRUCTOR, STAND_IN, FIRST_CALL, BUG = range(1001, 1009)

INTERFACE = """
import os, time
import torch
import cutlass
import cutlass.cute as cute
from cutlass.base_dsl.arch import Arch
from cutlass.cutlass_dsl import BaseDSL
from flash_attn.cute.kernels import FlashAttentionForwardSm80

NUMBERS = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}


def _get_device_arch():
    return int(os.environ["FLASH_ATTENTION_ARCH"].removeprefix("sm_"))


_get_device_arch.cache_clear = lambda: None


def _flash_attn_fwd(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                    seqused_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
                    window_size_left=None, window_size_right=None, learnable_sink=None, return_lse=False):
    arch, h, d = _get_device_arch(), *q.shape[-2:]
    assert arch // 10 in [8, 9, 10], "Unsupported compute capability"
    assert q.dtype in NUMBERS, "inputs must be half precision"
    if h == 1001:
        os._exit(3)
    if h == 1002:
        time.sleep(600)
    if h == 1003:
        q.sum().item()
    assert h != 1004
    if h == 1008:
        del d
        print(d)
    key = (h, d)
    if key not in _flash_attn_fwd.compile_cache:
        assert h != 1007 or softcap is None, "not with softcap"
        kernel = FlashAttentionForwardSm80(NUMBERS[q.dtype], d, h)
        assert h != 1006 or cute.size(kernel) > 3, "what is not known"
        _flash_attn_fwd.compile_cache[key] = cute.compile(kernel, options="--enable-tvm-ffi")
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    return out, lse


_flash_attn_fwd.compile_cache = {}


def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0,
                    window_size_left=None, window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None,
                    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dlse=None,
                    learnable_sink=None):
    if deterministic:
        raise NotImplementedError("deterministic backward not supported")
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(None, None)):
    return q, None
"""

KERNELS = """
import cutlass
from cutlass.cutlass_dsl import BaseDSL
from cutlass.base_dsl.arch import Arch
import cutlass.utils as utils


class FlashAttentionForwardSm80:
    def __init__(self, dtype, head_dim, heads, tile_m=128):
        assert heads != 1005, f"no tile for {heads} heads"
        assert BaseDSL._get_dsl().get_arch_enum() >= Arch.sm_80
        self.width = cutlass.const_expr(dtype.width)

    @staticmethod
    def can_implement(dtype, head_dim, tile_m):
        return 8 * tile_m * head_dim <= utils.get_smem_capacity_in_bytes("sm_80")
"""


def install(folder: Path, version: str = "4.0.0b36") -> Path:
    """Unpacked as a wheel is, into ``folder``."""
    about = folder / f"flash_attn_4-{version}.dist-info"
    package = folder / "flash_attn" / "cute"
    for made in (about, package):
        made.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.4\nName: flash-attn-4\nVersion: {version}\n")
    (package / "__init__.py").write_text("from .interface import flash_attn_func\n")
    (package / "interface.py").write_text(INTERFACE.lstrip())
    (package / "kernels.py").write_text(KERNELS.lstrip())
    return folder


def line_of(text: str) -> int:
    """Of the interface."""
    return 1 + INTERFACE.lstrip().split("\n").index(text)


def question(num_heads: int = 16, **fields: object) -> AttentionParams:
    return AttentionParams(
        **{"num_heads": num_heads, "attn_mask_type": "no_mask", "is_training": False, **fields}
    )
