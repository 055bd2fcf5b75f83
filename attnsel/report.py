"""An answer as text that fits a terminal, a log and an error message alike.

First the verdict in words; then where and what was asked; the candidates in their order; the reasons against
those that cannot run, each once however many it concerns; and the ways out.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnsel.candidates import CANDIDATES
from attnsel.candidates.proof import unproven_parts
from attnsel.errors import printable
from attnsel.rules import REGISTRY, Preference
from attnsel.selection.memory import memory_parts
from attnsel.selection.requirements import size

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams
    from attnsel.selection.select import Selection
    from attnsel.selection.verdict import Adaptation, Candidate, Reason
    from attnsel.unlock import Unlock

_NAME = 15  # columns for a candidate's name
_MARK = {"eligible": "✔", "unknown": "?", "refused": "✖"}
_MOST_WAYS = 3  # shown of the ways to one candidate
_NO_WHEEL = "# No "  # how attnsel/wheels.py begins where a package would have to be compiled
_BESIDE_PROOF = ("PREF011", "PREF012", "PREF013")  # said of what is unproven too
_STAYS = ("arch", "device", "platform")  # whatever is installed


def render(selection: Selection, width: int = 80, sources: bool = False) -> str:
    """The whole answer."""
    lines = [*_fold(verdict(selection), width), ""]
    lines += _join_items(environment_words(selection.environment), width)
    lines += _join_items(params_words(selection.params), width)
    lines += [f"! {warning}" for warning in selection.environment.warnings]
    lines += [f"! planned only: {why}" for why in dict.fromkeys(c.plan_only for c in selection.ranked) if why]
    policy = _policy_words(selection)
    if policy:
        lines += _join_items(["policy", *policy], width)
    if selection.layout is not None:
        lines += selection.layout.describe(width).splitlines()
    lines += ["", *_ranked_lines(selection, width), *_reason_lines(selection, width, sources)]
    lines += _unlock_lines(selection, width)
    lines += _closing_lines(selection, width)
    return "\n".join(printable(line.rstrip()) for line in lines)


# ---- in a sentence ----------------------------------------------------------------------------------


def verdict(selection: Selection) -> str:
    """What runs, and the one thing that keeps a better candidate from running."""
    better = _better(selection)
    chosen = selection.chosen
    if chosen is None:
        text = "Nothing runs this call"
        if selection.policy.backend is not None:
            codes = ", ".join(dict.fromkeys(r.code for r in selection[selection.policy.backend].reasons))
            text = f"{selection.policy.backend} cannot run this call ({codes}), and no other is allowed"
        nearest = better or next(iter(selection.unlocks), None)
        return f"{text}." if nearest is None else f"{text}. To get {nearest.candidate}: {nearest.change}."
    text = f"{chosen.name} {_verb(chosen)}"
    if CANDIDATES[chosen.name].last_resort and _on_gpu(selection.environment):
        text += " slowly"
    if chosen.adaptations:
        text += f" and {', '.join(made.text for made in chosen.adaptations)} on every call"
    if not chosen.eligible:
        text += ": nobody has checked"
    if better is None:
        return f"{text}."
    return f"{text}. To run {better.candidate} instead: {better.change}."


def _verb(candidate: Candidate) -> str:
    if candidate.plan_only:
        return "would run"
    return "runs" if candidate.eligible else "may run"


def _better(selection: Selection) -> Unlock | None:
    """The cheapest change by which another candidate would be first; another GPU only where nothing else is
    fast."""
    chosen = selection.chosen
    out = {"risk"} if chosen is None or CANDIDATES[chosen.name].last_resort else {"risk", "hardware"}
    return next((u for u in selection.unlocks if u.rank == 1 and u.effect not in out), None)


def one_line(selection: Selection) -> str:
    """Chosen, runner-up, what blocked the better ones, how to fix: for ATTNSEL_DEBUG=1."""
    ranked = [c for c in selection.ranked if c.executable or not selection.environment.detected]
    parts = [f"{selection.backend or 'nothing'} runs"]
    if ranked and ranked[0].adaptations:
        parts[0] += f" ({'; '.join(a.text for a in ranked[0].adaptations)})"
    if len(ranked) > 1:
        parts.append(f"next {ranked[1].name}")
    blocked = [
        f"{c.name} ({', '.join(dict.fromkeys(r.code for r in c.reasons))})"
        for c in selection.candidates
        if c.verdict == "refused" and not CANDIDATES[c.name].last_resort
    ]
    if blocked:
        parts.append("refused: " + ", ".join(blocked))
    better = _better(selection)
    if better is not None:
        parts.append(f"to get {better.candidate}: {better.change}")
    question = " ".join(params_words(selection.params))
    return printable(f"{'; '.join(parts)} [{question}]")


# ---- where and what ---------------------------------------------------------------------------------


def _on_gpu(env: Environment) -> bool:
    return env.device.type in ("cuda", "rocm")


def environment_words(env: Environment) -> list[str]:
    """Device and versions; an asterisk marks what nobody stated."""
    device = env.device
    first = device.name or device.type
    arch = f"sm{device.arch}"
    if device.arch is not None and device.name != arch:
        first = f"{device.name or 'GPU'} ({arch})"
    words = [first]
    names = {"cudnn": "cuDNN", "cuda": "CUDA", "cudnn_frontend": "frontend"}
    shown = (
        ("cudnn", "cudnn_frontend", "torch", "triton", "cuda")
        if device.type == "cuda"
        else ("torch", "triton")
    )
    for component in shown:
        version = getattr(env, component)
        star = "*" if component in env.assumed else ""
        words.append(f"{names.get(component, component)} {version or 'none'}{star}")
    for component in ("flash_attn", "flash_attn_3", "flash_attn_4"):
        version = getattr(env, component)
        if version is not None:
            words.append(f"{component.replace('_', '-')} {version}")
    if env.torch_flash != "FA2":
        words.append(f"torch's flash is {env.torch_flash}")
    if env.assumed:
        words.append("* assumed")
    return words


def params_words(p: AttentionParams) -> list[str]:
    """The question in the order people say it; only what differs from plain attention is named."""
    words = [p.dtype, p.qkv_layout if p.layout.group != "hd_hd_hd" or p.layout.paged else p.qkv_format]
    words += [
        f"b{p.batch_size}",
        f"h{p.num_heads}/{p.num_gqa_groups}",
        f"s{p.max_seqlen_q}×{p.max_seqlen_kv}",
        f"d{p.head_dim_qk}/{p.head_dim_v}",
        p.attn_mask_type,
    ]
    if p.windowed:
        words.append(f"window {p.window_size[0]},{p.window_size[1]}")
    if p.has_bias:
        grad = " with grad" if p.core_attention_bias_requires_grad else ""
        words.append(f"{p.core_attention_bias_type} {p.core_attention_bias_shape}{grad}")
    elif p.core_attention_bias_type == "alibi":
        words.append("alibi")
    if p.softmax_type != "vanilla":
        words.append(f"{p.softmax_type} sink")
    if p.softcap:
        words.append(f"softcap {p.softcap:g}")
    if p.attention_dropout:
        words.append(f"dropout {p.attention_dropout:g}")
    if p.fp8_attention:
        words.append(f"FP8 {getattr(p.recipe, 'kind', 'without recipe')}")
    for flag in ("deterministic", "return_lse", "return_max_logit", "pad_between_seqs", "cuda_graph"):
        if getattr(p, flag):
            words.append(flag.removeprefix("return_"))
    if p.kv_cache != "none":
        words.append(f"{p.kv_cache} KV cache" + (f" of {p.page_size}-token pages" if p.page_size else ""))
    if p.context_parallel:
        words.append(f"cp{p.cp_size} {p.cp_comm_type}")
    words.append("training" if p.is_training else "inference")
    return words


def _policy_words(selection: Selection) -> list[str]:
    policy = selection.policy
    return [
        f"{name}={size(value) if name == 'memory_limit' else value}"
        for name in type(policy).model_fields
        if (value := getattr(policy, name)) != type(policy).model_fields[name].default
    ]


# ---- the candidates ---------------------------------------------------------------------------------


def _ranked_lines(selection: Selection, width: int) -> list[str]:
    lines: list[str] = []
    for place, candidate in enumerate(selection.ranked, 1):
        head = f"{place:>3} {_MARK[candidate.verdict]} {candidate.name:<{_NAME}} "
        deeper = " " * len(head)
        texts = [_runs_text(candidate, selection), *_adaptation_texts(candidate, selection.params)]
        for number, text in enumerate(texts):
            lead, indent = (head, deeper) if not number else (deeper + "  ", deeper + "    ")
            lines += _fold(text, width, lead, indent)
    return lines


def _runs_text(candidate: Candidate, selection: Selection) -> str:
    record, env = CANDIDATES[candidate.name], selection.environment
    notes = [_verb(candidate)]
    if record.last_resort and _on_gpu(env):
        notes[0] += ", slow"
    if not candidate.eligible:
        notes[0] += ": nobody has checked"
    own = memory_parts(candidate.name, selection.params, env)
    notes += [f"{size(amount)} of {what}" for what, amount in own]
    if candidate.unproven:
        parts = unproven_parts(record, selection.params, env.target)
        where = f"{env.target} with {', '.join(parts)}" if parts else env.target
        notes.append(f"unproven on {where}: {unproven_words(candidate)}")
    if candidate.placed_by is not None and not record.last_resort:
        page = REGISTRY.pages[candidate.placed_by]
        assert isinstance(page, Preference)
        if not candidate.unproven or page.code in _BESIDE_PROOF:
            notes.append(page.short)
    return " · ".join(notes)


def unproven_words(candidate: Candidate) -> str:
    """What was done instead of running it on a GPU, in a few words."""
    record = CANDIDATES[candidate.name]
    if record.plugin:
        return f"{record.distribution} declares no proof"
    return "executed off-GPU" if candidate.executed_off_gpu else record.unproven_note


def _adaptation_texts(candidate: Candidate, p: AttentionParams) -> list[str]:
    """A line for each change, with what it costs and what it avoids."""
    return [f"{adaptation_words(made, p)}{_avoided(made)}" for made in candidate.adaptations]


def adaptation_words(made: Adaptation, p: AttentionParams) -> str:
    """A change and what it costs: memory it makes, and work beyond the call's own."""
    words = [made.text]
    if made.bytes:
        words.append(size(made.bytes))
    if made.flops:
        more = made.flops / max(1, p.flops)
        words.append(f"+{100 * more:.2g} % work" if more < 1 else f"{1 + more:.2g} times the work")
    return ", ".join(words)


