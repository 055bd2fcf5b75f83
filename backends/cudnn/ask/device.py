"""A GPU as cuDNN describes one: the JSON that its device-property descriptor reads.

The format is undocumented; what 9.8 to 9.28 ask for was read from their error messages. Unknown keys are
ignored and missing ones refused, so one superset serves all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attnsel.environment.gpus import ARCHITECTURES, CATALOGUE, Gpu


class _Arch(NamedTuple):
    threads_per_sm: int
    blocks_per_sm: int
    like: str  # the catalogue's card that stands in where a bare architecture is asked about


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_ARCHS: dict[int, _Arch] = {
    70: _Arch(2048, 32, "V100"),
    72: _Arch(2048, 32, "V100"),
    75: _Arch(1024, 16, "T4"),
    80: _Arch(2048, 32, "A100"),
    86: _Arch(1536, 16, "A10"),
    87: _Arch(1536, 16, "Orin"),
    89: _Arch(1536, 24, "RTX 4090"),
    90: _Arch(2048, 32, "H100"),
    100: _Arch(2048, 32, "B200"),
    103: _Arch(2048, 32, "B300"),
    110: _Arch(1536, 24, "Thor"),
    120: _Arch(1536, 24, "RTX 5090"),
    121: _Arch(1536, 24, "GB10"),
}


class _Board(NamedTuple):
    clock_mhz: int
    memory_mhz: int
    bus_bits: int
    l2_mib: int


# NVIDIA's data sheets and architecture white papers (boost clock, memory clock and bus, L2). Of these only
# the architecture, the SM count and the shared memory were seen to change an answer.
_BOARDS: dict[str, _Board] = {
    "V100": _Board(1530, 877, 4096, 6),
    "T4": _Board(1590, 5001, 256, 4),
    "A100": _Board(1410, 1593, 5120, 40),
    "A10": _Board(1695, 6251, 384, 6),
    "RTX 3090": _Board(1695, 9751, 384, 6),
    "L4": _Board(2040, 6251, 192, 48),
    "L40S": _Board(2520, 9001, 384, 96),
    "RTX 4090": _Board(2520, 10501, 384, 72),
    "H100": _Board(1980, 2619, 5120, 50),
    "H200": _Board(1980, 3201, 6144, 50),
    "B200": _Board(1965, 3996, 8192, 126),
    "B300": _Board(1920, 3996, 8192, 126),
    "RTX 5090": _Board(2407, 14001, 512, 96),
    "GB10": _Board(2418, 4266, 256, 24),
    "Orin": _Board(1300, 3200, 256, 4),
    "Thor": _Board(1575, 4266, 256, 32),
}
# Boards of Jetson that stand in: under these names the catalogue has an architecture alone.
_JETSON = {"Orin": Gpu("Orin", 87, 32, 16), "Thor": Gpu("Thor", 110, 128, 20)}


def device_json(
    arch: int, name: str = "", memory: int | None = None, sm_count: int | None = None
) -> dict[str, Any]:
    """What cuDNN's descriptor reads for this architecture (90 is sm90); known cards by name.

    Raises ValueError for an architecture that nothing is known about.
    """
    if arch not in _ARCHS:
        raise ValueError(f"nothing is known about sm{arch}; allowed: {', '.join(f'sm{a}' for a in _ARCHS)}")
    limits = _ARCHS[arch]
    like = _JETSON.get(limits.like) or CATALOGUE[_key(limits.like)]
    card = CATALOGUE.get(_key(name))
    if card is None or card.arch != arch:
        card = like
    board = _BOARDS.get(card.name, _BOARDS[limits.like])
    return {
        "deviceName": f"NVIDIA {name or limits.like}",
        "deviceVer": 10 * arch,
        "driverVer": 13000,
        "cudaDeviceId": 0,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "multiProcessorCount": sm_count or card.sm_count or like.sm_count,
        "smCountOrigin": 0,
        "warpSize": 32,
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": limits.threads_per_sm,
        "maxCtasPerSM": limits.blocks_per_sm,
        "regsPerBlock": 65536,
        "maxRegistersPerSM": 65536,
        "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": ARCHITECTURES[arch].shared_memory,
        "oversizedSharedMemoryPerBlock": 0,
        "reservedSharedMemoryPerBlock": 1024 if arch >= 80 else 0,
        "totalGlobalMem": memory or (card.memory_gib or like.memory_gib or 0) << 30,
        "smClockRateKHz": 1000 * board.clock_mhz,
        "memClockRateKHz": 1000 * board.memory_mhz,
        "memoryBusWidth": board.bus_bits,
        "l2CacheSize": board.l2_mib << 20,
    }


def _key(name: str) -> str:
    return name.casefold().replace(" ", "")
