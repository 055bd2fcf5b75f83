"""A call of a file again: on a candidate, beside attention by its definition in float64."""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnsel.diagnose.replay.build import Built, build
from attnsel.diagnose.replay.plain import exact_attention, moved, worst_row
from attnsel.errors import InvalidInput, NoBackendError, in_words, short
from attnsel.runtime.bind import contract_call, to_contract
from attnsel.runtime.call import Call, Config, read_config
from attnsel.runtime.dispatch import attend, clear_cache, make_call
from attnsel.runtime.inputs import params_of
from attnsel.runtime.reference import RowBlock, SequenceSpan, keys_of, of_kv, sequences_of, unit_of
from attnsel.runtime.replay_file import Generator, ReplayFile
from attnsel.settings import current, override
from attnsel.verdicts.evidence import REFUSED

if TYPE_CHECKING:
    from attnsel.backends.contract import Inputs, Spec

What = Literal["agrees", "wrong numbers", "refused", "error", "not tried"]

_CHANGES = 4  # of the inputs at random, to measure what rounding explains
_MOST_PAIRS = 1 << 28  # scores that are computed in float64, five times, and differentiated


class Figure(NamedTuple):
    """One result: the worst row's error and what rounding explains, both against the row's size."""

    result: str
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.error <= self.allowed


class Outcome(NamedTuple):
    """What happened this time. ``as_recorded``: the same as in the file; None where that was not tried."""

    what: What
    candidate: str
    device: str
    seed: int
    said: str
    figures: tuple[Figure, ...]
    as_recorded: bool | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        # Numbers that are not finite are no JSON.
        figures = [
            {**figure._asdict(), "error": figure.error if math.isfinite(figure.error) else None}
            for figure in self.figures
        ]
        return {**self._asdict(), "figures": figures, "notes": list(self.notes)}


class _Ran(NamedTuple):
    """Results as the contract has them: out, and gradients by name."""

    candidate: str
    call: Call
    results: dict[str, Tensor]
    dout: Tensor | None


class _Failed(NamedTuple):
    what: What
    said: str


def replay(
    file: ReplayFile, *, backend: str | None, device: torch.device, seed: int, data: dict[str, Tensor]
) -> Outcome:
    """Build the tensors, run the candidate, compare. What kernels refused in this process is forgotten.

    Raises InvalidInput where the file holds no call.
    """
    built = build(file, device, seed, data)
    name = backend or file.happened.candidate or None
    config = _config(file).replace(backend=name)
    notes = [] if data else ["the numbers are random: the file has none"]
    policy = file.settings.policy
    if name:  # what kept it from being chosen is not what is asked now
        policy = policy.replace(backend=None, memory_limit=None, allow=(), deny=())
    with (
        _alone(),
        override(policy=policy, selfcheck="0", check=file.settings.check, debug=0, replay_dir=None),
    ):
        _restore(file.generator, device)
        found = _attempt(config, built)
        if isinstance(found, _Ran) and config.attention_dropout:
            notes.append("numbers are compared without dropout: each kernel drops other entries")
            found = _attempt(config.replace(attention_dropout=0.0), built)
        if isinstance(found, _Failed):
            candidate = name or ""
            same = _as_recorded(file, found.what, candidate)
            return Outcome(found.what, candidate, str(device), seed, found.said, (), same, tuple(notes))
        figures, left_out = _compare(found)
    what: What = "agrees" if all(figure.right for figure in figures) else "wrong numbers"
    same = _as_recorded(file, what, found.candidate)
    return Outcome(what, found.candidate, str(device), seed, "", figures, same, (*notes, *left_out))


def _as_recorded(file: ReplayFile, what: What, candidate: str) -> bool | None:
    """Whether this is what the file is about; None where it could not be tried."""
    recorded = file.happened
    if what == "not tried":
        return True if recorded.kind == "nothing runs" else None
    return recorded.kind == what and recorded.candidate == candidate


def _config(file: ReplayFile) -> Config:
    try:
        return read_config(json.dumps({**file.static, "replayable": False, "label": ""}))
    except InvalidInput:
        raise
    except Exception as error:  # fields that there are not, or of another kind
        raise InvalidInput("config", short(file.config), f"is no call: {in_words(error)}") from None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    clear_cache()
    try:
        yield
    finally:
        clear_cache()


