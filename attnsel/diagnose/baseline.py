"""What a project expects of its attention, as a file in its repository, and what no longer holds of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from attnsel._version import __version__
from attnsel.base.model import FrozenModel, invalid_input
from attnsel.base.records import stamped, versions
from attnsel.decision import Selection, select
from attnsel.diagnose.compare import Outcome, keeps_away, outcome_of
from attnsel.diagnose.models.calls import BY_HAND, Call, Layers
from attnsel.diagnose.models.document import call_words
from attnsel.diagnose.models.plan import PHASES, Lengths, Phase, allocated, planned
from attnsel.dispatchers import DISPATCHERS
from attnsel.environment import Environment
from attnsel.errors import InvalidInput, short
from attnsel.params import ITEMSIZE, AttentionParams
from attnsel.policy import Policy
from attnsel.report.answer import better_way
from attnsel.report.document import Block, Code, Document, Inline, Item, Items, Paragraph, Ref, Strong, joined
from attnsel.selection.adaptations import bias_shape
from attnsel.selection.evaluate import mask_bytes
from attnsel.verdicts.requirements import size

# ---- the file --------------------------------------------------------------------------------------------


class ModelAsked(FrozenModel):
    """A model: a preset's name, or a config.json or its folder, named from the baseline's folder."""

    model: str
    batch_size: int = Field(default=1, gt=0)
    seqlen: int = Field(default=4096, gt=0)
    encoded: int | None = Field(default=None, gt=0, description="tokens of an encoder")
    tp_size: int = Field(default=1, gt=0)
    dtype: str | None = Field(default=None, description="the 16-bit type of each GPU if left out")
    phases: tuple[Phase, ...] = Field(default=PHASES, min_length=1)


class Limits(FrozenModel):
    """What must not be, whatever is expected: bytes of one call, null for no limit."""

    known_bugs: bool = Field(default=False, description="whether the kernel that runs may have any")
    max_score_bytes: ByteSize | None = Field(
        default=ByteSize(0), description="scores, masks and biases of queries x keys"
    )
    max_memory: ByteSize | None = Field(default=None, description="all that the kernel allocates")


class Expected(FrozenModel):
    """A kernel, and what is accepted of it: codes of known bugs, "scores", "memory"."""

    kernel: str | None
    allow: tuple[str, ...] = ()


class Baseline(BaseModel):
    """A file of ``attnsel check``. ``expected``: by environment and question the kernel, null for none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attnsel: str = Field(default="", description="the version that wrote what is expected")
    environments: dict[str, str] = Field(default_factory=dict, description="by name what --env takes")
    models: dict[str, ModelAsked] = Field(default_factory=dict)
    questions: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="by name fields of AttentionParams"
    )
    dispatcher: str | None = Field(default=None, description="whose kernels are expected: attnsel's if null")
    switches: dict[str, str] = Field(default_factory=dict)
    policy: Policy = Policy()
    limits: Limits = Limits()
    expected: dict[str, dict[str, str | Expected | None]] = Field(default_factory=dict)


_SCHEMA = re.compile(r"attnsel\.baseline/(\d{1,6})")


def read_baseline(held: Any, file: str) -> Baseline:
    """The baseline in a file's JSON. Raises InvalidInput, also for one that asks nothing."""
    schema = _SCHEMA.fullmatch(str(held.get("schema"))) if isinstance(held, dict) else None
    if schema is None:
        wanted = f"attnsel.baseline/{versions()['baseline']}"
        raise InvalidInput("FILE", file, f'is no baseline: an object with "schema": "{wanted}"')
    if int(schema[1]) != versions()["baseline"]:
        newer = int(schema[1]) > versions()["baseline"]
        allowed = f"is of {schema[0]}, which this attnsel ({__version__}) does not read"
        raise InvalidInput("FILE", file, f"{allowed}: {'a newer one wrote it' if newer else 'write it anew'}")
    try:
        found = Baseline(**{name: value for name, value in held.items() if name != "schema"})
    except ValidationError as error:
        raise within(file, invalid_input(error, Baseline.model_fields)) from None
    if not found.environments or not (found.models or found.questions):
        missing = "environment" if not found.environments else "model and no question"
        raise InvalidInput("FILE", file, f"asks nothing: it names no {missing}")
    if found.dispatcher is not None and found.dispatcher not in DISPATCHERS:
        raise InvalidInput(f"{file}: dispatcher", found.dispatcher, f"allowed: {', '.join(DISPATCHERS)}")
    for name in found.expected:
        if name not in found.environments:
            raise InvalidInput(f"{file}: expected", name, f"environments: {', '.join(found.environments)}")
    return found


