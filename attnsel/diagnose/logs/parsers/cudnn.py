"""What cuDNN and cudnn-frontend say: no plan for a graph, a condition not met, a library not loaded.

Read: NVIDIA/cudnn-frontend 1.23.0 (commit 3929da2): include/cudnn_frontend/plans.h,
node/sdpa_support_surface.h, node/scaled_dot_product_flash_attention.h. PyTorch puts "cuDNN Frontend error:"
before them, TransformerEngine "cuDNN Error:". A condition's text says what the frontend checks before it
asks libcudnn; "No execution plans" is libcudnn's own no.
"""

from __future__ import annotations

import re
from typing import Any

from attnsel.diagnose.logs.message import FirstOf, Message, Variant, declared, error

WITHOUT_CUDNN = (
    "leave cuDNN out of F.sdpa's choice: torch.backends.cuda.enable_cudnn_sdp(False), or "
    "TORCH_CUDNN_SDPA_ENABLED=0 where the release reads it"
)
GET_NVRTC = (
    "pip install nvidia-cuda-nvrtc-cu12 (nvidia-cuda-nvrtc with CUDA 13), or put the folder of libnvrtc.so "
    "on LD_LIBRARY_PATH; `attnsel doctor` looks for it"
)

_ERROR = re.compile(r"cuDNN (?:Frontend )?[Ee]rror: [^\n]*")


def _whole(match: re.Match[str]) -> dict[str, Any]:
    """The whole of what PyTorch raises, which is then cuDNN's message and not PyTorch's too."""
    raised = _ERROR.search(match.string)
    return {"text": raised[0] if raised and raised.end() >= match.end() else match[0]}


_MESSAGES = (
    # ---- libraries ----------------------------------------------------------------------------------------
    *declared("cudnn", "libraries", {"": _whole}, GET_NVRTC=GET_NVRTC, WITHOUT_CUDNN=WITHOUT_CUDNN),
    # ---- no plan ------------------------------------------------------------------------------------------
    error(
        pattern="No execution plans support the graph|No valid execution plans built|No valid engine configs",
        read=_whole,
        candidates=("sdpa.cudnn", "cudnn"),
        variants=(
            Variant(
                "cuDNN has no plan because libnvrtc, with which it compiles its attention kernels, is "
                "missing or does not fit",
                f"{GET_NVRTC}; {WITHOUT_CUDNN}",
                ("INSTALL009",),
                seen=("libnvrtc",),
            ),
            Variant(
                "ZLUDA runs CUDA programs on AMD's GPUs, and what stands for cuDNN there has no attention",
                f"{WITHOUT_CUDNN}; or PyTorch for ROCm in ZLUDA's place",
                seen=("zluda",),
            ),
            Variant(
                "PyTorch 2.5.0 tries cuDNN before its other kernels, and cuDNN has no plan for this call",
                f"torch 2.5.1 or newer, where cuDNN comes last again (or 2.4.1); {WITHOUT_CUDNN}",
                torch="2.5.0",
            ),
            Variant(
                "on a GPU older than Ampere (compute capability 8.0) cuDNN has no fused attention",
                f"F.sdpa's memory-efficient kernel, which runs there: {WITHOUT_CUDNN}",
                ("CUDNN106", "CUDNN002", "SDPA303"),
                archs=(0, 79),
            ),
            Variant(
                "cuDNN has no plan for this graph and does not say which condition failed: most often "
                "libnvrtc that does not load, a head dimension, mask or backward that this release has no "
                "kernel for, or a release too old for the GPU",
                "CUDNN_LOGERR_DBG=1 CUDNN_LOGDEST_DBG=stderr (CUDNN_LOGLEVEL_DBG=2 on newer releases) has "
                "libcudnn say which; `attnsel explain` with the shapes tells what this release refuses; "
                + WITHOUT_CUDNN,
            ),
        ),
        source="cudnn-frontend 1.23.0, include/cudnn_frontend/plans.h:120, 507, 575; "
        "NVIDIA/cudnn-frontend#116, huggingface/diffusers#9704",
    ),
    Message(
        # What its log names first is the condition; the lines below it only repeat that some call failed.
        "; Reason: ",
        r"CUDNN_STATUS_\w{3,40}; Reason: (?P<reason>(?![\w.>-]{1,80}\([^\n]{0,160}\)\s*(?:\n|$)|\(CUDNN)"
        r"[^\n]{8,200})",
        kind="refusal",
        candidates=("sdpa.cudnn", "cudnn"),
        known="libcudnn refuses the graph: {reason}",
        source="libcudnn's own log (CUDNN_LOGLEVEL_DBG); NVIDIA/Fuser#5639",
    ),
    Message(
        pattern=r'"smVersion":(?P<sm>\d{2,3})0\b',
        kind="machine",
        read=lambda match: {"environment": {"gpu": f"sm{match['sm']}"}},
        source="libcudnn 9's engine descriptions; Comfy-Org/ComfyUI#9947",
    ),
    # ---- conditions ---------------------------------------------------------------------------------------
    *declared("cudnn", "conditions", {"": _whole}, WITHOUT_CUDNN=WITHOUT_CUDNN),
)

LIBRARIES = (FirstOf("cuDNN", "no plan for a graph, conditions, libraries that do not load", _MESSAGES),)
