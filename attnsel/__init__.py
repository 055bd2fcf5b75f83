"""attnsel: which attention kernel will run, why each of the others cannot, and the way to a faster one."""

from __future__ import annotations

import os as _os
import sys as _sys

# In a checkout rules/ and backends/ stand beside this folder; installed, they are inside it.
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if _os.path.isfile(_os.path.join(_root, "pyproject.toml")) and _os.path.isdir(_os.path.join(_root, "rules")):
    __path__.append(_root)
del _root

from attnsel._version import __version__

TYPE_CHECKING = (
    False  # type checkers take it for true; typing's own would cost more than the rest of this file
)
if TYPE_CHECKING:
    from typing import Any as _Any

    from attnsel.decision import Selection, select
    from attnsel.diagnose.models.plan import plan as plan
    from attnsel.diagnose.watching.session import watch as watch
    from attnsel.environment import Device, Environment
    from attnsel.errors import InvalidInput, NoBackendError, UnsupportedArgument
    from attnsel.f_sdpa.function import scaled_dot_product_attention as scaled_dot_product_attention
    from attnsel.functional import attention as attention
    from attnsel.module import DotProductAttention as DotProductAttention
    from attnsel.params import AttentionParams, Tensors, TensorSpec
    from attnsel.params.layout import Layout, detect_layout
    from attnsel.policy import Policy
    from attnsel.recommendation import recommend as recommend
    from attnsel.runtime.call import assume_all_visible as assume_all_visible
    from attnsel.runtime.call import trivial_mask as trivial_mask
    from attnsel.runtime.dispatch import cache_info as cache_info
    from attnsel.runtime.dispatch import clear_cache as clear_cache
    from attnsel.settings import Settings, configure, override
    from attnsel.verdicts.reasons import Candidate, Evidence

# Importing attnsel loads nothing: a name's module is imported when the name is first used.
_PLANS = {
    "attnsel.decision": ("Selection", "select"),
    "attnsel.diagnose.models.plan": ("plan",),
    "attnsel.environment": ("Device", "Environment"),
    "attnsel.errors": ("InvalidInput", "NoBackendError", "UnsupportedArgument"),
    "attnsel.params": ("AttentionParams", "TensorSpec", "Tensors"),
    "attnsel.params.layout": ("Layout", "detect_layout"),
    "attnsel.policy": ("Policy",),
    "attnsel.recommendation": ("recommend",),
    "attnsel.settings": ("Settings", "configure", "override"),
    "attnsel.verdicts.reasons": ("Candidate", "Evidence"),
}
_NEEDS_TORCH = {  # the others do not: planning works where torch is not installed
    "attnsel.diagnose.watching.session": ("watch",),
    "attnsel.f_sdpa.function": ("scaled_dot_product_attention",),
    "attnsel.functional": ("attention",),
    "attnsel.module": ("DotProductAttention",),
    "attnsel.runtime.call": ("assume_all_visible", "trivial_mask"),
    "attnsel.runtime.dispatch": ("cache_info", "clear_cache"),
}
_HOME = {name: module for module, names in (_PLANS | _NEEDS_TORCH).items() for name in names}
_ROOMS = {module.split(".")[1] for module in _PLANS}
_ROOMS |= {"backends", "base", "debug", "dispatchers", "plugins", "report", "rules", "selection"}

__all__ = [
    "AttentionParams",
    "Candidate",
    "Device",
    "Environment",
    "Evidence",
    "InvalidInput",
    "Layout",
    "NoBackendError",
    "Policy",
    "Selection",
    "Settings",
    "TensorSpec",
    "Tensors",
    "UnsupportedArgument",
    "__version__",
    "configure",
    "detect_layout",
    "override",
    "plan",
    "recommend",
    "select",
    "settings",
]
# What runs attention: import * gives it where it can be imported. Looking costs what a few stats do.
if any(_os.path.isdir(_os.path.join(place, "torch")) for place in _sys.path):
    __all__ += [name for names in _NEEDS_TORCH.values() for name in names]


def __getattr__(name: str) -> _Any:
    import importlib

    if name in _ROOMS:  # attnsel.settings.VariableWarning, say, without an import of its own
        return importlib.import_module(f"attnsel.{name}")
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'attnsel' has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(importlib.import_module(module), name)  # found at once from now on
        return value
    except ModuleNotFoundError as error:
        if error.name != "torch" or module not in _NEEDS_TORCH:
            raise
        raise ImportError(
            f"attnsel.{name} runs attention and needs PyTorch: pip install torch. "
            "Planning (attnsel.select, the attnsel command) works without it."
        ) from error


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOME})
