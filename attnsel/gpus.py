"""The GPU catalogue: what is known about a card that is not in the machine.

Memory and SM counts are from NVIDIA's data sheets; shared memory per block is a property of the
architecture (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"). First toolkits
are from CUDA's release notes, first cuDNN releases from cuDNN's support matrices.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from attnsel.versions import Version


class Gpu(NamedTuple):
    name: str
    arch: int  # 10 * major + minor: 90 is compute capability 9.0
    memory_gib: int | None
    sm_count: int | None


class Architecture(NamedTuple):
    """``shared_memory``: the most that one block may ask for, in bytes. ``cuda``: the first toolkit that
    compiles for it; ``cudnn``: the first release with attention for it. None: older than what is asked."""

    shared_memory: int
    cuda: Version | None = None
    cudnn: Version | None = None


_CUDNN_8_9, _CUDNN_9_7 = Version(8, 9), Version(9, 7)

ARCHITECTURES: dict[int, Architecture] = {
    70: Architecture(98_304),
    75: Architecture(65_536, Version(10)),
    80: Architecture(166_912, Version(11)),
    86: Architecture(101_376, Version(11, 1)),
    87: Architecture(166_912),
    89: Architecture(101_376, Version(11, 8)),
    90: Architecture(232_448, Version(11, 8), _CUDNN_8_9),
    100: Architecture(232_448, Version(12, 8), _CUDNN_9_7),
    103: Architecture(232_448, Version(12, 8), _CUDNN_9_7),
    110: Architecture(232_448, Version(12, 8), _CUDNN_9_7),
    120: Architecture(101_376, Version(12, 8), _CUDNN_9_7),
    121: Architecture(101_376, Version(12, 8), _CUDNN_9_7),
}

CATALOGUE: dict[str, Gpu] = {
    gpu.name.casefold().replace(" ", ""): gpu
    for gpu in (
        Gpu("V100", 70, 32, 80),
        Gpu("T4", 75, 16, 40),
        Gpu("A100", 80, 80, 108),
        Gpu("A10", 86, 24, 72),
        Gpu("RTX 3090", 86, 24, 82),
        Gpu("L4", 89, 24, 58),
        Gpu("L40S", 89, 48, 142),
        Gpu("RTX 4090", 89, 24, 128),
        Gpu("H100", 90, 80, 132),
        Gpu("H200", 90, 141, 132),
        Gpu("B200", 100, 180, 148),
        Gpu("B300", 103, 288, 148),
        Gpu("RTX 5090", 120, 32, 170),
        Gpu("GB10", 121, 128, 48),
    )
}


def look_up_gpu(name: str) -> Gpu:
    """A catalogue entry by name ("H100", "rtx4090"), or a bare architecture ("sm90", "9.0").

    Raises ValueError with the nearest names when there is no such GPU.
    """
    key = re.sub(r"[\s_-]+|nvidia|geforce|tesla", "", name.casefold())
    key = key if key in CATALOGUE else f"rtx{key}"
    if key in CATALOGUE:
        return CATALOGUE[key]
    bare = re.fullmatch(r"(?:sm_?(\d{2,3})a?|(\d{1,2})\.(\d))", name.strip().casefold())
    if bare:
        arch = int(bare[1]) if bare[1] else 10 * int(bare[2]) + int(bare[3])
        if arch in ARCHITECTURES:
            return Gpu(f"sm{arch}", arch, None, None)
    near = difflib.get_close_matches(key.removeprefix("rtx"), CATALOGUE, n=2, cutoff=0.5)
    hint = f" (did you mean {' or '.join(CATALOGUE[n].name for n in near)}?)" if near else ""
    names = ", ".join(gpu.name for gpu in CATALOGUE.values())
    archs = ", ".join(f"sm{arch}" for arch in ARCHITECTURES)
    raise ValueError(f"unknown GPU{hint}; allowed: {names}, or an architecture: {archs}")
