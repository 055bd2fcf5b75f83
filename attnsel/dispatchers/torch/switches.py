"""What a user of PyTorch may set that decides which kernel F.sdpa takes, and what of it holds here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from attnsel.environment import Environment
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.rules.sdpa.platforms import EXPERIMENTAL
from attnsel.verdicts.dispatch import switches_in

_ONE = ("0", "1")
_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
_OPT_IN = "TORCH_CUDNN_SDPA_ENABLED"
_PREFERRED = "TORCH_CUDNN_SDPA_PREFERRED"
_DEPRIORITIZED = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
_NESTED = "TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED"
_AVOID_RECOMPILE = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"
_AOTRITON = EXPERIMENTAL.partition("=")[0]
_IMPL = "activate_flash_attention_impl"
_REDUCED = "allow_fp16_bf16_reduction_math_sdp"
_VARIABLES = (_DEPRIORITIZED, _PREFERRED, _OPT_IN, _NESTED, _AVOID_RECOMPILE, _AOTRITON)

_BY_NAME = {
    "flash": "flash",
    "flash_attention": "flash",
    "mem_efficient": "mem_efficient",
    "efficient": "mem_efficient",
    "efficient_attention": "mem_efficient",
    "math": "math",
    "cudnn": "cudnn",
    "cudnn_attention": "cudnn",
    "overrideable": "overrideable",
}
"""Kernels as SDPBackend, torch.backends.cuda and attnsel write them; overrideable is for other devices."""

_NUMBERS = {0: "math", 1: "flash", 2: "mem_efficient", 3: "cudnn"}
"""SDPBackend without overrideable, which is 4."""

_UNTOUCHED = ((1, 2, 0, 3), (3, 1, 2, 0))
"""The priority order as it is built in, and as F.sdpa itself sets it where cuDNN goes first."""

SWITCHES = switches_in("attnsel.dispatchers.torch")


class Held(NamedTuple):
    """What the switches say. ``priority``: the order that a user set, () for the default. ``enable_gqa``: the
    argument of the call."""

    priority: tuple[str, ...] = ()
    enable_gqa: bool = True
    impl: str = "FA2"
    deterministic: bool = False
    reduced: bool = False
    cudnn_first: bool = True
    cudnn_opt_in: bool = False
    experimental: bool = False
    avoid_recompile: bool = False
    off: Mapping[str, str] = {}  # per kernel that may not be taken, the switch that says so


Set = dict[str, str]
"""Switches that are set, by name."""


def held(env: Environment) -> Set:
    """The switches of this process: variables, and for the machine in front of us what it told torch.

    A variable that is neither 0 nor 1 means nothing to PyTorch either (c10::utils::check_env).
    """
    return set_here() if env.detected else _variables()


def set_here() -> Set:
    """What holds in this process at this moment: variables, and what the program told torch."""
    torch = sys.modules.get("torch")
    live = _live(torch) if torch is not None and hasattr(torch, "backends") else {}
    return {**_variables(), **live}


def as_words(switches: Set) -> tuple[str, ...]:
    """NAME=VALUE, as ``--switch`` takes them."""
    return tuple(f"{name}={value}" for name, value in sorted(switches.items()))


def _variables() -> Set:
    return {name: os.environ[name] for name in _VARIABLES if os.environ.get(name) in _ONE}


def _live(torch: Any) -> Set:
    found: Set = {}
    cuda = torch.backends.cuda
    for name in _KERNELS:
        asked = getattr(cuda, f"{name}_sdp_enabled", None)
        if asked is not None and not asked():
            found[f"enable_{name}_sdp"] = "false"
    order: tuple[int, ...] = getattr(torch._C, "_get_sdp_priority_order", tuple)()
    tried = tuple(number for number in order if number in _NUMBERS)
    kept = [name for number in tried if f"enable_{(name := _NUMBERS[number])}_sdp" not in found]
    if kept and tried not in _UNTOUCHED:
        found |= {"sdpa_kernel": ",".join(kept), "set_priority": "true"}
    if torch.are_deterministic_algorithms_enabled():
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        found["use_deterministic_algorithms"] = "warn_only" if warns else "true"
    if getattr(cuda, "fp16_bf16_reduction_math_sdp_allowed", bool)():
        found[_REDUCED] = "true"
    return found


def read(p: AttentionParams, env: Environment, release: Version, switches: Mapping[str, str]) -> Held:
    """The switches of a question. Raises InvalidInput for a kernel that there is not."""
    off = {
        name: f"enable_{name}_sdp=false"
        for name in _KERNELS
        if switches.get(f"enable_{name}_sdp", "true") == "false"
    }
    every = (*_KERNELS, "overrideable") if env.device.type == "xpu" else _KERNELS
    listed = _kernels(switches.get("sdpa_kernel"))
    if listed is not None:
        only = f"sdpa_kernel={switches['sdpa_kernel']}"
        off = {name: off.get(name, only) for name in every if name not in listed}
    ordered = listed if switches.get("set_priority") == "true" and env.device.type != "cpu" else None
    stays = _PREFERRED if release < (2, 10) else _DEPRIORITIZED
    deterministic = switches.get("use_deterministic_algorithms")
    return Held(
        priority=tuple(name for name in ordered or () if name in every and release >= (2, 6)),
        enable_gqa=switches.get("enable_gqa", "true") == "true",
        impl=switches.get(_IMPL, env.torch_flash),
        deterministic=p.deterministic if deterministic is None else deterministic == "true",
        reduced=switches.get(_REDUCED) == "true",
        cudnn_first=switches.get(stays) != ("0" if release < (2, 10) else "1"),
        cudnn_opt_in=switches.get(_OPT_IN) == "1",
        experimental=switches.get(_AOTRITON) == "1",
        avoid_recompile=switches.get(_AVOID_RECOMPILE) == "1",
        off=off,
    )


def _kernels(text: str | None) -> list[str] | None:
    """The kernels of ``sdpa_kernel``, each once, in its order."""
    if text is None:
        return None
    found: list[str] = []
    for name in text.replace("SDPBackend.", "").split(","):
        kernel = _BY_NAME.get(name.strip().casefold())
        if kernel is None:
            raise InvalidInput("sdpa_kernel", text, f"allowed, with commas: {', '.join(_KERNELS)}")
        if kernel not in found:
            found.append(kernel)
    return found
