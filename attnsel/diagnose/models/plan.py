"""What runs for each kind of attention of a model, in training, prefill and decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import to_json
from attnsel.decision import Selection, select
from attnsel.diagnose.models.calls import BY_HAND, Call, Layers, layer_count
from attnsel.diagnose.models.other import thread_of
from attnsel.diagnose.models.source import config_of, layers_of
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.params import ITEMSIZE, AttentionParams
from attnsel.policy import Policy
from attnsel.report.answer import better_way
from attnsel.rules.sdpa.common import mask_of
from attnsel.selection.adaptations import bias_shape
from attnsel.selection.evaluate import mask_bytes, memory_parts
from attnsel.verdicts.dispatch import Dispatch

Phase = Literal["training", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("training", "prefill", "decode")
ENCODED = {"vision": 1024, "speech encoder": 1500}
"""Tokens of an image or of a sound where nobody states how many: 32 x 32 patches; 30 s of Whisper's
(openai/whisper, N_AUDIO_CTX)."""


WRITTEN_OUT = "sdpa.math"
"""What attention by hand allocates is what F.sdpa's math kernel does, whose operators are the same."""


class Lengths(NamedTuple):
    """``batch`` sequences of ``seqlen`` tokens; an encoder's have ``encoded``, and what a diffusion
    transformer makes is of ``image_size`` pixels on each side."""

    batch: int = 1
    seqlen: int = 4096
    encoded: int | None = None
    image_size: int | None = None


class Cell(NamedTuple):
    """One kind of attention in one phase, on one of ``tp_size`` ranks."""

    call: Call
    phase: Phase
    selection: Selection

    @property
    def kernel(self) -> str | None:
        return BY_HAND if self.call.by_hand else self.selection.backend

    @property
    def slow(self) -> bool:
        chosen = self.selection.chosen
        return self.call.by_hand or (chosen is not None and CANDIDATES[chosen.name].last_resort)

    @property
    def blocked(self) -> tuple[str, str] | None:
        """The best kernel that would run before this one and the code of what keeps it away; "" where that is
        the model's own code."""
        better = better_way(self.selection)
        wanted = None if better is None else better.candidate
        if self.call.by_hand:
            wanted = "flash_attn.2" if self.call.reaches else self.selection.backend
        if wanted is None:
            return None
        reasons = self.selection[wanted].reasons
        return wanted, reasons[0].code if reasons else ""

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of one layer beside its own tensors: what the kernel takes, copies for it, mask and bias."""
        p, parts = self.selection.params, allocated(self.selection, self.call)
        if p.has_bias:
            parts["bias"] = prod(bias_shape(p)) * ITEMSIZE[p.dtype]
        elif self.call.mask == "tensor":
            parts.setdefault("mask", mask_bytes(p, made=True))
        return parts

    def as_dict(self) -> dict[str, Any]:
        chosen, blocked = self.selection.chosen, self.blocked
        dispatched = self.selection.dispatched
        theirs = {} if dispatched is None else {"dispatched": _taken(dispatched)}
        return {
            **to_json(self.call),
            **theirs,
            "phase": self.phase,
            "backend": self.kernel,
            "verdict": None if chosen is None or self.call.by_hand else chosen.verdict,
            "better": None if blocked is None else {"backend": blocked[0], "code": blocked[1]},
            "memory": self.memory,
            "thread": thread_of(self.call),
            "known_bugs": [reason.code for reason in self.selection.known_bugs],
            "params": to_json(self.selection.params),
        }


def allocated(selection: Selection, call: Call | None = None) -> dict[str, int]:
    """Bytes of the kernel that runs, by what for: another library's choice where that was asked, else ours
    with the copies for it; of a ``call`` that writes attention out, the model's own code."""
    dispatched, chosen = selection.dispatched, selection.chosen
    name, adaptations = ("", ()) if chosen is None else (chosen.name, chosen.adaptations)
    if dispatched is not None:
        name, adaptations = "" if dispatched.chosen is None else dispatched.chosen.candidate, ()
    if call is not None and call.by_hand:
        name, adaptations = WRITTEN_OUT, ()
    held = memory_parts(name, selection.params, selection.environment, adaptations) if name else ()
    parts: dict[str, int] = {}
    for what, amount in held:
        parts[what] = parts.get(what, 0) + amount
    return parts


