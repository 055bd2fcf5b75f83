"""What a command line asks: flags and files brought together.

``@asks`` gives a command every flag of :class:`AttentionParams`, of a machine and of :class:`Policy`; the
command receives what was stated as one :class:`Question`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from attnsel import settings
from attnsel.cli.files import called, once_only, read_environment, read_params
from attnsel.cli.flags import FLAGS, SHORTHANDS, THE_CALL, THE_MACHINE, Flag, Part
from attnsel.cli.layout_flags import Lying, layout_flags, read_lying
from attnsel.cli.shorthands import expand
from attnsel.environment import Environment, describe_device
from attnsel.errors import InvalidInput
from attnsel.pages.commands import DESCRIBED_AFTERWARDS
from attnsel.params import AttentionParams, TensorSpec
from attnsel.params.recipes import KINDS
from attnsel.policy import Policy

_PARAMS_FILE = Annotated[
    Path | None,
    Parameter(
        name="--params",
        group=THE_CALL,
        allow_leading_hyphen=True,
        help="JSON of AttentionParams, of an earlier --json, or what TransformerEngine prints under "
        "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2; - reads standard input; flags win over it",
    ),
]
_ENV_FILE = Annotated[
    Path | None,
    Parameter(
        name="--env",
        group=THE_MACHINE,
        allow_leading_hyphen=True,
        help="JSON of Environment, of an earlier --json or of doctor --json; - reads standard input; flags "
        "win over it",
    ),
]


@dataclass(frozen=True)
class Question:
    """What was stated on the command line, before anything is asked."""

    params: Mapping[str, Any]
    from_file: Mapping[str, str]  # fields that a file stated, and which file
    said_by: Mapping[str, str]  # fields that --head-dim, --seqlen, --causal, … stated, and which of these
    environment: Environment | None
    machine: Mapping[str, Any]
    policy: Policy
    lying: Lying  # where tensors lie
    flags: frozenset[str]  # fields that flags of their own stated

    def ask(self, **fields: Any) -> AttentionParams:
        """The call, with some fields changed. Raises InvalidInput."""
        try:
            return self.lying.of(AttentionParams(**{**self.params, **fields}))
        except InvalidInput as error:
            field = error.field.split(".")[0]
            if error.field in fields:
                raise
            if field in self.said_by:
                why = f"{field} {error.allowed}"
                raise InvalidInput(self.said_by[field], error.value, why) from None
            if field in self.from_file:
                where = f"{self.from_file[field]}: {error.field}"
                raise InvalidInput(where, error.value, error.allowed) from None
            raise

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
        stated = {flag: given.pop(flag.parameter.name, None) for flag in (*SHORTHANDS, *FLAGS)}
        lying = read_lying(given.pop("stride", None), given.pop("misaligned", None))
        question = _question(stated, given.pop("params", None), given.pop("env", None), lying)
        return command(question, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    flags = [flag.parameter for flag in (*SHORTHANDS, *FLAGS)]
    signature = inspect.Signature([files[0], *flags, *layout_flags(), files[1], *own])
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def _question(
    stated: Mapping[Flag, Any], params_file: Path | None, env_file: Path | None, lying: Lying
) -> Question:
    given: dict[Part, dict[str, Any]] = {"params": {}, "machine": {}, "policy": {}, "shorthand": {}}
    for flag, value in stated.items():
        if value == ():
            raise InvalidInput(flag.name, None, "needs a number behind it")
        if value is not None:
            given[flag.part][flag.field] = value
    for field in ("allow", "deny", "allow_known_bugs"):
        names = given["policy"].get(field, "")
        if names and not names.replace(",", "").strip():  # an empty text undoes a variable
            raise InvalidInput(field, names, "must be names with commas between")
    once_only(params_file, env_file)
    params, machine = with_tensors(with_recipe(given["params"])), given["machine"]
    base: Mapping[str, Any] = {}
    environment = None
    if params_file is not None:
        base, there = read_params(params_file)
        if env_file is None:
            machine = {**there, **machine}
    if env_file is not None:
        environment = read_environment(env_file)
    short = expand(given["shorthand"], params, base)
    bugs = given["policy"].get("allow_known_bugs")
    if bugs is not None:
        given["policy"]["allow_known_bugs"] = tuple(
            code if code == "all" else code.upper() for code in bugs.replace(" ", "").split(",") if code
        )
    policy = settings.current().policy
    params = {**short.fields, **params}
    return Question(
        params={**base, **params},
        from_file={field: called(params_file) for field in base if field not in params},
        said_by=short.said_by,
        environment=environment,
        machine=machine,
        policy=policy.replace(**given["policy"]) if given["policy"] else policy,
        lying=lying,
        flags=frozenset(flag.field for flag, value in stated.items() if value is not None),
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