def _avoided(made: Adaptation) -> str:
    if not made.avoids:
        return ""
    first, *others = made.avoids
    more = f" and {', '.join(reason.code for reason in others)}" if others else ""
    return f" · avoids {first.code}{more}: {first.rule.title}"


# ---- the reasons ------------------------------------------------------------------------------------


def _reason_lines(selection: Selection, width: int, sources: bool) -> list[str]:
    """Every reason once, below the names of all candidates that it refuses."""
    needing_gpu, absent = _needing_gpu(selection), _absent(selection)
    lines: list[str] = []
    told = [c for c in selection.candidates if c.name not in needing_gpu]
    for names, reasons in _grouped(told, absent).items():
        refused = selection[names[0]].verdict == "refused"
        lines += _fold(
            ", ".join(names), width, f"  – {_MARK['refused' if refused else 'unknown']} ", "      "
        )
        for message, reason in reasons:
            text = f"{reason.code}  {message}  [{reason.evidence}]"
            lines += _fold(text, width, "      ", "        ")
            if sources:
                lines += _fold(f"Source: {reason.source}", width, "        ", "          ")
    if absent:
        codes = ", ".join(absent.values())
        lines += _fold(f"{', '.join(absent)}: not installed ({codes})", width, "  – ✖ ", "      ")
    if needing_gpu:
        here = selection.environment.device.type
        lines += _fold(f"{', '.join(needing_gpu)}: need a GPU, and this is {here}", width, "  – ✖ ", "      ")
    return lines


