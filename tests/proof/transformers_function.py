"""A release of transformers asked itself: which implementation a name becomes, and its call of F.sdpa.

    TRANSFORMERS_FOR_TESTS=/folder python tests/proof/transformers_function.py --random 1000 --seed 7

The folder holds unpacked wheels, each in a folder of its version (v5.24.0/transformers/...). Nothing of
transformers is imported: its functions are taken out of the files, and what they ask of the machine is
answered here. Taken: integrations/sdpa_attention.py and masking_utils.py whole; of PreTrainedModel in
modeling_utils.py all that decides about a name; FLASH_ATTENTION_COMPATIBILITY_MATRIX and its neighbours.
Answered: which packages, which GPU, which torch; a kernel of the Hub is there where ``kernels`` is, and has
builds for CUDA, ROCm and XPU.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import random
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from packaging import version

from attnsel import AttentionParams, Environment
from attnsel.dispatchers import dispatched_by
from attnsel.dispatchers.transformers.implementations import sdpa_call
from attnsel.dispatchers.transformers.switches import read_switches
from attnsel.environment.versions import Version

FOLDER = os.environ.get("TRANSFORMERS_FOR_TESTS", "")


def releases() -> dict[Version, Path]:
    """The releases that are there, oldest first."""
    found = {
        Version.parse(path.name.removeprefix("v")): path / "transformers"
        for path in Path(FOLDER or ".").iterdir()
        if FOLDER and (path / "transformers/masking_utils.py").exists()
    }
    return {release: found[release] for release in sorted(found) if release >= (4, 57)}


def _release(root: Path) -> Version:
    """By its folder; what is installed says it itself."""
    name = root.parent.name.removeprefix("v")
    return Version.parse(name if name[:1].isdigit() else importlib.metadata.version("transformers"))


class Machine(NamedTuple):
    """What a release may ask. ``flash``: versions of the installed packages, by generation."""

    device: str = "cuda"
    major: int = 9
    torch: Version = Version(2, 13, 0)
    flash: tuple[tuple[int, str], ...] = ()
    kernels: bool = False

    def env(self) -> Environment:
        packages = {2: "flash_attn", 3: "flash_attn_3", 4: "flash_attn_4"}
        gpu = {"cuda": {7: "T4", 8: "A100", 9: "H100", 10: "B200"}[self.major], "rocm": "gfx942"}
        found = {packages[number]: text for number, text in self.flash}
        return Environment.describe(gpu.get(self.device, self.device), torch=str(self.torch), **found)


# ---- its functions, taken out of its files -----------------------------------------------------------


class _Anything(types.ModuleType):
    """A module of transformers that was not loaded: every name in it is a function that answers nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


