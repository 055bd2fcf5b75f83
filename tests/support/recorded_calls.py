"""Small calls and what comes of each, a line for each in tests/attnsel/recorded_calls/*.txt.

``> f({1|2}, {3|4})`` is asked for each choice of the alternatives; below it stands, indented, what comes of
it: a plain value; of tensors shape, type and numbers rounded to two digits; of an error its kind, the
argument it names, what that is, and the numbers in what is allowed; of a sentence its first word and its
numbers; of a ``Page`` each line; of a model the fields that differ from their defaults. ``definitions.txt``
has the constants of modules, and what may be left out of their functions. A name before the dot is that of a
module: attnsel.runtime.bind.make_spec. What changed is accepted as tests/support/records.py says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import io
import itertools
import pkgutil
import re
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import recorded_diagnosis
import runtime_ways
import varlen_cases
from attnsel import (
    DotProductAttention,
    Tensors,
    attention,
    configure,
    detect_layout,
    scaled_dot_product_attention,
    select,
)
from attnsel.backends import flash_attention
from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.flash_attention.kernel import Function
from attnsel.base.model import FrozenModel
from attnsel.environment import Environment
from attnsel.environment.versions import Version
from attnsel.errors import Caller, InvalidInput
from attnsel.params import AttentionParams, TensorSpec
from attnsel.params.layout import FORMATS
from attnsel.policy import Policy
from attnsel.runtime import adaptations as runtime_adaptations
from attnsel.runtime.call import NO_EXTRAS, Call, Extras, config
from attnsel.selection.adaptations import ADAPTERS
from attnsel.verdicts.reasons import Adaptation, RankKey
from emulated_flash_attn import installed
from flash_attention_cases import EVERY
from layout_cases import buffers_of, cut

FOLDER = Path(__file__).parents[1] / "attnsel" / "recorded_calls"
OF_A_MACHINE = ("_SITE", "_STANDARD", "_HERE", "_CHECKOUT_RULES", "_CHECKOUT_BACKENDS")
ROOMS = (
    "backends.flash_attention", "backends.sdpa", "backends.tiled", "cli", "diagnose.logs", "diagnose.ranks",
    "diagnose.watching", "f_sdpa", "flash_attn", "params", "report", "runtime",
    "selection",
)  # fmt: skip


def modules() -> Iterator[types.ModuleType]:
    """Those whose definitions are recorded. Lines name what is inside of them whole: attnsel.runtime.bind."""
    names = [f"attnsel.{name}" for name in ("base.suggestions", "debug", "functional", "module", "settings")]
    names += ["attnsel.diagnose.text_files"]
    for room in ROOMS:
        package = importlib.import_module(f"attnsel.{room}")
        found = pkgutil.walk_packages(package.__path__, f"attnsel.{room}.")
        names += [module.name for module in found if not module.ispkg]
    left_out = re.compile(r"shim$|[.]parsers[.]")  # what takes a place, and messages, which logs.txt has
    return (importlib.import_module(name) for name in sorted(names) if not left_out.search(name))


class Named:
    """A module by its whole name, also where a function of the same name stands in its package."""

    def __init__(self, name: str) -> None:
        self.__name = name

    def __getattr__(self, inner: str) -> Any:
        inside = f"{self.__name}.{inner}"
        return Named(inside) if is_module(inside) else getattr(importlib.import_module(self.__name), inner)


@functools.cache
def is_module(name: str) -> bool:
    within = importlib.import_module(name.rpartition(".")[0])
    return hasattr(within, "__path__") and importlib.util.find_spec(name) is not None


def tensor(*shape: int, dtype: str = "float32", step: float = 0.37, device: str = "cpu") -> Tensor:
    """Numbers between -1 and 1 that differ from each other, the same everywhere; of a large tensor one."""
    count = torch.Size(shape).numel()
    numbers = torch.sin(step * torch.arange(1, count + 1 if count < 1 << 16 else 2, dtype=torch.float64))
    numbers = numbers.to(device, getattr(torch, dtype))
    return numbers.expand(shape) if count >= 1 << 16 else numbers.reshape(shape)


def half(*shape: int, **more: Any) -> Tensor:
    return tensor(*shape, **{"dtype": "float16", **more})


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bools(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def asked(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What a function asks of the runtime: the settings that are no default, and the tensors."""
    seen: list[Any] = []

    def attend(cfg: Any, q: Tensor, k: Tensor, v: Tensor, extras: Any, *rest: Any) -> Any:
        fields = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.name != "text"}
        changed = {name: value for name, value in fields.items() if value != getattr(config(), name)}
        seen.append((changed, [[*t.shape] for t in (q, k, v)], extras))
        return (q, torch.zeros(*q.shape[:-1])) if cfg.return_lse else q

    with contextlib.ExitStack() as stack:
        for module in ("functional", "module", "f_sdpa.function", "flash_attn.functions"):
            stack.enter_context(patch(f"attnsel.{module}.attend", attend))
        stack.enter_context(patch("attnsel.functional.attend_again", attend))
        stack.enter_context(patch("attnsel.f_sdpa.function.attend_again", lambda *given, **more: None))
        function(*given, **named)
    return seen[0] if seen else "handed over"


