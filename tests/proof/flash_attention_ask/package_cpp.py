"""FlashAttention 2 or 3 made importable in this process, on the compiled file of checks.

For a child process only: it changes torch. The package's own Python comes from the folder that a user named,
so its signatures and checks are those of that release; a tensor on the GPU is one of device ``meta``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from flash_attention_ask.launch import Failure, failures
from flash_attention_ask.native import Library, Source, build, find_source


class Outcome(NamedTuple):
    """What the package said to a call."""

    supported: bool | None  # None: something other than the package refused
    words: str
    where: str  # "file:line" in the package's source, or ""
    launches: list[dict[str, Any]]  # of the kernels that it picked


@dataclass
class Package:
    """The package in this process. ``interface`` holds flash_attn_func and its like."""

    interface: ModuleType
    source: Source
    library: Library
    _capability: tuple[int, int] = (0, 0)

    def describe(self, arch: int, sm_count: int) -> None:
        """The GPU of the next calls: ``arch`` 89 is compute capability 8.9."""
        self.library.describe(arch, sm_count)
        self._capability = (arch // 10, arch % 10)

    def capability(self, device: object = None) -> tuple[int, int]:
        """Stands in for torch.cuda.get_device_capability."""
        return self._capability

    def ask(self, call: Callable[[], object]) -> Outcome:
        """Run a call of the package's functions on ``meta`` tensors."""
        self.library.forget()
        try:
            call()
        except Exception as error:  # whatever it raises is its answer
            return self._refusal(error)
        return Outcome(True, "", "", self.library.launches())

    def _refusal(self, error: Exception) -> Outcome:
        launches = self.library.launches()
        words = f"{type(error).__name__}: {error}".strip()
        checked = self.library.where() or _stable_place(str(error), self.source)
        where = checked or self._python_place(error)
        # torch says so of an operator that ``meta`` does not have, or of a value read: this stand-in's fault.
        if not checked and "meta" in words.lower():
            return Outcome(None, words, where, launches)
        return Outcome(False if where else None, words, where, launches)

    def _python_place(self, error: BaseException) -> str:
        """The innermost line of the package's own Python that the error came through."""
        while error.__cause__ is not None:  # attnsel's backend says in its own words what it caught
            error = error.__cause__
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame for frame in frames if Path(frame.filename).is_relative_to(self.source.python)]
        return f"{inside[-1].filename}:{inside[-1].lineno}" if inside else ""

    def failures(self, launches: Sequence[dict[str, Any]]) -> list[Failure]:
        """What the launch templates would do to ``launches`` on the described device: read, not executed."""
        arch = 10 * self._capability[0] + self._capability[1]
        return [*failures(self.source.python, self.source.generation, arch, launches)]


def _stable_place(words: str, source: Source) -> str:
    """STD_TORCH_CHECK writes the place into its message: function, file:line, message."""
    _, found, behind = words.partition(f"{source.api}:")
    line = behind.partition(",")[0]
    return f"{source.api}:{line}" if found and line.isdigit() else ""


def install(version_folder: Path, generation: Literal[2, 3], arch: int, sm_count: int) -> Package:
    """Import the release in ``version_folder``. Once in a process. Raises NoLibrary."""
    source = find_source(version_folder, generation)
    path = build(source)
    library = Library(path)
    package = Package(ModuleType("unset"), source, library)
    package.describe(arch, sm_count)
    _patch_torch(package)
    if generation == 3:
        _make_flash_attn_3(source)
    _load(source.module, path)
    sys.path.insert(0, str(source.python))
    if generation == 2:
        package.interface = importlib.import_module("flash_attn.flash_attn_interface")
    else:
        package.interface = importlib.import_module("flash_attn_interface")
        sys.modules["flash_attn_3.flash_attn_interface"] = package.interface
    return package


def _load(name: str, path: Path) -> None:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module


def _make_flash_attn_3(source: Source) -> None:
    """The package that setup.py would install, and the flags of its build, all at their default."""
    parent = ModuleType("flash_attn_3")
    parent.__path__ = []
    parent.__dict__["__version__"] = source.version
    sys.modules["flash_attn_3"] = parent
    config = ModuleType("flash_attn_config")
    config.__dict__["CONFIG"] = {"build_flags": _DefaultFlags()}
    sys.modules["flash_attn_config"] = config


class _DefaultFlags(dict[str, bool]):
    """hopper/setup.py sets none of FLASHATTENTION_DISABLE_… unless the environment does."""

    def __missing__(self, flag: str) -> bool:
        return False


def _patch_torch(package: Package) -> None:
    torch.cuda.get_device_capability = package.capability
    torch.library.custom_op = _custom_op
    torch.library.register_fake = _register_fake


class _Operator:
    """An operator that runs the package's function on every device.

    torch's own would run what is registered as its fake for ``meta`` tensors, and check nothing.
    """

    def __init__(self, name: str, function: Callable[..., Any], mutates: str | Iterable[str]) -> None:
        self._init_fn = function
        self._name = name
        namespace, short = name.split("::")
        self._library = torch.library.Library(namespace, "FRAGMENT")
        self._library.define(short + torch.library.infer_schema(function, mutates_args=mutates))
        self._library.impl(short, function, "CompositeExplicitAutograd")
        self._operator = getattr(getattr(torch.ops, namespace), short)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._operator(*arguments, **named)

    def register_autograd(self, backward: Callable[..., Any], **options: Any) -> None:
        torch.library.register_autograd(self._name, backward, lib=self._library, **options)


_TORCHS = torch.library.custom_op, torch.library.register_fake
_THEIRS = ("flash_attn::", "flash_attn_3::")


def _custom_op(name: str, *given: Any, **named: Any) -> Any:
    """Stands in for torch.library.custom_op, as flash_attn uses it: a decorator. torch makes some of its own
    when they are first needed."""
    if not name.startswith(_THEIRS):
        return _TORCHS[0](name, *given, **named)
    return lambda function: _Operator(name, function, named["mutates_args"])


def _register_fake(name: Any, *given: Any, **named: Any) -> Any:
    """Stands in for torch.library.register_fake: the functions themselves run on ``meta``."""
    if not str(name).startswith(_THEIRS):
        return _TORCHS[1](name, *given, **named)
    return lambda function: function
