"""The module name ``flash_attn`` in this process, for programs that import a package which is missing here.

The real package is kept wherever it works. That is found out by one tiny call on every GPU in a child
process, so that this process initialises no CUDA for it; the child's error is the reason that is reported.
"""

from __future__ import annotations

import importlib
import json
import logging
import pkgutil
import subprocess
import sys
import threading
from functools import lru_cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple

from attnsel.base.processes import first_in_children, no_longer_in_children, python

logger = logging.getLogger("attnsel")

NAME = "flash_attn"
MODULES = {
    "flash_attn.flash_attn_interface": "attnsel.flash_attn.interface",
    "flash_attn.bert_padding": "attnsel.flash_attn.bert_padding",
    "flash_attn.layers.rotary": "attnsel.flash_attn.rotary",
}
_LAYERS = "flash_attn.layers"
NAMES = (NAME, _LAYERS, *MODULES)

# The smallest call that the package takes, in the dtype that every architecture has.
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
_PROBE_SECONDS = 180  # to import torch from a cold disk and make a CUDA context per GPU


class Installation(NamedTuple):
    """The names that :func:`install` replaced, and why."""

    names: tuple[str, ...]  # in sys.modules
    version: str  # flash_attn.__version__ as programs see it
    why: str

    def __str__(self) -> str:
        return f"{NAME} {self.version} is attnsel's in this process: {self.why}"


class _State(NamedTuple):
    installed: Installation
    ours: dict[str, ModuleType]
    before: dict[str, ModuleType]  # sys.modules under these names, before


_lock = threading.RLock()
_state: _State | None = None


def install(*, force: bool = False) -> Installation | None:
    """From now on, and in this process, ``import flash_attn`` gives attnsel's functions.

    Only where the real package is missing or refuses a GPU of this machine; with ``force`` also where it
    works. Returns what was installed, or None where the real package was kept, and logs that in one line to
    the logger ``attnsel``. A second call changes nothing and returns the same.

    ``flash_attn.cute`` (FlashAttention-4) and all other modules that packages install under the name stay
    importable. Names imported from a real ``flash_attn`` before this call stay the real ones. Processes that
    multiprocessing spawns have the name from their start.
    """
    global _state
    with _lock:
        if _state is not None and is_installed():
            return _state.installed
        why = _why_install(force)
        if why is None:
            return None
        ours = _modules()
        version = str(ours[NAME].__dict__["__version__"])
        before = {name: sys.modules[name] for name in NAMES if name in sys.modules}
        sys.modules.update(ours)
        _adopt(ours)
        # Without a second probe: this process has decided already.
        first_in_children(__name__, f"from {__name__} import install; install(force=True)")
        _state = _State(Installation(NAMES, version, why), ours, before)
        logger.info("%s", _state.installed)
        return _state.installed


def is_installed() -> bool:
    """Whether ``flash_attn`` is attnsel's in this process."""
    with _lock:
        return _state is not None and sys.modules.get(NAME) is _state.ours[NAME]


def uninstall() -> bool:
    """Restore the modules that had these names before. Returns whether there was anything to undo."""
    global _state
    with _lock:
        if _state is None:
            return False
        for name, module in _state.ours.items():
            if sys.modules.get(name) is not module:
                continue  # replaced by other code since
            del sys.modules[name]
            if name in _state.before:
                sys.modules[name] = _state.before[name]
        no_longer_in_children(__name__)
        logger.info("%s is no longer attnsel's in this process", NAME)
        _state = None
        return True


# ---- whether to install -----------------------------------------------------------------------------


def _why_install(force: bool) -> str | None:
    """The reason to install; None where the real package is to be kept."""
    real = _real_package()
    if real is None:
        return "the real package is not installed"
    if force:
        return "asked for by force"
    refusal = _refusal(str(real.origin))
    if refusal is None:
        logger.info("%s is the real package: it works here", NAME)
        return None
    return f"the real package refuses: {refusal}"


def _real_package() -> ModuleSpec | None:
    """The spec of the real package. A namespace package with FlashAttention-4 alone does not count."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(NAME, None)
        if spec is not None:
            return spec if spec.origin is not None else None
    return None


@lru_cache(maxsize=8)
def _refusal(origin: str) -> str | None:
    """The error of the real package there when it runs on every visible GPU; None if there is none. To find
    out takes seconds."""
    command = python(_PROBE, json.dumps(sys.path))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning("%s did not answer within %d s whether it works here", NAME, _PROBE_SECONDS)
        return None  # no answer is not a refusal
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"


# ---- the modules ------------------------------------------------------------------------------------


def _modules() -> dict[str, ModuleType]:
    """A module per name. Leaves are attnsel's own; the two packages also find the modules of real ones."""
    # Late: they need torch, and ``install`` is asked first whether the real package works.
    api = importlib.import_module("attnsel.flash_attn")
    made = {name: importlib.import_module(source) for name, source in MODULES.items()}
    real = _real_package()
    package = _package(NAME, api, sys.path)
    if real is not None:  # an editable install is found by its own finder only
        package.__path__ += [p for p in real.submodule_search_locations or () if p not in package.__path__]
    functions = [name for name in api.__all__ if name.startswith("flash_attn")]
    package.__dict__.update({name: getattr(api, name) for name in functions})
    package.__dict__["__version__"] = api.__version__
    layers = _package(_LAYERS, api, list(package.__path__))
    for child in made:
        parent, _, leaf = child.rpartition(".")
        setattr(package if parent == NAME else layers, leaf, made[child])
    package.__dict__["layers"] = layers
    return {NAME: package, _LAYERS: layers, **made}


def _package(name: str, source: ModuleType, search: list[str]) -> ModuleType:
    """A package of this name whose path has the folders of every installed package of that name."""
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
    """Set loaded modules of other packages (``flash_attn.cute``) as attributes of their parent."""
    for name, module in list(sys.modules.items()):
        parent, _, leaf = name.rpartition(".")
        if parent in (NAME, _LAYERS) and name not in ours and module is not None:
            setattr(ours[parent], leaf, module)