def given_to(generation: int, version: str, case: str, **spec: Any) -> Any:
    """What a release of FlashAttention is given, by the name of each function."""
    module = {2: flash_attention.two, 3: flash_attention.three, 4: flash_attention.four}[generation]
    settings, inputs = varlen_cases.made(next(one for one in EVERY if one.name == case), torch.float16)
    settings, seen, run = dataclasses.replace(settings, **spec), [], Function._run
    with (
        installed(generation, version),
        patch.object(
            Function,
            "_run",
            lambda self, given: seen.append((self.where, given)) or run(self, given),
        ),
    ):
        kernel = module.KERNEL
        result = kernel.forward(settings, inputs)
        kernel.backward(settings, inputs, result, result.out, result.lse if settings.need_lse else None)
        bound = kernel.bind(settings, inputs)
        if bound is not None:
            bound(*inputs[:3])
    return [
        (where.rpartition(".")[2], {name: plain(given[name]) for name in sorted(given)})
        for where, given in seen
    ]


def plain(value: Any) -> Any:
    return [*value.shape] if isinstance(value, Tensor) and value.is_floating_point() else value


class Page(str):
    """A text that is recorded line by line."""


def answer(gpu: str, policy: Any = (), /, **about: Any) -> Any:
    """The engine's answer: fields of the question and releases on the machine, by name."""
    fields = {name: about.pop(name) for name in list(about) if name in AttentionParams.model_fields}
    machine = Environment.describe(gpu, **about)
    return select(AttentionParams(**fields), machine, policy=Policy(**dict(policy)))


def judged(name: str, gpu: str, policy: Any = (), /, **about: Any) -> Any:
    """A candidate's place and verdict, the codes against it, and what it changes on every call."""
    found = answer(gpu, policy, **about)
    one, names = found[name], [candidate.name for candidate in found]
    made = [(a.text, a.bytes, a.flops, [r.code for r in a.avoids]) for a in one.adaptations]
    return names.index(name) + 1, one.verdict, [reason.code for reason in one.reasons], made


def differing(p: AttentionParams, changed: AttentionParams) -> dict[str, Any]:
    """The fields of the second question that the first has otherwise."""
    now = {field: getattr(changed, field) for field in type(p).model_fields}
    return {field: value for field, value in now.items() if value != getattr(p, field)}


def adapted(name: str, target: Any = (), /, **fields: Any) -> Any:
    """The fields that an adaptation changes, and its words and cost."""
    p = AttentionParams(**fields)
    applied = ADAPTERS[name].apply(p, tuple(target))
    return applied and (differing(p, applied[0]), *applied[1][1:4])


