"""TE0xx: what is known of TransformerEngine's own attention, where its version was stated.

attnsel does not choose for TransformerEngine: these are notes beside the answer. Bugs of libcudnn itself are
rules (rules/bugs.py), whoever calls it.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.te_releases import OLDEST_INSTALLED, bundled_frontend
from attnsel.environment.versions import Version, cudnn, transformer_engine
from attnsel.params import AttentionParams
from attnsel.rules.api import REGISTRY, Rule
from attnsel.rules.hint import Advice, hint

_SM120 = frozenset({120})


@hint(
    "TE001",
    when=transformer_engine(">=1.0"),
    fires_on={"transformer_engine": "2.4"},
    passes={"transformer_engine": None},
)
def own_frontend(p: AttentionParams, env: Environment) -> Advice | None:
    """TransformerEngine brings its own cudnn-frontend, in C++

    Why: up to 2.17 it is compiled in from a submodule, and from 2.18 on from the headers that were installed
    where it was built. The Python package nvidia-cudnn-frontend, which attnsel calls, changes nothing there.
    Fix: read rules about the frontend with --cudnn-frontend at the version that TransformerEngine has.
    Source: 3rdparty/cudnn-frontend at the tags v1.0 to v2.17.1; NVIDIA/TransformerEngine#3169;
    attnsel/environment/te_releases.py.
    """
    version = env.transformer_engine
    assert version is not None
    inside = bundled_frontend(version)
    if inside is None:
        if env.detected:
            return None  # it is here, and nobody asked about it
        return Advice(f"TransformerEngine {version} was built with a frontend of {OLDEST_INSTALLED} or newer")
    here = _about_frontend(p, env, env.cudnn_frontend)
    there = _about_frontend(p, env, inside)
    text = f"TransformerEngine {version} has cudnn-frontend {inside} compiled in"
    gone = [code for code in here if code not in there]
    new = [code for code in there if code not in here]
    if gone:
        text += f"; {', '.join(gone)} ({env.cudnn_frontend}) does not touch it"
    if new:
        text += f"; {', '.join(new)} would"
    return Advice(text) if gone or new or not env.detected else None


def _about_frontend(p: AttentionParams, env: Environment, frontend: Version | None) -> list[str]:
    """The rules against cuDNN whose verdict hangs on the frontend, at one version of it."""
    other = env.replace(cudnn_frontend=frontend)
    return [
        rule.code
        for rule in REGISTRY.rules.values()
        if _asks_for_frontend(rule) and rule.concerns(p) and rule.applies(other) and rule.find(p, other)
    ]


def _asks_for_frontend(rule: Rule) -> bool:
    """Whether it holds for some releases of the frontend. Being installed is asked of Python's alone."""
    return "cudnn" in rule.candidates and any(gate.component == "cudnn_frontend" for gate in rule.when)


@hint(
    "TE002",
    when=transformer_engine(">=2.14"),
    arch=_SM120,
    evidence="source",
    fires_on={"deterministic": True},
    passes={"deterministic": True, "is_training": False},
)
def deterministic_on_sm120(p: AttentionParams, env: Environment) -> Advice | None:
    """On sm120 TransformerEngine has no deterministic fused training

    Why: nvte_get_fused_attn_backend returns no backend there from 2.14 on, though libcudnn accepts it.
    Earlier releases missed the case.
    Fix: flash-attn, which TransformerEngine takes then where it is installed.
    Source: NVIDIA/TransformerEngine#2798; common/fused_attn/fused_attn.cpp of v2.14 to v2.18.
    """
    if not (p.deterministic and p.is_training):
        return None
    return Advice(
        f"TransformerEngine {env.transformer_engine} has no deterministic cuDNN training on sm120 "
        "(#2798), whatever libcudnn accepts"
    )


@hint(
    "TE003",
    when=transformer_engine(">=2.14,<2.18"),
    arch=_SM120,
    evidence="reported",
    fires_on={"qkv_layout": "thd", "attn_mask_type": "padding_causal"},
    passes={"qkv_layout": "thd", "attn_mask_type": "padding_causal", "is_training": False},
)
def packed_gradients_on_sm120(p: AttentionParams, env: Environment) -> Advice | None:
    """On sm120 TransformerEngine below 2.18 has wrong packed cuDNN gradients

    Why: the forward is right and the backward is not; its own unfused attention is right.
    Fix: TransformerEngine 2.18, or NVTE_FUSED_ATTN=0.
    Source: NVIDIA/TransformerEngine#3333 (2.17.0, cuDNN 9.25); fixed by 70957ad5a, first in v2.18.
    """
    if p.qkv_format != "thd" or not p.is_training:
        return None
    return Advice(
        f"TransformerEngine {env.transformer_engine}: thd gradients of its cuDNN attention are wrong on "
        "sm120 (#3333); fixed in 2.18"
    )


@hint(
    "TE004",
    when=transformer_engine(">=1.9,<1.12"),
    evidence="source",
    fires_on={"window_size": (1024, 0)},
    passes={},
)
def window_one_short(p: AttentionParams, env: Environment) -> Advice | None:
    """TransformerEngine 1.9 to 1.11 gives cuDNN a window that is one key short

    Why: cuDNN's left bound is exclusive and TransformerEngine's is inclusive; one was handed on as the other.
    FlashAttention and the unfused attention are right. attnsel hands on left + 1.
    Fix: TransformerEngine 1.12.
    Source: NVIDIA/TransformerEngine#1197, fixed by #1212, first in v1.12; windows came with #992, in v1.9.
    """
    if p.window_size[0] < 0:
        return None
    return Advice(
        f"TransformerEngine {env.transformer_engine}: cuDNN's windows are one key short, unlike its other "
        "backends' (#1197); fixed in 1.12"
    )


@hint(
    "TE005",
    when=(transformer_engine(">=1.0"), cudnn("<9.18.0")),
    arch=frozenset({90}),
    evidence="reported",
    fires_on={"qkv_layout": "thd", "attn_mask_type": "padding_causal", "num_heads": 8, "cp_size": 2},
    passes={"qkv_layout": "thd", "attn_mask_type": "padding_causal", "num_heads": 8},
)
def padded_over_ranks(p: AttentionParams, env: Environment) -> Advice | None:
    """TransformerEngine's padding over ranks: NaN on Hopper below cuDNN 9.18

    Why: the gaps that the padding leaves are what BUG011 is about, and a short sequence can be all gap on
    one rank.
    Fix: cuDNN 9.18; say --pad-between-seqs here, so that the rule is asked.
    Source: NVIDIA/TransformerEngine#2186 (2.6, cuDNN 9.7.1, Hopper).
    """
    packed = p.qkv_format == "thd" and p.is_training and p.context_parallel
    if not packed or p.pad_between_seqs:
        return None
    return Advice(
        "TransformerEngine pads packed sequences to 2 × cp_size; gaps give NaN gradients on Hopper below "
        "cuDNN 9.18 (#2186): --pad-between-seqs"
    )
