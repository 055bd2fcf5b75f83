"""What a command line asks: flags and files brought together.

``@asks`` gives a command every flag of :class:`AttentionParams`, of a machine and of :class:`Policy`; the
command receives what was stated as one :class:`Question`.
"""

from __future__ import annotations

import inspect
import json
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from attnsel import settings
from attnsel.cli.flags import DESCRIBED_AFTERWARDS, FLAGS, THE_CALL, THE_MACHINE, Flag
from attnsel.environment import Environment, describe_device
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams, TensorSpec
from attnsel.policy import Policy
from attnsel.recipes import KINDS

_PARAMS_FILE = Annotated[
    Path | None,
    Parameter(
        name="--params",
        group=THE_CALL,
        allow_leading_hyphen=True,
        help="JSON of AttentionParams, or of an earlier --json; - reads standard input; flags win over it",
    ),
]
_ENV_FILE = Annotated[
    Path | None,
    Parameter(
        name="--env",
        group=THE_MACHINE,
        allow_leading_hyphen=True,
        help="JSON of Environment, or of an earlier --json; - reads standard input; flags win over it",
    ),
]


_MOST_CHARACTERS = 16 << 20  # of a file; a selection with every reason and way out has some 100,000


@dataclass(frozen=True)
class Question:
    """What was stated on the command line, before anything is asked."""

    params: Mapping[str, Any]
    from_file: Mapping[str, str]  # fields that a file stated, and which file
    environment: Environment | None
    machine: Mapping[str, Any]
    policy: Policy

    def ask(self, **fields: Any) -> AttentionParams:
        """The call, with some fields changed. Raises InvalidInput."""
        try:
            return AttentionParams(**{**self.params, **fields})
        except InvalidInput as error:
            file = self.from_file.get(error.field.split(".")[0])
            if file is None or error.field in fields:
                raise
            raise InvalidInput(f"{file}: {error.field}", error.value, error.allowed) from None

    def where(self, **changes: Any) -> Environment:
        """The machine, with some parts changed. Raises InvalidInput."""
        machine = {**self.machine, **changes}
        if self.environment is None and "gpu" in machine:
            more = {name: machine.pop(name) for name in DESCRIBED_AFTERWARDS if name in machine}
            described = Environment.describe(**machine)
            return described.replace(**more) if more else described
        base = self.environment or Environment.detect()
        if not machine:
            return base
        # Another GPU or version makes it a machine that is not in front of us.
        machine["assumed"] = tuple(name for name in base.assumed if name not in machine)
        if "gpu" in machine:
            machine["device"] = describe_device(machine.pop("gpu"))
        return base.replace(**machine, detected=False)


