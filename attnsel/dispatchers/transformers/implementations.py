"""Each implementation of transformers: its call, and what refuses it when a model is made or runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attnsel.dispatchers import dispatched_by
from attnsel.dispatchers.known_bugs import known_bugs
from attnsel.dispatchers.transformers.switches import Switches, is_hub, source
from attnsel.environment import Environment
from attnsel.environment.versions import Version
from attnsel.params import AttentionParams
from attnsel.verdicts.dispatch import Offer, Refusal

# --------------------------------------------------------------------------------------------------------
# What transformers passes to F.scaled_dot_product_attention: a mask or is_causal, kv heads repeated.


_ENABLED = ", enable_gqa=True"


class SdpaCall(NamedTuple):
    """The call, as a question about F.sdpa; ``notes``: what became of the model's question on the way."""

    params: AttentionParams
    text: str
    notes: tuple[str, ...]


def sdpa_call(p: AttentionParams, env: Environment, asked: Switches) -> SdpaCall:
    """Source: sdpa_attention_forward and sdpa_mask (see ``releases``)."""
    masked, why = _mask(p, env, asked)
    causal = p.causal and not masked and p.max_seqlen_q > 1
    notes = [f"{why} [{source('mask', asked.release)}]"] if why else []
    changes, heads, note = _heads(p, env, asked, masked)
    if note:
        notes.append(f"{note} [{source('heads', asked.release)}]")
    if asked.release < (4, 56):
        notes.append("q, k and v are copied where they are not contiguous")
    mask = "attn_mask=bool [b, 1, s_q, s_kv]" if masked else "attn_mask=None"
    kind: dict[str, Any] = {"attn_mask_type": "causal" if causal else "no_mask"}
    if p.core_attention_bias_type == "alibi":
        mask = "attn_mask=float [b, h, s_q, s_kv]"
        kind |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": "bhss"}
    elif masked and asked.release >= (4, 53):
        kind = {"attn_mask_type": "arbitrary"}
    elif masked:
        mask = "attn_mask=float [b, 1, s_q, s_kv]"
        kind |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": "b1ss"}
    if asked.release >= (5, 13) and causal and p.max_seqlen_kv > p.max_seqlen_q:
        kind["max_seqlen_kv"] = p.max_seqlen_q
        notes.append(f"keys after the last row are cut off [{source('is_causal', asked.release)}]")
    text = f"F.scaled_dot_product_attention(q, k, v, {mask}, is_causal={causal}{heads})"
    return SdpaCall(_derived(p, {**kind, **changes}), text, tuple(notes))


def _mask(p: AttentionParams, env: Environment, asked: Switches) -> tuple[bool, str]:
    """Whether a mask is made, and why, or why not where one might be expected."""
    if p.attn_mask_type == "arbitrary":
        return True, "the model's own mask is passed on"
    if p.has_bias:
        return True, "the bias and causality go into one mask"
    if p.core_attention_bias_type == "alibi":
        return True, "ALiBi is added to a causal mask of numbers for every head"
    if p.qkv_format == "thd":
        return True, "packed sequences become one row with a block-diagonal mask of s * s elements"
    if p.padding:
        return True, "padding becomes a mask of s_q * s_kv elements"
    left, right = p.window_size
    if p.windowed and not 0 <= p.max_seqlen_kv <= left and (left, right) not in ((-1, -1), (-1, 0)):
        return True, f"the window ({left}, {right}) becomes a mask of s_q * s_kv elements"
    on_xpu = env.device.type == "xpu" and (4, 55) <= asked.release < (5,)  # _ignore_causal_mask_sdpa
    if p.causal and p.max_seqlen_q not in (1, p.max_seqlen_kv) and p.bottom_right and not on_xpu:
        return True, "rows that begin after the first key (a chunk with a cache) need a mask"
    if asked.compiled and asked.release >= (4, 53) and p.causal:
        return True, "a compiled graph cannot read whether there is padding, so that the mask is made"
    if p.causal:
        return False, "no padding: the mask is skipped"
    return False, ""