def _stubs(root: Path, machine: Machine) -> dict[str, Any]:
    gpu = machine.device in ("cuda", "rocm")
    flash = dict(machine.flash)
    newer = version.parse(str(machine.torch))
    least = "2.3.3" if _release(root) >= (5, 4) else "2.1.0"
    third = {3: 8, 4: 9} if least == "2.3.3" else {3: 0, 4: 0}

    def has(number: int) -> bool:
        if number == 2:
            return gpu and 2 in flash and version.parse(flash[2]) >= version.parse(least)
        return gpu and number in flash and machine.major >= third[number]

    def lazily(name: str, *_: Any, allow_all_kernels: bool = True, **__: Any) -> None:
        hub = "/" in name or (machine.device == "xpu" and name == "flash_attention_2")
        if hub and (not machine.kernels or ("metal" not in name and not (gpu or machine.device == "xpu"))):
            raise ImportError("`kernels` is not installed, or has no build for the device")
        if "/" in name and not name.startswith("kernels-community/") and not allow_all_kernels:
            raise ValueError("outside kernels-community")

    packages = {
        "flash_attn": [{2: "flash-attn", 4: "flash-attn-4"}[n] for n in flash if n != 3],
        "flash_attn_interface": ["flash-attn-3"] if 3 in flash else [],
    }
    specs = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn"}
    return {
        "torch": SimpleNamespace(
            float16=1, bfloat16=2, version=SimpleNamespace(cuda="13.0", hip=None),
            cuda=SimpleNamespace(is_available=lambda: gpu, get_device_capability=lambda: (machine.major, 0)),
        ),
        "logger": mock.MagicMock(), "re": re, "warnings": warnings, "version": version,
        "importlib": SimpleNamespace(
            util=SimpleNamespace(find_spec=lambda name: name in {specs[n] for n in flash} or None),
            metadata=SimpleNamespace(version=lambda name: flash.get(2, "0")),
        ),
        "_package_distribution_mapping": lambda: packages,
        "PACKAGE_DISTRIBUTION_MAPPING": packages,
        "is_flash_attn_2_available": lambda: has(2), "is_flash_attn_3_available": lambda: has(3),
        "is_flash_attn_4_available": lambda: has(4),
        "is_flash_attn_greater_or_equal": lambda low: version.parse(flash.get(2, "0")) >= version.parse(low),
        "is_torch_cuda_available": lambda: gpu,
        "is_torch_xpu_available": lambda *_, **__: machine.device == "xpu",
        "is_torch_mps_available": lambda *_: machine.device == "mps",
        "is_torch_npu_available": lambda *_: False,
        "is_torch_mlu_available": lambda: False, "is_torch_musa_available": lambda: False,
        "is_rocm_platform": lambda: machine.device == "rocm", "get_device_type": lambda: machine.device,
        "is_kernels_available": lambda *_: machine.kernels,
        "is_torch_flex_attn_available": lambda: machine.torch >= (2, 5),
        "is_torch_greater_or_equal": lambda text, **_: newer >= version.parse(text),
        "is_torchdynamo_compiling": lambda: False, "is_torchdynamo_exporting": lambda: False,
        "is_tracing": lambda *_: False,
        "load_and_register_kernel": lazily, "lazy_import_flash_attention": lazily,
        "lazy_import_paged_flash_attention": lazily,
        "PagedAttentionCache": type("PagedAttentionCache", (), {}),
        "deprecate_kwarg": lambda *_, **__: lambda function: function,
        "Callable": Any, "Optional": Any, "PreTrainedConfig": Any, "PretrainedConfig": Any, "Union": Any,
    }  # fmt: skip


_OF_A_NAME = re.compile(
    r"_flash_attn\w*can_dispatch|_flash_attn_import_error|_(sdpa|flex_attn)_can_dispatch"
    r"|get_correct_attn_implementation|_check_and_adjust_attn_implementation"
)
_TABLES = re.compile(r"FLASH_ATTN_KERNEL_(FALLBACK|DEVICES)|FLASH_ATTENTION_COMPATIBILITY_MATRIX")


@functools.lru_cache(maxsize=64)
def _code(root: Path) -> tuple[Any, Any, list[str]]:
    """(functions and tables, the methods that decide about a name, the names that attention goes by)."""
    said: list[ast.stmt] = []
    for file, wanted in (
        ("utils/generic.py", ("is_flash_attention_requested", "split_attention_implementation")),
        ("modeling_utils.py", ("split_attention_implementation", "is_flash_attention_requested")),
        ("integrations/hub_kernels.py", ("is_kernel",)),
        ("modeling_flash_attention_utils.py", ()),
    ):
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body:
            function = isinstance(node, ast.FunctionDef) and node.name in wanted
            table = isinstance(node, ast.Assign) and _TABLES.fullmatch(ast.unparse(node.targets[0]))
            said += [node] if function or table else []
    tree = ast.parse((root / "modeling_utils.py").read_text(encoding="utf-8"))
    model = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "PreTrainedModel")
    methods = [n for n in model.body if isinstance(n, ast.FunctionDef) and _OF_A_NAME.fullmatch(n.name)]
    names = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "AttentionInterface")
    mapping = next(n.value for n in names.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Dict))
    keys = [str(key.value) for key in mapping.keys if isinstance(key, ast.Constant)]
    later = ast.parse("from __future__ import annotations").body
    compiled = [compile(ast.Module([*later, *body], []), str(root), "exec") for body in (said, methods)]
    return compiled[0], compiled[1], keys