def carried_through(name: str, target: Any = (), extras: Any = NO_EXTRAS, /, **fields: Any) -> Page:
    """What a step makes of a call and of its results, and of what a backward is given and gives."""
    sizes = {"batch_size": 2, "num_heads": 2, "max_seqlen_q": 3, "head_dim_qk": 1, "dtype": "fp32", **fields}
    p = AttentionParams(**sizes)
    after, made = ADAPTERS[name].apply(p, tuple(target))
    step, form = runtime_adaptations.STEPS[name](made, p, after), FORMATS[p.qkv_format]
    rows = [(p.max_seqlen_q, p.num_heads, p.head_dim_qk), (p.max_seqlen_kv, p.num_gqa_groups, p.head_dim_qk)]
    rows.append((p.max_seqlen_kv, p.num_gqa_groups, p.head_dim_v))
    q, k, v = (
        tensor(5, *row[1:], step=step_of)
        if form.packed
        else tensor(p.batch_size, *row, step=step_of).permute(*_IN_FORMAT[form.name])
        for row, step_of in zip(rows, (0.37, 0.5, 0.61), strict=True)
    )
    call = Call(config(qkv_format=form.name), q, k, v, extras, configure(), need_grad=True)
    inner = step.into(call)
    lse = tensor(p.num_heads, 5) if form.packed else tensor(p.batch_size, p.num_heads, p.max_seqlen_q)
    inner_lse = step.inner_lse(lse, call)
    out = inner.q[..., :1].expand(*inner.q.shape[:-1], after.head_dim_v)
    grads = step.grads(Grads(inner.q, inner.k, inner.v, inner.extras.core_attention_bias), call)
    dout = step.dout(q[..., :1].expand(*q.shape[:-1], p.head_dim_v), call)
    found = {"q": inner.q, "k": inner.k, "v": inner.v, "extras": inner.extras, "out": step.out(out, call)}
    found |= {"lse": step.lse(inner_lse, call), "inner lse": inner_lse, "dout": dout, "grads": grads}
    return Page("\n".join(f"{what}: {said(one)}" for what, one in found.items()))


_IN_FORMAT = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}


def packed(fmt: str, packing: str, groups: int) -> tuple[Tensor, ...]:
    """q, k and v cut from one buffer, without data."""
    return cut(fmt, packing, groups, [t.detach().to("meta") for t in buffers_of(fmt, packing, groups)])


def ways(name: str, gpu: str, policy: Any = (), /, **about: Any) -> Page:
    """The ways out for a refused candidate."""
    found = [one for one in answer(gpu, policy, **about).unlocks if one.candidate == name]
    about_each = [(one.rank, one.cost, one.changes, *one[1:4], one.install) for one in found]
    return Page("\n".join(map(said, about_each)))


def lies(*given: Any, **about: Any) -> Page:
    """How tensors lie, and the drawing of it."""
    found = detect_layout(*given, **about)
    of_each = [(t.memory, t.dense, t.overlaps_itself, t.alignment, t.row_alignment) for t in found.tensors]
    of_all = found.known, found.plain, found.shared, found.overlaps, found.row, of_each
    return Page(f"{found.describe(60)}\n{said(of_all)}")


def events(function: str, *given: Any, **named: Any) -> Page:
    """What happens on a way of a call (tests/support/runtime_ways.py), a line for each event."""
    happened = getattr(runtime_ways, function)(*given, **named)
    return Page("\n".join(f"{what}: {said(one)}" for what, one in happened))


NAMES: dict[str, Any] = {
    "attnsel": Named("attnsel"),
    **recorded_diagnosis.NAMES,
    **{one.__name__: one for one in (AttentionParams, DotProductAttention, Environment, Extras, Inputs)},
    **{one.__name__: one for one in (Result, Spec, TensorSpec, attention, scaled_dot_product_attention)},
    **{one.__name__: one for one in (Policy, asked, bools, config, given_to, half, ints, tensor)},
    **{one.__name__: one for one in (Adaptation, Caller, InvalidInput, Page, RankKey, Tensors, Version)},
    **{one.__name__: one for one in (adapted, answer, carried_through, detect_layout, differing, judged)},
    **{one.__name__: one for one in (events, lies, packed, select, ways)},
    "carries": runtime_ways.carries, "raised_in": runtime_ways.raised_in,
    "planned": functools.partial(runtime_ways.planned, answer=answer),
    "dataclasses": dataclasses, "io": io, "torch": torch, "inf": float("inf"), "nan": float("nan"),
}  # fmt: skip


