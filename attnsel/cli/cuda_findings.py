"""What the doctor makes of cuDNN's and NVRTC's files."""

from __future__ import annotations

from collections.abc import Iterator

from attnsel.cli.cuda_libraries import NVRTC_PACKAGE
from attnsel.cli.findings import Finding
from attnsel.cli.probe import CudaLibraries
from attnsel.environment import Environment


def find_cuda(found: CudaLibraries, env: Environment) -> Iterator[Finding]:
    """Each thing that is wrong with them, and the line that mends it."""
    nvrtc = f"pip install --force-reinstall {NVRTC_PACKAGE[found.cuda]}"
    release = f"=={env.cudnn}.*" if env.cudnn is not None else ""
    cudnn = f"pip install --force-reinstall --no-deps 'nvidia-cudnn-cu{found.cuda}{release}'"
    for name in found.absent:
        of_nvrtc = name.startswith("libnvrtc")
        needs = "cuDNN compiles its attention with it" if of_nvrtc else "cuDNN's graphs need it"
        yield Finding("error", f"{name} is not there: {needs}", nvrtc if of_nvrtc else cudnn)
    for name, why in found.broken.items():
        fix = nvrtc if name.startswith("libnvrtc") else cudnn
        yield Finding("error", f"{name} does not load: {why}", fix)
    for name in found.foreign:
        yield Finding("error", f"{name} was overwritten: its size is not what the package brought", cudnn)
    if found.owners:
        names = " and ".join(found.owners)
        yield Finding(
            "error",
            f"{names} write into one folder, nvidia/cudnn/lib: which files are there depends on the order",
            f"pip uninstall -y {' '.join(found.owners)}; {cudnn}",
        )
    if found.ahead:
        places = ", ".join(f"{name} from {path}" for name, path in found.ahead.items())
        yield Finding(
            "warning",
            f"LD_LIBRARY_PATH puts another cuDNN before torch's: {places}",
            "take that folder off LD_LIBRARY_PATH: pieces of two releases do not work together",
        )
