"""flash_attn.cute, made importable where there is no GPU, and told which GPU it is on.

Its compiler, the CuTe DSL with what belongs to it, is used where it is installed; otherwise its modules are
stood in for, and then only the package's checks before a compile can be heard. ``depth`` says how far a
question goes:

    check    its Python up to ``cute.compile``: shapes, dtypes, architectures, the kernels' constructors
    trace    the kernels are built too, up to the compiler's own code (some seconds each): what kernels
             refuse while they are built, and the shared memory that they ask for
    compile  down to machine code

Sources: flash_attn/cute/interface.py (FLASH_ATTENTION_ARCH, FLASH_ATTENTION_NUM_SMS, is_fake_mode),
cache_utils.py and utils.py in the wheels 4.0.0b20 and 4.0.0b36; cutlass/base_dsl/env_manager.py in
nvidia-cutlass-dsl 4.6 to 4.8 (CUTE_DSL_ARCH, CUTE_DSL_DRYRUN).
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from attnsel.environment.gpus import ARCHITECTURES
from flash_attention_ask import device
from flash_attention_ask.standins import anything, stand_in

DEPTHS = ("check", "trace", "compile")
_COMPILER = ("cutlass", "cuda", "quack", "tvm_ffi", "torch_c_dlpack_ext")
_ARCHITECTURE_SPECIFIC = 90  # from here on kernels are compiled for sm_90a, not sm_90
_NO_CAPABILITY = "says no (nobody asks it, and the launch fails)"
_CHECKED = tuple(f"FlashAttention{way}Sm{arch}" for way in ("Forward", "Backward") for arch in (80, 120))


class Refused(RuntimeError):
    """What the package's own ``can_implement`` or the described device says no to, though nobody asks."""

    def __init__(self, words: str, where: str = "") -> None:
        super().__init__(words)
        self.where = where


