"""What cuDNN and cudnn-frontend say: no plan for a graph, a condition not met, a library not loaded.

Read: NVIDIA/cudnn-frontend 1.23.0 (commit 3929da2): include/cudnn_frontend/plans.h,
node/sdpa_support_surface.h, node/scaled_dot_product_flash_attention.h. PyTorch puts "cuDNN Frontend error:"
before them, TransformerEngine "cuDNN Error:". A condition's text says what the frontend checks before it
asks libcudnn; "No execution plans" is libcudnn's own no.
"""

from __future__ import annotations

import re
from typing import Any

from attnsel.diagnose.logs.message import FirstOf, Message, Variant

_PLANS = "cudnn-frontend 1.23.0, include/cudnn_frontend/plans.h"
_SURFACE = "cudnn-frontend 1.23.0, include/cudnn_frontend/node/sdpa_support_surface.h"
_NODE = "cudnn-frontend 1.23.0, include/cudnn_frontend/node/scaled_dot_product_flash_attention.h"

NO_PLAN = r"No execution plans support the graph|No valid execution plans built|No valid engine configs"
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


def _said(quick: str | tuple[str, ...] = "", pattern: str = "", **declared: Any) -> Message:
    return Message(quick, pattern, **{"kind": "error", "read": _whole, **declared})


CANDIDATES = ("sdpa.cudnn", "cudnn")