def _needing_gpu(selection: Selection) -> list[str]:
    """Off a GPU, the candidates whose reasons come to that; those of a forced one are always shown."""
    if _on_gpu(selection.environment):
        return []
    forced = selection.policy.backend
    return [
        c.name
        for c in selection.candidates
        if c.name != forced and any(r.field == "device" for r in c.reasons)
    ]


def _absent(selection: Selection) -> dict[str, str]:
    """The candidates, but for a forced one, whose own package is not there, and the code that says so."""
    needing_gpu = _needing_gpu(selection)
    missing = {
        c.name: _own_package(c)
        for c in selection.candidates
        if c.name not in (selection.policy.backend, *needing_gpu)
    }
    return {name: reason.code for name, reason in missing.items() if reason is not None}


def _own_package(candidate: Candidate) -> Reason | None:
    """The reason that its own package is not installed."""
    library = CANDIDATES[candidate.name].library
    return next((r for r in candidate.reasons if r.field == library and r.observed is None), None)


def _grouped(
    candidates: list[Candidate], told: Mapping[str, str]
) -> dict[tuple[str, ...], list[tuple[str, Reason]]]:
    """Reasons by the candidates that share them, in the order in which they are met. Of a candidate in
    ``told``, which is not installed, those that stay when it is: what this GPU is not."""
    sharing: dict[tuple[str, str], list[str]] = {}
    first: dict[tuple[str, str], Reason] = {}
    for candidate in candidates:
        for reason in candidate.reasons:
            if candidate.name in told and (reason.code == told[candidate.name] or reason.field not in _STAYS):
                continue
            key = (reason.code, _of_any(candidate.name, reason))
            if candidate.name not in sharing.setdefault(key, []):
                sharing[key].append(candidate.name)
            first.setdefault(key, reason)
    groups: dict[tuple[str, ...], list[tuple[str, Reason]]] = {}
    for key, names in sharing.items():
        reason = first[key]
        text = reason.message if len(names) == 1 else key[1]
        groups.setdefault(tuple(names), []).append((text, reason))
    return groups