def _taken(dispatched: Dispatch) -> dict[str, Any]:
    chosen = None if dispatched.chosen is None else dispatched.chosen.name
    return {"dispatcher": dispatched.dispatcher, "release": dispatched.release, "chosen": chosen}


class Fix(NamedTuple):
    """A change, the layers that it helps, and the lines to paste."""

    change: str
    candidate: str
    layers: int
    phases: tuple[Phase, ...]
    paste: str


class ModelPlan(NamedTuple):
    """A model on a machine."""

    layers: Layers
    environment: Environment
    lengths: Lengths
    cells: tuple[Cell, ...]
    tp_size: int = 1

    @property
    def kv_cache_bytes(self) -> int:
        """Of one rank, for the whole batch at its full length; a window keeps no more than it sees."""
        return sum(cache_bytes(cell, self.lengths) for cell in self.cells)

    @property
    def fixes(self) -> tuple[Fix, ...]:
        """What brings a better kernel, the change that helps most layers first."""
        helped: dict[tuple[str, str], list[Cell]] = {}
        pastes: dict[tuple[str, str], str] = {}
        for cell in self.cells:
            way = None if cell.call.by_hand else better_way(cell.selection)
            if way is not None:
                helped.setdefault((way.change, way.candidate), []).append(cell)
                pastes[way.change, way.candidate] = way.paste
        found = []
        for (change, candidate), cells in helped.items():
            phases = tuple(dict.fromkeys(cell.phase for cell in cells))
            layers = layer_count(cell.call for cell in cells)
            found.append(Fix(change, candidate, layers, phases, pastes[change, candidate]))
        return tuple(sorted(found, key=lambda fix: -fix.layers * len(fix.phases)))

    def as_dict(self) -> dict[str, Any]:
        """As docs/schemas/model-2.json has it."""
        return {
            "model_type": self.layers.model_type,
            "read_by": self.layers.by,
            "calls": [cell.as_dict() for cell in self.cells],
            "other": to_json(self.layers.other),
            "unread": list(self.layers.unread),
            "assumed": list(self.layers.assumed),
            "environment": to_json(self.environment),
            "lengths": to_json(self.lengths),
            "tp_size": self.tp_size,
            "kv_cache_bytes": self.kv_cache_bytes,
            "fixes": to_json(self.fixes),
        }


def plan(
    model: Any,
    environment: Environment | None = None,
    *,
    batch_size: int = 1,
    seqlen: int = 4096,
    encoded: int | None = None,
    image_size: int | None = None,
    tp_size: int = 1,
    phases: tuple[Phase, ...] = PHASES,
    policy: Policy | None = None,
    dispatcher: str | None = None,
    switches: Mapping[str, str] | None = None,
    **stated: Any,
) -> ModelPlan:
    """What runs for each kind of attention of a model.

    ``model``: a model of transformers or its config, a configuration as a dictionary, or a preset's name.
    ``environment`` None is this machine. ``encoded``: tokens of an encoder, where it has others than
    ``seqlen``. ``image_size``: pixels on each side of what a diffusion transformer makes. ``dispatcher`` and
    ``switches``: as of ``attnsel.select``, asked about each call too.
    ``stated``: fields of AttentionParams that a model does not decide, such as ``dtype``.

    Raises InvalidInput for what is no model, for a field of it that is no number where one is needed, and for
    a ``tp_size`` that does not divide its heads.
    """
    env = Environment.detect() if environment is None else environment
    lengths = Lengths(batch_size, seqlen, encoded, image_size)
    stated.setdefault("dtype", env.half)
    ask = partial(select, policy=policy or Policy(), dispatcher=dispatcher, switches=switches)
    return planned(
        layers_of(config_of(model)),
        env,
        lengths,
        ask,
        stated=stated,
        phases=phases,
        tp_size=tp_size,
    )