def _heads(
    p: AttentionParams, env: Environment, asked: Switches, masked: bool
) -> tuple[dict[str, Any], str, str]:
    """(changes of the question, the text of enable_gqa, the note) for fewer kv heads than query heads.

    Source: use_gqa_in_sdpa, since 4.54; head dimensions since 5.13 (transformers#46960); pack_gqa and the
    variable in 5.23.
    """
    if p.core_attention_bias_type == "alibi":
        return _repeated(p, "falcon's own code: ") if p.gqa else ({}, "", "")
    if asked.release < (4, 54):
        return _repeated(p, "") if p.gqa else ({}, "", "")
    if not p.gqa and asked.release >= (5, 13):
        return {}, "", ""  # before, a model without groups was given enable_gqa too
    if asked.force_gqa and asked.release >= (5, 23):
        return {}, _ENABLED, ""
    why = " and ".join(_against_gqa(p, env, asked, masked))
    if not why or not p.gqa:
        return {}, "" if why else _ENABLED, ""
    if asked.release >= (5, 23) and p.max_seqlen_q == 1 and not asked.compiled:
        packed = {"num_heads": p.num_gqa_groups, "max_seqlen_q": p.num_heads // p.num_gqa_groups}
        return packed, "", f"no enable_gqa, as {why}: the heads of a group become rows of one kv head"
    return _repeated(p, f"no enable_gqa, as {why}: ")


def _repeated(p: AttentionParams, why: str) -> tuple[dict[str, Any], str, str]:
    times = p.num_heads // p.num_gqa_groups
    return (
        {"num_gqa_groups": p.num_heads},
        "",
        f"{why}kv heads are repeated {times} times, a copy on every call",
    )


def _against_gqa(p: AttentionParams, env: Environment, asked: Switches, masked: bool) -> list[str]:
    """use_gqa_in_sdpa: every reason for not passing enable_gqa."""
    torch = env.torch
    if env.device.type == "xpu":
        return ["torch is older than 2.8"] if torch is not None and torch < (2, 8) else []
    if env.device.type == "mps" and asked.release >= (5, 18):
        return ["torch is older than 2.13"] if torch is not None and torch < (2, 13) else []
    reasons = ["there is a mask"] if masked else []
    if asked.release < (5, 18) and torch is not None and torch < (2, 5):
        reasons.append("torch is older than 2.5")
    if asked.release >= (5, 13) and not p.head_dim_qk == p.head_dim_v <= 256:
        reasons.append(f"head dimensions {p.head_dim_qk}/{p.head_dim_v} are not one of at most 256")
    return reasons


def _derived(p: AttentionParams, changes: dict[str, Any]) -> AttentionParams:
    """The question that F.sdpa gets: dense, without a window, lengths, soft cap or sinks."""
    dense: dict[str, Any] = {
        "qkv_layout": "bshd_bshd_bshd",
        "window_size": (-1, -1),
        "bottom_right_diagonal": None,
        "softcap": 0.0,
        "softmax_type": "vanilla",
        "kv_cache": "none",
        "page_size": None,
        "pad_between_seqs": False,
        "core_attention_bias_type": "no_bias",
        "core_attention_bias_shape": None,
        "core_attention_bias_requires_grad": False,
        "alibi_slopes_shape": None,
        "max_seqlen_kv": p.max_seqlen_kv,
    }
    if p.qkv_format == "thd":
        dense |= {"batch_size": 1, "max_seqlen_q": p.batch_size * p.max_seqlen_q}
        dense["max_seqlen_kv"] = p.batch_size * p.max_seqlen_kv
    if p.has_bias and "core_attention_bias_type" not in changes and p.core_attention_bias_type != "alibi":
        dense |= {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias_shape": p.core_attention_bias_shape or "1hss",
            "core_attention_bias_requires_grad": p.core_attention_bias_requires_grad,
        }
        changes = {**changes, "attn_mask_type": "no_mask"}
    names = (
        "dtype", "batch_size", "num_heads", "num_gqa_groups", "max_seqlen_q", "head_dim_qk", "head_dim_v",
        "attention_dropout", "is_training", "deterministic",
    )  # fmt: skip
    return AttentionParams(**{**{name: getattr(p, name) for name in names}, **dense, **changes})


NAMES = {
    "sdpa": Version.parse("4.48"),
    "eager": Version.parse("4.48"),
    "flash_attention_2": Version.parse("4.48"),
    "flash_attention_3": Version.parse("4.53"),
    "flash_attention_4": Version.parse("5.4"),
    "flex_attention": Version.parse("4.48"),
}
"""Since which release read each name is known. (AttentionInterface and is_flash_attn_N_available.)"""

_HALF = ("fp16", "bf16")


class Attempt(NamedTuple):
    """One implementation. What refuses it when it runs is not met by a fall-back: the program stops."""

    name: str
    call: str
    candidate: str = ""
    refused_when_made: tuple[Refusal, ...] = ()
    refused_when_run: tuple[Refusal, ...] = ()
    note: str = ""
    notes: tuple[str, ...] = ()
    known_bugs: tuple[Refusal, ...] = ()

    def offer(self, before: tuple[Refusal, ...] = ()) -> Offer:
        refusals = (*before, *self.refused_when_made, *self.refused_when_run)
        return Offer(self.name, self.candidate, refusals, self.note)


def attempt(name: str, p: AttentionParams, env: Environment, asked: Switches) -> Attempt:
    """What this implementation makes of the question."""
    if is_hub(name):
        return _hub(name, p, env, asked)
    make = _MAKERS.get(name)
    if make is None or NAMES[name] > asked.release:
        text = f"transformers {asked.release} has no implementation of that name"
        told = f'Specified `attn_implementation="{name}"` is not supported.'
        return Attempt(
            name, name, refused_when_made=(Refusal(text, source("names", asked.release), told=told),)
        )
    return make(name, p, env, asked)


# ---- sdpa and eager ---------------------------------------------------------------------------------


def _sdpa(name: str, p: AttentionParams, env: Environment, asked: Switches) -> Attempt:
    made, run, notes = [], [], list[str]()
    if not asked.sdpa:
        made.append(_unsupported("_supports_sdpa", "sdpa_check", asked))
    if p.softcap and asked.release >= (5, 21):
        told = "ValueError: `sdpa` attention does not support `softcap`"
        run.append(Refusal(f"softcap {p.softcap:g}", source("softcap", asked.release), told=told))
    wrong = []
    if p.softcap and asked.release < (5, 21):
        where = source("softcap", asked.release)
        wrong.append(
            Refusal(f"sdpa ignores softcap {p.softcap:g} without a word: the numbers are others", where)
        )
    wrong += _ignored_sinks(p, "sdpa", asked)
    if asked.output_attentions:
        if asked.release < (4, 53):
            notes.append("output_attentions: the model's layers run eager instead, with a warning")
        else:
            notes.append("output_attentions: sdpa gives none, and warns")
    call = sdpa_call(p, env, asked)
    notes += call.notes
    answer = dispatched_by("torch", call.params, env, {})
    chosen = answer.chosen
    if chosen is None:
        told = f"RuntimeError: {answer.error}"
        run.append(Refusal("F.sdpa has no kernel for it", answer.order_source, told=told))
        return Attempt(name, call.text, "", tuple(made), tuple(run), "", tuple(notes))
    before = answer.offers[: answer.offers.index(chosen)]
    passed = [f"{offer.name}: {offer.refusals[0].text}" for offer in before if offer.refusals]
    notes += [f"F.sdpa passes over {'; '.join(passed)}"] if passed else []
    kernel = f"F.sdpa takes {chosen.name}"
    return Attempt(
        name, call.text, chosen.candidate, tuple(made), tuple(run), kernel, tuple(notes),
        (*wrong, *answer.known_bugs),
    )  # fmt: skip


def _eager(name: str, p: AttentionParams, env: Environment, asked: Switches) -> Attempt:
    repeats = ", and repeats kv heads" if p.gqa else ""
    call = "softmax(q @ k.T * scale + mask) @ v, the model's own code"
    note = f"eager holds the scores, [b, h, s_q, s_kv]{repeats}"
    return Attempt(name, call, note="matmul, softmax, matmul", notes=(note,))


# ---- FlashAttention's packages ----------------------------------------------------------------------


def _flash(name: str, p: AttentionParams, env: Environment, asked: Switches) -> Attempt:
    number = int(name[-1])
    made = _package_refusals(number, env, asked)
    if not asked.flash:
        made.insert(0, _unsupported("_supports_flash_attn", "flash_check", asked))
    run, notes, wrong = _flash_call(number, p, env, asked)
    note = "" if made or run else f"flash-attn {_package(number, env)}"
    candidate = f"flash_attn.{number}"
    bugs = (*wrong, *(() if made or run else known_bugs("transformers", candidate, p, env)))
    return Attempt(name, _flash_text(p), candidate, tuple(made), tuple(run), note, tuple(notes), bugs)


def _package(number: int, env: Environment) -> Version | None:
    found: Version | None = getattr(env, {2: "flash_attn", 3: "flash_attn_3", 4: "flash_attn_4"}[number])
    return found


def _package_refusals(number: int, env: Environment, asked: Switches) -> list[Refusal]:
    """Package, device and compute capability, as transformers asks for them before a model is made."""
    made = []
    here, check = source("flash_package", asked.release), source("flash_check", asked.release)
    package = _package(number, env)
    if package is None:
        told = f"ImportError: the package for FlashAttention{number} doesn't seem to be installed"
        made.append(Refusal(f"FlashAttention {number} is not installed", here, told=told))
    elif number == 2:
        least = Version.parse("2.3.3" if asked.release >= (5, 4) else "2.1.0")
        if package < least:
            text = f"flash-attn is {package}, at least {least}"
            told = f"ImportError: FlashAttention2 requires at least version `{least}`"
            made.append(Refusal(text, here, told=told))
    if env.device.type not in ("cuda", "rocm"):
        told = f"ValueError or ImportError: Flash Attention {number} with no GPU available"
        made.append(Refusal(f"the device is {env.device.type}, a GPU with CUDA is wanted", check, told=told))
    least_major = {3: 8, 4: 9}.get(number)
    arch = env.arch
    if least_major and arch is not None and arch // 10 < least_major and asked.release >= (5, 4):
        text = f"compute capability {arch // 10}.{arch % 10}, at least {least_major}.0"
        made.append(Refusal(text, check, told=f"ImportError: requires compute capability >= {least_major}"))
    return made


def _flash_call(
    number: int, p: AttentionParams, env: Environment, asked: Switches, sinks: bool = False
) -> tuple[list[Refusal], list[str], list[Refusal]]:
    """What fails when the function is called, what becomes of the call, and what of it is lost, so that the
    numbers are others. ``sinks``: the function has them."""
    run, notes, wrong = [], list[str](), list[Refusal]()
    here, release = source("flash_call", asked.release), asked.release
    arch = env.arch
    if number == 2 and arch is not None and env.device.type == "cuda" and arch < 80:
        told = "RuntimeError: FlashAttention only supports Ampere GPUs or newer, from the first call"
        run.append(Refusal(f"sm{arch}, at least sm80", "csrc/flash_attn/flash_api.cpp, 2.8", told=told))
    if p.dtype not in _HALF:
        told = "RuntimeError: FlashAttention only support fp16 and bf16 data type, from the first call"
        run.append(Refusal(f"{p.dtype}, and no autocast that casts it: fp16 or bf16", here, told=told))
    if max(p.head_dim_qk, p.head_dim_v) > 256:
        told = "RuntimeError: head dimension at most 256, from the first call"
        text = f"head dimension {max(p.head_dim_qk, p.head_dim_v)}, at most 256"
        run.append(Refusal(text, "csrc/flash_attn/flash_api.cpp, 2.8", told=told))
    if p.head_dim_qk != p.head_dim_v:
        if release >= (5, 16):
            notes.append(f"values are padded from {p.head_dim_v} to {p.head_dim_qk}, and the output is cut")
        else:
            text = f"head dimensions {p.head_dim_qk} and {p.head_dim_v} differ"
            run.append(Refusal(text, here, told="an error of the package, unless the model pads by itself"))
    if p.attn_mask_type == "arbitrary":
        run.append(Refusal("a mask other than padding [b, s]", here, told="an error where it is unpadded"))
    if p.core_attention_bias_type == "alibi":
        told = "ValueError: `alibi` is not supported when `use_flash_attn` is True"
        run.append(
            Refusal(
                "ALiBi has no argument here",
                "models/falcon/modeling_falcon.py, line 466, transformers 5.24.0",
                told=told,
            )
        )
    if p.has_bias:
        wrong.append(Refusal("a bias has no argument here: it is ignored", here))
    package = _package(number, env)
    if p.softcap and number == 2 and package is not None and package < (2, 6):  # which has it since
        if release < (5, 21):
            text = f"flash-attn {package} has no softcap: it is ignored without a word"
            wrong.append(Refusal(text, here))
        else:
            told = "ValueError: This flash attention implementation does not support `softcap`"
            run.append(Refusal(f"softcap {p.softcap:g}", here, told=told))
    if number < 4 and not sinks:
        wrong += _ignored_sinks(p, f"flash-attn {number}", asked)
    if p.attention_dropout and number > 2:
        notes.append(f"FlashAttention {number} has no dropout: it is left out, with a warning")
    return run, notes, wrong


def _flash_text(p: AttentionParams) -> str:
    packed = p.padding or p.qkv_format == "thd"
    window = f", window_size=({p.window_size[0]}, …)" if p.windowed and p.window_size[0] >= 0 else ""
    name = (
        "flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, …"
        if packed
        else "flash_attn_func(q, k, v"
    )
    return f"{name}, causal={p.causal}{window})"


# ---- the Hub, flex ----------------------------------------------------------------------------------


def _hub(name: str, p: AttentionParams, env: Environment, asked: Switches) -> Attempt:
    made = []
    here = source("resolve", asked.release)
    if asked.release < (4, 53):
        text = f"transformers {asked.release} loads no kernels from the Hub, 4.53 is the first read that does"
        made.append(Refusal(text, source("names", asked.release), told=f'"{name}" is not supported'))
    if not asked.kernels:
        told = "ImportError or ValueError: `kernels` is not installed"
        made.append(Refusal("the package kernels is not installed", here, switch="kernels=false", told=told))
    organisation = name.partition("/")[0]
    if organisation != "kernels-community" and asked.release >= (5, 3) and not asked.all_kernels:
        text = f"{organisation} is not kernels-community, and allow_all_kernels is not set"
        made.append(Refusal(text, here, switch="allow_all_kernels=false", told="an error when it is loaded"))
    if env.device.type not in ("cuda", "rocm", "xpu") and "metal" not in name:
        text = f"the device is {env.device.type}, for which it has no build"
        made.append(Refusal(text, here, told="an error when it is loaded"))
    if not asked.flash and "flash" in name and asked.release >= (5, 24):
        made.append(_unsupported("_supports_flash_attn", "flash_check", asked))
    number = 3 if "attn3" in name else 4 if "attn4" in name else 2
    run, notes, wrong = _flash_call(number, p, env, asked, sinks=_takes_sinks(name, asked))
    notes.append("a kernel of the Hub is downloaded: which release of it is decided there")
    return Attempt(
        name, _flash_text(p), "", tuple(made), tuple(run), "from the Hub", tuple(notes), tuple(wrong)
    )


def _takes_sinks(name: str, asked: Switches) -> bool:
    """vLLM's FlashAttention 3 has s_aux; so have those that a model with sinks names.

    Source: modeling_flash_attention_utils.py, lines 707 to 711, transformers 5.24.0 ("FA3 (vllm)").
    """
    return "vllm-flash-attn3" in name or name in asked.compatible


def _flex(name: str, p: AttentionParams, env: Environment, asked: Switches) -> Attempt:
    made, run, notes = [], [], list[str]()
    here, check = source("flex_call", asked.release), source("flex_check", asked.release)
    if not asked.flex:
        made.append(_unsupported("_supports_flex_attn", "flex_check", asked))
    if env.torch is not None and env.torch < (2, 5):
        told = "ImportError: PyTorch Flex Attention requirements are not met"
        made.append(Refusal(f"torch is {env.torch}, at least 2.5", check, told=told))
    if p.attention_dropout and asked.release >= (4, 53):
        told = "ValueError: `flex_attention` does not support `dropout`"
        run.append(Refusal(f"attention_dropout {p.attention_dropout:g}", here, told=told))
    if p.softmax_type != "vanilla" and env.device.type == "cpu" and asked.release >= (5,):
        told = "ValueError: Attention sinks cannot be run on CPU with flex attention"
        run.append(Refusal("sinks on a CPU", here, told=told))
    if p.num_heads & (p.num_heads - 1):
        notes.append(f"{p.num_heads} heads are no power of two: kv heads are repeated, a copy on every call")
    call = "flex_attention(q, k, v, score_mod, block_mask), compiled"
    note = "torch's flex_attention"
    return Attempt(name, call, "", tuple(made), tuple(run), note, tuple(notes))


def _unsupported(flag: str, subject: str, asked: Switches) -> Refusal:
    told = "ValueError when the model is made: the model does not support it yet"
    text = f"the model's class says {flag} = False"
    return Refusal(text, source(subject, asked.release), switch=f"{flag}=false", told=told)


def _ignored_sinks(p: AttentionParams, who: str, asked: Switches) -> list[Refusal]:
    if p.softmax_type == "vanilla":
        return []
    return [
        Refusal(
            f"{who} ignores sinks without a word: the numbers are others", source("flash_call", asked.release)
        )
    ]


_MAKERS: dict[str, Callable[[str, AttentionParams, Environment, Switches], Attempt]] = {
    "sdpa": _sdpa,
    "eager": _eager,
    "flash_attention_2": _flash,
    "flash_attention_3": _flash,
    "flash_attention_4": _flash,
    "flex_attention": _flex,
}
