"""What every candidate needs before anything else is asked."""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import rule
from attnsel.verdict import AtLeast, Bad, OneOf, Words
from attnsel.versions import Version

_PYTORCH = ("sdpa.cudnn", "sdpa.flash", "sdpa.efficient", "sdpa.math", "tiled")
_OLDEST_TORCH = Version(2, 6)


@rule(
    "INSTALL001",
    *_PYTORCH,
    "cudnn",
    "triton",
    evidence="measured",
    trips={"gpu": "H100", "torch": None},
)
def torch_installed(p: AttentionParams, env: Environment) -> Bad | None:
    """PyTorch must be installed to run attention.

    Why: attnsel's kernels take and return torch tensors; planning alone needs no torch.
    Fix: pip install 'attnsel[torch]'.
    Source: attnsel's pyproject.toml.
    """
    if env.torch is None:
        return Bad("torch", None, AtLeast(_OLDEST_TORCH))
    return None


@rule(
    "INSTALL002",
    "triton",
    evidence="measured",
    trips={"gpu": "H100", "triton": None},
)
def triton_installed(p: AttentionParams, env: Environment) -> Bad | None:
    """Triton must be installed to compile attnsel's own kernels.

    Why: the CPU builds of PyTorch do not bring it; the CUDA builds on Linux do.
    Fix: pip install 'attnsel[triton]'.
    Source: Requires-Dist of the torch wheels on PyPI, 2.2 to 2.14.
    """
    if env.triton is None:
        return Bad("triton", None, AtLeast(Version(3, 2)))
    return None


@rule(
    "INSTALL003",
    "cudnn",
    evidence="documented",
    trips={"gpu": "H100", "cudnn": None},
)
def cudnn_installed(p: AttentionParams, env: Environment) -> Bad | None:
    """cuDNN must be installed.

    Why: the kernels live in libcudnn and its engine libraries.
    Fix: pip install nvidia-cudnn-cu12 (or -cu13 with a CUDA 13 build of PyTorch).
    Source: nvidia-cudnn-frontend documentation, "Installation".
    """
    if env.cudnn is None:
        return Bad("cudnn", None, AtLeast(Version(8, 9)))
    return None


@rule(
    "INSTALL004",
    "cudnn",
    evidence="documented",
    trips={"gpu": "H100", "cudnn_frontend": None},
)
def cudnn_frontend_installed(p: AttentionParams, env: Environment) -> Bad | None:
    """nvidia-cudnn-frontend must be installed: graphs are built through it.

    Why: attnsel describes attention to cuDNN as a graph; the frontend is its Python interface.
    Fix: pip install 'attnsel[cudnn]'.
    Source: attnsel's pyproject.toml; frontend releases 1.20 to 1.28 honour a described device.
    """
    if env.cudnn_frontend is None:
        return Bad("cudnn_frontend", None, AtLeast(Version(1, 20)))
    return None


@rule(
    "DEVICE001",
    "cudnn",
    evidence="documented",
    trips={"gpu": "cpu"},
)
def needs_a_cuda_device(p: AttentionParams, env: Environment) -> Bad | None:
    """cuDNN runs on NVIDIA GPUs only.

    Why: its kernels are CUDA machine code.
    Fix: describe or use an NVIDIA GPU.
    Source: cuDNN documentation, "Support Matrix".
    """
    if env.device.type != "cuda":
        return Bad("device", env.device.type, OneOf("cuda"))
    return None


@rule(
    "DEVICE002",
    "sdpa.cudnn",
    "sdpa.flash",
    "sdpa.efficient",
    "cudnn",
    "triton",
    evidence="measured",
    trips={"max_seqlen_q": 0},
)
def something_to_attend(p: AttentionParams, env: Environment) -> Bad | None:
    """Fused kernels want at least one query and one key.

    Why: an empty grid is refused by some kernels and kills the process in others (PyTorch's CPU flash
    kernel divides by the number of keys).
    Fix: none is needed: sdpa.math and tiled return the empty or zero result.
    Source: torch sdp_utils (check for non-zero lengths); SIGFPE seen on torch 2.13 with s_kv = 0.
    """
    if p.max_seqlen_q == 0:
        return Bad("max_seqlen_q", 0, AtLeast(1))
    if p.max_seqlen_kv == 0:
        return Bad("max_seqlen_kv", 0, Words("at least 1"))
    return None
