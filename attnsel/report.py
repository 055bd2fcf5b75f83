"""How an answer is told: plain text that fits a terminal, a log and an error message alike."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from attnsel.candidates import CANDIDATES
from attnsel.memory import memory_parts
from attnsel.verdict import size

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams
    from attnsel.select import Candidate, Selection
    from attnsel.unlock import Unlock
    from attnsel.verdict import Adaptation

_NAME = 15  # columns for a candidate's name
_MARK = {"eligible": "✔", "unknown": "?", "refused": "✖"}


def render(selection: Selection, width: int = 80) -> str:
    """The whole answer: where, what, the ranking, every reason, the ways out."""
    lines = [*_wrap_items(environment_words(selection.environment), width)]
    lines += _wrap_items(params_words(selection.params), width)
    lines += [f"! {warning}" for warning in selection.environment.warnings]
    wish = _policy_words(selection)
    if wish:
        lines += _wrap_items(["policy", *wish], width)
    if selection.layout is not None:
        lines += selection.layout.describe(width).splitlines()
    lines.append("")
    place = 0
    for candidate in selection.candidates:
        if candidate.verdict != "refused":
            place += 1
        lines += _candidate_lines(candidate, place, width, selection)
    lines += _unlock_lines(selection, width)
    lines += _closing_lines(selection, width)
    return "\n".join(line.rstrip() for line in lines)


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
    better = [u for u in selection.unlocks if u.rank == 1 and u.effect != "risk"]
    if better:
        parts.append(f"to get {better[0].candidate}: {better[0].change}")
    question = " ".join(params_words(selection.params))
    return f"{'; '.join(parts)} [{question}]"


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


def adaptation_words(a: Adaptation, p: AttentionParams) -> str:
    """A change and what it costs: memory it makes, and work beyond the call's own."""
    words = [a.text]
    if a.bytes:
        words.append(size(a.bytes))
    if a.flops:
        words.append(f"+{100 * a.flops / max(1, p.flops):.2g} % work")
    return ", ".join(words)


def _policy_words(selection: Selection) -> list[str]:
    policy = selection.policy
    return [
        f"{name}={size(value) if name == 'memory_limit' else value}"
        for name in type(policy).model_fields
        if (value := getattr(policy, name)) != type(policy).model_fields[name].default
    ]


def _candidate_lines(candidate: Candidate, place: int, width: int, selection: Selection) -> list[str]:
    number = f"{place:>3}" if candidate.verdict != "refused" else "  –"
    head = f"{number} {_MARK[candidate.verdict]} {candidate.name:<{_NAME}} "
    texts = []
    if candidate.verdict != "refused":
        texts.append(_runs_text(candidate, selection))
    texts += [f"{reason.code}  {reason.message}  [{reason.evidence}]" for reason in candidate.reasons]
    lines: list[str] = []
    for text in texts:
        lead = head if not lines else " " * len(head)
        deeper = " " * len(head) + ("" if candidate.verdict != "refused" and text == texts[0] else "  ")
        lines += textwrap.wrap(
            text, width, initial_indent=lead, subsequent_indent=deeper, break_on_hyphens=False
        )
    return lines


def _runs_text(candidate: Candidate, selection: Selection) -> str:
    words = "runs" if candidate.verdict == "eligible" else "may run: nobody has checked"
    if candidate.adaptations:
        changes = "; ".join(adaptation_words(a, selection.params) for a in candidate.adaptations)
        words += f" ({changes})"
    notes = []
    info = CANDIDATES[candidate.name]
    if info.last_resort and selection.environment.device.type != "cpu":
        notes.append("slow")
    if candidate.name == "sdpa.math":
        scores = memory_parts("sdpa.math", selection.params, selection.environment)
        notes += [f"{size(amount)} for the {what}" for what, amount in scores]
    if candidate.unproven:
        how = "compiled only" if info.owned else "not run there yet"
        if info.plugin:
            how = f"{info.plugin} declares no proof"
        notes.append(f"unproven on {selection.environment.target}: {how}")
    if candidate.plan_only:
        notes.append(f"plan only: {candidate.plan_only}")
    told = ", ".join([words, *notes])
    return f"{told}  · placed by {candidate.placed_by}" if candidate.placed_by else told


def _unlock_lines(selection: Selection, width: int) -> list[str]:
    """The cheapest two ways to each refused fused kernel."""
    shown: dict[str, list[Unlock]] = {}
    for unlock in selection.unlocks:
        if not CANDIDATES[unlock.candidate].last_resort:
            shown.setdefault(unlock.candidate, []).append(unlock)
    lines: list[str] = []
    for name, unlocks in shown.items():
        for unlock in unlocks[:3]:
            lead = f"  To get {name}: " if unlock is unlocks[0] else "  or: "
            place = "would be first" if unlock.rank == 1 else f"would be number {unlock.rank}"
            lines += textwrap.wrap(
                f"{unlock.change}  [{unlock.effect}; re-checked: {place}]",
                width,
                initial_indent=lead,
                subsequent_indent="      ",
                break_on_hyphens=False,
            )
            lines += [
                f"      {line}"
                for paste in unlock.paste.splitlines()
                if paste not in unlock.change
                for line in _shell_lines(paste, width - 6)
            ]
    return ["", *lines] if lines else []


def _shell_lines(paste: str, width: int) -> list[str]:
    """A line to paste; one for pip is continued where it does not fit."""
    command = "pip install "
    if len(paste) <= width or not paste.startswith(command):
        return [paste]
    return [f"{command}\\", f"  {paste.removeprefix(command)}"]


def _closing_lines(selection: Selection, width: int) -> list[str]:
    codes = [r.code for c in selection.candidates for r in c.reasons]
    bugs = list(dict.fromkeys(code for code in codes if code.startswith("BUG")))
    text = f"Known bugs that touch this: {', '.join(bugs) or 'none'}."
    if codes:
        text += f"  Why a rule: attnsel rule {codes[0]}"
    return ["", *textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")]


def _wrap_items(items: list[str], width: int) -> list[str]:
    """Items joined by a dot, never broken inside one."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 3 + len(item) <= width:
            lines[-1] += f" · {item}"
        else:
            lines.append(item)
    return lines
