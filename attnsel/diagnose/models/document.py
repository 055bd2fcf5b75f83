"""The answer about a whole model: its layers, what runs for them in each phase, what it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from attnsel.diagnose.models.calls import Call, Other, layer_count
from attnsel.diagnose.models.other import thread_of
from attnsel.diagnose.models.plan import Cell, Lengths, ModelPlan, cache_bytes
from attnsel.report.answer import known_bug_words, presumed, warnings
from attnsel.report.document import (
    Block,
    Code,
    Document,
    Facts,
    Fields,
    Inline,
    Item,
    Paragraph,
    Paste,
    Ref,
    Screen,
    Strong,
    joined,
)
from attnsel.report.words import environment_words
from attnsel.verdicts.requirements import size

_FIXES = 3
"""Ways that are shown; ``--json`` has all."""


def model_document(plan: ModelPlan) -> Document:
    layers, lengths = plan.layers, plan.lengths
    blocks: list[Block] = [Paragraph(Strong(verdict(plan)))]
    if plan.cells:
        first = plan.cells[0].selection
        long = () if layers.assumed else (f"s{lengths.seqlen}",)
        asked = [f"b{lengths.batch}", *long, first.params.dtype]
        asked += [f"tensor parallel {plan.tp_size}"] if plan.tp_size > 1 else []
        notes = (*warnings(first.environment), *presumed(first))
        blocks.append(Facts((tuple(environment_words(first.environment)), tuple(asked), *notes)))
    blocks += [
        _of_call(call, cells, lengths) for call, cells in groupby(plan.cells, key=lambda cell: cell.call)
    ]
    if layers.other:
        rows = tuple((each.kind, (other_words(each),)) for each in layers.other)
        blocks.append(Screen((Paragraph(Strong("Layers that are no softmax attention")), Fields(rows))))
    if plan.kv_cache_bytes:
        share = " of one rank" if plan.tp_size > 1 else ""
        blocks.append(
            Paragraph(f"Keys and values of {lengths.seqlen} tokens{share}: {size(plan.kv_cache_bytes)}")
        )
    for place, fix in enumerate(plan.fixes[:_FIXES], 1):
        helps = f"To run {fix.candidate} in {_layers(fix.layers)} ({', '.join(fix.phases)}): {fix.change}"
        blocks.append(Item(helps, number=place, below=(Paste(tuple(fix.paste.splitlines())),)))
    blocks += [Item(f"Assumed: {text}.", "!") for text in layers.assumed]
    blocks += [Item(f"Not understood: {text}.", "!") for text in layers.unread]
    blocks.append(Paragraph(f"Read by {layers.by}. Why a rule: attnsel rule CODE."))
    return Document(tuple(blocks))


def verdict(plan: ModelPlan) -> str:
    """What the model is made of, and how much of it runs on a slow path."""
    calls, other = plan.layers.calls, plan.layers.other
    others = sum(len(each.layers) for each in other)
    name = plan.layers.model_type or "This model"
    kinds = "all alike" if len(calls) == 1 else f"of {len(calls)} kinds"
    text = f"{name}: {_layers(layer_count(calls))} of attention, {kinds}"
    text += f", and {others} of another kind" if others else ""
    slow = [cell for cell in plan.cells if cell.kernel is None or cell.slow]
    if not plan.cells:
        return f"{text}."
    if not slow:
        return f"{text}; each runs on a fast kernel."
    where = layer_count(cell.call for cell in slow)
    phases = ", ".join(dict.fromkeys(cell.phase for cell in slow))
    return f"{text}; {_layers(where)} on a slow path ({phases})."


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _of_call(call: Call, cells: Iterable[Cell], lengths: Lengths) -> Screen:
    """A kind of attention: a line for each outcome, under its phases."""
    outcomes: dict[Inline, list[str]] = {}
    for cell in cells:
        outcomes.setdefault(outcome(cell, cache_bytes(cell, lengths)), []).append(cell.phase)
    rows = tuple((", ".join(phases), (text,)) for text, phases in outcomes.items())
    heading = Paragraph(Strong(f"{_layers(len(call.layers))}: {call_words(call)}"))
    but = f' but "{call.reaches}"' if call.reaches else ""
    notes = {
        "its code": f"writes queries x keys: no attn_implementation{but} reaches a kernel"
        if call.by_hand
        else "",
        "thread": thread_of(call),
    }
    told = tuple((name, (text,)) for name, text in notes.items() if text)
    return Screen((heading, Fields((*rows, *told))))


def outcome(cell: Cell, cache: int) -> Inline:
    blocked, name, dispatched = cell.blocked, cell.kernel, cell.selection.dispatched
    takes = [f" · {size(amount)} of {what}" for what, amount in cell.memory.items()]
    takes += [f" · {size(cache)} of keys and values"] if cache else []
    parts: list[Inline] = []
    lead = ""
    if dispatched is not None and not cell.call.by_hand:
        theirs = "nothing" if dispatched.chosen is None else dispatched.chosen.name
        more = () if dispatched.chosen is None else takes
        parts.append((f"{dispatched.dispatcher} takes ", Code(theirs), *more))
        lead, takes = "attnsel ", []
    if name is None:
        parts.append((lead, "nothing runs"))
    else:
        bugs = known_bug_words((bug.code, bug.rule.title) for bug in cell.selection.known_bugs)
        word: Inline = name if cell.call.by_hand else Code(name)
        told = "" if cell.call.by_hand else bugs
        parts.append((lead, word, *[" · slow"] * cell.slow, *takes, told))
    if blocked is not None:
        code = (" would be first but for ", Ref(blocked[1])) if blocked[1] else (" could run",)
        parts.append((Code(blocked[0]), *code))
    return joined(parts, "; ")


def call_words(call: Call) -> str:
    return ", ".join(_words(call))


def _words(call: Call) -> Iterator[str]:
    """What differs from plain attention, and the sizes."""
    yield f"{call.stack}, {call.attn}" if call.attn == "cross" else call.stack
    yield f"{call.q_heads}/{call.kv_heads} heads"
    widths = dict.fromkeys((call.head_dim_qk, call.head_dim_v))
    yield f"d{'/'.join(map(str, widths))}"
    if call.causal:
        yield "causal"
    if call.window is not None:
        yield f"window {call.window}"
    elif call.window_left is not None:
        yield f"window {call.window_left} and {call.window_right}"
    if call.chunk is not None:
        yield f"chunks of {call.chunk}"
    if call.softcap:
        yield f"softcap {call.softcap:g}"
    if call.sinks:
        yield "sinks"
    if call.bias:
        yield "a bias"
    if abs(call.scale - call.head_dim_qk**-0.5) > 1e-6:
        yield f"scale {call.scale:.4g}"
    if call.calls_per_layer > 1:
        yield f"{call.calls_per_layer} times a layer"


def other_words(other: Other) -> str:
    text = f"{_layers(len(other.layers))}, {other.stack}"
    if other.package:
        more = f" ({other.thread})" if other.thread else ""
        return f"{text}: fast with {other.package}; without them {other.without}{more}"
    return f"{text}; runs as {other.without}" if other.without else text
