"""SDPA6xx: PyTorch's FlashAttention 2 by its own op, with lengths, windows and pages.

What the kernels themselves want stands in ``flash``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import torch
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.sdpa.common import CUDA
from attnsel.verdicts.requirements import AtMost, FreeText, Multiple, OneOf
from attnsel.verdicts.verdict import Unknown, Violation

rule = rules_about("sdpa.varlen")

PAGED = {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged", "page_size": 256, "is_training": False}
_STEPS = "one sequence right behind the other"


@rule("SDPA600", fires_on={"gpu": "cpu"})
def varlen_devices(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """The op with lengths exists on NVIDIA GPUs

    Why: on a CPU it raises. ROCm builds answer it with AOTriton or CK, whose limits were not read; XPU and
    MPS have other ops.
    Fix: sdpa.math and tiled run on every device.
    Source: torch 2.13 native_functions.yaml, _flash_attention_forward (dispatch: CUDA).
    """
    if env.device.type == "cuda":
        return None
    finding = Unknown if env.device.type == "rocm" else Violation
    return finding("device", env.device.type, OneOf("cuda"))


@rule("SDPA601", when=torch("<2.6.0"), fires_on={"torch": "2.5.1"}, passes={"torch": "2.6.0"})
def varlen_since_2_6(p: AttentionParams, env: Environment) -> Violation:
    """The op takes windows beside lengths from PyTorch 2.6 on

    Why: attnsel runs from 2.6 on, and no earlier wheel was looked at.
    Fix: install PyTorch 2.6 or newer.
    Source: schema of aten::_flash_attention_forward in the wheels of 2.6.0 to 2.13.0.
    """
    return Violation("torch", env.torch, FreeText("2.6.0 or newer"))


@rule(
    "SDPA602",
    device=CUDA,
    fires_on={"max_seqlen_q": 1024, "max_seqlen_kv": 4096},
    passes={"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 4096},
)
def varlen_diagonal(p: AttentionParams, env: Environment) -> Violation | None:
    """The op's diagonal goes to the bottom right of each sequence

    Why: FlashAttention 2.1 and newer align the last query with the last key. Where queries and keys are
    equally long that is the top-left diagonal too: with lengths this is known if one tensor says both. Of a
    dense call the bounds are moved by the difference, as long as they stay on their side of the diagonal.
    Fix: give one tensor for both lengths, or ask for the bottom-right diagonal where that is meant.
    Source: mask.h and flash_api.cpp of FlashAttention 2 in PyTorch 2.13; attnsel/backends/sdpa/varlen.py,
    "window_of".
    """
    if p.bottom_right_diagonal or p.window_size == (-1, -1):
        return None
    if p.padding or p.qkv_format == "thd" or p.kv_cache == "paged":
        if p.same_lengths:
            return None
        needed = FreeText("one tensor for the lengths of queries and keys, or a bottom-right diagonal")
    else:
        left, right = p.window_size
        longer = p.max_seqlen_kv - p.max_seqlen_q
        if (left < 0 or left + longer >= 0) and (right < 0 or right >= longer):
            return None
        needed = FreeText("equal lengths, or a bottom-right diagonal")
    if p.causal:
        return Violation("attn_mask_type", p.attn_mask_type, needed)
    return Violation("bottom_right_diagonal", p.bottom_right_diagonal, needed)


@rule(
    "SDPA603",
    fires_on={"qkv_layout": "sbhd_sbhd_sbhd", "attn_mask_type": "padding"},
    passes={"qkv_layout": "sbhd_sbhd_sbhd"},
    device=CUDA,
)
def varlen_rows(p: AttentionParams, env: Environment) -> Violation | None:
    """With lengths, sequences must lie one behind the other

    Why: the op takes rows [t, h, d] and the first row of each sequence; a padded batch is that as it lies if
    it is bshd. In sbhd and bhsd the rows of a sequence are apart.
    Fix: use bshd; attnsel packs other formats (adaptation "pack") or copies a tensor that steps otherwise.
    Source: attnsel/backends/sequences.py.
    """
    if not p.padding or p.layout.q_format == "thd" or p.batch_size == 1:
        return None
    if p.layout.q_format != "bshd" or (p.kv_cache != "paged" and p.layout.kv_format != "bshd"):
        return Violation("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd"))
    tensors = p.tensors
    if tensors.q is tensors.k is tensors.v is None:
        return None
    for name, spec in (("q", tensors.q), ("k", tensors.k), ("v", tensors.v)):
        if spec is None or spec.shape[1] <= 1 or (p.kv_cache == "paged" and name != "q"):
            continue
        if spec.stride[0] != spec.shape[1] * spec.stride[1]:
            return Violation(f"tensors.{name}", spec.stride, FreeText(_STEPS))
    return None


@rule(
    "SDPA604",
    device=CUDA,
    when=torch("<2.12.0"),
    fires_on={**PAGED, "torch": "2.11.0"},
    passes={**PAGED, "torch": "2.12.0"},
)
def varlen_pages_since_2_12(p: AttentionParams, env: Environment) -> Violation | None:
    """The op takes pages from PyTorch 2.12 on

    Fix: install PyTorch 2.12 or newer, or let triton or cudnn read the pages.
    Source: argument block_table in the schema of aten::_flash_attention_forward, wheels 2.11.0 and 2.12.0.
    """
    return Violation("torch", env.torch, FreeText("2.12.0 or newer")) if p.kv_cache == "paged" else None


@rule(
    "SDPA605",
    device=CUDA,
    requires={"page_size": Multiple(256)},
    fires_on={**PAGED, "page_size": 64},
    passes=PAGED,
)
def varlen_page_size(p: AttentionParams, env: Environment) -> bool:
    """Pages have a multiple of 256 rows

    Why: the kernel's tiles of keys must not cross a page.
    Fix: pages of 256 rows, or a kernel with smaller ones: triton, cudnn.
    Source: TORCH_CHECK in mha_varlen_fwd of PyTorch's flash_api.cpp, "Paged KV cache block size must be
    divisible by 256", read at pytorch 03b7c19d.
    """
    return p.kv_cache == "paged"


@rule(
    "SDPA606",
    device=CUDA,
    requires={"batch_size": AtMost(32767)},
    fires_on={"batch_size": 32768, "max_seqlen_q": 16, "attn_mask_type": "padding_causal"},
    passes={"batch_size": 32767, "max_seqlen_q": 16, "attn_mask_type": "padding_causal"},
)
def varlen_grid(p: AttentionParams, env: Environment) -> bool:
    """With padding, or gaps, the op takes at most 32767 sequences

    Why: what lies between two sequences is a sequence to the kernel, and their number is a dimension of its
    launch grid, of which CUDA allows 65535.
    Fix: split the batch.
    Source: flash_fwd_launch_template.h, dim3 grid(num_m_block, b, h); attnsel/backends/sequences.py.
    """
    return (p.padding and p.qkv_format != "thd") or p.pad_between_seqs


@rule(
    "SDPA607",
    device=CUDA,
    fires_on={**PAGED, "torch_flash": "FA4"},
    passes={**PAGED, "torch_flash": "FA4", "gpu": "B200"},
)
def varlen_pages_of_fa4(p: AttentionParams, env: Environment) -> Violation | None:
    """FA4 in its place reads pages on datacentre Blackwell alone

    Fix: torch.nn.attention.restore_flash_attention_impl().
    Source: torch 2.13, torch/nn/attention/_fa4.py, "paged KV (block_table) not supported on SM".
    """
    paged = p.kv_cache == "paged" and env.torch_flash == "FA4"
    if not paged or (env.arch is not None and 100 <= env.arch < 110):
        return None
    return Violation("torch_flash", "FA4", FreeText("FA2: torch.nn.attention.restore_flash_attention_impl()"))