def within(file: str, error: InvalidInput) -> InvalidInput:
    """A mistake in the file, told as one."""
    return InvalidInput(f"{file}: {error.field}", error.value, error.allowed)


# ---- what holds now --------------------------------------------------------------------------------------


class Held(NamedTuple):
    """What runs for a question now, and what it takes. ``scores``: bytes of queries x keys."""

    environment: str
    question: str
    outcome: Outcome
    scores: int
    memory: int
    selection: Selection

    @property
    def kernel(self) -> str | None:
        return self.outcome.kernel


class Failure(NamedTuple):
    """One thing that does not hold: what of a question, what it was or may be, what it is, why and what
    helps. ``line``: of the file."""

    environment: str
    question: str
    what: Literal["kernel", "known bug", "scores", "memory", "not expected yet", "not asked any more"]
    was: str
    now: str
    codes: tuple[str, ...] = ()
    fix: str = ""
    line: int = 1

    @property
    def words(self) -> str:
        """In one line, without the fix."""
        codes = f" ({', '.join(self.codes)})" if self.codes else ""
        return f"{self.environment}: {self.question}: {self.what}: {self.was} → {self.now}{codes}"


def held_now(
    baseline: Baseline, environments: Mapping[str, Environment], models: Mapping[str, Layers]
) -> list[Held]:
    """Every question in every environment, answered. Raises InvalidInput naming the part of the file."""
    found: list[Held] = []
    for place, env in environments.items():
        asked: dict[str, tuple[Selection, Call | None]] = {}
        for name, model in baseline.models.items():
            for question, selection, call in _of_model(name, model, models[name], env, baseline):
                asked[question if question not in asked else f"{question} ({len(asked)})"] = selection, call
        for name, fields in baseline.questions.items():
            try:
                p = AttentionParams(**{"dtype": env.half, **fields})
            except InvalidInput as error:
                raise InvalidInput(f"questions.{name}.{error.field}", error.value, error.allowed) from None
            if name in asked:
                raise InvalidInput("questions", name, "is the name of a model's question too")
            asked[name] = _ask(p, env, baseline), None
        found += [_held(place, name, *answer) for name, answer in asked.items()]
    return found


def _of_model(
    name: str, model: ModelAsked, layers: Layers, env: Environment, baseline: Baseline
) -> Iterator[tuple[str, Selection, Call]]:
    """Each question, its answer, and what the model's own code does beside it."""
    stated = {"dtype": model.dtype or env.half}
    lengths = Lengths(model.batch_size, model.seqlen, model.encoded)
    try:
        plan = planned(
            layers,
            env,
            lengths,
            lambda p, where: _ask(p, where, baseline),
            stated=stated,
            phases=model.phases,
            tp_size=model.tp_size,
        )
    except InvalidInput as error:
        raise InvalidInput(f"models.{name}.{error.field}", error.value, error.allowed) from None
    if not plan.cells:
        raise InvalidInput(f"models.{name}", model.model, "holds no attention to ask about")
    for cell in plan.cells:
        yield f"{name}: {call_words(cell.call)}, {cell.phase}", cell.selection, cell.call


def _ask(p: AttentionParams, env: Environment, baseline: Baseline) -> Selection:
    switches = None if baseline.dispatcher is None else baseline.switches
    return select(p, env, policy=baseline.policy, dispatcher=baseline.dispatcher, switches=switches)


def _held(place: str, name: str, selection: Selection, call: Call | None) -> Held:
    """``call``: of a model, which may make a mask of queries x keys, or write its attention out."""
    p, parts = selection.params, allocated(selection, call)
    outcome = Outcome(BY_HAND) if call is not None and call.by_hand else outcome_of(selection)
    scores = parts.get("scores", 0) + parts.get("mask", 0)
    scores += mask_bytes(p, made=call is not None and call.mask == "tensor")
    if p.has_bias:
        scores += prod(bias_shape(p)) * ITEMSIZE[p.dtype]
    square = scores if p.max_seqlen_q > 1 else 0
    return Held(place, name, outcome, square, sum(parts.values()), selection)


def failures(baseline: Baseline, now: list[Held], line_of: Callable[[str, str], int]) -> list[Failure]:
    """All that does not hold. ``line_of``: where a question of an environment stands in the file."""
    found: list[Failure] = []
    for held in now:
        before = baseline.expected.get(held.environment, {})
        was = before.get(held.question)
        expected = was if isinstance(was, Expected) else Expected(kernel=was)
        if held.question not in before:
            found.append(Failure(*held[:2], "not expected yet", "nothing written", held.kernel or "nothing"))
        elif expected.kernel != held.kernel:
            found.append(_other_kernel(held, expected))
        found += _beyond(held, baseline.limits, expected.allow)
    asked = {(held.environment, held.question) for held in now}
    for place, questions in baseline.expected.items():
        for question, was in questions.items():
            if (place, question) not in asked:
                kernel = was.kernel if isinstance(was, Expected) else was
                found.append(Failure(place, question, "not asked any more", kernel or "nothing", "not asked"))
    return [one._replace(line=line_of(one.environment, one.question)) for one in found]


