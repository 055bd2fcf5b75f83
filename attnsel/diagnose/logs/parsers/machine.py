"""What a log says of the machine: torch.utils.collect_env, nvidia-smi, pip list, what programs print.

The texts are as issues show them; the sources of these programs were not read.
"""

from __future__ import annotations

import re

from attnsel.diagnose.logs.message import Facts, Library, Message
from attnsel.environment.gpus import look_up_gpu

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
_NUMBER = r"(?P<version>\d+\.\d[\w.]*)"


def _package(match: re.Match[str]) -> Facts:
    """A package's version, without what its build adds."""
    release = re.match(r"\d+(?:\.\d+){1,3}", match["version"])
    assert release is not None  # the pattern begins so
    parts = release[0].split(".")[:3]
    return {"text": match[0], "environment": {_PIP[match["package"]]: ".".join(parts)}}


def _gpu(match: re.Match[str]) -> Facts | None:
    name = match["name"].strip()
    try:
        look_up_gpu(name)
    except ValueError:
        return None
    return {"text": f"GPU {name}", "environment": {"gpu": name}}


def _cudnn(match: re.Match[str]) -> Facts:
    return {"environment": {"cudnn": int(match["number"])}}


def _machine(quick: str, pattern: str, **more: object) -> Message:
    return Message(quick, pattern, kind="machine", **more)  # type: ignore[arg-type]


LIBRARY = Library(
    "the machine",
    "torch.utils.collect_env, nvidia-smi and pip list: where it ran (alone they are no call)",
    (
        _machine("PyTorch version:", r"PyTorch version: (?P<torch>\d+\.\d+(?:\.\d+)?)"),
        _machine("pytorch version:", r"pytorch version: (?P<torch>\d+\.\d+(?:\.\d+)?)"),
        _machine("CUDA used to build PyTorch:", r"CUDA used to build PyTorch: (?P<cuda>\d+\.\d+)"),
        _machine("Is CUDA available:", r"Is CUDA available: False", environment={"gpu": "cpu"}),
        _machine("Python version:", r"Python version: (?P<python>3\.\d+)(?=.*\bruntime\b)"),
        _machine("OS: Microsoft Windows", "OS: Microsoft Windows", environment={"platform": "windows"}),
        _machine("cuDNN version:", r"cuDNN version: (?P<number>\d{4,6})\b", read=_cudnn),
        _machine("cudnn", r"libcudnn\.so\.(?P<cudnn>\d+\.\d+\.\d+)"),
        _machine("GPU ", r"\bGPU \d+: (?P<name>(?:NVIDIA|GeForce|Tesla|Quadro)[\w \-]*\w)", read=_gpu),
        _machine("NVIDIA ", r"\|\s+\d+\s+(?P<name>NVIDIA [\w \-]*?\w)\s+(?:On|Off)\s", read=_gpu),
        _machine("cuda:", r"Device: cuda:\d+ (?P<name>NVIDIA [\w \-]*\w)", read=_gpu),
        *(
            _machine(quick, rf"{_PACKAGE}(?:==|\s{{1,40}}(?:@\s)?|-)v?{_NUMBER}", read=_package)
            for quick in (
                "torch=",
                "triton=",
                "flash-attn",
                "flash_attn=",
                "nvidia-cudnn",
                "transformer_engine=",
            )
        ),
    ),
)
