"""INSTALL and DEVICE: what every candidate needs before anything else is asked."""

from __future__ import annotations

from attnsel.backends.registry import OLDEST_TORCH, needing, where
from attnsel.environment import Environment, without_code
from attnsel.environment.releases import OLDEST
from attnsel.environment.versions import Version
from attnsel.params import AttentionParams
from attnsel.rules.api import rule
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import AnyBuild, AtLeast, FreeText, Installed, OneOf


@rule(
    "INSTALL001",
    needing("torch"),
    requires={"torch": Installed(Version(*OLDEST_TORCH), known=OLDEST)},
    evidence="measured",
    fires_on={"gpu": "H100", "torch": None},
    passes={"torch": "2.2.0"},
)
def torch_installed(p: AttentionParams, env: Environment) -> None:
    """PyTorch must be installed to run attention.

    Why: attnsel's kernels take and return torch tensors; planning alone needs no torch. What an older PyTorch
    than 2.2 runs is not known, so nothing is said of one that is installed here, and none can be described.
    Fix: pip install torch.
    Source: attnsel's pyproject.toml.
    """


@rule(
    "INSTALL011",
    where(lambda record: "torch" in record.needs and not record.f_sdpa),
    requires={"torch": AtLeast(Version(*OLDEST_TORCH))},
    evidence="measured",
    fires_on={"torch": "2.5.1"},
    passes={"torch": "2.6.0"},
)
def torch_that_attnsel_runs_on(p: AttentionParams, env: Environment) -> bool:
    """attnsel runs on PyTorch 2.6 and newer.

    Why: what calls this kernel is attnsel, and it imports on 2.6 and newer. With an older one the kernels
    behind F.scaled_dot_product_attention are planned all the same: F.sdpa runs them without attnsel. An
    older one that nobody stated, which goes with a cuDNN that somebody did, is not held against a kernel.
    Fix: upgrade PyTorch.
    Source: attnsel's pyproject.toml.
    """
    return "torch" not in env.assumed


@rule(
    "INSTALL002",
    needing("triton"),
    requires={"triton": Installed(Version(3, 2))},
    evidence="measured",
    fires_on={"gpu": "H100", "triton": None},
)
def triton_installed(p: AttentionParams, env: Environment) -> None:
    """Triton must be installed to compile attnsel's own kernels.

    Why: the CPU builds of PyTorch do not bring it; the CUDA builds on Linux do.
    Fix: pip install triton.
    Source: Requires-Dist of the torch wheels on PyPI, 2.2 to 2.14.
    """


@rule(
    "INSTALL003",
    needing("cudnn"),
    requires={"cudnn": Installed(Version(8, 9))},
    evidence="documented",
    fires_on={"gpu": "H100", "cudnn": None},
)
def cudnn_installed(p: AttentionParams, env: Environment) -> None:
    """cuDNN must be installed.

    Why: the kernels live in libcudnn and its engine libraries.
    Fix: pip install nvidia-cudnn-cu12 (or -cu13 with a CUDA 13 build of PyTorch).
    Source: nvidia-cudnn-frontend documentation, "Installation".
    """


@rule(
    "INSTALL004",
    needing("cudnn_frontend"),
    requires={"cudnn_frontend": Installed(Version(1, 20))},
    evidence="documented",
    fires_on={"gpu": "H100", "cudnn_frontend": None},
)
def cudnn_frontend_installed(p: AttentionParams, env: Environment) -> None:
    """nvidia-cudnn-frontend must be installed: graphs are built through it.

    Why: attnsel describes attention to cuDNN as a graph; the frontend is its Python interface.
    Fix: pip install 'nvidia-cudnn-frontend<1.29'.
    Source: attnsel's pyproject.toml; frontend releases 1.20 to 1.28 honour a described device.
    """


