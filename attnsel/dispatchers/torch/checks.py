"""What F.sdpa's chooser checks, kernel by kernel and in its order, release by release.

Where one of attnsel's rules about the same kernel says the same, the check names it; what the chooser has
beside, or otherwise, stands here. A rule that no check names is one that the chooser does not have.

They are rows of data/checks.csv. The releases were read as ``_READ`` beside says; no GPU ran any of it here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attnsel.base.rows import read_rows
from attnsel.dispatchers.conditions import attribute, read_conditions
from attnsel.dispatchers.torch.switches import Held
from attnsel.environment import Environment
from attnsel.environment.versions import Version
from attnsel.params import AttentionParams, TensorSpec
from attnsel.rules.sdpa.common import VECTOR
from attnsel.verdicts.reasons import Reason

HEADER = "sdp_utils_cpp.h"
CUDA = "cuda/sdp_utils.cpp"
XPU = "mkldnn/xpu/Attention.cpp"
_NEVER = (99,)
_HALF = ("bf16", "fp16")


class CheckInput(NamedTuple):
    """One call to one release. ``p``: the question as F.sdpa sees it."""

    p: AttentionParams
    env: Environment
    release: Version
    held: Held

    @property
    def gpu(self) -> bool:
        return self.env.device.type in ("cuda", "rocm")

    @property
    def arch(self) -> int:
        return self.env.arch or 0

    @property
    def mask(self) -> TensorSpec | None:
        return self.p.tensors.mask


class Objection(NamedTuple):
    """What one check has against a call. ``silent``: it has no text for it; ``raises``: it does not refuse,
    it raises."""

    check: Check
    text: str
    code: str = ""
    silent: bool = False
    raises: bool = False


class Check(NamedTuple):
    """A row. ``says`` and ``own``: what it says by itself, the latter with the rule it is closest to.
    ``where``: of which calls."""

    name: str
    file: str
    codes: tuple[str, ...] = ()
    says: str = ""
    own: Callable[[CheckInput], tuple[str, str] | None] | None = None
    since: tuple[int, ...] = ()
    before: tuple[int, ...] = _NEVER
    where: Callable[[CheckInput], bool] = bool
    effect: str = ""

    def holds_for(self, asked: CheckInput) -> bool:
        return self.since <= asked.release < self.before and self.where(asked)

    def objections(self, asked: CheckInput, found: Mapping[str, Reason]) -> list[Objection]:
        said = self.own(asked) if self.own is not None else None
        texts = [said] if said is not None else []
        texts += [(self.says.format(p=asked.p), "")] if self.says else []
        texts += [(found[code].message, code) for code in self.codes if code in found]
        return [Objection(self, *text, self.effect == "silent", self.effect == "raises") for text in texts]


# What the chooser says by itself.


def _no_groups(asked: CheckInput) -> tuple[str, str] | None:
    p = asked.p
    if not p.gqa or asked.held.enable_gqa or (asked.release >= (2, 14) and p.num_gqa_groups == 1):
        return None
    heads = f"{p.num_heads} query heads and {p.num_gqa_groups} key/value heads"
    return (f"{heads}, and enable_gqa is not set", "")


def _no_groups_on_cpus(asked: CheckInput) -> tuple[str, str] | None:
    if asked.p.gqa and asked.held.enable_gqa and (2, 5) <= asked.release < (2, 9):
        return ("the CPU kernel has no groups of heads before torch 2.9, whatever enable_gqa says", "")
    return _no_groups(asked)


def _batches(asked: CheckInput) -> tuple[str, str] | None:
    """Only math broadcasts a batch of one."""
    tensors = asked.p.tensors
    if not asked.p.qkv_format.startswith("b"):
        return None
    for name, spec in (("q", tensors.q), ("k", tensors.k), ("v", tensors.v)):
        if spec is not None and spec.shape[0] != asked.p.batch_size:
            return (f"{name} has batch {spec.shape[0]} where others have {asked.p.batch_size}", "")
    return None


def _stride(asked: CheckInput) -> tuple[str, str] | None:
    """Where head_dim is 1, any stride will do for flash and cuDNN."""
    return None if asked.p.head_dim_qk == 1 and asked.release >= (2, 3) else _any_stride(asked)


def _any_stride(asked: CheckInput) -> tuple[str, str] | None:
    tensors = asked.p.tensors
    for name, spec in (("q", tensors.q), ("k", tensors.k), ("v", tensors.v)):
        if spec is not None and spec.stride[-1] != 1:
            return (f"the last dimension of {name} has stride {spec.stride[-1]}, needs 1", "SDPA020")
    return None


def _mask_stride(asked: CheckInput) -> tuple[str, str] | None:
    mask = asked.mask
    if mask is None or not mask.stride or mask.stride[-1] == 1:
        return None
    return (f"the last dimension of attn_mask has stride {mask.stride[-1]}, needs 1", "")


def _mask_of_no_rows(asked: CheckInput) -> tuple[str, str] | None:
    if asked.mask is None or len(asked.mask.shape) > 1:
        return None
    return (f"attn_mask has {len(asked.mask.shape)} dimensions, needs 2 or 4", "SDPA015")


def _mask_ends(asked: CheckInput) -> tuple[str, str] | None:
    p, mask = asked.p, asked.mask
    if mask is None or len(mask.shape) < 2:
        return None
    wanted = (p.max_seqlen_q, p.max_seqlen_kv)
    if all(n in (1, m) for n, m in zip(mask.shape[-2:], wanted, strict=True)):
        return None
    return (
        f"attn_mask ends in {list(mask.shape[-2:])}, needs {list(wanted)}, or 1 in either place",
        "SDPA015",
    )


def _mask_dimensions(asked: CheckInput) -> tuple[str, str] | None:
    p, mask = asked.p, asked.mask
    if mask is None or len(mask.shape) <= 2 or (asked.release >= (2, 14) and p.tensors.rank == 3):
        return None
    wanted = (p.batch_size, p.num_heads)
    if len(mask.shape) == 4 and all(n in (1, m) for n, m in zip(mask.shape, wanted, strict=False)):
        return None
    return (
        f"attn_mask is {list(mask.shape)}, needs [s_q, s_kv] or [b, h, s_q, s_kv], each of its size or 1",
        "",
    )


def _mask_gradient(asked: CheckInput) -> tuple[str, str] | None:
    """requires_grad alone counts, under torch.no_grad too."""
    if asked.mask is None or not asked.mask.requires_grad:
        return None
    return ("attn_mask requires a gradient", "SDPA326" if asked.gpu else "SDPA502")


def between_vectors(p: AttentionParams) -> tuple[str, int] | None:
    """The first of q, k and v that begins between 16 bytes, and the bytes that it begins at a multiple of."""
    for name, spec in (("q", p.tensors.q), ("k", p.tensors.k), ("v", p.tensors.v)):
        if spec is not None and spec.alignment < VECTOR:
            return name, spec.alignment
    return None


def _offset(asked: CheckInput) -> tuple[str, str] | None:
    found = between_vectors(asked.p)
    if found is None:
        return None
    where = f"{found[0]} begins at a multiple of {found[1]} bytes"
    return (f"{where} in its storage, needs {VECTOR}", "SDPA021")


def _beyond(asked: CheckInput) -> tuple[str, str] | None:
    """Architectures above the last that the release names; Blackwell before 2.7 is a rule's."""
    last = 120 if asked.release < (2, 8) else 121
    if asked.release < (2, 7) or asked.arch <= last:
        return None
    return (f"the GPU is sm{asked.arch}, taken up to sm{last}", "")


