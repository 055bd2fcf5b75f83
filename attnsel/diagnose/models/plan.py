"""What runs for each kind of attention of a model, in training, prefill and decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import to_json
from attnsel.decision import Selection, select
from attnsel.diagnose.models.calls import Call, Layers
from attnsel.diagnose.models.source import config_of, layers_of
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.params import ITEMSIZE, AttentionParams, Tensors, TensorSpec
from attnsel.policy import Policy
from attnsel.report.answer import better_way
from attnsel.verdicts.dispatch import Dispatch

Phase = Literal["training", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("training", "prefill", "decode")
ENCODED = {"vision": 1024, "speech encoder": 1500}
"""Tokens of an image or of a sound where nobody states how many: 32 x 32 patches; 30 s of Whisper's
(openai/whisper, N_AUDIO_CTX)."""


class Lengths(NamedTuple):
    """``batch`` sequences of ``seqlen`` tokens; an encoder's have ``encoded``."""

    batch: int = 1
    seqlen: int = 4096
    encoded: int | None = None


class Cell(NamedTuple):
    """One kind of attention in one phase, on one of ``tp_size`` ranks."""

    call: Call
    phase: Phase
    selection: Selection

    @property
    def kernel(self) -> str | None:
        return self.selection.backend

    @property
    def slow(self) -> bool:
        chosen = self.selection.chosen
        return chosen is not None and CANDIDATES[chosen.name].last_resort

    @property
    def blocked(self) -> tuple[str, str] | None:
        """The best kernel that would run before this one and the code of what keeps it away."""
        better = better_way(self.selection)
        if better is None:
            return None
        reasons = self.selection[better.candidate].reasons
        return better.candidate, reasons[0].code if reasons else ""

    def as_dict(self) -> dict[str, Any]:
        chosen, blocked = self.selection.chosen, self.blocked
        dispatched = self.selection.dispatched
        theirs = {} if dispatched is None else {"dispatched": _taken(dispatched)}
        return {
            **to_json(self.call),
            **theirs,
            "phase": self.phase,
            "backend": self.kernel,
            "verdict": None if chosen is None else chosen.verdict,
            "better": None if blocked is None else {"backend": blocked[0], "code": blocked[1]},
            "known_bugs": [reason.code for reason in self.selection.known_bugs],
            "params": to_json(self.selection.params),
        }


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
        return sum(
            len(cell.call.layers) * _kept(cell.call, self.lengths) * _width(cell, self.lengths)
            for cell in self.cells
            if cell.phase == "decode"
        )

    @property
    def fixes(self) -> tuple[Fix, ...]:
        """What brings a better kernel, the change that helps most layers first."""
        helped: dict[tuple[str, str], list[Cell]] = {}
        pastes: dict[tuple[str, str], str] = {}
        for cell in self.cells:
            way = better_way(cell.selection)
            if way is not None:
                helped.setdefault((way.change, way.candidate), []).append(cell)
                pastes[way.change, way.candidate] = way.paste
        found = []
        for (change, candidate), cells in helped.items():
            phases = tuple(dict.fromkeys(cell.phase for cell in cells))
            found.append(Fix(change, candidate, _count(cells), phases, pastes[change, candidate]))
        return tuple(sorted(found, key=lambda fix: -fix.layers * len(fix.phases)))

    def as_dict(self) -> dict[str, Any]:
        """As docs/schemas/model-1.json has it."""
        return {
            "model_type": self.layers.model_type,
            "read_by": self.layers.by,
            "calls": [cell.as_dict() for cell in self.cells],
            "other": to_json(self.layers.other),
            "unread": list(self.layers.unread),
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
    tp_size: int = 1,
    phases: tuple[Phase, ...] = PHASES,
    policy: Policy | None = None,
    **stated: Any,
) -> ModelPlan:
    """What runs for each kind of attention of a model.

    ``model``: a model of transformers or its config, a configuration as a dictionary, or a preset's name.
    ``environment`` None is this machine. ``encoded``: tokens of an encoder, where it has others than
    ``seqlen``. ``stated``: fields of AttentionParams that a model does not decide, such as ``dtype``.

    Raises InvalidInput for what is no model, for a field of it that is no number where one is needed, and for
    a ``tp_size`` that does not divide its heads.
    """
    env = Environment.detect() if environment is None else environment
    lengths = Lengths(batch_size, seqlen, encoded)
    stated.setdefault("dtype", env.half)
    layers, own = layers_of(config_of(model)), policy or Policy()
    return planned(
        layers,
        env,
        lengths,
        lambda params, where: select(params, where, policy=own),
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
    if call.q_heads % tp_size:
        raise InvalidInput("tp_size", tp_size, f"must divide {call.q_heads}, the query heads of the model")
    encoded = lengths.encoded or ENCODED.get(call.stack, lengths.seqlen)
    own = lengths.seqlen if call.stack in ("text", "decoder") else encoded
    rows = 1 if phase == "decode" else own
    keys = (lengths.encoded or lengths.seqlen) if call.attn == "cross" else own
    asked: dict[str, Any] = {
        "batch_size": lengths.batch,
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
        asked["tensors"] = Tensors(mask=_square(rows, keys))
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


def _square(rows: int, keys: int) -> TensorSpec:
    shape, stride = (1, 1, rows, keys), (rows * keys, rows * keys, keys, 1)
    return TensorSpec.model_validate({"shape": shape, "stride": stride, "dtype": "bool"})


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


def _count(cells: list[Cell]) -> int:
    return len({(cell.call.stack, layer) for cell in cells for layer in cell.call.layers})


def distinct(cells: tuple[Cell, ...]) -> Iterator[tuple[Call, tuple[Cell, ...]]]:
    """The cells of each call, in order."""
    by_call: dict[Call, list[Cell]] = {}
    for cell in cells:
        by_call.setdefault(cell.call, []).append(cell)
    yield from ((call, tuple(own)) for call, own in by_call.items())
