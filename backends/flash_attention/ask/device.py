"""A GPU that is described, to whoever asks torch about it. For a child process: torch's functions are replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

SHARED_MEMORY = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""KiB that one block may have, by architecture.

Source: CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per Compute
Capability": maximum amount of shared memory per thread block.
"""


def describe(arch: int, sm_count: int) -> None:
    """From now on torch's current device is this one, though nothing can run on it."""
    properties = SimpleNamespace(
        name=f"sm{arch}",
        major=arch // 10,
        minor=arch % 10,
        multi_processor_count=sm_count,
        shared_memory_per_block_optin=SHARED_MEMORY.get(arch, 99) * 1024,
        warp_size=32,
    )
    stream = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0))
    replaced: dict[str, Any] = {
        "get_device_capability": lambda device=None: (arch // 10, arch % 10),
        "get_device_properties": lambda device=None: properties,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "current_stream": lambda device=None: stream,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
    }
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