_MESSAGES = (
    # ---- libraries ----------------------------------------------------------------------------------------
    _said(
        pattern=r"libnvrtc[\w.-]{0,40}: cannot open shared object file|failed to open libnvrtc|"
        r"Could not load library (?:libnvrtc|nvrtc64)",
        kind="refusal",
        candidates=CANDIDATES,
        known="libnvrtc is not found: cuDNN compiles its attention kernels with it when they first run, "
        "and offers no plan without it",
        environment={"missing": "libnvrtc"},
        codes=("INSTALL009",),
        fix=(GET_NVRTC, WITHOUT_CUDNN),
        source="cuDNN's loader; Comfy-Org/ComfyUI#10090, pytorch/pytorch#140930",
    ),
    _said(
        "major version mismatch between cudart and nvrtc",
        kind="refusal",
        candidates=CANDIDATES,
        known="NVRTC is of another CUDA than the runtime: packages of CUDA 12 and 13 lie side by side, and "
        "cuDNN cannot compile its attention kernels",
        environment={"missing": "libnvrtc"},
        codes=("INSTALL009",),
        fix=(
            "one CUDA in the environment: pip list | grep nvidia, uninstall the nvidia-…-cu12 packages "
            "beside a CUDA 13 torch (or the reverse), and nothing of another CUDA on LD_LIBRARY_PATH",
            WITHOUT_CUDNN,
        ),
        source="libcudnn 9, CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING; Comfy-Org/ComfyUI#10170",
    ),
    _said(
        "CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING",
        kind="refusal",
        candidates=CANDIDATES,
        known="cuDNN could not compile its attention kernel: NVRTC is missing, or does not fit",
        environment={"missing": "libnvrtc"},
        codes=("INSTALL009",),
        fix=(GET_NVRTC, WITHOUT_CUDNN),
        source="libcudnn 9, cudnn_graph.h: cudnnStatus_t",
    ),
    _said(
        ("libcudnn", "64_9", "64_8"),
        r"(?:Could not load library|Unable to load any of|cannot (?:open|load)[^\n]{0,30}) ?\{?"
        r"(?:libcudnn|cudnn\w{0,20}64_\d)|libcudnn[\w.]{0,40}: cannot open shared object",
        kind="refusal",
        candidates=CANDIDATES,
        known="a piece of cuDNN is missing or does not load",
        environment={"missing": "libcudnn"},
        codes=("INSTALL010",),
        fix="pip install --force-reinstall the nvidia-cudnn-cu12 (-cu13) that torch requires, and no other "
        "cuDNN on LD_LIBRARY_PATH; `attnsel doctor` lists the pieces",
        source="libcudnn 9's loader shim",
    ),
    _said(
        pattern=r"CUDNN_STATUS_(?:SUBLIBRARY_VERSION_MISMATCH|SUBLIBRARY_LOADING_FAILED|VERSION_MISMATCH)|"
        r"cuDNN version incompatibility",
        kind="refusal",
        candidates=CANDIDATES,
        known="pieces of two releases of cuDNN are mixed",
        codes=("INSTALL010",),
        fix="one cuDNN in the process: drop the system's from LD_LIBRARY_PATH, reinstall the one that "
        "torch pins",
        source="libcudnn 9, cudnn_graph.h: cudnnStatus_t; torch/backends/cudnn/__init__.py",
    ),
    # ---- no plan ------------------------------------------------------------------------------------------
    _said(
        pattern=NO_PLAN,
        candidates=CANDIDATES,
        variants=(
            Variant(
                "cuDNN has no plan because libnvrtc, with which it compiles its attention kernels, is "
                "missing or does not fit",
                f"{GET_NVRTC}; {WITHOUT_CUDNN}",
                ("INSTALL009",),
                seen=("libnvrtc",),
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
        source=f"{_PLANS}:120, 507, 575; NVIDIA/cudnn-frontend#116, huggingface/diffusers#9704",
    ),
    _said(
        pattern=r'"smVersion":(?P<sm>\d{2,3})0\b',
        kind="machine",
        read=lambda match: {"environment": {"gpu": f"sm{match['sm']}"}},
        source="libcudnn 9's engine descriptions; Comfy-Org/ComfyUI#9947",
    ),
    # ---- conditions ---------------------------------------------------------------------------------------
    _said(
        pattern=r"s_(?:kv|q) not a multiple of 64 (?:with|is)[^\n]{0,80}below 9\.0\.0",
        known="below cuDNN 9.0.0 lengths must be multiples of 64",
        codes=("CUDNN109", "CUDNN110"),
        fix=("torch 2.4 or newer, which brings cuDNN 9", WITHOUT_CUDNN),
        source="cudnn-frontend 1.x before 1.23, node/scaled_dot_product_flash_attention.h",
    ),
    _said(
        pattern=r"hidden_dim (?:shou?l?d )?(?:be )?(?:less than or equal to (?:128|256) and hidden_dim "
        r"should be )?multiple of 8",
        known="a head dimension is no multiple of 8",
        codes=("CUDNN005", "CUDNN006", "CUDNN111", "CUDNN112"),
        fix="pad q, k and v with zeros to the next multiple of 8",
        source=f"{_SURFACE}:222",
    ),
    _said(
        "head_dim should be less than or equal to 128 for backend version 9.9 or below on ampere",
        known="up to cuDNN 9.9 head dimensions end at 128 on Ampere and Ada",
        codes=("CUDNN160",),
        fix="cuDNN 9.10.2 or newer, or another kernel for wide heads",
        source=f"{_SURFACE}:327",
    ),
    _said(
        "head_dim should be less than or equal to 256 for backend version 9.9 or below on hopper",
        known="up to cuDNN 9.9 head dimensions end at 256 on Hopper",
        codes=("CUDNN161",),
        fix="cuDNN 9.10.2 or newer",
        source=f"{_SURFACE}:333",
    ),
    _said(
        "head_dim should be less than or equal to 128 for backend version 9.8 or",
        known="in cuDNN 9.8 head dimensions end at 128 on Blackwell",
        codes=("CUDNN162",),
        fix="cuDNN 9.9 or newer",
        source=f"{_SURFACE}:338",
    ),
    _said(
        pattern=r"Num hidden_dim should be less than or equal to (?:128|256) and hidden_dim should be "
        r"multiple of 8",
        known="the backward has no kernel for this head dimension",
        codes=("CUDNN235", "CUDNN233", "CUDNN236"),
        fix="cuDNN 9.11 or newer on Blackwell; elsewhere head dimensions up to 128 (Hopper: 256)",
        source=_NODE,
    ),
    _said(
        "Num hidden_dim d_v should be equal to 128 if d_qk is 192",
        known="of unequal wide heads the backward has 192/128 only",
        codes=("CUDNN234", "CUDNN237"),
        fix="pad the values to 128, or FlashAttention 3 on Hopper",
        source=_NODE,
    ),
    _said(
        "THD (ragged offset) is only supported in Hopper and above",
        known="packed sequences (thd) need Hopper or newer in this cuDNN",
        codes=("CUDNN431", "CUDNN170"),
        fix="cuDNN 9.18.1 or newer on Ampere and Ada, flash-attn's varlen functions, or padded batches",
        source=f"{_SURFACE}:350",
    ),
    _said(
        "SDPA FP16/BF16 requires SM80",
        known="cuDNN has no fused attention for a GPU older than Ampere",
        codes=("CUDNN002", "CUDNN106"),
        fix=WITHOUT_CUDNN,
        source=f"{_SURFACE}:320",
    ),
    _said(
        pattern=r"not supported on cuDNN 9\.10\.0/9\.10\.1 due to known bugs|not supported on cudnn 9\.10\.0",
        known="cuDNN 9.10.0 and 9.10.1 have known bugs in attention and are blocked",
        codes=("BUG001", "CUDNN001"),
        fix="cuDNN 9.10.2 or newer: pip install 'nvidia-cudnn-cu12>=9.10.2'",
        source=f"{_SURFACE}:203",
    ),
    _said(
        "cuDNN 9.14.0 has a known bug",
        known="cuDNN 9.14.0 reads out of bounds with a window over more than 1024 keys",
        codes=("BUG002",),
        fix="cuDNN 9.14.1 or newer",
        source=f"{_SURFACE}:211",
    ),
    _said(
        "below 9.7.0, bottom right causal masking is not supported",
        known="FP8 with a bottom-right causal mask needs cuDNN 9.7.0",
        codes=("CUDNN332", "CUDNN333"),
        fix="cuDNN 9.7.0 or newer, or a top-left causal mask where lengths are equal",
        source=f"{_SURFACE}:181",
    ),
    _said(
        "Bottom right causal mask is only supported with s_q multiple of 64",
        known="below cuDNN 9.6.0 a bottom-right causal mask needs lengths in multiples of 64",
        codes=("CUDNN405", "CUDNN406"),
        fix="cuDNN 9.6.0 or newer, or lengths padded to 64",
        source=f"{_SURFACE}:119",
    ),
    _said(
        "Bottom right causal mask does not support max_s_q > max_s_kv",
        known="a bottom-right causal mask with more queries than keys",
        codes=("CUDNN407", "CUDNN010"),
        fix="the last s_kv queries alone: the rest see no key",
        source=f"{_SURFACE}:108",
    ),
    _said(
        "Bottom right causal mask is only supported with is_bias=False",
        known="a bottom-right causal mask beside a bias, ALiBi or dropout",
        codes=("CUDNN408", "CUDNN409", "CUDNN011", "CUDNN012"),
        fix="the mask top left where lengths are equal, or another kernel",
        source=f"{_SURFACE}:114",
    ),
    _said(
        "Left and right bounds are only supported with is_dropout=False",
        known="a window beside dropout or a bias",
        codes=("CUDNN416", "CUDNN417", "CUDNN016", "CUDNN017"),
        fix="cuDNN 9.10.2 or newer, or no dropout in these layers",
        source=f"{_SURFACE}:249",
    ),
    _said(
        "Sliding window attention is only supported with max_s_q <= max_s_kv",
        known="a window with more queries than keys",
        codes=("CUDNN418", "CUDNN014"),
        fix="another kernel for this call",
        source=f"{_SURFACE}:236",
    ),
    _said(
        pattern=r"decode only mode, i\.e\. s_q == 1,? not supported",
        known="a single query in a form that this cuDNN refuses",
        codes=("CUDNN410", "CUDNN013", "CUDNN140", "CUDNN164"),
        fix="no causal flag with one query (it hides nothing), or cuDNN 9.10 or newer",
        source=f"{_SURFACE}:268",
    ),
    _said(
        "dBias not support s_q/s_kv which aren't multiple of 64",
        known="below cuDNN 9.5.0 the gradient of a bias needs lengths in multiples of 64",
        codes=("CUDNN208", "CUDNN209"),
        fix="cuDNN 9.5.0 or newer, or a bias (a mask of floats) that needs no gradient",
        source=_NODE,
    ),
    _said(
        "Deterministic algorithm is not supported on blackwell architecture with cudnn version below 9.18",
        known="on Blackwell a deterministic backward needs cuDNN 9.18.0",
        codes=("CUDNN260", "CUDNN206"),
        fix="cuDNN 9.18.0 or newer, or deterministic=False",
        source=_NODE,
    ),
    _said(
        "SDPA with sink_token is not supported before 9.13",
        known="attention sinks need cuDNN 9.13.0",
        codes=("CUDNN024", "CUDNN126"),
        fix="cuDNN 9.13.0 or newer",
        source=_NODE,
    ),
    _said(
        pattern=r"below 9\.5\.0, paged caches are not supported|Paged attention only supported with d_qk and "
        r"d_v <= 128",
        known="a paged cache that this cuDNN does not read",
        codes=("CUDNN435", "CUDNN173"),
        fix="cuDNN 9.10 or newer",
        source=f"{_SURFACE}:279",
    ),
    _said(
        pattern=r"sdpa fp8 forward operation is only supported (?:on (?:Hopper|Blackwell)|starting)",
        known="FP8 attention that this GPU or this cuDNN does not have",
        codes=("CUDNN304", "CUDNN305", "CUDNN315"),
        fix="attention in bf16 and the rest in FP8: a recipe with fp8_dpa=False",
        source=f"{_SURFACE}:143",
    ),
    _said(
        "number of heads for key and query must be a factor of number of heads for query",
        known="the number of query heads is no multiple of the number of key/value heads",
        codes=(),
        fix="look at the order of dimensions: [batch, heads, length, head_dim] here",
        source=f"{_SURFACE}:70",
    ),
    _said(
        "The stride for the last dimension corresponding to the embedding size",
        known="the head dimension is not the innermost one of a tensor",
        codes=("CUDNN007",),
        fix=".contiguous() before the call",
        source=f"{_SURFACE}:60",
    ),
    _said(
        "[cudnn_frontend] E",
        r"\[cudnn_frontend\] (?:ERROR|Error): (?P<said>(?!No )[A-Z][^\n]{10,160})",
        known="cudnn-frontend refuses the graph: {said}",
        fix="`attnsel explain` with the shapes and this cuDNN tells the rule and the release that lifts it",
        source="cudnn-frontend 1.23.0, graph_helpers.h: RETURN_CUDNN_FRONTEND_ERROR_IF",
    ),
)

LIBRARIES = (FirstOf("cuDNN", "no plan for a graph, conditions, libraries that do not load", _MESSAGES),)
