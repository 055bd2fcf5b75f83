"""FLASH0xx: what every generation of FlashAttention wants: where it runs, how tensors lie, which diagonal.

The bodies are those of PyTorch's copy of FlashAttention 2 (rules/sdpa), which wants the same.
"""

from __future__ import annotations

from attnsel.backends.registry import where
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.sdpa.common import last_dimension_contiguous, sixteen_byte_rows
from attnsel.rules.sdpa.flash import varlen_diagonal, varlen_rows
from attnsel.verdicts.reasons import Unknown, Violation
from attnsel.verdicts.requirements import OneOf

EVERY = where(lambda record: record.family == "FLASH")
Finding = Violation | Unknown | bool | None

rule = rules_about(EVERY, device={"cuda", "rocm"})
_Q = {"shape": (2, 4096, 16, 128)}
_TWO = {"flash_attn": "2.8.3"}  # without it a report says no more than that it is not installed


@rule(
    "FLASH001",
    device=None,
    requires={"platform": OneOf("linux")},
    unknown=True,
    evidence="documented",
    fires_on={"platform": "windows"},
)
def linux_only(p: AttentionParams, env: Environment) -> bool:
    """FlashAttention's packages are made for Linux

    Why: its wheels are built on Linux alone; people have built flash-attn on Windows, which nobody tests, and
    CuTe DSL has no Windows wheels.
    Fix: Linux or WSL.
    Source: README.md of flash-attention at 0251105a, "Requirements"; its .github/workflows/publish.yml.
    """
    return env.platform != "linux"


@rule(
    "FLASH002",
    fires_on={"tensors": {"q": {**_Q, "stride": (8388608, 1, 524288, 4096)}}, **_TWO},
    passes=_TWO,
)
def contiguous_rows(p: AttentionParams, env: Environment) -> Finding:
    """The head dimension of q, k and v must have stride 1

    Why: rows are loaded as one run of memory. The packages copy what lies otherwise on every call and say
    nothing; attnsel copies too, and says so.
    Fix: x.contiguous(), or nothing: attnsel copies the tensor (adaptation "contiguous").
    Source: TORCH_CHECK "Input tensor must have contiguous last dimension", flash_api.cpp of flash-attn
    v2.8.3, line 380, and of hopper/ at 0251105a, line 726; maybe_contiguous in the Python of all three.
    """
    return last_dimension_contiguous(p, env)


@rule(
    "FLASH003",
    fires_on={"tensors": {"q": {**_Q, "stride": (8388608, 2048, 128, 1), "alignment": 2}}, **_TWO},
    passes={"tensors": {"q": {**_Q, "stride": (8388608, 2048, 128, 1)}}, **_TWO},
)
def whole_vectors(p: AttentionParams, env: Environment) -> Finding:
    """q, k and v must start, and step, at multiples of 16 bytes

    Why: the kernels load 128 bits at a time. FlashAttention 2 and 3 check nothing: a misaligned address loses
    the CUDA context. FlashAttention 4 copies from 4.0.0b36 on.
    Fix: attnsel copies the tensor (adaptation "contiguous").
    Source: uint128_t copies in csrc/flash_attn/src/kernel_traits.h v2.8.3; flash_attn/cute/interface.py
    4.0.0b36, maybe_contiguous.
    """
    return sixteen_byte_rows(p, env)


@rule(
    "FLASH004",
    fires_on={"max_seqlen_q": 1024, "max_seqlen_kv": 4096, **_TWO},
    passes={"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 4096, **_TWO},
)
def bottom_right_diagonal(p: AttentionParams, env: Environment) -> Finding:
    """The diagonal goes to the bottom right of each sequence

    Why: since 2.1 the last query is aligned with the last key. Where queries and keys are equally long that
    is the top-left diagonal too: with lengths this is known if one tensor says both. Of a dense call the
    bounds are moved by the difference, as long as they stay on their side of the diagonal. ALiBi counts from
    the same diagonal.
    Fix: causal_bottom_right where that is meant (decoding, chunked prefill), or one tensor for both lengths.
    Source: README.md of flash-attention, "2.1: Change behavior of causal flag"; src/mask.h v2.8.3;
    flash_attn/cute/mask.py 4.0.0b36; backends/rows.py, "bottom_right_window".
    """
    found = varlen_diagonal(p, env)
    if found is not None or p.core_attention_bias_type != "alibi" or p.bottom_right_diagonal:
        return found
    lengths = p.padding or p.qkv_format == "thd" or p.kv_cache == "paged"
    if p.same_lengths if lengths else p.max_seqlen_q == p.max_seqlen_kv:
        return None
    return Violation("bottom_right_diagonal", False, OneOf(True))


@rule(
    "FLASH005",
    fires_on={"qkv_layout": "sbhd_sbhd_sbhd", "attn_mask_type": "padding", **_TWO},
    passes={"qkv_layout": "sbhd_sbhd_sbhd", **_TWO},
)
def rows_behind_each_other(p: AttentionParams, env: Environment) -> Finding:
    """With lengths, sequences must lie one behind the other

    Why: a call with lengths takes rows [t, h, d] and the first row of each sequence; a padded batch is that
    as it lies if it is bshd. In sbhd and bhsd the rows of a sequence are apart.
    Fix: use bshd; attnsel packs other formats (adaptation "pack") or copies a tensor that steps otherwise.
    Source: flash_attn_varlen_func of all three; backends/rows.py.
    """
    return varlen_rows(p, env)
