"""The order in which F.sdpa tries its kernels: the one table of it, for every release of PyTorch."""

from __future__ import annotations

from typing import NamedTuple

from attnsel.backends.registry import OLDEST_TORCH
from attnsel.environment import Environment
from attnsel.environment.versions import Version

OLDEST = ".".join(map(str, OLDEST_TORCH))
BY_F_SDPA = f"F.sdpa runs it; attnsel itself runs on torch {OLDEST} or newer"
"""Why a kernel is planned only, where it needs no attnsel to be run."""

FLASH, EFFICIENT, MATH, CUDNN = "sdpa.flash", "sdpa.efficient", "sdpa.math", "sdpa.cudnn"
ONEDNN, SYCL_FLASH = "overrideable", "flash"
"""Kernels of Intel's GPUs, as torch names them: no candidates of attnsel's."""

_FLASH_FIRST = (FLASH, EFFICIENT, MATH, CUDNN)
_CUDNN_FIRST = (CUDNN, FLASH, EFFICIENT, MATH)
_CUDNN_SECOND = (FLASH, CUDNN, EFFICIENT, MATH)
_BEFORE_CUDNN = (FLASH, EFFICIENT, MATH)
_TRUSTED = Version(9, 15, 0)  # cuDNN: 9.15.1 repairs lengths that 128 does not divide (pytorch#169849)

# CUDA of the builds of 2.9, which are compiled with cuDNN 9.8.0.87 (PyPI's), or with 9.10.2.21 (12.6, 12.9)
# and 9.13.0.50 (13.0): PyTorch's install_cuda.sh at v2.9.0; 90800 in libtorch_cuda.so of PyPI's.
_COMPILED_WITH_9_8 = ((12, 8),)
_COMPILED_WITH_NEWER = ((12, 6), (12, 9), (13, 0))


class SdpaOrder(NamedTuple):
    """Kernels as F.sdpa tries them, with where that is written.

    ``by_cudnn``: the variable and its value that would put cuDNN behind the others; "" where none does.
    ``inferred``: what of it was not read, "" if all was.
    """

    kernels: tuple[str, ...]
    source: str
    by_cudnn: str = ""
    inferred: str = ""


def f_sdpa_order(env: Environment) -> tuple[str, ...]:
    """Kernels in the order in which F.sdpa tries them; none for a torch that attnsel runs on, or that
    nobody stated."""
    if env.torch is None or env.torch >= OLDEST_TORCH or "torch" in env.assumed:
        return ()
    return sdpa_order(env, env.torch).kernels


def sdpa_order(env: Environment, torch: Version, cudnn_first: bool = True) -> SdpaOrder:
    """The default order of one release. ``cudnn_first`` False: a variable forbids cuDNN the first place.

    Read in the source of 2.4.0, and in the machine code of select_sdp_backend of each wheel from 2.2.2 to
    2.15.0 (libtorch_cuda.so).
    """
    if env.device.type == "cpu":
        return SdpaOrder((FLASH, MATH), "priority_order_cpp, sdp_utils_cpp.cpp")
    where = "priority_order, sdp_utils.cpp"
    if env.device.type == "xpu":
        return _on_xpu(torch)
    if env.device.type not in ("cuda", "rocm"):
        return SdpaOrder((MATH,), "scaled_dot_product_attention, attention.cpp")
    if torch < (2, 3):
        return SdpaOrder(_BEFORE_CUDNN, where)
    if torch < (2, 5):
        return SdpaOrder(_CUDNN_FIRST, where if torch < (2, 4) else f"{where}, line 48")
    if torch < (2, 5, 1):
        return SdpaOrder(_CUDNN_FIRST if (env.arch or 0) >= 90 else _CUDNN_SECOND, where)
    if torch < (2, 9):
        return SdpaOrder(_FLASH_FIRST, where)
    return _by_cudnn(env, torch, cudnn_first)


def _on_xpu(torch: Version) -> SdpaOrder:
    """oneDNN's kernel came with 2.7 (pytorch#147614), FlashAttention by SYCL-TLA with 2.10 (pytorch#167057).

    Read in pytorch's main at about 2.9 (commit 0067c6fa), in a fork at about 2.14, in transformers/xpu/
    sdp_utils.cpp at a048055e, and in the wheels: transformers/xpu/sdp_utils.h is there from 2.10 on.
    """
    where, forks = (
        "priority_order, mkldnn/xpu/Attention.cpp",
        "that wheels for XPU are as pytorch's main and forks, which were read",
    )
    if torch < (2, 7):
        return SdpaOrder((MATH,), where, inferred="that builds for XPU before 2.7 have no kernel of oneDNN")
    return SdpaOrder(
        (ONEDNN, SYCL_FLASH, MATH) if torch >= (2, 10) else (ONEDNN, MATH), where, inferred=forks
    )


def _by_cudnn(env: Environment, torch: Version, allowed: bool) -> SdpaOrder:
    """From 2.9 on cuDNN goes first on Hopper and Blackwell servers, by its version and the build's."""
    where, inferred = "check_prefer_cudnn_attention and priority_order, sdp_utils.cpp", ""
    if torch < (2, 10):
        # By the version that torch was compiled with, whatever is loaded: from 9.9 on.
        variable = "TORCH_CUDNN_SDPA_PREFERRED=0"
        right = env.arch in (90, 100) and env.cuda is not None and env.cuda[:2] not in _COMPILED_WITH_9_8
        if right and env.cuda is not None and env.cuda[:2] not in _COMPILED_WITH_NEWER:
            inferred = (
                "that a build for this CUDA, which is in no index, was compiled with cuDNN 9.9 or newer"
            )
    else:
        variable = "TORCH_CUDNN_SDPA_DEPRIORITIZED=1"
        major, minor = divmod(env.arch or 0, 10)
        every = torch >= (2, 13) and env.cuda is not None and env.cuda >= (13,)
        known = env.cudnn is not None and env.cudnn > _TRUSTED
        right = known and major in (9, 10) and (every or minor in (0, 3))
    if env.device.type != "cuda" or not right:
        return SdpaOrder(_FLASH_FIRST, where)
    return SdpaOrder(_CUDNN_FIRST if allowed else _FLASH_FIRST, where, variable, inferred)
