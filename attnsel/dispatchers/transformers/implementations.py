"""Each implementation of transformers: its call, and what refuses it when a model is made or runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attnsel.base.rows import read_rows
from attnsel.dispatchers import dispatched_by
from attnsel.dispatchers.conditions import Filter, attribute, read_filter
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


# ---- what refuses it, or is lost on the way ---------------------------------------------------------


class _Asked(NamedTuple):
    """A question to one implementation. ``number``: of FlashAttention; ``package``: what is here of it."""

    name: str
    p: AttentionParams
    env: Environment
    asked: Switches
    number: int = 0
    package: Version | None = None

    @property
    def widest(self) -> int:
        return max(self.p.head_dim_qk, self.p.head_dim_v)

    @property
    def organisation(self) -> str:
        return self.name.partition("/")[0]

    @property
    def capability(self) -> str:
        arch = self.env.arch or 0
        return f"{arch // 10}.{arch % 10}"


_WORDS: dict[str, Callable[[_Asked], object]] = {
    "installed": lambda a: a.package is not None,
    "unlike": lambda a: a.p.head_dim_qk != a.p.head_dim_v,
    "sinks": lambda a: a.p.softmax_type != "vanilla",
    # vLLM's FlashAttention 3 has s_aux; so have those that a model with sinks names
    # (modeling_flash_attention_utils.py, lines 707 to 711, transformers 5.24.0, "FA3 (vllm)").
    "takes_sinks": lambda a: "vllm-flash-attn3" in a.name or a.name in a.asked.compatible,
    "of_hub": lambda a: is_hub(a.name),
    "of_metal": lambda a: "metal" in a.name,
    "of_flash": lambda a: "flash" in a.name,
    "power_of_two": lambda a: a.p.num_heads & (a.p.num_heads - 1) == 0,
}
_PLACES = (("", _Asked), ("asked.", Switches), ("env.", Environment), ("p.", AttentionParams))


def _filters() -> dict[str, list[Filter]]:
    """The rows of ``data/refusals.csv``, by table."""
    found: dict[str, list[Filter]] = {}
    for row in read_rows("attnsel.dispatchers.transformers", "refusals"):
        read = read_filter(row, _WORDS, lambda word: attribute(word, _PLACES))
        found.setdefault(row["table"], []).append(read)
    return found


_FILTERS = _filters()


def _found(table: str, a: _Asked) -> list[Refusal]:
    """What holds of a table: refusals when it is "made" or "run", what makes the numbers "wrong", notes."""
    kind, release, found = "hub" if is_hub(a.name) else a.name, a.asked.release, []
    for one in _FILTERS[table]:
        if kind in one.kernels and one.holds(release) and (text := one.check(a)):
            subject = one.lines.removeprefix("lines.csv: ")
            where = one.lines if subject == one.lines else source(subject, release)
            found.append(Refusal(text, where, switch=one.switch, told=one.told.format(a=a)))
    return found


def _judged(a: _Asked, call: str, candidate: str = "", note: str = "") -> Attempt:
    made, run, wrong, notes = (tuple(_found(table, a)) for table in ("made", "run", "wrong", "note"))
    return Attempt(a.name, call, candidate, made, run, note, tuple(one.text for one in notes), wrong)


# ---- sdpa and eager ---------------------------------------------------------------------------------


def _sdpa(name: str, p: AttentionParams, env: Environment, asked: Switches) -> Attempt:
    call = sdpa_call(p, env, asked)
    found = _judged(_Asked(name, p, env, asked), call.text)
    notes = (*found.notes, *call.notes)
    answer = dispatched_by("torch", call.params, env, {})
    chosen = answer.chosen
    if chosen is None:
        told = f"RuntimeError: {answer.error}"
        refused = Refusal("F.sdpa has no kernel for it", answer.order_source, told=told)
        return found._replace(refused_when_run=(*found.refused_when_run, refused), notes=notes, known_bugs=())
    before = answer.offers[: answer.offers.index(chosen)]
    passed = [f"{offer.name}: {offer.refusals[0].text}" for offer in before if offer.refusals]
    return found._replace(
        candidate=chosen.candidate,
        note=f"F.sdpa takes {chosen.name}",
        notes=(*notes, *([f"F.sdpa passes over {'; '.join(passed)}"] if passed else [])),
        known_bugs=(*found.known_bugs, *answer.known_bugs),
    )


def _eager(name: str, p: AttentionParams, env: Environment, asked: Switches) -> Attempt:
    repeats = ", and repeats kv heads" if p.gqa else ""
    call = "softmax(q @ k.T * scale + mask) @ v, the model's own code"
    note = f"eager holds the scores, [b, h, s_q, s_kv]{repeats}"
    return Attempt(name, call, note="matmul, softmax, matmul", notes=(note,))


# ---- FlashAttention's packages, the Hub, flex -------------------------------------------------------


def _flash(name: str, p: AttentionParams, env: Environment, asked: Switches) -> Attempt:
    number = int(name[-1])
    package = _package(number, env)
    found = _judged(_Asked(name, p, env, asked, number, package), _flash_text(p), f"flash_attn.{number}")
    if found.refused_when_made or found.refused_when_run:
        return found
    bugs = (*found.known_bugs, *known_bugs("transformers", found.candidate, p, env))
    return found._replace(note=f"flash-attn {package}", known_bugs=bugs)


def _package(number: int, env: Environment) -> Version | None:
    found: Version | None = getattr(env, {2: "flash_attn", 3: "flash_attn_3", 4: "flash_attn_4"}[number])
    return found


def _flash_text(p: AttentionParams) -> str:
    packed = p.padding or p.qkv_format == "thd"
    window = f", window_size=({p.window_size[0]}, …)" if p.windowed and p.window_size[0] >= 0 else ""
    name = (
        "flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, …"
        if packed
        else "flash_attn_func(q, k, v"
    )
    return f"{name}, causal={p.causal}{window})"


def _hub(name: str, p: AttentionParams, env: Environment, asked: Switches) -> Attempt:
    number = 3 if "attn3" in name else 4 if "attn4" in name else 2
    a = _Asked(name, p, env, asked, number, _package(number, env))
    return _judged(a, _flash_text(p), note="from the Hub")


def _flex(name: str, p: AttentionParams, env: Environment, asked: Switches) -> Attempt:
    call = "flex_attention(q, k, v, score_mod, block_mask), compiled"
    return _judged(_Asked(name, p, env, asked), call, note="torch's flex_attention")


_MAKERS: dict[str, Callable[[str, AttentionParams, Environment, Switches], Attempt]] = {
    "sdpa": _sdpa,
    "eager": _eager,
    "flash_attention_2": _flash,
    "flash_attention_3": _flash,
    "flash_attention_4": _flash,
    "flex_attention": _flex,
}