def asks(command: Callable[..., int]) -> Callable[..., int]:
    """Every flag of a question for ``command``, which receives them as its first argument."""
    hints = typing.get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in list(inspect.signature(command).parameters.values())[1:]
    ]
    only = inspect.Parameter.KEYWORD_ONLY
    files = [
        inspect.Parameter("params", only, default=None, annotation=_PARAMS_FILE),
        inspect.Parameter("env", only, default=None, annotation=_ENV_FILE),
    ]

    def run(**given: Any) -> int:
        stated = {flag: given.pop(flag.parameter.name, None) for flag in FLAGS}
        question = _question(stated, given.pop("params", None), given.pop("env", None))
        return command(question, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    signature = inspect.Signature([files[0], *(flag.parameter for flag in FLAGS), files[1], *own])
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def _question(stated: Mapping[Flag, Any], params_file: Path | None, env_file: Path | None) -> Question:
    given: dict[str, dict[str, Any]] = {"params": {}, "machine": {}, "policy": {}}
    for flag, value in stated.items():
        if value is not None:
            given[flag.part][flag.field] = value
    params = with_tensors(with_recipe(given["params"]))
    base: dict[str, Any] = {}
    if params_file is not None:
        base = _read_json(params_file, "params", "--params")
    environment = None
    if env_file is not None:
        described = _read_json(env_file, "environment", "--env")
        described.pop("warnings", None)  # written by an earlier --json, and worked out again
        try:
            environment = Environment(**described)
        except InvalidInput as error:
            raise InvalidInput(f"{_called(env_file)}: {error.field}", error.value, error.allowed) from None
    bugs = given["policy"].get("allow_known_bugs")
    if bugs is not None:
        given["policy"]["allow_known_bugs"] = tuple(
            code if code == "all" else code.upper() for code in bugs.replace(" ", "").split(",") if code
        )
    policy = settings.current().policy
    return Question(
        params={**base, **params},
        from_file={field: _called(params_file) for field in base if field not in params},
        environment=environment,
        machine=given["machine"],
        policy=policy.replace(**given["policy"]) if given["policy"] else policy,
    )


def with_recipe(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fp8_recipe`` written out in the fields of AttentionParams. Raises InvalidInput."""
    fields = dict(fields)
    kind = fields.pop("fp8_recipe", None)
    if kind is not None:
        if kind not in KINDS:
            raise InvalidInput("fp8_recipe", kind, f"must be one of {', '.join(KINDS)}")
        fields |= {"fp8": True, "fp8_meta": {"recipe": {"kind": kind, "fp8_dpa": True}}}
    return fields


def with_tensors(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``mask_dtype`` and ``tensor_rank``, which plain F.sdpa cares about, as specs. Raises InvalidInput."""
    fields = dict(fields)
    dtype, rank = fields.pop("mask_dtype", None), fields.pop("tensor_rank", None)
    if dtype is not None:
        if fields.setdefault("attn_mask_type", "arbitrary") != "arbitrary":
            raise InvalidInput("mask_dtype", dtype, "goes with --attn-mask-type arbitrary")
        try:
            mask = TensorSpec(shape=(1, 1, 1, 1), stride=(1, 1, 1, 1), dtype=dtype)
        except InvalidInput as error:
            raise InvalidInput("mask_dtype", dtype, error.allowed) from None
        fields["tensors"] = {**fields.get("tensors", {}), "mask": mask}
    if rank is not None:
        fields["tensors"] = {**fields.get("tensors", {}), "rank": rank}
    return fields


def _read_json(path: Path, part: str, flag: str) -> dict[str, Any]:
    """An object from a file; ``part`` of it where the file holds a whole answer. Raises InvalidInput."""
    try:
        text = _text_of(path)
        if len(text) > _MOST_CHARACTERS:
            raise InvalidInput(flag, str(path), f"is longer than {_MOST_CHARACTERS >> 20} Mi characters")
        data = json.loads(text)
    except InvalidInput:
        raise
    except OSError as error:
        raise InvalidInput(flag, str(path), error.strerror or str(error)) from None
    except RecursionError:
        raise InvalidInput(flag, str(path), "is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidInput(flag, str(path), "is no UTF-8 text; needs JSON") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidInput(flag, str(path), f"is no JSON: {where}: {error.msg}") from None
    except ValueError as error:  # a number of thousands of digits, a name with a NUL in it
        raise InvalidInput(flag, str(path), f"cannot be read: {str(error).partition(';')[0]}") from None
    if isinstance(data, dict) and isinstance(data.get(part), dict):
        data = data[part]
    if not isinstance(data, dict):
        raise InvalidInput(flag, str(path), "must hold a JSON object")
    return data


def _text_of(path: Path) -> str:
    """What stands there, as far as it is looked at: /dev/zero has no end."""
    if str(path) == "-":
        return sys.stdin.read(_MOST_CHARACTERS + 1)
    with path.open(encoding="utf-8") as file:
        return file.read(_MOST_CHARACTERS + 1)


def _called(path: Path | None) -> str:
    return "standard input" if str(path) == "-" else str(path)
