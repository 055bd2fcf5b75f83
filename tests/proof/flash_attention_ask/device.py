"""A GPU that is described, to whoever asks torch about it.

For a child process: functions of torch are replaced.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from attnsel.environment.gpus import ARCHITECTURES


def describe(arch: int, sm_count: int) -> None:
    """From now on torch's current device is this one, though nothing can run on it."""
    properties = SimpleNamespace(
        name=f"sm{arch}",
        major=arch // 10,
        minor=arch % 10,
        multi_processor_count=sm_count,
        shared_memory_per_block_optin=ARCHITECTURES[arch].shared_memory,
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
