"""What TransformerEngine's ``get_attention_backend`` would choose, with every reason.

It keeps a flag for each kernel and clears it at the first condition that fails; a line of its log names that
one, and its query of cuDNN names none. Here all conditions are asked.

==================  ==========================================================
file                holds
==================  ==========================================================
``data/filters``    every condition that takes kernels away, a row each; what a release does not run on
``asked``           a question in TransformerEngine's terms; how a row is read; the variables
``filters``         what takes several steps, of the filters in Python
``query``           the same of the query of cuDNN, in C++
``config``          its configuration as it prints it
==================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Mapping

from attnsel.dispatchers.te.asked import (
    FLASH,
    FLASH_2,
    FLASH_3,
    FLASH_4,
    FUSED,
    NEVER,
    RAISED,
    SWITCHES,
    UNFUSED,
    FilterInput,
    held,
)
from attnsel.dispatchers.te.filters import FILTERS, OLDEST_CUDNN, UNASKED
from attnsel.dispatchers.te.query import raised, refusals, sub_backend
from attnsel.environment import Environment
from attnsel.environment.versions import Version
from attnsel.params import AttentionParams
from attnsel.verdicts.dispatch import Dispatch, Offer, Refusal

__all__ = ["SWITCHES", "dispatch", "held", "selected"]

NEWEST = Version(2, 20, 2)
READ = (
    *(Version(1, minor) for minor in (11, 12, 13)),
    *(Version(2, minor) for minor in range(20)),
    NEWEST,
)
"""Releases whose own function gives the same answers to thousands of questions
(tests/proof/te_function.py). Patch releases have the function of theirs (2.2.1, 2.14.1, 2.16.1, 2.17.1)."""

_CANDIDATES = {
    FLASH_2: "flash_attn.2",
    FLASH_3: "flash_attn.3",
    FLASH_4: "flash_attn.4",
    FUSED: "cudnn",
    UNFUSED: "",
}
_FIRST_FLASH_4 = Version(2, 15)
_UTILS = "dot_product_attention/utils.py"


def dispatch(p: AttentionParams, env: Environment, switches: Mapping[str, str]) -> Dispatch:
    """What TransformerEngine would choose. Pure."""
    te = env.transformer_engine or (NEWEST if (env.cudnn or NEVER) >= OLDEST_CUDNN else READ[-2])
    asked = FilterInput(p, env, te, switches)
    for one in UNASKED:
        if one.holds(te) and (missing := one.check(asked)):
            return Dispatch("te", str(te), _read(te), _call(asked), (), None, one.lines, error=missing)
    # Of FlashAttention's 4 goes first, then 3, then 2.
    flash = (FLASH_4, FLASH_3, FLASH_2) if te >= _FIRST_FLASH_4 else (FLASH_3, FLASH_2)
    order = (FUSED, *flash, UNFUSED) if _fused_first(asked) else (*flash, FUSED, UNFUSED)
    offers = _without_4_beside_3(asked, tuple(_offer(asked, kernel) for kernel in order))
    chosen = next((offer for offer in offers if offer.taken), None)
    error = "" if chosen else "No dot product attention backend is available for the provided inputs."
    if chosen is not None and chosen.name == FUSED and (text := raised(asked)):
        error = f"{FUSED} is taken, and raises: {text}"
        refusal = Refusal(error, "context_parallel.py, AttnFuncWithCPAndKVAllGather", told=RAISED)
        offers = tuple(o._replace(refusals=(refusal,)) if o is chosen else o for o in offers)
        chosen = None
    return Dispatch(
        "te",
        str(te),
        _read(te),
        _call(asked),
        offers,
        chosen,
        f"{_UTILS}, lines 1871-1905 of 2.20.2",
        inferred=_inferred(te, env),
        error=error,
        switches=tuple(sorted(switches.items())),
        notes=tuple(_notes(asked, chosen)),
    )


def selected(dispatch: Dispatch) -> tuple[str, tuple[bool, ...]]:
    """As get_attention_backend says it: the choice, and whether FlashAttention, FusedAttention and the
    unfused one are left. It does not know what is raised later."""
    left = [offer.name for offer in dispatch.offers if all(r.told == RAISED for r in offer.refusals)]
    families = ("FlashAttention", "FusedAttention", "Unfused")
    return (left[0] if left else "none"), tuple(any(n.startswith(one) for n in left) for one in families)


def _fused_first(asked: FilterInput) -> bool:
    """From Hopper on FusedAttention goes before FlashAttention; before 2.2 in fp16 and bf16 only its
    sub-backend for sequences of any length does, before 2.0 only on sm90, and in FP8 it goes before
    FlashAttention 3 alone (v1.13 attention.py:898-927, v2.1:995-1024)."""
    if asked.te >= Version(2, 2):
        return asked.arch >= 90
    if asked.fp8_query:
        return _offer(asked, FLASH_3).taken
    return sub_backend(asked) == 1 and (asked.arch >= 90 if asked.te >= Version(2) else asked.arch == 90)


def _offer(asked: FilterInput, kernel: str) -> Offer:
    found = [
        Refusal(text, _source(one.lines), switch=one.switch, told=one.told)
        for one in FILTERS
        if kernel in one.kernels and one.holds(asked.te) and (text := one.check(asked))
    ]
    note = ""
    if kernel == FUSED:
        found += refusals(asked)
        note = f"sub-backend {sub_backend(asked)}"
    elif kernel == UNFUSED:
        note = f"stores {asked.p.batch_size * asked.p.num_heads} matrices of scores"
    elif kernel == FLASH_2 and asked.p.head_dim_qk != asked.p.head_dim_v:
        note = "pads v or q and k on every call"
    return Offer(kernel, _CANDIDATES[kernel], tuple(found), note)


def _source(lines: str) -> str:
    return f"{_UTILS}, {lines if lines.startswith('v') else f'lines {lines}'}"


def _without_4_beside_3(asked: FilterInput, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """On Hopper 4 gives way wherever 3 is installed and switched on, whether or not 3 then takes the call."""
    off = not (asked.enabled("NVTE_FLASH_ATTN") and asked.enabled("NVTE_FLASH_ATTN_V3"))
    if asked.arch != 90 or asked.env.flash_attn_3 is None or off:
        return offers
    beside = Refusal("FlashAttention 3 is installed, which goes first on sm90", f"{_UTILS}, lines 659-667")
    return tuple(
        offer._replace(refusals=(*offer.refusals, beside)) if offer.name == FLASH_4 else offer
        for offer in offers
    )


def _read(te: Version) -> str:
    """The newest release that was read and is not above ``te``; the oldest for what is older still."""
    return str(max((one for one in READ if one[:2] <= te[:2]), default=READ[0]))


def _inferred(te: Version, env: Environment) -> str:
    if any(one[:2] == te[:2] for one in READ):
        why = "" if te == NEWEST else f", and {NEWEST} needs cuDNN {OLDEST_CUDNN}"
        return f"no version was stated{why}" if env.transformer_engine is None else ""
    return f"{te} is {'older' if te < READ[0] else 'newer'} than what was read"


def _call(asked: FilterInput) -> str:
    """DotProductAttention's arguments, those that are not its defaults."""
    p = asked.p
    channels = p.head_dim_qk if p.head_dim_qk == p.head_dim_v else (p.head_dim_qk, p.head_dim_v)
    said = [f"num_attention_heads={p.num_heads}", f"kv_channels={channels}"]
    if p.gqa:
        said.append(f"num_gqa_groups={p.num_gqa_groups}")
    said += [f"qkv_layout={p.qkv_layout!r}", f"attn_mask_type={p.attn_mask_type!r}"]
    if asked.window != (-1, -1):
        said.append(f"window_size={asked.window}")
    if p.has_bias or p.core_attention_bias_type == "alibi":
        said.append(f"core_attention_bias_type={p.core_attention_bias_type!r}")
    if p.attention_dropout:
        said.append(f"attention_dropout={p.attention_dropout}")
    if p.softcap:
        said.append(f"softcap={p.softcap}")
    if p.softmax_type != "vanilla":
        said.append(f"softmax_type={p.softmax_type!r}")
    return f"DotProductAttention({', '.join(said)})"


def _notes(asked: FilterInput, chosen: Offer | None) -> list[str]:
    p, notes = asked.p, []
    name = "" if chosen is None else chosen.name
    if p.window_size != asked.window:
        notes.append(
            f"the window {p.window_size} is handed on as {asked.window} under the mask {p.attn_mask_type}"
        )
    if name in FLASH and p.qkv_format == "sbhd":
        notes.append("q, k and v are transposed to bshd on every call (backends.py, lines 967-985)")
    if name in FLASH and p.padding and p.qkv_format != "thd":
        notes.append("padded sequences are packed and unpacked on every call (backends.py, lines 1022-1067)")
    if (
        name == FUSED
        and asked.arch == 90
        and asked.on.get("NVTE_FUSED_ATTN_USE_FAv2_BWD") == "1"
        and not p.has_bias
    ):
        notes.append("the backward is FlashAttention 2's: NVTE_FUSED_ATTN_USE_FAv2_BWD=1")
    if name == UNFUSED and p.windowed:
        notes.append("the window becomes a mask tensor")
    return notes
