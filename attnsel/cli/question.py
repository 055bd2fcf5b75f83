"""What a command line asks: flags and files brought together.

``@asks`` gives a command every flag of :class:`AttentionParams`, of a machine and of :class:`Policy`; the
command receives what was stated as one :class:`Question`.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import stat
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from attnsel import settings
from attnsel.base.suggestions import suggestion, with_meant
from attnsel.cli.flags import (
    FLAGS,
    OTHER,
    SHORTHANDS,
    THE_CALL,
    THE_MACHINE,
    Flag,
    Lying,
    Part,
    expand,
    layout_flags,
    read_lying,
)
from attnsel.cli.output import complain
from attnsel.decision import Selection, select
from attnsel.dispatchers import DISPATCHERS, held_by, switches_of
from attnsel.environment import COMPONENTS, Environment, describe_device
from attnsel.environment.installed import component_versions
from attnsel.errors import InvalidInput, short
from attnsel.pages.commands import DESCRIBED_AFTERWARDS
from attnsel.params import AttentionParams, TensorSpec
from attnsel.params.options import KINDS
from attnsel.policy import Policy

if TYPE_CHECKING:
    from attnsel.dispatchers.te.config import TeConfig

# --------------------------------------------------------------------------------------------------------
# What ``--params`` and ``--env`` read: JSON, of attnsel's own or of ``doctor``, and what TransformerEngine
# prints.


_PATIENCE = 2  # seconds for the writer of a named pipe to come
_MOST_CHARACTERS = 16 << 20  # of a file; a selection with every reason and way out has some 100,000


def read_params(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The fields of a call, and of the machine what TransformerEngine's line says of it: ``gpu`` and versions
    for Environment.describe. Raises InvalidInput."""
    text = _text(path, "--params")
    found = _printed(path, text)
    if found is None:
        return _object(path, text, "params", "--params"), {}
    machine = dict(found.versions) if found.gpu is None else {"gpu": found.gpu, **found.versions}
    return found.params, machine


class Place(NamedTuple):
    """A machine as somebody wrote it down: the environment of a file, None for one that is described or this
    one; and what is otherwise there, ``gpu`` and fields of Environment."""

    environment: Environment | None
    changes: Mapping[str, Any]

    def where(self, changes: Mapping[str, Any] = MappingProxyType({})) -> Environment:
        """The machine, with some parts changed. Raises InvalidInput."""
        machine = {**self.changes, **changes}
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


HERE = "here"
_PLACES = "must be a file, a GPU or a description such as torch=2.8,gpu=H100"


def place_of(text: str, flag: str = "--env", folder: Path | None = None) -> Place:
    """A machine from ``FILE``, ``H100``, ``here``, ``gpu=H100,torch=2.8`` or ``FILE,torch=2.15``: first where
    it begins, then what is otherwise. ``NAME=installed`` is the version that is installed here. Another torch
    for a file brings what its wheel does. Files may be named from ``folder``. Raises InvalidInput naming
    ``flag``."""
    if not text.strip():
        raise InvalidInput(flag, text, _PLACES)
    first, *rest = text.split(",")
    if _is_file(text, folder):  # a comma or an equals sign may be in its name
        first, rest = text, []
    elif "=" in first:
        first, rest = HERE, [first, *rest]
    base, changes = _beginning(first.strip(), text, flag, folder)
    name = ""
    for part in rest:
        before, equals, value = (word.strip() for word in part.partition("="))
        if equals:
            name = before.replace("-", "_")
            if name in changes:
                raise InvalidInput(flag, text, f"{before} is stated twice")
            if name not in (*_PARTS, "gpu"):
                said = suggestion(name, _PARTS) or f"there are: gpu, {', '.join(_PARTS)}"
                raise InvalidInput(flag, text, f"{before!r} is no part of an environment; {said}")
            changes[name] = _installed(name, text, flag) if value == "installed" else value
        elif name == "missing" and before:  # which may name several
            changes[name] += f",{before}"
        else:
            raise InvalidInput(flag, text, f"{part!r} says nothing: {_PLACES}")
        if not value and equals:
            raise InvalidInput(flag, text, f"{before} needs a value")
    if base is not None and "torch" in changes:
        base = told_of(base.with_torch, changes.pop("torch"), text, flag)
    return Place(base, changes)


def environment_of(text: str, flag: str = "--env", folder: Path | None = None) -> Environment:
    """The machine that a text says: see ``place_of``. Raises InvalidInput naming ``flag``."""
    return told_of(place_of(text, flag, folder).where, {}, text, flag)


