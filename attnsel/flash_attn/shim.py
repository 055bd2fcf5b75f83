"""The name ``flash_attn``, in this process: for programs written for a package that is not there.

The real package is kept wherever it works. Whether it does is asked of the package itself, by one tiny call
on every GPU in a child process: its own words are the reason, and this process initialises no CUDA for it.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing.spawn
import pkgutil
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

logger = logging.getLogger("attnsel")

NAME = "flash_attn"
MODULES = {
    "flash_attn.flash_attn_interface": "attnsel.flash_attn.interface",
    "flash_attn.bert_padding": "attnsel.flash_attn.bert_padding",
    "flash_attn.layers.rotary": "attnsel.flash_attn.layers.rotary",
}
_LAYERS = "flash_attn.layers"
NAMES = (NAME, _LAYERS, *MODULES)

# The smallest call the package makes sense of, in the dtype that every architecture has.
_PROBE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from flash_attn import flash_attn_func
import torch
if not torch.cuda.is_available():
    sys.exit("torch sees no GPU here")
for number in range(torch.cuda.device_count()):
    with torch.cuda.device(number):
        q = torch.zeros(1, 16, 1, 64, dtype=torch.float16, device="cuda")
        flash_attn_func(q, q, q)
        torch.cuda.synchronize()
"""
_PROBE_SECONDS = 180  # torch, a CUDA context per GPU, and a cold disk


class Installed(NamedTuple):
    """What :func:`install` put in place, and why."""

    names: tuple[str, ...]  # in sys.modules, ours now
    version: str  # flash_attn.__version__ as programs see it
    why: str

    def __str__(self) -> str:
        return f"{NAME} {self.version} is attnsel's in this process: {self.why}"


class _State(NamedTuple):
    installed: Installed
    ours: dict[str, ModuleType]
    before: dict[str, ModuleType]  # what stood in sys.modules under these names


_lock = threading.RLock()
_state: _State | None = None
_refusals: dict[str, str | None] = {}  # by the origin of a real package: asking takes seconds


def install(*, force: bool = False) -> Installed | None:
    """Let ``import flash_attn`` find attnsel's functions, from now on and in this process.

    Does so where the real package is absent, or refuses a GPU of this machine; with ``force`` also over one
    that works. Returns what was done, or None where the real package was kept; the logger ``attnsel`` says it
    in one line. A second call changes nothing and returns the same.

    ``flash_attn.cute`` (FlashAttention-4) and whatever else installed packages keep under the name stay
    importable. Names that were imported from a real ``flash_attn`` before this call remain what they are.
    Processes that multiprocessing makes have the name from their start.
    """
    global _state
    with _lock:
        if _state is not None and sys.modules.get(NAME) is _state.ours[NAME]:
            return _state.installed
        why = _why_install(force)
        if why is None:
            return None
        ours = _modules()
        version = str(ours[NAME].__dict__["__version__"])
        before = {name: sys.modules[name] for name in NAMES if name in sys.modules}
        sys.modules.update(ours)
        _adopt(ours)
        multiprocessing.spawn.get_preparation_data = _preparation
        _state = _State(Installed(NAMES, version, why), ours, before)
        logger.info("%s", _state.installed)
        return _state.installed


def uninstall() -> bool:
    """Put back what stood under these names before. Returns whether there was anything to undo."""
    global _state
    with _lock:
        if _state is None:
            return False
        for name, module in _state.ours.items():
            if sys.modules.get(name) is not module:
                continue  # somebody else's by now
            del sys.modules[name]
            if name in _state.before:
                sys.modules[name] = _state.before[name]
        if multiprocessing.spawn.get_preparation_data is _preparation:
            multiprocessing.spawn.get_preparation_data = _stdlib_preparation
        logger.info("%s is no longer attnsel's in this process", NAME)
        _state = None
        return True


# ---- whether ---------------------------------------------------------------------------------------------


def _why_install(force: bool) -> str | None:
    """The reason to install, in words; None where the real package is to be kept."""
    real = _real_package()
    if real is None:
        return "the real package is not installed"
    if force:
        return "asked for by force"
    refusal = _refusal(real)
    if refusal is None:
        logger.info("%s is the real package: it works here", NAME)
        return None
    return f"the real package refuses: {refusal}"


