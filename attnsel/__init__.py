"""attnsel: which attention kernel will run, why each of the others cannot, and the way to a faster one."""

from pathlib import Path as _Path

# In a checkout rules/ and backends/ stand beside this folder; installed, they are inside it.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "rules").is_dir():
    __path__.append(str(_root))
del _root

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from attnsel._version import __version__
from attnsel.decision import Selection, select
from attnsel.environment import Device, Environment
from attnsel.errors import InvalidInput, NoBackendError, UnsupportedArgument
from attnsel.params import AttentionParams, Tensors, TensorSpec
from attnsel.params.layout import Layout, detect_layout
from attnsel.policy import Policy
from attnsel.settings import Settings, configure, override
from attnsel.verdicts.reasons import Candidate, Evidence

if _TYPE_CHECKING:
    from attnsel.diagnose.watching.session import watch as watch
    from attnsel.f_sdpa.function import scaled_dot_product_attention as scaled_dot_product_attention
    from attnsel.functional import attention as attention
    from attnsel.module import DotProductAttention as DotProductAttention
    from attnsel.runtime.call import assume_all_visible as assume_all_visible
    from attnsel.runtime.call import trivial_mask as trivial_mask
    from attnsel.runtime.dispatch import cache_info as cache_info
    from attnsel.runtime.dispatch import clear_cache as clear_cache

# What needs torch is imported when it is asked for: planning works where torch is not installed.
_NEEDS_TORCH = {
    "DotProductAttention": "attnsel.module",
    "attention": "attnsel.functional",
    "cache_info": "attnsel.runtime.dispatch",
    "clear_cache": "attnsel.runtime.dispatch",
    "scaled_dot_product_attention": "attnsel.f_sdpa.function",
    "trivial_mask": "attnsel.runtime.call",
    "assume_all_visible": "attnsel.runtime.call",
    "watch": "attnsel.diagnose.watching.session",
}

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
    "select",
]


def __getattr__(name: str) -> _Any:
    module = _NEEDS_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module 'attnsel' has no attribute {name!r}")
    import importlib

    try:
        value = globals()[name] = getattr(importlib.import_module(module), name)  # found at once from now on
        return value
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"attnsel.{name} runs attention and needs PyTorch: pip install 'attnsel[torch]'. "
            "Planning (attnsel.select, the attnsel command) works without it."
        ) from error


def __dir__() -> list[str]:
    return sorted([*__all__, *_NEEDS_TORCH])