def told_of(make: Callable[[Any], Environment], given: Any, text: str, flag: str) -> Environment:
    """A mistake is one of this flag's."""
    try:
        return make(given)
    except InvalidInput as error:
        raise InvalidInput(flag, text, f"{error.field} {short(error.value, str)}: {error.allowed}") from None


_PARTS = (*COMPONENTS, *DESCRIBED_AFTERWARDS)


def _beginning(
    first: str, text: str, flag: str, folder: Path | None
) -> tuple[Environment | None, dict[str, Any]]:
    if first == HERE:
        return None, {}
    if first == "-" or _is_file(first, folder) or Path(first).suffix or "/" in first:
        return read_environment(Path(first) if first == "-" else (folder or Path()) / first, flag), {}
    try:
        describe_device(first)
    except InvalidInput as error:
        raise InvalidInput(flag, text, f"{_PLACES}; {first!r} is no file, and {error.allowed}") from None
    return None, {"gpu": first}


def _is_file(text: str, folder: Path | None) -> bool:
    try:
        return ((folder or Path()) / text).exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _installed(name: str, text: str, flag: str) -> str:
    version = component_versions().get(name)
    if version is None:
        raise InvalidInput(flag, text, f"{name} is not installed here")
    return str(version)


def read_environment(path: Path, flag: str = "--env") -> Environment:
    """An environment. Raises InvalidInput naming the file."""
    described = dict(_object(path, _text(path, flag), "environment", flag))
    devices = described.get("devices")
    if "device" not in described and isinstance(devices, list):  # of doctor --json
        described = dict(_first_device(path, devices))
    described.pop("warnings", None)  # written by an earlier --json, and worked out again
    try:
        return Environment(**described)
    except InvalidInput as error:
        raise InvalidInput(f"{called(path)}: {error.field}", error.value, error.allowed) from None


def read_object(path: Path, flag: str) -> dict[str, Any]:
    """A file's JSON object. Raises InvalidInput."""
    return _object(path, _text(path, flag), "", flag)


def read_json(path: Path, flag: str) -> Any:
    """What a file's JSON holds. Raises InvalidInput, also for a key that is there twice."""
    return _parsed(path, _text(path, flag), flag)


def called(path: Path | None) -> str:
    """A file's name in a message."""
    return "standard input" if str(path) == "-" else str(path)


def _first_device(path: Path, devices: list[Any]) -> Mapping[str, Any]:
    """The machine of a doctor's answer: its first device, as for a call that names none."""
    if not devices or not isinstance(devices[0], dict):
        raise InvalidInput(f"{called(path)}: devices", devices, "must hold an environment")
    if len(devices) > 1:
        complain(f"{called(path)}: holds {len(devices)} devices; the first is asked about")
    first: Mapping[str, Any] = devices[0]
    return first


def _printed(path: Path, text: str) -> TeConfig | None:
    """The first configuration of TransformerEngine's in a text that is no JSON of ours; None without one."""
    # With TransformerEngine's filters: for such a file alone.
    from attnsel.dispatchers.te.config import configs

    found: list[TeConfig] = []
    for one in configs(text):
        if one not in found and len(found) < 100:
            found.append(one)
    if not found:
        return None
    first, name = found[0], called(path)
    if len(found) > 1:
        complain(
            f"{name}: holds {len(found)} different configurations of TransformerEngine; the first is read"
        )
    if first.unread:
        complain(f"{name}: not read of TransformerEngine's configuration: {', '.join(first.unread)}")
    return first


def _object(path: Path, text: str, part: str, flag: str) -> dict[str, Any]:
    """An object; ``part`` of it where the file holds a whole answer. Raises InvalidInput."""
    data = _parsed(path, text, flag)
    if isinstance(data, dict) and isinstance(data.get(part), dict):
        data = data[part]
    if not isinstance(data, dict):
        raise InvalidInput(flag, str(path), "must hold a JSON object")
    return data


