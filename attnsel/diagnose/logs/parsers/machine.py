"""What a log says of the machine: torch.utils.collect_env, nvidia-smi, pip list, what programs print, what
people write beside an error; and whose code it shows.

The texts are as issues show them; the sources of these programs were not read.
"""

from __future__ import annotations

import re
from contextlib import suppress

from attnsel.diagnose.logs.message import SEEN, Facts, Library, Message
from attnsel.environment import describe_device
from attnsel.environment.gpus import look_up_gpu
from attnsel.errors import InvalidInput

_PIP = {
    "torch": "torch",
    "triton": "triton",
    "flash-attn": "flash_attn",
    "flash_attn": "flash_attn",
    "flash-attn-3": "flash_attn_3",
    "flash-attn-4": "flash_attn_4",
    "transformer-engine": "transformer_engine",
    "transformer_engine": "transformer_engine",
    "nvidia-cudnn-cu11": "cudnn",
    "nvidia-cudnn-cu12": "cudnn",
    "nvidia-cudnn-cu13": "cudnn",
    "nvidia-cudnn-frontend": "cudnn_frontend",
}
_PACKAGE = r"(?<![\w./-])(?P<package>" + "|".join(sorted(_PIP, key=len, reverse=True)) + r")"
_NUMBER = r"(?P<version>\d+\.\d[\w.]*)(?:\+cu(?P<cuda>\d{3})\b)?"
_TORCH = r"(?P<release>\d+\.\d+(?:\.\d+)?)[\w.]{0,24}(?:\+cu(?P<cu>\d{3})\b)?"


def _package(match: re.Match[str]) -> Facts:
    """A package's version, without what its build adds."""
    release = re.match(r"\d+(?:\.\d+){1,3}", match["version"])
    assert release is not None  # the pattern begins so
    parts = release[0].split(".")[:3]
    environment: dict[str, object] = {_PIP[match["package"]]: ".".join(parts)}
    if match["package"] == "torch" and match["cuda"]:
        environment["cuda"] = f"{match['cuda'][:2]}.{match['cuda'][2:]}"
    return {"text": match[0], "environment": environment}


def _torch(match: re.Match[str]) -> Facts:
    """A release of torch; what its build was made for is in its name: 2.9.1+cu130 is CUDA 13.0."""
    environment = {"torch": match["release"]}
    if match["cu"]:
        environment["cuda"] = f"{match['cu'][:2]}.{match['cu'][2:]}"
    return {"environment": environment}


def _gpu(match: re.Match[str]) -> Facts | None:
    name = match["name"].strip()
    try:
        look_up_gpu(name)
    except ValueError:
        return None
    return {"text": f"GPU {name}", "environment": {"gpu": name}}


def _cudnn(match: re.Match[str]) -> Facts:
    return {"environment": {"cudnn": int(match["number"])}}


def _machine(quick: str | tuple[str, ...], pattern: str, **more: object) -> Message:
    return Message(quick, pattern, kind="machine", **more)  # type: ignore[arg-type]


_PRINTED = Library(
    "the machine",
    "torch.utils.collect_env, nvidia-smi and pip list: where it ran (alone they are no call)",
    (
        _machine(
            ("PyTorch version", "pytorch version"),
            rf"[Pp]y[Tt]orch version[^\n:]{{0,9}}: {_TORCH}",
            read=_torch,
        ),
        _machine("CUDA used to build PyTorch:", r"CUDA used to build PyTorch: (?P<cuda>\d+\.\d+)"),
        _machine("Is CUDA available:", r"Is CUDA available: False", environment={"gpu": "cpu"}),
        _machine("Python version:", r"Python version: (?P<python>3\.\d+)(?=.*\bruntime\b)"),
        _machine("OS: Microsoft Windows", "OS: Microsoft Windows", environment={"platform": "windows"}),
        _machine("cuDNN version:", r"cuDNN version: (?P<number>\d{4,6})\b", read=_cudnn),
        _machine("cudnn", r"libcudnn\.so\.(?P<cudnn>\d+\.\d+\.\d+)"),
        _machine("GPU ", r"\bGPU \d+: (?P<name>(?:NVIDIA|GeForce|Tesla|Quadro)[\w \-]*\w)", read=_gpu),
        _machine("NVIDIA ", r"\|\s+\d+\s+(?P<name>NVIDIA [\w \-]*?\w)\s+(?:On|Off)\s", read=_gpu),
        _machine("cuda:", r"Device: cuda:\d+ (?P<name>NVIDIA [\w \-]*\w)", read=_gpu),
        _machine(
            ("torch=", "triton=", "flash-attn", "flash_attn=", "nvidia-cudnn", "transformer_engine="),
            rf"{_PACKAGE}(?:==|\s{{1,40}}(?:@\s)?|-)v?{_NUMBER}",
            read=_package,
        ),
    ),
)