def _real_package() -> ModuleSpec | None:
    """Where the real package would come from. A bare folder with FlashAttention-4 in it is not it."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(NAME, None)
        if spec is not None:
            return spec if spec.origin is not None else None
    return None


def _refusal(real: ModuleSpec) -> str | None:
    """The real package's words when it is asked to run on every GPU in sight; None when it does."""
    origin = str(real.origin)
    if origin not in _refusals:
        _refusals[origin] = _ask(real)
    return _refusals[origin]


def _ask(real: ModuleSpec) -> str | None:
    command = [sys.executable, "-c", _PROBE, json.dumps(sys.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning("%s did not answer within %d s whether it works here", NAME, _PROBE_SECONDS)
        return None  # not known to refuse
    if done.returncode == 0:
        return None
    words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return words[-1] if words else f"exit code {done.returncode}"


# ---- what ------------------------------------------------------------------------------------------------


def _modules() -> dict[str, ModuleType]:
    """A module per name. Leaves are attnsel's own; the two packages get paths that real ones share."""
    api = importlib.import_module("attnsel.flash_attn")
    made = {name: importlib.import_module(source) for name, source in MODULES.items()}
    real = _real_package()
    package = _package(NAME, api, sys.path)
    if real is not None:  # an editable install lies where only its own finder looks
        package.__path__ += [p for p in real.submodule_search_locations or () if p not in package.__path__]
    functions = [name for name in api.__all__ if name.startswith("flash_attn")]
    package.__dict__.update({name: getattr(api, name) for name in functions})
    package.__dict__["__version__"] = api.__version__
    layers = _package(_LAYERS, importlib.import_module("attnsel.flash_attn.layers"), list(package.__path__))
    for child in made:
        parent, _, leaf = child.rpartition(".")
        setattr(package if parent == NAME else layers, leaf, made[child])
    package.__dict__["layers"] = layers
    return {NAME: package, _LAYERS: layers, **made}


def _package(name: str, source: ModuleType, search: list[str]) -> ModuleType:
    """A package of this name whose path holds the folders of every installed package of that name."""
    package = ModuleType(name, source.__doc__)
    package.__file__ = source.__file__
    package.__package__ = name
    package.__path__ = _folders(name, search)
    # Libraries look for the spec before they import.
    package.__spec__ = ModuleSpec(name, None, origin="attnsel", is_package=True)
    package.__spec__.submodule_search_locations = package.__path__
    return package


def _folders(name: str, search: list[str]) -> list[str]:
    """What pkgutil.extend_path finds, also for a package that is not imported yet."""
    found: list[str] = []
    for finder in map(pkgutil.get_importer, search):
        spec = None if finder is None else finder.find_spec(name)
        found += [] if spec is None else list(spec.submodule_search_locations or [])
    return list(dict.fromkeys(found))


def _adopt(ours: dict[str, ModuleType]) -> None:
    """Modules of others that are loaded already (``flash_attn.cute``), as attributes of their parent."""
    for name, module in list(sys.modules.items()):
        parent, _, leaf = name.rpartition(".")
        if parent in (NAME, _LAYERS) and name not in ours and module is not None:
            setattr(ours[parent], leaf, module)


# ---- spawned processes -----------------------------------------------------------------------------------

# A process that is spawned imports the program's main module before anything of ours could run there, except
# for what unpickles with the instructions that multiprocessing sends it first.

_stdlib_preparation = multiprocessing.spawn.get_preparation_data


def _preparation(name: str) -> dict[str, Any]:
    return {**_stdlib_preparation(name), "attnsel": _InChild()}


class _InChild:
    """Unpickled, it installs: the parent has decided already, so nothing is asked again."""

    def __reduce__(self) -> tuple[Any, ...]:
        home = str(Path(__file__).resolve().parents[2])  # the child's sys.path is not the parent's yet
        code = f"import sys; sys.path.append({home!r}); from attnsel.flash_attn.shim import install; "
        return exec, (f"{code}install(force=True)",)