def _parsed(path: Path, text: str, flag: str) -> Any:
    if not text.strip():
        raise InvalidInput(flag, str(path), "is empty")
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except RecursionError:
        raise InvalidInput(flag, str(path), "is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidInput(flag, str(path), f"is no JSON: {where}: {error.msg}") from None
    except ValueError as error:  # a number of thousands of digits, a key twice
        raise InvalidInput(flag, str(path), f"cannot be read: {str(error).partition(';')[0]}") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of a key that stands twice, as after a merge, nobody knows which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the key {short(twice)} stands twice in one object")
    return found


def _text(path: Path, flag: str) -> str:
    """A file's text. Raises InvalidInput."""
    try:
        text = _read(path)
    except OSError as error:
        raise InvalidInput(flag, str(path), error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise InvalidInput(flag, str(path), "is no UTF-8 text; needs JSON") from None
    except ValueError as error:  # a name with a NUL in it
        raise InvalidInput(flag, str(path), f"cannot be read: {error}") from None
    if len(text) > _MOST_CHARACTERS:
        raise InvalidInput(flag, str(path), f"is longer than {_MOST_CHARACTERS >> 20} Mi characters")
    return text


def _read(path: Path) -> str:
    """What stands there, as far as it is looked at: /dev/zero has no end."""
    if str(path) == "-":
        if sys.stdin is None:
            raise OSError("standard input is closed")
        return sys.stdin.read(_MOST_CHARACTERS + 1).removeprefix("\ufeff")
    with open(path, encoding="utf-8-sig", opener=_open) as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            return _from_pipe(file.fileno()).decode("utf-8-sig")
        return file.read(_MOST_CHARACTERS + 1)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _from_pipe(pipe: int) -> bytes:
    """All of a named pipe, or of ``<(command)``. Raises OSError where nobody begins to write."""
    if sys.platform == "win32":  # it was opened as it is: reading waits
        with open(pipe, "rb", closefd=False) as file:
            return file.read(_MOST_CHARACTERS + 1)
    data = bytearray()
    until = time.monotonic() + _PATIENCE
    while len(data) <= _MOST_CHARACTERS:
        try:
            chunk = os.read(pipe, 1 << 16)
        except BlockingIOError:  # there is a writer, who may take as long as it takes
            os.set_blocking(pipe, True)
            continue
        if chunk:
            data += chunk
        elif data or os.get_blocking(pipe):
            break
        elif time.monotonic() > until:
            raise OSError("nobody writes into this pipe")
        else:
            time.sleep(0.02)
    return bytes(data)


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
_ENV = Annotated[
    Path | None,
    Parameter(
        name="--env",
        group=THE_MACHINE,
        allow_leading_hyphen=True,
        help="JSON of doctor --json, of an earlier --json or of Environment; - reads standard input; or a "
        "description: gpu=H100,torch=2.8; or FILE,torch=2.15; flags win over it",
    ),
]


@dataclass(frozen=True)
class Question:
    """What was stated on the command line, before anything is asked."""

    params: Mapping[str, Any]
    from_file: Mapping[str, str]  # fields that a file stated, and which file
    said_by: Mapping[str, str]  # fields that --head-dim, --seqlen, --causal, … stated, and which of these
    place: Place
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

    def put(self, p: AttentionParams, env: Environment, **fields: Any) -> tuple[AttentionParams, Environment]:
        """The call as it is asked there: in fp16 where the GPU has no bf16 and nobody stated a dtype, in
        ``fields`` neither, which the environment then says is assumed."""
        stated = {**self.params, **fields}
        if env.half == "bf16" or "dtype" in stated or "qkv_dtype" in stated:
            return p, env
        assumed = tuple(sorted({*env.assumed, "dtype"}))
        return self.ask(**fields, dtype=env.half), env.derive(assumed=assumed)

    def where(self, **changes: Any) -> Environment:
        """The machine, with some parts changed. Raises InvalidInput."""
        return self.place.where(changes)


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
        inspect.Parameter("env", only, default=None, annotation=_ENV),
    ]

    def run(*words: str, **given: Any) -> int:
        stated = {flag: given.pop(flag.parameter.name, None) for flag in (*SHORTHANDS, *FLAGS)}
        lying = read_lying(given.pop("stride", None), given.pop("misaligned", None))
        question = _question(stated, given.pop("params", None), given.pop("env", None), lying)
        return command(question, *words, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    flags = [flag.parameter for flag in (*SHORTHANDS, *FLAGS)]
    parameters = [files[0], *flags, *layout_flags(), files[1], *own]
    signature = inspect.Signature(sorted(parameters, key=lambda each: each.kind))
    run.__signature__ = signature  # type: ignore[attr-defined]

    def with_flags_of(words: Sequence[str]) -> Callable[..., int]:
        """The command without those flags of a question that ``words`` do not name: there are a hundred, and
        making all of them ready takes cyclopts longer than the answer takes. For ``--help`` those that people
        use most, and of what it says the first, the last and the examples."""
        named = {word.partition("=")[0] for word in words}
        asked = {
            flag.parameter.name for flag in (*SHORTHANDS, *FLAGS) if named & {*flag.names, flag.negative}
        }
        asked |= signature.parameters.keys() - {flag.parameter.name for flag in (*SHORTHANDS, *FLAGS)}
        fewer = functools.update_wrapper(functools.partial(run), run)
        if named & {"--help", "-h"}:
            asked = set(_IN_BRIEF.split())
            first, *more, last = inspect.cleandoc(run.__doc__ or "").split("\n\n")
            examples = [part for part in more if part.startswith("    ") or part.endswith(":")]
            fewer.help = "\n\n".join((first, *examples, _HELP_ALL, last))  # type: ignore[attr-defined]
        kept = [one for one in signature.parameters.values() if one.name in asked]
        fewer.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return fewer

    run.with_flags_of = with_flags_of  # type: ignore[attr-defined]
    return run


_IN_BRIEF = (
    "machine_gpu machine_cudnn machine_torch params_num_heads params_num_gqa_groups shorthand_head_dim "
    "shorthand_seqlen params_dtype params_attn_mask_type params_is_training model from_log as_ short form "
    "feature rows cols kernel csv places questions"
)
"""Parameters whose flags ``--help`` shows."""

_HELP_ALL = (
    "--help-all shows every flag: --as torch|te|transformers, masks, layouts, FP8, policies, many ranks."
)


def _question(
    stated: Mapping[Flag, Any], params_file: Path | None, env: Path | None, lying: Lying
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
    env_text = None if env is None else str(env)
    if str(params_file) == env_text == "-":
        raise InvalidInput("--env", "-", "standard input is read by --params already; put one into a file")
    params, machine = with_tensors(with_recipe(given["params"])), given["machine"]
    base: Mapping[str, Any] = {}
    place = Place(None, machine)
    if params_file is not None:
        base, there = read_params(params_file)
        if env_text is None:
            place = Place(None, {**there, **machine})
    if env_text is not None:
        found = place_of(env_text)
        if found.environment is None:
            environment_of(env_text)  # so that a mistake in it is told of it
        place = Place(found.environment, {**found.changes, **machine})
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
        place=place,
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
            allowed = with_meant("fp8_recipe", kind, f"must be one of {', '.join(KINDS)}")
            raise InvalidInput("fp8_recipe", kind, allowed)
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


# ---- ``--as`` and ``--switch``: another library's chooser asked beside attnsel -------------------------


As = Annotated[
    str | None,
    Parameter(
        name="--as",
        group=OTHER,
        help=f"what this library would choose by itself, and why: {', '.join(DISPATCHERS)}",
    ),
]

SwitchFlag = Annotated[
    list[str] | None,
    Parameter(
        name="--switch",
        group=OTHER,
        negative="",
        help="with --as: something of the library's that is set, as NAME=VALUE, such as NVTE_FUSED_ATTN=0; "
        "it wins over what is set in this process. Any number of times",
    ),
]


class Chooser(NamedTuple):
    """The chooser that a command line asks beside attnsel, if any."""

    dispatcher: str | None
    switches: tuple[tuple[str, str], ...] = ()

    def select(self, p: AttentionParams, env: Environment, policy: Policy) -> Selection:
        """attnsel's answer, beside the other's. Raises InvalidInput."""
        if self.dispatcher is None:
            return select(p, env, policy=policy)
        switches = {**held_by(self.dispatcher, env), **dict(self.switches)}
        try:
            return select(p, env, policy=policy, dispatcher=self.dispatcher, switches=switches)
        except InvalidInput as error:
            if error.field in switches:
                given = f"{error.field}={error.value}"
                raise InvalidInput("--switch", given, error.allowed) from None
            raise


def asked_of(dispatcher: str | None, switches: Sequence[str] | None) -> Chooser:
    """Raises InvalidInput for a library or a switch that there is not."""
    if dispatcher is None:
        if switches:
            raise InvalidInput("--switch", switches[0], "says nothing without --as")
        return Chooser(None)
    if dispatcher not in DISPATCHERS:
        allowed = with_meant("dispatcher", dispatcher, f"allowed: {', '.join(DISPATCHERS)}")
        raise InvalidInput("--as", dispatcher, allowed)
    pairs: dict[str, str] = {}
    for text in switches or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            has = ", ".join(switches_of(dispatcher))
            raise InvalidInput("--switch", text, f"must be NAME=VALUE; {dispatcher} has: {has}")
        if name in pairs:
            raise InvalidInput("--switch", text, f"{name} is given twice")
        pairs[name] = value
    return Chooser(dispatcher, tuple(pairs.items()))
