"""What happens to a call after ``flash_api.cpp`` picked a kernel: read from the ``.h`` files, not executed.

The launch templates need CUTLASS and a compiler for CUDA, so nothing of them runs here. Each check below
names the file that says so, and is looked up in the release at hand: where the line is not there, the check
is not made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from attnsel.environment.gpus import ARCHITECTURES

_GRID_YZ = 65_535  # the most blocks in y and z, CUDA C++ Programming Guide, "Technical Specifications"
Launch = Mapping[str, Any]


class LaunchCheck(NamedTuple):
    """``fails`` says whether a recorded launch on an architecture goes wrong."""

    generation: Literal[2, 3]
    file: str
    line: str  # a regular expression, found on the line that says so
    words: str
    fails: Callable[[Launch, int], bool]


class Failure(NamedTuple):
    words: str
    where: str  # "file:line"


def _shared_memory(arch: int) -> int:
    """Of one block, in bytes; for an architecture that is not listed, of the newest one below it."""
    return ARCHITECTURES[max(known for known in ARCHITECTURES if known <= arch)].shared_memory


def _is_backward(launch: Launch) -> bool:
    return bool(launch["kernel"] == "run_mha_bwd_")


def _is_attention(launch: Launch) -> bool:
    return _is_backward(launch) or str(launch["kernel"]).startswith("run_mha_fwd_")


def _no_dropout_kernel(launch: Launch, arch: int) -> bool:
    wide_with_dropout = launch.get("Headdim") == 256 and launch["p_dropout"] < 1.0
    return _is_backward(launch) and wide_with_dropout and _shared_memory(arch) < 144 * 1024


def _forward_grid(launch: Launch, arch: int) -> bool:
    if _is_backward(launch) or not _is_attention(launch):
        return False
    y, z = launch["b"], launch["h"]
    if launch["kernel"] == "run_mha_fwd_splitkv_dispatch" and launch["num_splits"] > 1:
        y, z = launch["num_splits"], launch["b"] * launch["h"]
    return bool(launch["seqlen_q"] < 1 or max(y, z) > _GRID_YZ)


def _backward_grid(launch: Launch, arch: int) -> bool:
    if not _is_backward(launch):
        return False
    no_keys = launch["seqlen_k"] < 1 and not launch["deterministic"]
    return bool(no_keys or max(launch["b"], launch["h"]) > _GRID_YZ)


def _not_hopper(launch: Launch, arch: int) -> bool:
    return _is_attention(launch) and launch.get("Arch") == 90 and arch != 90


def _takes_turns(launch: Launch, arch: int) -> bool:
    return _is_backward(launch) and bool(launch["deterministic"])


def _wide_values(launch: Launch, arch: int) -> bool:
    return bool(launch["dv"] > launch.get("kHeadDimV", launch["dv"]))


_TWO = "csrc/flash_attn/src/"
CHECKS = (
    LaunchCheck(
        2,
        f"{_TWO}flash_bwd_launch_template.h",
        r"max smem is 99 KB\. Only works without dropout",
        "no kernel is launched and dq, dk, dv stay as they were allocated: the backward of head_dim above "
        "192 with dropout needs 144 KB of shared memory in a block",
        _no_dropout_kernel,
    ),
    LaunchCheck(
        2,
        f"{_TWO}flash_fwd_launch_template.h",
        r"dim3 grid\(num_m_block, params\.",
        "CUDA refuses the launch: the grid has no block (no queries), or more than 65535 in y or z (batch, "
        "heads; with split keys, batch times heads)",
        _forward_grid,
    ),
    LaunchCheck(
        2,
        f"{_TWO}flash_bwd_launch_template.h",
        r"dim3 grid_n\(gridDimx, params\.b, params\.h\)",
        "CUDA refuses the launch: the grid has no block (no keys), or more than 65535 in y or z "
        "(batch, heads)",
        _backward_grid,
    ),
    LaunchCheck(
        3,
        "setup.py",
        r"arch=compute_90a,code=sm_90a",
        "the kernel picked is compiled for compute capability 9.0 alone: no image of it is for this "
        "GPU, and the process ends (CHECK_CUDA in cuda_check.h calls exit)",
        _not_hopper,
    ),
    LaunchCheck(
        3,
        "flash_bwd_launch_template.h",
        r"false /\*Deterministic\*/",
        "the gradients are not the same bits every run: the template is instantiated without Deterministic",
        _takes_turns,
    ),
    LaunchCheck(
        3,
        "flash_api.cpp",
        r"float_e4m3_t, 64, 64",
        "columns of v are left out: the kernel picked has a smaller head_dim of v",
        _wide_values,
    ),
)


def failures(
    folder: Path, generation: Literal[2, 3], arch: int, launches: Sequence[Launch]
) -> Iterator[Failure]:
    """What the launch templates do to these launches. ``folder``: Source.python."""
    for check in CHECKS:
        if check.generation == generation and any(check.fails(launch, arch) for launch in launches):
            number = _line(folder / check.file, check.line)
            if number is not None:
                yield Failure(check.words, f"{folder / check.file}:{number}")


def _line(file: Path, wanted: str) -> int | None:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((number for number, line in enumerate(lines, 1) if re.search(wanted, line)), None)