def resolved(root: Path, machine: Machine, name: str | None, flags: dict[str, Any]) -> str | None:
    """What _check_and_adjust_attn_implementation makes of a name; None where it raises."""
    tables, methods, keys = _code(root)
    space = _stubs(root, machine)
    space["ALL_ATTENTION_FUNCTIONS"] = SimpleNamespace(valid_keys=lambda: keys)
    space["ALL_MASK_ATTENTION_FUNCTIONS"] = space["ALL_ATTENTION_FUNCTIONS"]
    exec(tables, space)
    made: dict[str, Any] = {}
    exec(methods, space, made)
    config = SimpleNamespace(dtype=2, attention_dropout=0.0, _name_or_path="", torch_dtype=2)
    model = type("Model", (), {**made, **flags, "config": config})()
    try:
        found: str = model._check_and_adjust_attn_implementation(name, is_init_check=True)
    except (ImportError, ValueError):
        return None
    return found.removeprefix("paged|")


@functools.lru_cache(maxsize=64)
def _loaded(root: Path, file: str, machine: Machine) -> Any:
    """A file of transformers as a module in a package whose other modules answer nothing."""
    stubs = _stubs(root, machine) | {"torch": torch}
    package = f"transformers_{str(_release(root)).replace('.', '_')}_{abs(hash(machine))}"
    name = f"{package}.{file.removesuffix('.py').replace('/', '.')}"

    class Finder:
        def find_spec(self, wanted: str, *_: Any) -> Any:
            if not wanted.startswith(package) or wanted == name:
                return None
            return importlib.util.spec_from_loader(wanted, self, is_package=True)

        def create_module(self, spec: Any) -> types.ModuleType:
            module = _Anything(spec.name)
            module.__dict__.update({key: value for key, value in stubs.items() if key not in ("torch", "re")})
            return module

        def exec_module(self, module: types.ModuleType) -> None:
            pass

    sys.meta_path.insert(0, Finder())
    try:
        spec = importlib.util.spec_from_file_location(name, root / file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    finally:
        del sys.meta_path[0]
    return module


class Call(NamedTuple):
    """What reaches F.sdpa, as far as it decides about a kernel."""

    masked: bool
    causal: bool
    enable_gqa: bool
    heads: tuple[int, int]
    lengths: tuple[int, int]


def called(
    root: Path, machine: Machine, p: AttentionParams, past: int, window: int | None, padded: bool
) -> Call:
    """sdpa_mask, then sdpa_attention_forward, on tensors without storage."""
    masks, sdpa = (
        _loaded(root, "masking_utils.py", machine),
        _loaded(root, "integrations/sdpa_attention.py", machine),
    )
    rows, keys, h, groups = p.max_seqlen_q, p.max_seqlen_kv, p.num_heads, p.num_gqa_groups
    padding = torch.ones(2, keys, dtype=torch.bool)
    padding[0, 0] = not padded
    seen = masks.causal_mask_function if window is None else masks.sliding_window_causal_mask_function(window)
    if "cache_position" in masks.sdpa_mask.__code__.co_varnames[: masks.sdpa_mask.__code__.co_argcount]:
        mask = masks.sdpa_mask(2, torch.arange(past, past + rows), keys, 0, seen, padding, window)
    else:
        mask = masks.sdpa_mask(2, rows, keys, past, 0, seen, padding, window)
    shapes = ((2, h, rows, p.head_dim_qk), (2, groups, keys, p.head_dim_qk), (2, groups, keys, p.head_dim_v))
    q, k, v = (torch.zeros(shape, device="meta") for shape in shapes)
    module = SimpleNamespace(num_key_value_groups=h // groups, is_causal=True)
    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention") as noted:
        noted.return_value = q
        sdpa.sdpa_attention_forward(module, q, k, v, None if mask is None else mask.to("meta"))
    (query, key, *_), given = noted.call_args
    return Call(
        given["attn_mask"] is not None,
        bool(given["is_causal"]),
        bool(given.get("enable_gqa", False)),
        (query.shape[1], key.shape[1]),
        (query.shape[2], key.shape[2]),
    )


# ---- questions ---------------------------------------------------------------------------------------

_NAMES = (None, None, "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4")
_NAMES += ("flex_attention", "paged|eager", "nonsense", "kernels-community/flash-attn2", "someone/kernel")
_FLAGS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
_COMPATIBLE = ((), (), ("kernels-community/vllm-flash-attn3", "flash_attention_4"), ("flash_attention_4",))
_COMPATIBLE += (("kernels-community/metal-flash-sdpa", "kernels-community/vllm-flash-attn3"),)


def machines(pick: random.Random) -> Machine:
    device = pick.choice(("cuda", "cuda", "cuda", "rocm", "cpu", "mps", "xpu"))
    flash = {2: pick.choice(("2.8.3", "2.2.0")), 3: "3.0.0", 4: "4.0.0b36"}
    there = tuple(
        (n, text) for n, text in flash.items() if device in ("cuda", "rocm") and pick.random() < 0.4
    )
    torch_ = pick.choice((Version(2, 6, 0), Version(2, 8, 0), Version(2, 10, 0), Version(2, 13, 0)))
    major = 9 if device == "rocm" else pick.choice((7, 8, 9, 10))
    return Machine(device, major, torch_, there, pick.random() < 0.5)


def names(release: Version, root: Path, count: int, seed: int) -> Iterator[str]:
    """Contradictions about what a name becomes."""
    pick = random.Random(f"names {seed} {release}")
    for _ in range(count):
        machine, name = machines(pick), pick.choice(_NAMES)
        flags: dict[str, Any] = {flag: pick.random() < 0.8 for flag in _FLAGS}
        compatible = pick.choice(_COMPATIBLE)
        switches = {flag: str(value).lower() for flag, value in flags.items()}
        switches |= {"transformers": str(release), "kernels": str(machine.kernels).lower()}
        switches |= {"attn_implementation": name} if name else {}
        switches |= {"_compatible_flash_implementations": ",".join(compatible)} if compatible else {}
        wanted = resolved(
            root, machine, name, flags | {"_compatible_flash_implementations": list(compatible) or None}
        )
        p = AttentionParams(is_training=False, dtype="bf16")
        answer = dispatched_by("transformers", p, machine.env(), switches)
        found = next((offer.name for offer in answer.offers if offer == answer.chosen), None)
        if answer.chosen is None and answer.error and wanted is not None:
            offer = next((one for one in answer.offers if one.name == wanted), None)
            made = {"F.sdpa has no kernel for it"}  # what refuses it when it runs is no matter of the name
            if offer is not None and all(r.text in made or "sm" in r.text for r in offer.refusals):
                found = wanted
        if found != wanted:
            yield f"{release} {name} {machine} {flags} {compatible}: says {found}, its source {wanted}"


def calls(release: Version, root: Path, count: int, seed: int) -> Iterator[str]:
    """Contradictions about the call of F.sdpa."""
    pick = random.Random(f"calls {seed} {release}")
    for _ in range(count):
        machine = Machine(pick.choice(("cuda", "cuda", "cpu", "mps", "xpu")), 9, machines(pick).torch)
        rows, past = pick.choice((1, 1, 2, 7)), pick.choice((0, 0, 5))
        window, padded = pick.choice((None, None, 3)), pick.random() < 0.3
        d = pick.choice((8, 8, 264))
        p = AttentionParams(
            dtype="fp32", batch_size=2, num_heads=4, num_gqa_groups=pick.choice((1, 2, 4)), max_seqlen_q=rows,
            max_seqlen_kv=rows + past, head_dim_qk=d, head_dim_v=pick.choice((d, d, 4)),
            attn_mask_type="padding_causal_bottom_right" if padded else "causal_bottom_right",
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )  # fmt: skip
        made = sdpa_call(p, machine.env(), read_switches({"transformers": str(release)}, p))
        q = made.params
        found = Call(
            q.attn_mask_type == "arbitrary",
            q.attn_mask_type == "causal",
            "enable_gqa=True" in made.text,
            (q.num_heads, q.num_gqa_groups),
            (q.max_seqlen_q, q.max_seqlen_kv),
        )
        wanted = called(root, machine, p, past, window, padded)
        if found != wanted:
            asked = f"{release} {machine} {p.model_dump(exclude_defaults=True)} past {past}"
            yield f"{asked}: says {found}, its source {wanted}"


def main() -> int:
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    count, seed = int(given.get("--random", 1000)), int(given.get("--seed", 0))
    wrong: list[str] = []
    for release, root in releases().items():
        found = [*names(release, root, count, seed), *calls(release, root, count, seed)]
        print(f"{release}: {2 * count} questions, {len(found)} contradictions")
        wrong += found
    print("\n".join(wrong) or "no difference")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