def _other_kernel(held: Held, expected: Expected) -> Failure:
    wanted = Outcome(expected.kernel)
    codes = tuple(dict.fromkeys(why.code for why in keeps_away(held.selection, wanted) if why.code))
    way = next((u for u in held.selection.unlocks if u.candidate == expected.kernel), None)
    if way is None:
        way = better_way(held.selection)
        way = way if way is not None and (held.kernel is None or held.scores) else None
    own = way is not None and held.selection.dispatched is None
    fix = f"to get {way.candidate}: {way.change}" if way is not None and own else ""
    return Failure(*held[:2], "kernel", expected.kernel or "nothing", held.kernel or "nothing", codes, fix)


def _beyond(held: Held, limits: Limits, allowed: tuple[str, ...]) -> Iterator[Failure]:
    """What the limits do not let pass and nobody accepted."""
    kernel = held.kernel or "nothing"
    bugs = tuple(code for code in held.outcome.known_bugs if code not in allowed)
    if bugs and not limits.known_bugs:
        yield Failure(*held[:2], "known bug", "none", kernel, bugs)
    most = limits.max_score_bytes
    if most is not None and held.scores > most and "scores" not in allowed:
        yield Failure(*held[:2], "scores", f"at most {size(most)}", f"{size(held.scores)} by {kernel}")
    most = limits.max_memory
    if most is not None and held.memory > most and "memory" not in allowed:
        yield Failure(*held[:2], "memory", f"at most {size(most)}", f"{size(held.memory)} by {kernel}")


# ---- what is written -------------------------------------------------------------------------------------


def written_anew(held: Mapping[str, Any], baseline: Baseline, now: list[Held]) -> str:
    """The file's text with what holds now as what is expected; all else as it stands. What was accepted of a
    question stays accepted."""
    expected: dict[str, dict[str, Any]] = {}
    for one in now:
        was = baseline.expected.get(one.environment, {}).get(one.question)
        allow = list(was.allow) if isinstance(was, Expected) else []
        kernel = {"kernel": one.kernel, "allow": allow} if allow else one.kernel
        expected.setdefault(one.environment, {})[one.question] = kernel
    kept = {name: value for name, value in held.items() if name != "expected"}
    said = stamped("baseline", {**kept, "attnsel": __version__, "expected": expected})
    return json.dumps(said, indent=2, ensure_ascii=False) + "\n"


def line_finder(text: str) -> Callable[[str, str], int]:
    """Where a question of an environment stands in such a text; the environment, else the first line."""
    lines = [line.strip() for line in text.splitlines()]

    def after(start: int, key: str) -> int:
        keys = [f"{json.dumps(key, ensure_ascii=ascii)}:" for ascii in (False, True)]
        return next((n for n in range(start, len(lines)) if lines[n].startswith(tuple(keys))), -1)

    def line_of(environment: str, question: str) -> int:
        place = after(max(after(0, "expected"), 0), environment)
        found = after(place + 1, question)
        return max(found if found >= 0 else place, 0) + 1

    return line_of


def check_document(file: str, asked: int, found: list[Failure], updated: bool) -> Document:
    many = f"{asked} questions" if asked != 1 else "1 question"
    wrote = f"{file} written: " if updated else f"{file}: "
    if not found:
        return Document((Paragraph(Strong(f"{wrote}{many}, all as expected.")),))
    failed = len({(one.environment, one.question) for one in found})
    blocks: list[Block] = [Paragraph(Strong(f"{wrote}{failed} of {many} not as expected."))]
    alike: dict[tuple[Any, ...], list[Failure]] = {}
    for one in found:
        alike.setdefault((one.environment, one.what, one.was, one.now, one.codes, one.fix), []).append(one)
    items = []
    for (place, what, was, now, codes, fix), ones in alike.items():
        head: tuple[Inline, ...] = (f"{place}: {what}: ", Code(was), " → ", Code(now))
        why = (" (", joined(map(Ref, codes)), ")") if codes else ()
        below: list[Block] = [Item(one.question) for one in ones]
        items.append(Item((*head, *why), "✖", below=(*below, *([Item(fix, "→")] if fix else []))))
    blocks.append(Items(tuple(items)))
    meant = f"If it is meant: attnsel check {short(file, str)} --update"
    return Document((*blocks, Paragraph("Why a rule: attnsel rule CODE." if updated else meant)))