def _too_early(asked: CheckInput) -> tuple[str, str] | None:
    return (f"the GPU is sm{asked.arch}, taken from sm50 on", "") if 0 < asked.arch < 50 else None


def _not_opted_in(asked: CheckInput) -> tuple[str, str] | None:
    if asked.held.cudnn_opt_in:
        return None
    return ("cuDNN is an experiment in torch 2.3 and 2.4: TORCH_CUDNN_SDPA_ENABLED=1", "SDPA720")


def _early_cudnn(asked: CheckInput) -> tuple[str, str] | None:
    """v2.4.0 sdp_utils.cpp, lines 313 to 525."""
    p = asked.p
    if p.head_dim_qk % 8 or p.head_dim_qk > 256:
        return (f"head_dim_qk is {p.head_dim_qk}, needs a multiple of 8 up to 256", "")
    if p.is_training:
        return ("q, k or v require a gradient", "")
    dense = all(spec is None or spec.contiguous for spec in (p.tensors.q, p.tensors.k, p.tensors.v))
    if p.qkv_format != "bshd" or not dense:
        return ("q, k and v must lie as [b, s, h, d] in memory", "")
    return None


def _has_fa3_in_fp8(asked: CheckInput) -> bool:
    """check_dtypes_flash_attention, since 2.11."""
    return (
        asked.held.impl == "FA3"
        and asked.p.dtype == "fp8_e4m3"
        and asked.release >= (2, 11)
        and asked.arch >= 90
    )


def _asks_fa4(asked: CheckInput) -> bool:
    """userEnabledFA4SDP: from 2.15 on the chooser knows what activate_flash_attention_impl put there."""
    return asked.held.impl == "FA4" and asked.release >= (2, 15)


def _fa4_head_dims(asked: CheckInput) -> tuple[str, str] | None:
    """check_head_dim_size_flash of 2.15, lines 234 to 250: FA4's own limits, in the machine code."""
    d, e = asked.p.head_dim_qk, asked.p.head_dim_v
    pairs = asked.arch == 90 or (d, e) in ((192, 128), (256, 256))
    if asked.arch == 90 and max(d, e) > 256:
        return (f"head_dim_qk and head_dim_v are {d} and {e}, FA4 takes at most 256", "SDPA122")
    if not pairs and max(d, e) > 128:
        return (f"head_dim_qk and head_dim_v are {d} and {e}, FA4 takes 128, 192/128 or 256/256", "SDPA122")
    return None