# ---- whose code it is: the frames of a traceback, by library; nothing of their paths is kept ----------

_SEP = r"[/\\]"


def _seen(name: str, quick: str | tuple[str, ...], pattern: str = "") -> Message:
    return Message(quick, pattern, kind="machine", read=lambda match: {"text": name})


_FRAMES = Library(
    SEEN,
    "",
    (
        _seen("zluda", ("ZLUDA", "Zluda", "zluda")),
        _seen("flash_attn", "flash_attn_interface"),
        _seen("flash_attn", "flash-attention", rf"flash-attention{_SEP}"),
        _seen("flash_attn", ("flash_fwd_launch_template", "flash_bwd_launch_template")),
        _seen("flash_attn", "mha_fwd", r"\bmha_(?:varlen_)?fwd"),
        _seen("flash_attn_3", "hopper", rf"flash-attention{_SEP}hopper"),
        _seen("flash_attn_3", "flash_attn_3"),
        _seen("vllm", ("vllm", "Vllm"), r"[/\\]vllm[/\\]|\bvllm==|\bVllmWorker|EngineCore_"),
        _seen("transformers", "transformers", rf"{_SEP}transformers{_SEP}"),
        _seen("F.sdpa", "scaled_dot_product_attention("),
        _seen("F.sdpa", "sdpa_attention.py"),
    ),
)

# ---- what people write beside an error: the name of the card, packages with their versions -----------

_MAKER = r"(?:NVIDIA|GeForce|Tesla|Quadro|AMD|Radeon|Instinct|Intel\(R\)|Apple) "
_BEFORE = rf"(?:\b(?:GPU|AMDGPU|Device|GPU type)(?: \d{{1,2}})?: ?(?:cuda:\d )?|\b\d{{1,2}}x |(?={_MAKER}))"
_CARD = r"(?P<card>(?:[\w()+-]{1,24} ){0,5}[\w()+-]{1,24})"


def _card(match: re.Match[str]) -> Facts | None:
    """The card that the most of the words name, if there is one."""
    words = match["card"].split()
    while words:
        name = " ".join(words).strip(" :,.;")
        with suppress(InvalidInput):
            device = describe_device(name)
            if device.name != f"sm{device.arch}":
                return {"environment": {"gpu": name}}
        words.pop()
    return None


def _version(quick: str, component: str) -> Message:
    return Message(
        quick,
        rf"(?:^|(?<!build)[\s*(-]){re.escape(quick)}(?: ?==? ?| ?: ?| "
        rf"{{1,30}})(?P<{component}>\d+\.\d+[\w.+]{{0,40}}(?<!\.))",
        kind="machine",
    )


_PASTED = Library(
    "the machine",
    "",
    (
        _machine(
            (
                "NVIDIA ",
                "GPU",
                "Tesla ",
                "Quadro ",
                "AMD ",
                "Radeon",
                "Instinct",
                "Intel(R)",
                "Apple ",
                "Device:",
                "x ",
            ),
            _BEFORE + _CARD,
            read=_card,
        ),
        _version("torch", "torch"),
        _version("PyTorch Version", "torch"),
        _version("PyTorch", "torch"),
        _version("flash-attn", "flash_attn"),
        _version("flash_attn", "flash_attn"),
    ),
)

LIBRARIES = (_PRINTED, _FRAMES, _PASTED)