def said(value: Any) -> str:
    if isinstance(value, Tensor):
        about = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.device.type != "cpu" or value.numel() > 24:
            return about
        numbers = [
            f"{n:.2f}".replace("-0.00", "0.00") if isinstance(n, float) else str(n)
            for n in value.flatten().tolist()
        ]
        return " ".join([about, *numbers])
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Version):
        return str(value)
    if isinstance(value, FrozenModel):
        fields = type(value).model_fields
        usual = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        kept = {n: one for n, usual in usual.items() if (one := getattr(value, n)) != usual}
        return type(value).__name__ + said(kept)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return said({name: one for name, one in fields.items() if one is not None and name != "text"})
    if hasattr(value, "_asdict"):
        return said({name: one for name, one in value._asdict().items() if one is not None})
    if isinstance(value, dict):
        return "{" + ", ".join(f"{said(key)}: {said(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(said, value))) + "}"
    if isinstance(value, (tuple, list, types.GeneratorType)):
        return "(" + ", ".join(map(said, value)) + ")"
    return getattr(value, "__qualname__", None) or str(value)


def outcome(call: str) -> str:
    try:
        value = eval(call, dict(NAMES))
        if isinstance(value, Page):
            return "".join(f"\n        {line}" for line in value.splitlines())
        if isinstance(value, str) and value.count(" ") > 2:  # a sentence: what it is about, and its numbers
            return " ".join([value.split()[0], "...", *re.findall(r"-?[\d.]*\d", value)])
        return said(value)
    except InvalidInput as error:
        of = " ".join(re.findall(r"-?\d+", error.allowed))
        return f"{type(error).__name__} {error.field} = {error.value}".splitlines()[0] + f" | {of}".rstrip(
            " |"
        )
    except AssertionError:  # python -m pytest knows attnsel's files, and writes values behind it
        return "AssertionError"
    except Exception as error:
        return " ".join([type(error).__name__, *re.findall(r"(?<!\w)-?\d+\b", str(error))])


def answered(line: str) -> Iterator[str]:
    """The line and what comes of it."""
    yield line
    parts = re.split(r"\{([^{}]*\|[^{}]*)\}", line.removeprefix("> "))
    choices = [part.split("|") for part in parts[1::2]]
    for chosen in itertools.product(*choices):
        call = "".join(a + b for a, b in itertools.zip_longest(parts[::2], chosen, fillvalue=""))
        came = f"    {' ; '.join(chosen)}{' : ' if chosen else ''}{outcome(call)}"
        yield from (one.rstrip() for one in came.splitlines() if one.strip())


def definitions(module: types.ModuleType) -> Iterator[str]:
    """What a module names: plain constants, and what may be left out of its calls."""
    source = inspect.getsource(module)
    for name, value in vars(module).items():
        if (
            name.isupper()
            and name not in ("KERNELS", "FLAGS", "FLAG_OF", "SHORTHANDS")
            and isinstance(value, (int, float, str, tuple, frozenset, dict))
        ):
            if (
                not re.search(rf"^[A-Z_0-9, ]*\b{name}\b[^(]* = ", source, re.MULTILINE)
                or name in OF_A_MACHINE
            ):
                continue  # another module's, or a folder
            if not (name == "CANDIDATES" and dataclasses.is_dataclass(value[0])):
                yield f"{name} = {said(value)}".replace("\n", "\\n")
                continue
            for record in value:
                for field in dataclasses.fields(record):
                    yield f"{record.name}: {field.name} = {said(getattr(record, field.name))}"
        elif getattr(value, "__module__", "") == module.__name__:
            parts = [
                value,
                *(filter(inspect.isfunction, vars(value).values()) if inspect.isclass(value) else ()),
            ]
            for part in (
                parts
                if callable(value) and not {BaseException, threading.local} & {*getattr(value, "__mro__", ())}
                else ()
            ):
                parameters = inspect.signature(part).parameters.values()
                given = [f"{p.name}={said(p.default)}" for p in parameters if p.default is not p.empty]
                if given and part.__name__ not in ("__init__", "OperatorMode"):
                    yield f"{part.__qualname__}({', '.join(given)})"


def now(name: str) -> Iterator[str]:
    """The lines that the record of that name would have now."""
    importlib.import_module("torch.nn.attention.bias")  # loads Dynamo: not while tests are collected
    if name == "definitions":
        for module in modules():
            yield from (f"{module.__name__}: {line}" for line in definitions(module))
        return
    for line in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("> "):
            yield from answered(line)
        elif not line.startswith("    "):
            yield line