def _half_filled_tile(asked: CheckInput) -> tuple[str, str] | None:
    """check_cudnn_tensor_shapes of 2.15, line 770; whatever the mask is, and for a gradient of q."""
    p, cudnn = asked.p, asked.env.cudnn
    if asked.arch != 90 or p.causal or not p.is_training or p.max_seqlen_kv % 128 != 64:
        return None
    if cudnn is None or cudnn >= (9, 26):
        return None
    return (
        f"max_seqlen_kv is {p.max_seqlen_kv}, 64 more than a multiple of 128, and cuDNN is {cudnn}",
        "BUG006",
    )


def _wants_whole_vectors(asked: CheckInput) -> bool:
    """minimum_gemm_alignment: 1 without tensor cores."""
    half = asked.p.dtype in _HALF
    return asked.env.device.type == "rocm" or asked.arch >= 80 or (half and asked.arch >= 70)


_SYCL = re.compile(r"pvc|ponte|\bmax 1\d\d\d|bmg|battlemage|\bb(50|60|70|570|580)\b|^xpu$|^$")
"""Ponte Vecchio and Battlemage (pytorch#167057); a GPU without a name may be one."""


def _not_for_sycl(asked: CheckInput) -> tuple[str, str] | None:
    card, platform = asked.env.device.name or "xpu", asked.env.platform
    near = platform == "linux" and _SYCL.search(card.casefold())
    return None if near else (f"the GPU is {card} on {platform}", "")


def _oblong(asked: CheckInput) -> bool:
    return asked.p.max_seqlen_q != asked.p.max_seqlen_kv


def _wide(asked: CheckInput) -> bool:
    return max(asked.p.head_dim_qk, asked.p.head_dim_v) > 576


def _unlike_or_wide(asked: CheckInput) -> bool:
    return not asked.p.head_dim_qk == asked.p.head_dim_v <= 192


_OWN = (
    *(_no_groups, _no_groups_on_cpus, _batches, _stride, _any_stride, _mask_stride, _mask_of_no_rows),
    *(_mask_ends, _mask_dimensions, _mask_gradient, _offset, _beyond, _too_early, _not_opted_in),
    *(_early_cudnn, _fa4_head_dims, _half_filled_tile, _not_for_sycl),
)
_WHERE = (_asks_fa4, _has_fa3_in_fp8, _wants_whole_vectors, _oblong, _wide, _unlike_or_wide)
_PLACES = (("", CheckInput), ("held.", Held), ("env.", Environment), ("p.", AttentionParams))


def _read_checks() -> dict[str, tuple[Check, ...]]:
    """The rows of ``data/checks.csv``, by kernel. Functions are named there without their underscore."""
    named: dict[str, Any] = {function.__name__.lstrip("_"): function for function in (*_OWN, *_WHERE)}
    named[""] = None
    found: dict[str, tuple[Check, ...]] = {}
    for row in read_rows("attnsel.dispatchers.torch", "checks"):
        check = Check(
            row["name"],
            row["file"],
            tuple(row["codes"].split()),
            row["says"],
            named[row["own"]],
            _release(row["since"]),
            _release(row["before"]) or _NEVER,
            read_conditions(row["where"], named, lambda word: attribute(word, _PLACES)),
            row["effect"],
        )
        for kernel in row["kernels"].split():
            found[kernel] = (*found.get(kernel, ()), check)
    return found


def _release(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split("."))))


_CHECKS = _read_checks()
_TURNED_OFF = {
    "flash": ("check_runtime_disabled_flash", HEADER),
    "mem_efficient": ("check_runtime_disabled_mem_efficient", HEADER),
    "cudnn": ("check_runtime_disabled_cudnn", CUDA),
    "math": ("select_sdp_backend", CUDA),
    "overrideable": ("select_sdp_backend_xpu", XPU),
}


def objections(kernel: str, asked: CheckInput, found: Mapping[str, Reason]) -> list[Objection]:
    """All that the chooser has against a kernel, in the order in which it looks.

    ``found``: what attnsel's rules have against it, by code.
    """
    made: list[Objection] = []
    if kernel in asked.held.off:
        made.append(Objection(Check(*_TURNED_OFF[kernel]), "turned off", silent=kernel == "math"))
    for check in _of(kernel, asked):
        if check.holds_for(asked):
            made += check.objections(asked, found)
    return made


def checked_codes(kernel: str, asked: CheckInput) -> frozenset[str]:
    """attnsel's rules that the chooser of this release has too."""
    return frozenset(code for check in _of(kernel, asked) if check.holds_for(asked) for code in check.codes)


def _of(kernel: str, asked: CheckInput) -> tuple[Check, ...]:
    if kernel == "flash" and not asked.gpu:
        kernel = "flash_xpu" if asked.env.device.type == "xpu" else "flash_cpu"
    return _CHECKS.get(kernel, ())
