"""Small calls and what comes of each, a line for each in recorded_calls/*.txt; test_recorded_calls.py compares.

    python tests/attnsel/recorded_calls.py --accept      # write down what comes of the lines now

``> f({1|2}, {3|4})`` is asked for each choice of the alternatives; below it stands, indented, what came of it:
a plain value; of tensors shape, type and numbers rounded to two digits; of an error its kind, the argument it
names, what that is, and the numbers of what is allowed. A name before the dot is that of a module in MODULES.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnsel import DotProductAttention, attention, scaled_dot_product_attention
from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams, TensorSpec
from attnsel.runtime.call import Extras, config

FOLDER = Path(__file__).with_suffix("")
MODULES = {
    name.rpartition(".")[2] if "." in name else name: importlib.import_module(f"attnsel.{name}")
    for name in ("functional", "module")
}
for _package, _names in {
    "runtime": "bind call compiled contents fused_qkv inputs kernels lengths mask_polarity plugin_kernels "
    "recompute reference refusals replay_file leave_replay selfcheck sizes trivial_mask",
    "flash_attn": "arguments bert_padding cache forward functions interface options private_api probabilities",
    "f_sdpa": "function masks shapes theirs",
}.items():
    MODULES |= {name: importlib.import_module(f"attnsel.{_package}.{name}") for name in _names.split()}
for _package, _names in {
    "sdpa": "candidate conditions masks ops plan shapes varlen",
    "flash_attention": "candidate four kernel packages three two",
    "tiled": "backward candidate differentiable forward philox sequences tiles",
}.items():
    MODULES |= {
        f"{_package}_{name}": importlib.import_module(f"attnsel.backends.{_package}.{name}")
        for name in _names.split()
    }


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


NAMES: dict[str, Any] = {
    **MODULES,
    **{one.__name__: one for one in (AttentionParams, DotProductAttention, Environment, Extras, Inputs, Result)},
    **{one.__name__: one for one in (Spec, TensorSpec, attention, scaled_dot_product_attention)},
    **{one.__name__: one for one in (bools, config, half, ints, tensor)},
    "torch": torch, "inf": float("inf"), "nan": float("nan"),
}  # fmt: skip


def said(value: Any) -> str:
    if isinstance(value, Tensor):
        about = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.device.type != "cpu" or value.numel() > 24:
            return about
        numbers = [f"{n:.2f}".replace("-0.00", "0.00") if isinstance(n, float) else str(n) for n in value.flatten().tolist()]
        return " ".join([about, *numbers])
    if isinstance(value, float):
        return f"{value:.4g}"
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
        return said(eval(call, dict(NAMES)))
    except InvalidInput as error:
        of = " ".join(re.findall(r"-?\d+", error.allowed))
        return f"{type(error).__name__} {error.field} = {error.value}".splitlines()[0] + f" | {of}".rstrip(" |")
    except Exception as error:
        about, of = re.split(r"[:;(]", str(error))[0][:40], " ".join(re.findall(r"-?\d+", str(error)))
        return f"{type(error).__name__} {about} | {of}".rstrip(" |")


def answered(line: str) -> Iterator[str]:
    """The line and what comes of it."""
    yield line
    parts = re.split(r"\{([^{}]*\|[^{}]*)\}", line.removeprefix("> "))
    choices = [part.split("|") for part in parts[1::2]]
    for chosen in itertools.product(*choices):
        call = "".join(a + b for a, b in itertools.zip_longest(parts[::2], chosen, fillvalue=""))
        yield f"    {' ; '.join(chosen)}{' : ' if chosen else ''}{outcome(call)}".rstrip()


def definitions(module: types.ModuleType) -> Iterator[str]:
    """What a module names: plain constants, and what may be left out of its calls."""
    source = inspect.getsource(module)
    for name, value in vars(module).items():
        if name.isupper() and isinstance(value, (int, float, str, tuple, frozenset, dict)):
            if not re.search(rf"^[A-Z_0-9, ]*\b{name}\b[^(]* = ", source, re.MULTILINE):
                continue  # another module's
            if name != "CANDIDATES":
                yield f"{name} = {said(value)}"
                continue
            for record in value:
                yield from (f"{record.name}: {field} = {said(one)}" for field, one in vars(record).items())
        elif getattr(value, "__module__", "") == module.__name__:
            parts = [value, *(filter(inspect.isfunction, vars(value).values()) if inspect.isclass(value) else ())]
            for part in parts if callable(value) and BaseException not in getattr(value, "__mro__", ()) else ():
                parameters = inspect.signature(part).parameters.values()
                given = [f"{p.name}={said(p.default)}" for p in parameters if p.default is not p.empty]
                if given and part.__name__ != "__init__":
                    yield f"{part.__qualname__}({', '.join(given)})"


def now(name: str) -> str:
    """What the record of that name would be now."""
    if name == "definitions":
        lines = [f"{module}: {line}" for module, held in MODULES.items() for line in definitions(held)]
        return "\n".join(lines) + "\n"
    kept = [line for line in (FOLDER / f"{name}.txt").read_text().splitlines() if not line.startswith("    ")]
    return "\n".join(
        one for line in kept for one in (answered(line) if line.startswith("> ") else [line])
    ) + "\n"


if __name__ == "__main__" and sys.argv[1:] == ["--accept"]:
    for path in sorted(FOLDER.glob("*.txt")):
        text = now(path.stem)
        changed = len(set(text.splitlines()) ^ set(path.read_text().splitlines()))
        path.write_text(text)
        print(f"{path.stem}: {changed} lines differ")