def _restore(generator: Generator, device: torch.device) -> None:
    """The generator as it was when the call was made; on another kind of device its seed alone."""
    try:
        state = torch.tensor(list(base64.b64decode(generator.state)), dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
    except (RuntimeError, TypeError, ValueError):
        torch.manual_seed(generator.initial_seed)


def _attempt(config: Config, built: Built) -> _Ran | _Failed:
    """The call, and its gradients where the recorded one had any."""
    q, k, v, extras = built
    holder: dict[str, Any] = {}
    try:
        made = attend(config, q, k, v, extras, holder)
        out = made[0] if isinstance(made, tuple) else made
        wanted = {f"d{n}": t for n, t in zip("qkv", (q, k, v), strict=True) if t.requires_grad}
        call = make_call(config, q, k, v, extras, current())
        dout, grads = None, {}
        if wanted and out.requires_grad:
            noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
            dout = noise.to(out.device, out.dtype)
            grads = dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), dout), strict=True))
        if q.device.type == "cuda":
            torch.cuda.synchronize(q.device)
    except InvalidInput:
        raise
    except NoBackendError as error:
        return _no_backend(error, config.backend)
    except Exception as error:
        return _Failed("error", in_words(error))
    ran = holder["_last"].selection
    heads = (ran.params.num_heads, ran.params.head_dim_v)

    def contract(t: Tensor) -> Tensor:
        return to_contract(config, t.unflatten(-1, heads) if config.flatten_heads else t)

    results = {"out": contract(out.detach()), **{name: to_contract(config, t) for name, t in grads.items()}}
    return _Ran(ran.backend, call, results, None if dout is None else contract(dout))


def _no_backend(error: NoBackendError, name: str | None) -> _Failed:
    selection = error.selection
    reasons = selection[name].reasons if name else ()
    when_run = [str(reason.observed) for reason in reasons if reason.code == REFUSED]
    if when_run:
        return _Failed("refused", short(when_run[0], str, 2000))
    if name:
        told = "; ".join(f"{reason.code} {reason.message}" for reason in reasons[:3])
    else:
        told = "; ".join(f"{one.name}: {one.reasons[0].code}" for one in selection if one.reasons)
    return _Failed("not tried", short(told, str, 2000))


# ---- beside the definition ----------------------------------------------------------------------------


def _compare(ran: _Ran) -> tuple[tuple[Figure, ...], tuple[str, ...]]:
    """The worst row of every result, over as many sequences as float64 takes in reasonable time."""
    p = params_of(ran.call)
    spec, inputs = contract_call(ran.call, p, dropout=False)
    unit = unit_of(inputs.q)
    worst: dict[str, Figure] = {}
    spans = [s for s in sequences_of(spec, inputs) if s.len_q > 0 and s.len_kv > 0]
    pairs, compared = 0, 0
    for s in spans:
        pairs += s.len_q * s.len_kv * p.num_heads
        if compared and pairs > _MOST_PAIRS:
            break
        compared += 1
        for figure in _of_sequence(ran, spec, inputs, s, unit):
            before = worst.get(figure.result)
            if before is None or figure.error * before.allowed > before.error * figure.allowed:
                worst[figure.result] = figure
    notes = () if compared == len(spans) else (f"{compared} of {len(spans)} sequences were compared",)
    return tuple(worst.values()), notes


def _of_sequence(ran: _Ran, spec: Spec, inputs: Inputs, s: SequenceSpan, unit: float) -> Iterator[Figure]:
    block = RowBlock(s, range(s.len_q))

    def rows(t: Tensor) -> Tensor:
        return block.of_q(t, spec.packed)[0]

    def pairs(t: Tensor | None) -> Tensor | None:
        return None if t is None else block.of_pairs(t[(None,) * (4 - t.dim())])[0]

    q, k, v = rows(inputs.q), *(keys_of(t, spec, inputs, s)[0] for t in (inputs.k, inputs.v))
    dout = None if ran.dout is None else rows(ran.dout)
    slopes, sinks = inputs.alibi_slopes, inputs.softmax_offset
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[s.number]
    if spec.softmax_type == "off-by-one":
        sinks = torch.zeros(q.shape[0], device=q.device)
    settings: dict[str, Any] = {
        "scale": spec.softmax_scale,
        "left": spec.window_left,
        "right": spec.window_right,
        "bottom_right": spec.bottom_right,
        "softcap": spec.softcap,
        "bias": pairs(inputs.bias),
        "slopes": slopes,
        "hidden": pairs(inputs.attn_mask),
        "sinks": sinks,
    }
    exact = exact_attention(q, k, v, dout, **settings)
    changed = []
    for n in range(_CHANGES):
        near = [moved(t, unit, 10 * n + i) for i, t in enumerate((q, k, v))]
        changed.append(exact_attention(near[0], near[1], near[2], dout, slip=unit, **settings))
    seen = exact["lse"] > -torch.inf
    for name, actual in ran.results.items():
        mine = rows(actual) if name in ("out", "dq") else of_kv(actual, spec.packed, s)[0]
        judged = seen if name in ("out", "dq") else None
        others = [one[name] for one in changed]
        yield Figure(name, *worst_row(mine, exact[name], others, judged, unit))
