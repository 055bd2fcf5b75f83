"""What F.scaled_dot_product_attention would run for a question, and every reason against its other kernels.

``switches``: what a user may set. ``checks``: what the chooser checks, in its order, release by release.
The order in which kernels are tried: ``attnsel/selection/f_sdpa.py``. On CPUs the answer is compared with
what torch runs (tests/attnsel/dispatchers/); what is said of GPUs rests on the sources and libraries of each
release alone, as no C++ check of theirs can run without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from attnsel.dispatchers.known_bugs import known_bugs
from attnsel.dispatchers.torch.checks import CheckInput, Objection, between_vectors, checked_codes, objections
from attnsel.dispatchers.torch.switches import SWITCHES, held, read
from attnsel.environment import Environment, require_known_torch
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams, TensorSpec
from attnsel.rules.sdpa.common import window_hides
from attnsel.rules.sdpa.platforms import EXPERIMENTAL
from attnsel.selection.evaluate import findings
from attnsel.selection.f_sdpa import SdpaOrder, sdpa_order
from attnsel.verdicts.dispatch import Dispatch, Offer, Refusal
from attnsel.verdicts.reasons import Reason

# --------------------------------------------------------------------------------------------------------
# A question as a call of F.scaled_dot_product_attention: what it is given, and what it has no word for.


_BIAS_ROWS = {"bhss": "bhqk", "1hss": "hqk", "b1ss": "bqk", "11ss": "qk", "111s": "k"}
"""Dimensions of a bias that are not 1, by its shape."""


class SdpaCall(NamedTuple):
    """``seen``: the question that is left for a kernel, with ``mask`` as a tensor where one is given.
    ``text``: the call. ``notes``: how the rest of the question is brought into it."""

    text: str
    seen: AttentionParams
    mask: TensorSpec | None
    notes: tuple[str, ...]


class _Mask(NamedTuple):
    """What a mask that the caller builds has to say: the dimensions that are not 1, and whether numbers."""

    dimensions: frozenset[str] = frozenset()
    numbers: bool = False
    causal: bool = False  # left to is_causal
    given: TensorSpec | None = None

    @property
    def needed(self) -> bool:
        return bool(self.dimensions)


def call_of(p: AttentionParams, release: Version, enable_gqa: bool, deterministic: bool) -> SdpaCall:
    """The call that asks F.sdpa for ``p``. Only what a mask can say, or an argument, comes through: what
    neither can stays in ``seen`` for the rules to object to."""
    notes: list[str] = []
    made = _mask_of(p, notes)
    mask = _spec(p, made) if made.needed else None
    kind = "arbitrary" if mask is not None else "causal" if made.causal else "no_mask"
    seen = p
    if p.qkv_format != "thd" and p.kv_cache != "paged":
        seen = p.replace(
            attn_mask_type=kind,
            window_size=(-1, -1),
            bottom_right_diagonal=None,
            core_attention_bias_type="no_bias",
            core_attention_bias_shape=None,
            core_attention_bias_requires_grad=False,
            alibi_slopes_shape=None,
            kv_cache="none",
            fp8=False,
            cp_size=1,
            deterministic=deterministic,
            tensors=p.tensors.replace(mask=mask, mask_hides_nothing=False),
        )
    if p.cp_size > 1:
        notes.append("F.sdpa knows no ranks: judged as one call on the whole sequence")
    if p.fp8 and not p.dtype.startswith("fp8"):
        notes.append("F.sdpa takes no FP8 recipe: it computes in the type of q, k and v")
    text = f"F.scaled_dot_product_attention({', '.join(_arguments(p, seen, mask, release, enable_gqa))})"
    return SdpaCall(text, seen, mask, tuple(notes))


def _arguments(
    p: AttentionParams, seen: AttentionParams, mask: TensorSpec | None, release: Version, enable_gqa: bool
) -> list[str]:
    arguments = ["q", "k", "v"]
    if mask is not None:
        arguments.append(f"attn_mask={mask.dtype}{list(mask.shape)}")
    if seen.attn_mask_type == "causal":
        arguments.append("is_causal=True")
    if p.dropout:
        arguments.append(f"dropout_p={p.attention_dropout:g}")
    if p.gqa and enable_gqa and release >= (2, 5):
        arguments.append("enable_gqa=True")
    return arguments


def _mask_of(p: AttentionParams, notes: list[str]) -> _Mask:
    """What has to be in a mask, and what is left to is_causal."""
    tensor = p.tensors.mask
    alone = p.attn_mask_type == "no_mask" and not window_hides(p)
    numbers = tensor is not None and tensor.dtype != "bool"
    if alone and numbers and p.core_attention_bias_type == "post_scale_bias":
        return _Mask(frozenset({"given"}), numbers=True, given=tensor)  # the bias as a call gave it
    biased = p.has_bias or p.core_attention_bias_type == "alibi"
    diagonal = _diagonal(p, notes, biased or p.padding)
    needs: set[str] = set()
    if diagonal == "mask":
        needs |= {"q", "k"}
    if p.padding:
        needs |= {"b", "k"}
        if p.attn_mask_type == "padding_causal" and p.same_lengths and not biased and not p.windowed:
            notes.append(
                "where padding is at the end, is_causal=True alone gives the real queries the same result"
            )
    if p.has_bias:
        needs |= set(_BIAS_ROWS[p.core_attention_bias_shape or "1hss"])
        if p.core_attention_bias_type == "pre_scale_bias":
            notes.append("attn_mask is added to scaled scores: the bias times the softmax scale")
    if p.core_attention_bias_type == "alibi":
        notes.append("ALiBi is a mask of numbers that the caller builds: F.sdpa takes no slopes")
        needs |= {"h", "q", "k"} | ({"b"} if len(p.alibi_slopes_shape or ()) == 2 else set())
    given = None
    if p.attn_mask_type == "arbitrary":
        given = tensor
        if given is None:
            needs |= {"b", "q", "k"}
            notes.append("nothing says what the mask is: taken for bool[b, 1, s_q, s_kv]")
        else:
            needs.add("given")
    return _Mask(frozenset(needs), biased, diagonal == "flag", given)


def _diagonal(p: AttentionParams, notes: list[str], masked: bool) -> str:
    """Who says which keys lie too far: nobody (""), is_causal ("flag") or the mask."""
    if window_hides(p):
        return "mask"
    if not p.causal:
        return ""
    if p.bottom_right and p.max_seqlen_q == 1:
        return ""  # a single query, as in decoding, sees every key
    if p.bottom_right and (p.max_seqlen_q != p.max_seqlen_kv or not p.same_lengths):
        notes.append(
            "is_causal starts at the top left, so that a mask says the bottom right; from torch 2.3 on "
            "torch.nn.attention.bias.causal_lower_right(s_q, s_kv) as attn_mask keeps flash"
        )
        return "mask"
    if masked:  # one call takes attn_mask or is_causal
        return "mask"
    return "flag"


def _spec(p: AttentionParams, made: _Mask) -> TensorSpec:
    """The mask as a tensor: the given one, or a dense one of what it has to say."""
    if made.given is not None and made.dimensions == {"given"}:
        given = made.given
        return given.replace(requires_grad=True) if p.core_attention_bias_requires_grad else given
    sizes = {"b": p.batch_size, "h": p.num_heads, "q": p.max_seqlen_q, "k": p.max_seqlen_kv}
    wanted = made.dimensions
    if made.given is not None:  # with a bias, a window or padding besides: of all their sizes
        wanted = wanted | {"b", "q", "k"}
    shape = tuple(size if name in wanted else 1 for name, size in sizes.items())
    if not wanted & {"b", "h"}:
        shape = shape[2:]
    elif p.tensors.rank == 3:  # q is [b*h, s, d]
        shape = (p.batch_size * p.num_heads, *shape[2:])
    numbers = "bf16" if p.dtype.startswith("fp8") else p.dtype
    return TensorSpec(
        shape=shape,
        stride=tuple(prod(shape[place + 1 :]) for place in range(len(shape))),
        dtype=numbers if made.numbers else "bool",
        requires_grad=p.core_attention_bias_requires_grad,
    )


# ---- Which releases' choosers were read, and where -----------------------------------------------------


_READ = tuple(
    Version.parse(text)
    for text in (
        *("2.2.2", "2.3.1", "2.4.0", "2.5.0", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1"),
        *("2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0"),
    )
)
"""2.4.0 as source (MetaX-MACA/mcPytorch, commit 37348663, whose chooser is PyTorch's); the others as the
machine code of libtorch_cuda.so and libtorch_cpu.so of PyPI's wheel for Linux, whose symbols name each check,
whose constants are the limits and whose warnings carry their line in sdp_utils.cpp, with sdp_utils_cpp.h from
the wheel."""


class Read(NamedTuple):
    """``release`` was read for the one asked about; ``inferred``: why that one, "" where it is the same."""

    release: Version
    inferred: str = ""


def read_for(release: Version) -> Read:
    """The release whose source answers for ``release``: of the same minor, or else the newest before it."""
    if release in _READ:
        return Read(release)
    same = [known for known in _READ if known[:2] == release[:2]]
    before = [known for known in same or _READ if known <= release]
    found = before[-1] if before else (same or _READ)[0]
    what = f"the chooser of {release} itself was not read"
    if found[:2] == release[:2]:
        return Read(found, f"{what}; patch releases seldom change it")
    return Read(found, f"{what}; whether it differs is not known")


__all__ = ["SWITCHES", "dispatch", "held"]

_CANDIDATES = {
    "flash": "sdpa.flash",
    "mem_efficient": "sdpa.efficient",
    "math": "sdpa.math",
    "cudnn": "sdpa.cudnn",
}
_NAMES = {candidate: name for name, candidate in _CANDIDATES.items()}

_NO_WORD_FOR_IT = ("SDPA004", "SDPA005", "SDPA006", "SDPA007", "SDPA008")
"""Rules about what neither an argument nor a mask can say."""

_CANNOT_BROADCAST = ("SDPA015", "SDPA016")
"""Rules about masks that F.sdpa raises for, whichever kernel it takes."""

_RAISES = {
    "flash": ("SDPA109", "SDPA120", "SDPA121"),
    "mem_efficient": ("SDPA206",),
    "cudnn": ("SDPA327",),
    "math": ("SDPA003", "SDPA710"),
}
"""Rules that the chooser does not have and the kernel does: it is taken, and raises."""

_ON_CARD = "measured on an H200, torch 2.11.0, cuDNN 9.19.0 (tests/proof/f_sdpa_on_card.py)"
_CHECKED_STEP = (
    8  # bytes; the kernel itself compares addresses with those of the narrowest load it was built for
)
_LOST = "CUDA error: misaligned address, after which nothing runs on the GPU in this process"

_DONE_BY_F_SDPA = {"SDPA003", "SDPA111", "SDPA204", "SDPA806", "SDPA108", "SDPA401"}
"""Rules about a call of the op itself, which F.sdpa answers (it pads, FA3 behind flash takes FP8), or which
are about attnsel's call."""

_NOTHING_LEFT = "No available kernel. Aborting execution."
_ALL_OFF = (
    "No viable backend for scaled_dot_product_attention was found. This is likely due to turning off both "
    "the math kernel and the fused kernels."
)
_TOLD_NOTHING = "nothing, as long as a kernel is left"
_TOLD_FIRST = "a UserWarning with the first reason against each fused kernel, before the error"
_TOLD_LATER = "of a kernel its first reason alone"
_TOLD_SILENT = "for some reasons no text (math that is turned off, masks that do not fit or want a gradient)"


_ZEROS = Offer("zeros", "", note="there is no query or no key: zeros, and no kernel is asked")
"""scaled_dot_product_attention since 2.12: machine code of the wheels 2.11.0 and 2.12.0; measured on 2.13."""


class _Kernel(NamedTuple):
    """One kernel judged: what the chooser has against it, and what else attnsel knows of such a call.
    ``candidate``: attnsel's, "" for those of Intel's GPUs."""

    name: str
    candidate: str
    against: list[Objection]
    beside: dict[str, Reason]

    @property
    def raising(self) -> Objection | None:
        """What ends the search with an error: a check that raises and that nothing comes before."""
        return self.against[0] if self.against and self.against[0].raises else None


class _Outcome(NamedTuple):
    """``chosen``: the kernel that is taken, and what it then ``raised``. ``impossible``: there is no such
    call; ``asks_none``: there is nothing to compute."""

    chosen: _Kernel | None = None
    raised: Refusal | None = None
    error: str = ""
    impossible: bool = False
    asks_none: bool = False


def dispatch(p: AttentionParams, env: Environment, switches: Mapping[str, str]) -> Dispatch:
    """What F.sdpa of ``env``'s torch does with the question. Pure.

    Raises InvalidInput where no torch is stated, or one older than any that is known, and for a kernel in
    ``sdpa_kernel`` that there is not.
    """
    release = env.torch
    if release is None:
        raise InvalidInput("torch", None, "F.scaled_dot_product_attention needs torch: state its version")
    require_known_torch(release)
    said = read(p, env, release, switches)
    env = env if said.impl == env.torch_flash else env.replace(torch_flash=said.impl)
    call = call_of(p, release, said.enable_gqa, said.deterministic)
    asked = CheckInput(call.seen, env, release, said)
    order = _ordered(sdpa_order(env, release, said.cudnn_first), said.priority)
    kernels = [_judged(candidate, asked) for candidate in order.kernels]
    outcome = _outcome(p, kernels, asked)
    left = outcome.asks_none or outcome.chosen is not None
    offers = [_offer(kernel, asked, left, outcome) for kernel in kernels]
    if outcome.asks_none:
        offers.insert(0, _ZEROS)
    notes = (*call.notes, *(() if outcome.asks_none else _notes(outcome.chosen, order, asked)))
    known = read_for(release)
    return Dispatch(
        dispatcher="torch",
        release=str(release),
        read=str(known.release),
        call="none" if outcome.impossible else call.text,
        offers=tuple(offers),
        chosen=None if outcome.error else next(offer for offer in offers if offer.taken),
        order_source=f"{order.source} of torch {known.release}",
        inferred="; ".join(filter(None, (known.inferred, order.inferred))),
        error=outcome.error,
        switches=tuple(sorted(switches.items())),
        notes=() if outcome.impossible else notes,
        known_bugs=_known_bugs(outcome, asked),
    )


def _known_bugs(outcome: _Outcome, asked: CheckInput) -> tuple[Refusal, ...]:
    """Those of the kernel that computes."""
    if outcome.chosen is None or outcome.error:
        return ()
    found = known_bugs("torch", outcome.chosen.candidate, asked.p, asked.env)
    if outcome.chosen.name == "cudnn" and asked.release < (2, 5):
        where = "scaled_dot_product_attention, v2.4.0 attention.cpp, line 668"
        text = "Before PyTorch 2.5 F.sdpa calls cuDNN without the mask it is given"
        return (Refusal(text, where, "SDPA720"),) if asked.mask is not None else ()
    misaligned = _misaligned(outcome.chosen, asked)
    if outcome.chosen.name == "cudnn" and misaligned is not None:
        text = f"cuDNN is wrong, and says nothing, where the {misaligned[0]} begins between 16 bytes"
        return (*found, Refusal(text, _ON_CARD, "SDPA021"))
    return found


def _outcome(p: AttentionParams, kernels: list[_Kernel], asked: CheckInput) -> _Outcome:
    error = _impossible(p, kernels)
    if error:
        return _Outcome(error=error, impossible=True)
    if asked.release >= (2, 12) and 0 in (p.max_seqlen_q, p.max_seqlen_kv):
        return _Outcome(asks_none=True)
    for kernel in kernels:
        if kernel.raising is not None:
            return _Outcome(error=f"Dimension out of range: {kernel.raising.text}")
        if not kernel.against:
            raised = _raised(kernel, asked)
            return _Outcome(kernel, raised, "" if raised is None else raised.text)
    here = {"cpu": {"flash", "math"}, "xpu": {"overrideable", "flash", "math"}}
    every = here.get(asked.env.device.type, {"flash", "mem_efficient", "math", "cudnn"})
    return _Outcome(error=_ALL_OFF if every <= set(asked.held.off) else _NOTHING_LEFT)


def _ordered(order: SdpaOrder, priority: tuple[str, ...]) -> SdpaOrder:
    """What a user's own priority makes of the order: those that it names first."""
    if not priority:
        return order
    named = {_NAMES.get(candidate, candidate): candidate for candidate in order.kernels}
    first = [named[name] for name in priority if name in named]
    kernels = (*first, *(name for name in order.kernels if name not in first))
    return order._replace(kernels=kernels, by_cudnn="")


def _judged(candidate: str, asked: CheckInput) -> _Kernel:
    name = _NAMES.get(candidate, candidate)
    ours = candidate if candidate in _NAMES else ""
    about = ours or "sdpa.math"  # of what every kernel needs, the rules about that one speak
    sure: dict[str, Reason] = {}
    beside: dict[str, Reason] = {}
    for reason in findings(asked.p, asked.env, among=(about,))[about]:
        experimental = reason.required == EXPERIMENTAL
        if experimental and asked.held.experimental:
            continue
        (beside if reason.unknown and not experimental else sure)[reason.code] = reason
    checked = checked_codes(name, asked)
    beside |= {code: reason for code, reason in sure.items() if code not in checked}
    return _Kernel(name, ours, objections(name, asked, sure), beside if ours else {})


def _impossible(p: AttentionParams, kernels: list[_Kernel]) -> str:
    """What F.sdpa has no argument for, or raises for before it looks for a kernel; "" if nothing."""
    found = {code: reason for kernel in kernels for code, reason in kernel.beside.items()}
    for code in _NO_WORD_FOR_IT:
        if code in found:
            return f"F.scaled_dot_product_attention cannot express it: {found[code].message}"
    if p.return_lse:
        return "F.scaled_dot_product_attention cannot express it: it returns the output, no log-sum-exp"
    if "SDPA016" in found:
        wanted = "Expected attn_mask dtype to be bool or float or to match query dtype"
        return f"{wanted}: {found['SDPA016'].message}"
    return ""


def _raised(chosen: _Kernel, asked: CheckInput) -> Refusal | None:
    """What the kernel that is taken raises; None where it computes."""
    for code in (*_RAISES.get(chosen.name, ()), "SDPA015"):
        reason = chosen.beside.get(code)
        if reason is not None and not reason.unknown:
            return _error_of(chosen, reason.message, reason.source, code)
    p, mask = asked.p, asked.mask
    misaligned = _misaligned(chosen, asked)
    if misaligned is not None and chosen.name in ("flash", "mem_efficient"):
        name, step = misaligned
        checked = chosen.name == "mem_efficient" and step < _CHECKED_STEP
        text = f"p.{name}_ptr is not correctly aligned" if checked else _LOST
        return _error_of(chosen, text, _ON_CARD, "SDPA021")
    if chosen.name == "cudnn" and mask is not None and mask.shape[-1:] == (1,) and p.max_seqlen_kv > 1:
        text = f"attn_mask ends in 1, which cuDNN reads as {p.max_seqlen_kv}: {_LOST}"
        return _error_of(chosen, text, _ON_CARD)
    if chosen.name != "math":
        return None
    where = "_scaled_dot_product_attention_math, attention.cpp; measured on CPU, torch 2.13"
    if mask is not None and len(mask.shape) > p.tensors.rank:
        return _error_of(chosen, f"attn_mask has more dimensions than q, {p.tensors.rank}", where)
    if p.gqa and not asked.held.enable_gqa and p.num_gqa_groups > 1:
        sizes = f"the size of tensor a ({p.num_heads}) must match the size of tensor b ({p.num_gqa_groups})"
        place = 1 if p.tensors.rank == 4 else 0
        return _error_of(chosen, f"{sizes} at non-singleton dimension {place}; set enable_gqa", where)
    return None


def _misaligned(kernel: _Kernel, asked: CheckInput) -> tuple[str, int] | None:
    """``between_vectors``, in F.sdpa's names; None too where the release's chooser looks at it."""
    found = between_vectors(asked.p) if "SDPA021" in kernel.beside else None
    return None if found is None else ({"q": "query", "k": "key", "v": "value"}[found[0]], found[1])


def _error_of(kernel: _Kernel, text: str, source: str, code: str = "") -> Refusal:
    told = "the error that the kernel raises"
    return Refusal(f"{kernel.name} is taken, and raises: {text}", source, code, told=told)


def _offer(kernel: _Kernel, asked: CheckInput, left: bool, outcome: _Outcome) -> Offer:
    """``left``: a kernel is left, this or another."""
    release = read_for(asked.release).release
    refusals = [
        Refusal(kernel.beside[code].message, kernel.beside[code].source, code)
        for code in _NO_WORD_FOR_IT
        if code in kernel.beside
    ]
    if kernel is outcome.chosen and outcome.raised is not None:
        refusals.append(outcome.raised)
    for place, made in enumerate(kernel.against):
        told = _TOLD_LATER if place else _TOLD_FIRST
        told = _TOLD_NOTHING if left else _TOLD_SILENT if made.silent else told
        switch = asked.held.off.get(kernel.name, "") if made.text == "turned off" else ""
        source = f"{made.check.name}, {made.check.file}, torch {release}"
        refusals.append(Refusal(made.text, source, made.code, switch, told))
    return Offer(kernel.name, kernel.candidate, tuple(refusals), _way(kernel, asked))


def _way(kernel: _Kernel, asked: CheckInput) -> str:
    """What F.sdpa does to the call on the way to a kernel."""
    p, mask = asked.p, asked.mask
    if kernel.name == "flash" and "SDPA111" in kernel.beside and asked.gpu:
        width = -(-max(p.head_dim_qk, p.head_dim_v) // 8) * 8
        return f"copies q, k and v into head_dim {width} on every call"
    if kernel.name == "math":
        parts = [f"stores {_size(p.score_bytes)} of scores"]
        if p.dtype in ("bf16", "fp16") and asked.release >= (2, 5) and not asked.held.reduced and asked.gpu:
            parts = [f"stores {_size(2 * p.score_bytes)} of scores, in fp32"]
        if p.gqa and asked.held.enable_gqa and asked.release >= (2, 5):
            parts.append("repeats k and v")
        return ", ".join(parts)
    if asked.env.device.type == "xpu":
        return "oneDNN's kernel" if kernel.name == "overrideable" else "FlashAttention by SYCL-TLA"
    if mask is not None and mask.dtype == "bool" and not kernel.against:
        return f"turns the bool mask into {p.dtype} on every call"
    return ""


def _size(count: int) -> str:
    for unit, width in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << width:
            return f"{count / (1 << width):.1f} {unit}"
    return f"{count} bytes"


def _notes(chosen: _Kernel | None, order: SdpaOrder, asked: CheckInput) -> list[str]:
    notes: list[str] = []
    if chosen is None:
        return notes
    if order.by_cudnn and chosen.name == "cudnn":
        notes.append(f"cuDNN goes first here; {order.by_cudnn} puts it last")
    if chosen.name == "cudnn" and asked.held.avoid_recompile:
        notes.append(
            "TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1: one plan serves many lengths where there is no mask"
        )
    said = {"SDPA021"} if _misaligned(chosen, asked) is not None else set()
    known = {*_DONE_BY_F_SDPA, *_RAISES.get(chosen.name, ()), *_CANNOT_BROADCAST, *said}
    for code, reason in chosen.beside.items():
        if code.startswith(("SDPA", "BUG")) and code not in known:
            doubt = "not known" if reason.unknown else "F.sdpa does not look at it"
            notes.append(f"{doubt}: {code}  {reason.message}")
    return notes