class Cute:
    """The package in this process."""

    def __init__(self, folder: Path, arch: int, sm_count: int, standins: bool = False) -> None:
        self.folder = folder / "flash_attn"
        self.real = not standins and all(find_spec(name) is not None for name in ("cutlass", "quack"))
        self.arch = arch
        self._kept: dict[tuple[str, int], dict[str, dict[Any, Any]]] = {}
        self.describe(arch, sm_count)
        if not self.real:
            for name in _COMPILER:
                stand_in(name, self._known)
        if find_spec("einops") is None:
            stand_in("einops")
        whole = ModuleType("flash_attn")  # FlashAttention 2 has the same name, and wants a GPU to be imported
        whole.__path__ = [str(self.folder)]
        sys.modules["flash_attn"] = whole
        self.interface = importlib.import_module("flash_attn.cute.interface")
        self._compile = getattr(self.interface.cute, "compile", None)
        self.interface.cute.compile = self._compiled
        self._watch_constructors()
        if self.real:
            self._watch_launches()
        self.depth = "check"
        self.go_to("check")

    @property
    def compiler(self) -> str | None:
        """Its release; None for stand-ins."""
        if not self.real:
            return None
        return str(getattr(importlib.import_module("cutlass"), "__version__", "of no release"))

    def describe(self, arch: int, sm_count: int) -> None:
        """The GPU of the questions that come."""
        self.arch, self.sm_count = arch, sm_count
        device.describe(arch, sm_count)
        suffix = "a" if arch >= _ARCHITECTURE_SPECIFIC else ""
        os.environ["FLASH_ATTENTION_ARCH"] = f"sm_{arch}"
        os.environ["FLASH_ATTENTION_NUM_SMS"] = str(sm_count)
        os.environ["CUTE_DSL_ARCH"] = f"sm_{arch}{suffix}"
        if hasattr(self, "interface"):
            self.interface._get_device_arch.cache_clear()
            if self.real:
                _dsl().envar.arch = f"sm_{arch}{suffix}"
            self.go_to(self.depth)

    def go_to(self, depth: str) -> None:
        """How far the questions that come go. What was built at another depth is not taken for it."""
        self.depth = depth if self.real else "check"
        if self.real:
            _dsl().envar.dryrun = depth != "compile"
        # Some of its checks are made only when a kernel is not there yet: a first call meets all of them.
        kept = {} if self.depth == "check" else self._kept.setdefault((self.depth, self.arch), {})
        for name, function in vars(self.interface).items():
            if inspect.isfunction(function) and hasattr(function, "compile_cache"):
                function.compile_cache = kept.setdefault(name, {})

    def _compiled(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of ``cute.compile``."""
        if self.depth == "check":
            self._can_implement(kernel)
            return anything("compiled")
        assert self._compile is not None
        return self._compile(kernel, *args, **kwargs)

    def _can_implement(self, kernel: Any) -> None:
        """What the kernel's class says of itself: the package has the function, and never calls it. A kernel
        that it says no to does not fit into shared memory. Raises Refused."""
        kind = type(kernel)
        if kind.__name__ not in _CHECKED or not hasattr(kernel, "_given"):
            return
        names = inspect.signature(kind.can_implement).parameters
        if set(names) - set(kernel._given):
            return
        if not kind.can_implement(**{name: kernel._given[name] for name in names}):
            raise Refused(
                f"{kind.__name__}.can_implement {_NO_CAPABILITY}",
                _line_of(kind.can_implement, self.folder),
            )

    def _watch_constructors(self) -> None:
        """Kernels remember what they were made of."""
        kinds: list[Any] = [kind for kind in vars(self.interface).values() if inspect.isclass(kind)]
        for kind in kinds:
            if kind.__name__ in _CHECKED:
                kind.__init__ = _remembering(kind.__init__)

    def _watch_launches(self) -> None:
        """A kernel that asks for more shared memory than the described device has is refused where it is
        launched; and the compiler asks the device, not the driver, how many multiprocessors there are."""
        config = importlib.import_module("cutlass.base_dsl.dsl").BaseDSL.LaunchConfig
        allocator = importlib.import_module("cutlass.utils.smem_allocator").SmemAllocator
        cute = self

        class Hardware:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                pass

            def get_device_multiprocessor_count(self) -> int:
                return cute.sm_count

            def get_max_active_clusters(self, cluster_size: int, *args: Any, **kwargs: Any) -> int:
                return cute.sm_count // cluster_size

        for name in ("cutlass.utils", "cutlass.utils.hardware_info", "flash_attn.cute.tile_scheduler"):
            importlib.import_module(name).HardwareInfo = Hardware  # type: ignore[attr-defined]
        launched, allocate = config.__post_init__, allocator.allocate

        def launching(made: Any) -> None:
            if isinstance(made.smem, int):
                cute._fits(made.smem)
            launched(made)

        def allocating(made: Any, what: Any, *args: Any, **kwargs: Any) -> Any:
            cute._fits(what if isinstance(what, int) else _bytes_of(what))
            return allocate(made, what, *args, **kwargs)

        config.__post_init__, allocator.allocate = launching, allocating

    def _fits(self, size: int) -> None:
        there = ARCHITECTURES[self.arch].shared_memory
        if size > there:
            raise Refused(f"the kernel needs {size} bytes of shared memory; sm_{self.arch} has {there}")

    def _known(self, module: ModuleType) -> None:
        """What the package's checks want to know of the compiler, as far as it is plain."""
        name = module.__name__
        if name == "cutlass":
            module.const_expr = lambda value: value  # type: ignore[attr-defined]
            for number, width in _NUMBERS.items():
                setattr(module, number, anything(number, width=width))
        elif name == "cutlass.cute":
            module.ceil_div = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
            module.arch = anything("cutlass.cute.arch", **_HARDWARE)  # type: ignore[attr-defined]
        elif name == "cutlass.cute.arch":
            vars(module).update(_HARDWARE)
        elif name.startswith(("cutlass.base_dsl", "cutlass.cutlass_dsl")):
            module.Arch = Arch  # type: ignore[attr-defined]
            here = anything("dsl", get_arch_enum=lambda: Arch(self.arch))
            module.BaseDSL = anything("BaseDSL", _get_dsl=lambda: here)  # type: ignore[attr-defined]
        elif name == "cutlass.utils":
            module.get_smem_capacity_in_bytes = (  # type: ignore[attr-defined]
                lambda sm: ARCHITECTURES[int(sm.removeprefix("sm_"))].shared_memory
            )


# Source: cute.arch.get_max_tmem_alloc_cols of nvidia-cutlass-dsl 4.8.1, for every architecture that it knows.
_HARDWARE = {"WARP_SIZE": 32, "get_max_tmem_alloc_cols": lambda sm: 512}
_NUMBERS = {"Float16": 16, "BFloat16": 16, "Float32": 32, "Float8E4M3FN": 8, "Float8E5M2": 8}
_NUMBERS |= {"Int8": 8, "Uint8": 8, "Int32": 32, "Uint32": 32, "Int64": 64, "Boolean": 8}


class _Architectures(type):
    """``Arch.sm_90a`` and the like."""

    def __getattr__(cls, name: str) -> Any:
        digits = "".join(c for c in name if c.isdigit())
        if not name.startswith("sm_") or not digits:
            raise AttributeError(name)
        return cls(int(digits), name.endswith("f"))


class Arch(metaclass=_Architectures):
    """An architecture as the DSL has it: ordered, and of a family (sm_103 is of that of sm_100f)."""

    def __init__(self, number: int, family: bool = False) -> None:
        self.number, self.family = number, family

    def is_family_of(self, other: Arch) -> bool:
        return self.number // 10 == other.number // 10 and self.number >= other.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arch) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __lt__(self, other: Arch) -> bool:
        return self.number < other.number

    def __le__(self, other: Arch) -> bool:
        return self.number <= other.number

    def __gt__(self, other: Arch) -> bool:
        return self.number > other.number

    def __ge__(self, other: Arch) -> bool:
        return self.number >= other.number


def install(folder: Path, arch: int, sm_count: int, standins: bool = False) -> Cute:
    """``flash_attn.cute`` of the folder: an unpacked wheel, site-packages or a checkout. ``standins``: as if
    its compiler were not installed. Raises ImportError."""
    return Cute(folder, arch, sm_count, standins)


def _dsl() -> Any:
    return importlib.import_module("cutlass.cutlass_dsl").CuTeDSL._get_dsl()


def _remembering(construct: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(construct)

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self, "_given"):
            try:
                bound = signature.bind(self, *args, **kwargs)
                bound.apply_defaults()
                self._given = bound.arguments
            except TypeError:  # of a class that passes everything on: its parent's constructor knows
                pass
        construct(self, *args, **kwargs)

    return remember


def _bytes_of(what: Any) -> int:
    size = what.size_in_bytes() if hasattr(what, "size_in_bytes") else what.width // 8
    return int(size)


def _line_of(function: Any, folder: Path) -> str:
    code = inspect.unwrap(function).__code__
    return f"{Path(code.co_filename).relative_to(folder).name}:{code.co_firstlineno}"
