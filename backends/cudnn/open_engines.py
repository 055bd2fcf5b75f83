"""cudnn-frontend's own attention kernels, from 1.29 on: what they take beyond libcudnn, as planned only.

From 1.29 on the frontend depends on CuTe DSL and brings kernels of its own, which it ranks beside
libcudnn's: head dimensions up to 512 in training on sm100 and in inference on sm90 and sm12x, and Rubin
(sm107). Its dependencies take about 2 GB, so attnsel's extra stays below 1.29 and its calls go to libcudnn
alone. Where rules refuse libcudnn and such a kernel takes the call, cudnn is planned and not run.

Of each engine the frontend's own ``Capabilities`` are the judge: rows of ``data/open_engines.csv``. Less
than they do is claimed where a feature has conditions of its own: a bias, pages, packed sequences in
training, FP8.
Source: cudnn/sdpa/{fwd,bwd}/engines.py, ``mismatch``, and cudnn/engines/manifest.py of 1.29.1 and 1.32.0.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attnsel.base.rows import read_rows
from attnsel.environment import Environment
from attnsel.environment.versions import Version
from attnsel.params import AttentionParams

if TYPE_CHECKING:
    from attnsel.verdicts.reasons import Reason

FIRST = Version(1, 29)  # what is read of it; 1.28 had some of them, with an extra and by opting in


class OpenEngine(NamedTuple):
    """One of them: a row of the table, where its columns are explained. ``shapes``: widths of q and v, and
    what both must exceed."""

    frontend: str
    phase: str
    engine: str
    opt_in: str
    first: int
    last: int
    shapes: tuple[tuple[int, int, int], ...]
    multiple: int
    takes: frozenset[str]

    def fits(self, p: AttentionParams, arch: int) -> bool:
        """Whether it is a candidate for a call, as far as that was read."""
        if not self.first <= arch <= self.last:
            return False
        d, e = p.head_dim_qk, p.head_dim_v
        wide = any((d, e) == (s, t) for s, t, _ in self.shapes)
        if not wide and self.multiple and not d % self.multiple and not e % self.multiple:
            wide = any(d <= s and e <= t and min(d, e) > floor for s, t, floor in self.shapes)
        return wide and features_of(p, self.phase) <= self.takes


@lru_cache(maxsize=1)
def _engines() -> dict[Version, tuple[OpenEngine, ...]]:
    """The rows of the table, by the release that they are of."""
    found: dict[Version, tuple[OpenEngine, ...]] = {}
    for row in read_rows("attnsel.backends.cudnn", "open_engines"):
        read: dict[str, Any] = {
            "shapes": tuple(map(_shape, row["shapes"].split())),
            "takes": frozenset(row["takes"].split()),
            **{name: int(row[name]) for name in ("first", "last", "multiple")},
        }
        release = Version.parse(row["frontend"])
        found[release] = (*found.get(release, ()), OpenEngine(**{**row, **read}))
    return found


def _shape(text: str) -> tuple[int, int, int]:
    """``512x512>256``; without the last number it is 0."""
    d, e, floor = map(int, re.findall(r"\d+", text if ">" in text else f"{text}>0"))
    return d, e, floor


def features_of(p: AttentionParams, phase: str) -> set[str]:
    """What a call asks of a kernel, in the words of the table and some that none of them takes."""
    left, right = p.window_size
    packed, diagonal = p.qkv_format == "thd", p.causal or right >= 0
    covered = p.padding or packed or (p.causal and (p.bottom_right or p.max_seqlen_q <= p.max_seqlen_kv))
    turned = bool(p.bottom_right_diagonal)
    asked = {
        "causal": p.causal,
        "bottom_right": turned and (diagonal or left >= 0),
        "window": left >= 0,
        "right": right > 0 or (right == 0 and not p.causal),
        "padding": p.padding and not packed,
        "thd": packed,
        "sinks": p.softmax_type != "vanilla",
        "deterministic": p.deterministic and phase == "bwd",
        "decode": p.max_seqlen_q == 1,
        "gqa": p.gqa,
        "narrow_v": p.head_dim_v < p.head_dim_qk,
        "wide_v": p.head_dim_v > p.head_dim_qk,
        "tail": phase == "fwd" and p.max_seqlen_kv % 128 != 0 and not covered,
        "any_order": p.qkv_format not in ("bshd", "thd"),
        # Of these nothing is claimed.
        "odd widths": bool(p.head_dim_qk % 8 or p.head_dim_v % 8)
        or (p.head_dim_qk > 512 and p.qkv_format != "bshd"),
        "a type of 16 bits": p.dtype not in ("bf16", "fp16") or p.fp8_attention,
        "an open diagonal": turned and not diagonal and left >= 0,
        "more queries": (turned or left >= 0) and p.max_seqlen_q > p.max_seqlen_kv,
        "one query": p.max_seqlen_q == 1 and p.softmax_type != "vanilla",
        "a mask tensor": p.attn_mask_type == "arbitrary",
        "a cache": p.kv_cache != "none" or p.pad_between_seqs,
        "dense tensors": p.layout.group != "hd_hd_hd" or any((p.tensors.q, p.tensors.k, p.tensors.v)),
        "scores": p.core_attention_bias_type != "no_bias" or p.softcap != 0.0 or p.dropout,
        "results": p.return_max_logit or p.context_parallel or not p.max_seqlen_q or p.max_seqlen_kv < 2,
    }
    return {word for word, holds in asked.items() if holds}


def open_engines(p: AttentionParams, env: Environment) -> tuple[OpenEngine, ...]:
    """One for each phase, on by default if one is; none where a phase has none. A release that was not read
    is taken for the one before it."""
    frontend, arch, engines = env.cudnn_frontend, env.arch, _engines()
    read = max((release for release in engines if frontend is not None and release <= frontend), default=None)
    if arch is None or read is None:
        return ()
    found: list[OpenEngine | None] = []
    for phase in ("fwd", "bwd") if p.is_training else ("fwd",):
        fit = [each for each in engines[read] if each.phase == phase and each.fits(p, arch)]
        found += sorted(fit, key=lambda engine: engine.opt_in)[:1] or [None]
    return tuple(engine for engine in found if engine is not None and None not in found)


@lru_cache(maxsize=256)
def _planned(p: AttentionParams, env: Environment) -> str | None:
    """Why a call is planned by some of them, if it is."""
    found = open_engines(p, env)
    setting = ", CUDNN_FRONTEND_ENABLE_FROST_ENGINES=1" if any(each.opt_in for each in found) else ""
    text = (
        f"cudnn-frontend {env.cudnn_frontend} has {' and '.join(each.engine for each in found)} for it, "
        "which attnsel does not call; it needs nvidia-cutlass-dsl "
        f"{'4.8' if env.arch == 107 else '4.7'} or newer{setting}"
    )
    return text if found else None


def planned_by(p: AttentionParams, env: Environment, reasons: Collection[Reason]) -> str | None:
    """``CandidateRecord.beyond``: what rules say of libcudnn does not touch these kernels; what is not
    installed, and a user's policy, do."""
    if env.cudnn_frontend is None or env.cudnn_frontend < FIRST:
        return None
    others = any(reason.rule.family not in ("CUDNN", "BUG") for reason in reasons)
    return None if others else _planned(p, env)
