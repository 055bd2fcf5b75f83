"""Many questions at once: those of a whole model, as ``attnsel explain --model`` asks them, or of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from attnsel.base.records import stamped
from attnsel.cli.form import PageForm
from attnsel.cli.output import FOUND, NO_BACKEND, complain
from attnsel.cli.question import Chooser, Question, read_json, read_object
from attnsel.diagnose.models.calls import Layers
from attnsel.diagnose.models.document import model_document
from attnsel.diagnose.models.page import model_page
from attnsel.diagnose.models.plan import Lengths, ModelPlan, planned
from attnsel.diagnose.models.source import layers_of, preset
from attnsel.diagnose.ranks.lines import UnreadLine, lines_of, read_line
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams

_STATED = ("dtype", "deterministic", "cp_size", "cp_comm_type", "cuda_graph")
"""Fields of a call that a model does not decide."""

_LENGTHS = ("batch_size", "max_seqlen_q", "max_seqlen_kv")


def explain_model(
    model: str, question: Question, tp_size: int, image_size: int | None, chooser: Chooser, form: PageForm
) -> int:
    """Raises InvalidInput."""
    layers = layers_of(read_model(model))
    plan = plan_there(layers, question.where(), question, tp_size, chooser, image_size)
    form.print(
        lambda: model_document(plan),
        lambda: stamped("model", plan.as_dict()),
        page=lambda: model_page(plan, lambda p, env: chooser.select(p, env, question.policy)),
    )
    runs = [cell.kernel is not None for cell in plan.cells]
    return FOUND if all(runs) else NO_BACKEND


def plan_there(
    layers: Layers,
    env: Environment,
    question: Question,
    tp_size: int,
    chooser: Chooser,
    image_size: int | None = None,
) -> ModelPlan:
    """A model on a machine, at the lengths that were stated. Raises InvalidInput, also for a flag whose value
    comes from the model."""
    for field in question.params:
        if field not in (*_STATED, *_LENGTHS):
            raise InvalidInput(
                f"--{field.replace('_', '-')}", question.params[field], "comes from the --model"
            )
    asked, env = question.put(question.ask(), env)
    encoded = question.params.get("max_seqlen_kv")
    lengths = Lengths(
        asked.batch_size if "batch_size" in question.params else 1,
        asked.max_seqlen_q,
        encoded if isinstance(encoded, int) and encoded != asked.max_seqlen_q else None,
        image_size,
    )
    stated = {name: getattr(asked, name) for name in _STATED if name in question.params or name == "dtype"}
    try:
        return planned(
            layers,
            env,
            lengths,
            lambda params, where: chooser.select(params, where, question.policy),
            stated=stated,
            tp_size=tp_size,
        )
    except InvalidInput as error:
        if error.field in ("tp_size", "image_size"):
            flag = f"--{error.field.replace('_', '-')}"
            raise InvalidInput(flag, error.value, error.allowed) from None
        raise


def read_model(model: str) -> Mapping[str, Any]:
    """The configuration of a file, of the config.json in a folder, or of a preset. Raises InvalidInput."""
    path = Path(model)
    try:
        if path.is_dir():
            inside = path / "transformer" / "config.json"  # as a pipeline of diffusers is saved
            path = inside if inside.exists() and not (path / "config.json").exists() else path / "config.json"
        found = str(model) == "-" or path.exists()
    except (OSError, ValueError):  # a name that no file can have
        found = False
    return read_object(path, "--model") if found else preset(model)


# ---- the questions of a file -----------------------------------------------------------------------------

_MOST_QUESTIONS = 20_000


def read_questions(file: Path, flag: str = "--questions") -> list[AttentionParams]:
    """Every question that a file holds, each once. Raises InvalidInput, also where there is none."""
    read = [_params(fields) for fields in islice(_described(file, flag), _MOST_QUESTIONS)]
    found = list(dict.fromkeys(one for one in read if isinstance(one, AttentionParams)))
    broken = [one for one in read if isinstance(one, str)]
    if not found:
        said = f"holds no question that can be read: {broken[0]}" if broken else "holds no question"
        raise InvalidInput(flag, str(file), said)
    if broken:
        complain(f"{file}: {len(broken)} of its questions cannot be read, such as: {broken[0]}")
    return found


def _params(fields: Mapping[str, Any]) -> AttentionParams | str:
    """The question, or why it is none."""
    try:
        return AttentionParams(**fields)
    except (InvalidInput, TypeError) as error:
        return str(error)


def _described(file: Path, flag: str) -> Iterator[Mapping[str, Any]]:
    try:
        held = read_json(file, flag)
    except InvalidInput:
        lines = list(islice(_of_lines(file), _MOST_QUESTIONS)) if file.is_file() else []
        if not lines:
            raise
        held = lines
    for one in held if isinstance(held, list) else [held]:
        if isinstance(one, dict):
            yield one["params"] if isinstance(one.get("params"), dict) else one


def _of_lines(file: Path) -> Iterator[Mapping[str, Any]]:
    for _, text, _ in lines_of(str(file), lambda done: None):
        with suppress(UnreadLine):
            line = read_line(text)
            if line is not None and line.params:
                yield line.params