def _of_any(name: str, reason: Reason) -> str:
    """A reason's message; that of a policy, which asks for each candidate by its name, without that name."""
    if reason.evidence != "policy":
        return reason.message
    return re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.])", "one of these", reason.message)


# ---- the ways out -----------------------------------------------------------------------------------


def _worth_showing(unlock: Unlock, selection: Selection) -> bool:
    """A package that is not there is worth its installation where it would be first, on this GPU."""
    candidate = selection[unlock.candidate]
    if candidate.name == selection.policy.backend or _own_package(candidate) is None:
        return True
    return unlock.rank == 1 and unlock.effect != "hardware"


def _unlock_lines(selection: Selection, width: int) -> list[str]:
    """The cheapest ways to each refused fused kernel."""
    shown: dict[str, list[Unlock]] = {}
    for unlock in selection.unlocks:
        if not CANDIDATES[unlock.candidate].last_resort and _worth_showing(unlock, selection):
            shown.setdefault(unlock.candidate, []).append(unlock)
    lines: list[str] = []
    for name, unlocks in shown.items():
        for unlock in unlocks[:_MOST_WAYS]:
            lead = f"  To get {name}: " if unlock is unlocks[0] else "  or: "
            place = "would be first" if unlock.rank == 1 else f"would be number {unlock.rank}"
            text = f"{unlock.change}  [{unlock.effect}; re-checked: {place}]"
            if unlock.paste.startswith(_NO_WHEEL) and name != selection.policy.backend:
                text += f"; no wheel is known: --backend {name} shows how it is built"
                lines += _fold(text, width, lead, "      ")
                continue
            lines += _fold(text, width, lead, "      ")
            lines += [
                f"      {line}"
                for paste in unlock.paste.splitlines()
                if paste not in unlock.change
                for line in _shell_lines(paste, width - 6)
            ]
    return ["", *lines] if lines else []


def _shell_lines(paste: str, width: int) -> list[str]:
    """A line to paste; a comment is folded, one for pip is continued, where they do not fit."""
    if paste.startswith("# "):
        return _fold(paste.removeprefix("# "), width, "# ", "# ")
    command = "pip install "
    if len(paste) <= width or not paste.startswith(command):
        return [paste]
    return [f"{command}\\", f"  {paste.removeprefix(command)}"]


def _closing_lines(selection: Selection, width: int) -> list[str]:
    unshown = _needing_gpu(selection)
    codes = [r.code for c in selection.candidates if c.name not in unshown for r in c.reasons]
    avoided = [r.code for c in selection.candidates for a in c.adaptations for r in a.avoids]
    bugs = [code for code in dict.fromkeys(codes) if code.startswith("BUG")]
    bugs += [
        f"{code} (avoided)" for code in dict.fromkeys(avoided) if code.startswith("BUG") and code not in codes
    ]
    text = f"Known bugs that touch this: {', '.join(bugs) or 'none'}."
    why = next(iter((*codes, *avoided)), None)
    if why is not None:
        text += f"  Why a rule: attnsel rule {why}"
    return ["", *_fold(text, width, "  ", "  ")]


# ---- lines ------------------------------------------------------------------------------------------


def _fold(text: str, width: int, lead: str = "", indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False)


def _join_items(items: list[str], width: int) -> list[str]:
    """Items joined by a dot, never broken inside one."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 3 + len(item) <= width:
            lines[-1] += f" · {item}"
        else:
            lines.append(item)
    return lines