def planned(
    layers: Layers,
    environment: Environment,
    lengths: Lengths,
    ask: Callable[[AttentionParams, Environment], Selection],
    *,
    stated: Mapping[str, Any],
    phases: tuple[Phase, ...] = PHASES,
    tp_size: int = 1,
) -> ModelPlan:
    """``ask``: the engine. ``stated``: fields of AttentionParams that hold for every call.

    Raises InvalidInput for heads that ``tp_size`` does not divide.
    """
    if any(tp_size < 1 or call.q_heads % tp_size for call in layers.calls):
        heads = ", ".join(sorted({str(call.q_heads) for call in layers.calls}))
        raise InvalidInput("tp_size", tp_size, f"must be a divisor of the query heads: {heads}")
    grids = [call.grid for call in layers.calls if call.grid is not None]
    for grid in grids[:1]:
        side = lengths.image_size or grid.side
        if side < grid.pixels or side > 1 << 16:
            raise InvalidInput(
                "image_size", lengths.image_size, f"must be pixels, from {grid.pixels} to 65536"
            )
        made = f"{side} x {side} pixels" + (f" in {grid.frames} frames of latents" if grid.frames > 1 else "")
        told = f"{grid.image_tokens(side)} tokens of a picture of {made}"
        text = grid.text if lengths.encoded is None else lengths.encoded
        layers = layers._replace(assumed=(f"{told}, {text} of text" if text else told,))
    cells = []
    for call in layers.calls:
        for phase in phases:
            if phase == "decode" and call.stack not in ("text", "decoder"):
                continue
            params = params_of(call, phase, lengths, tp_size, stated)
            cells.append(Cell(call, phase, ask(params, environment)))
    return ModelPlan(layers, environment, lengths, tuple(cells), tp_size)


def params_of(
    call: Call, phase: Phase, lengths: Lengths, tp_size: int, stated: Mapping[str, Any]
) -> AttentionParams:
    """The question that one call asks. Keys and values of fewer heads than ranks are on several of them."""
    encoded = lengths.encoded or ENCODED.get(call.stack, lengths.seqlen)
    own = lengths.seqlen if call.stack in ("text", "decoder") else encoded
    keys = (lengths.encoded or lengths.seqlen) if call.attn == "cross" else own
    batch = lengths.batch
    if call.grid is not None:
        text = call.grid.text if lengths.encoded is None else lengths.encoded
        own = call.grid.image_tokens(lengths.image_size) + text * call.joint
        keys = text if call.attn == "cross" else own
    elif call.chunk is not None and not call.causal:  # windows of a picture, which are as sequences apart
        batch, own = batch * -(-own // call.chunk), min(own, call.chunk)
        keys = own
    rows = 1 if phase == "decode" else own
    asked: dict[str, Any] = {
        "batch_size": batch,
        "num_heads": call.q_heads // tp_size,
        "num_gqa_groups": max(1, call.kv_heads // tp_size),
        "max_seqlen_q": rows,
        "max_seqlen_kv": keys,
        "head_dim_qk": call.head_dim_qk,
        "head_dim_v": call.head_dim_v,
        "attn_mask_type": _mask_type(call, rows, keys),
        "softcap": call.softcap,
        "softmax_type": "learnable" if call.sinks else "vanilla",
        "is_training": phase == "training",
        **_window(call),
        **stated,
    }
    if call.bias:
        asked |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": "1hss"}
    if call.chunk is not None and keys > call.chunk:  # a mask of its own, which no flag says
        asked["tensors"] = mask_of(1, 1, rows, keys, dtype="bool")
        asked["attn_mask_type"] = "no_mask"
    return AttentionParams(**asked)


def _mask_type(call: Call, rows: int, keys: int) -> str:
    if not call.causal:
        return "no_mask"
    return "causal" if rows == keys else "causal_bottom_right"


def _window(call: Call) -> dict[str, tuple[int, ...]]:
    if call.window_left is None and call.window_right is None:
        return {}
    right = 0 if call.causal else call.window_right
    return {
        "window_size": (-1 if call.window_left is None else call.window_left, -1 if right is None else right)
    }


def cache_bytes(cell: Cell, lengths: Lengths) -> int:
    """Of the keys and values that these layers keep between steps; 0 outside of decode."""
    kept = len(cell.call.layers) * _kept(cell.call, lengths) * _width(cell, lengths)
    return kept if cell.phase == "decode" else 0


def _kept(call: Call, lengths: Lengths) -> int:
    """Tokens of one sequence whose keys and values a cache keeps."""
    if call.attn == "cross":
        return lengths.encoded or lengths.seqlen
    most = min(filter(None, (call.window, call.chunk)), default=lengths.seqlen)
    return min(most, lengths.seqlen)


def _width(cell: Cell, lengths: Lengths) -> int:
    """Bytes of the keys and values of one token in one layer, for the whole batch."""
    p = cell.selection.params
    return lengths.batch * p.num_gqa_groups * (p.head_dim_qk + p.head_dim_v) * ITEMSIZE[p.dtype]