@rule(
    "INSTALL005",
    needing("flash_attn"),
    requires={"flash_attn": Installed(Version(2, 8, 3))},
    evidence="documented",
    fires_on={"gpu": "H100", "flash_attn": None},
    passes={"flash_attn": "2.8.3"},
)
def flash_attn_installed(p: AttentionParams, env: Environment) -> None:
    """flash-attn must be installed: FlashAttention 2.

    Why: its kernels come with it. It has wheels for some versions of PyTorch, CUDA and Python, and none in
    PyPI; where there is no wheel, pip compiles it, which takes hours and a CUDA toolkit.
    Fix: the wheel that fits, which attnsel explain names; attnsel doctor says what is wrong with one that is
    there.
    Source: README.md and setup.py of flash-attention v2.8.3.
    """


@rule(
    "INSTALL006",
    needing("flash_attn_3"),
    requires={"flash_attn_3": Installed(Version(3))},
    evidence="documented",
    fires_on={"gpu": "H100", "flash_attn_3": None},
    passes={"flash_attn_3": "3.0.0"},
)
def flash_attn_3_installed(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 3 must be installed, built from hopper/ of its repository

    Why: its kernels come with it, and no release of it is in PyPI.
    Fix: build hopper/ of flash-attention, or take a wheel from PyTorch's index.
    Source: README.md of flash-attention at 0251105a, "FlashAttention-3 beta release".
    """


@rule(
    "INSTALL007",
    needing("flash_attn_4"),
    requires={"flash_attn_4": Installed(Version.parse("4.0.0b36"))},
    evidence="documented",
    fires_on={"gpu": "H100", "flash_attn_4": None},
    passes={"flash_attn_4": "4.0.0b36"},
)
def flash_attn_4_installed(p: AttentionParams, env: Environment) -> None:
    """flash-attn-4 must be installed: FlashAttention 4.

    Why: its kernels are written in CuTe DSL and compiled when they are first needed.
    Fix: pip install --pre flash-attn-4 (with the extra cu13 for CUDA 13).
    Source: README.md of flash-attention at 0251105a, "FlashAttention-4".
    """


_PUBLISHED_FOR = "one that PyTorch is published for: sm37, sm50 and newer but for old Jetsons (sm53, sm62)"


@rule(
    "INSTALL008",
    needing("torch"),
    device={"cuda"},
    fires_on={"gpu": "V100", "torch": "2.14.0", "cuda": "13.0"},
    passes={"gpu": "V100", "torch": "2.14.0", "cuda": "12.6"},
)
def code_for_the_gpu(p: AttentionParams, env: Environment) -> Violation | None:
    """torch's wheel must have code for the GPU's architecture.

    Why: without it nothing starts on the GPU, not even a copy: "no kernel image is available". A wheel has
    machine code for a few architectures, fewer of the old ones with each CUDA: CUDA 13 compiles for none
    before sm75. For Fermi, Kepler but for K80, and the Jetsons before Xavier nothing was published since
    PyTorch 2.2: JetPack 4, the last for those, has PyTorch 1.10.
    Fix: the wheel of the same torch for another CUDA, from PyTorch's index; else a torch that has it. A torch
    that was built from source, as in NVIDIA's containers, has what TORCH_CUDA_ARCH_LIST said: state its CUDA
    with it; where no wheel has both, nothing is refused.
    Source: the wheels themselves, 2.2 to 2.15 (attnsel/environment/releases.py); CUDA C++ Programming
    Guide, "Binary Compatibility"; pytorch#172352.
    """
    lacking = without_code(env)
    if lacking is None:
        return None
    if not lacking.nearest:
        return Violation(
            "arch",
            env.arch,
            FreeText(_PUBLISHED_FOR),
            f"{lacking} for sm{env.arch}",
        )
    observed = env.cuda if lacking.field == "cuda" else env.torch
    return Violation(lacking.field, observed, AnyBuild(lacking.nearest), f"{lacking} for sm{env.arch}")


@rule(
    "INSTALL009",
    "cudnn",
    "sdpa.cudnn",
    device={"cuda"},
    fp8="both",
    evidence="reported",
    fires_on={"gpu": "H100", "missing": "libnvrtc"},
)
def nvrtc_found(p: AttentionParams, env: Environment) -> Violation | None:
    """cuDNN compiles its attention kernels when they first run, with NVRTC

    Why: without libnvrtc the engines that hold attention offer no plan: "Could not load library
    libnvrtc.so.12" and then "No execution plans support the graph". CUDA wheels of torch bring it as a
    package of its own; images without the CUDA toolkit do not have it otherwise.
    Fix: pip install nvidia-cuda-nvrtc-cu12 (nvidia-cuda-nvrtc with CUDA 13), or LD_LIBRARY_PATH with the
    folder of libnvrtc.so; attnsel doctor looks for it.
    Source: huggingface/diffusers#9704, Comfy-Org/ComfyUI#10090, NixOS/nixpkgs#461334;
    attnsel/backends/cudnn/ask/libraries.py, which loads it before it asks libcudnn.
    """
    if "libnvrtc" not in env.missing:
        return None
    new = env.cuda is not None and env.cuda.major >= 13
    package = "nvidia-cuda-nvrtc" if new else "nvidia-cuda-nvrtc-cu12"
    return Violation("missing", "libnvrtc", FreeText(f"NVRTC: pip install {package}"))


@rule(
    "INSTALL010",
    "cudnn",
    "sdpa.cudnn",
    device={"cuda"},
    fp8="both",
    evidence="reported",
    fires_on={"gpu": "H100", "missing": "libcudnn"},
)
def cudnn_whole(p: AttentionParams, env: Environment) -> Violation | None:
    """Every piece of libcudnn must be there, loadable and of one release

    Why: libcudnn loads libcudnn_graph, libcudnn_engines_precompiled and its other parts by name when they
    are first needed. One that is absent, or of another release (two packages in one folder,
    LD_LIBRARY_PATH), ends the call or the process.
    Fix: reinstall one nvidia-cudnn package, and keep other copies off LD_LIBRARY_PATH; attnsel doctor says
    which piece it is.
    Source: cuDNN 9 documentation, "Graph API", sub-libraries; Comfy-Org/Nvidia_RTX_Nodes_ComfyUI#40.
    """
    if "libcudnn" not in env.missing:
        return None
    major = 13 if env.cuda is not None and env.cuda.major >= 13 else 12
    release = f"=={env.cudnn}.*" if env.cudnn is not None else ""
    return Violation(
        "missing",
        "libcudnn",
        FreeText(f"all of it: pip install --force-reinstall 'nvidia-cudnn-cu{major}{release}'"),
    )


@rule(
    "DEVICE001", "cudnn", requires={"device": OneOf("cuda")}, evidence="documented", fires_on={"gpu": "cpu"}
)
def needs_a_cuda_device(p: AttentionParams, env: Environment) -> None:
    """cuDNN runs on NVIDIA GPUs only.

    Why: its kernels are CUDA machine code.
    Fix: describe or use an NVIDIA GPU.
    Source: cuDNN documentation, "Support Matrix".
    """


@rule(
    "DEVICE002",
    where(lambda record: "empty" not in record.takes and record.limits == "rules"),
    requires={"max_seqlen_q": AtLeast(1), "max_seqlen_kv": AtLeast(1)},
    evidence="measured",
    fires_on={"max_seqlen_q": 0},
)
def something_to_attend(p: AttentionParams, env: Environment) -> None:
    """Fused kernels want at least one query and one key.

    Why: an empty grid is refused by some kernels and kills the process in others (PyTorch's CPU flash
    kernel divides by the number of keys).
    Fix: none is needed: sdpa.math and tiled return the empty or zero result.
    Source: torch sdp_utils (check for non-zero lengths); SIGFPE seen on torch 2.13 with s_kv = 0.
    """
