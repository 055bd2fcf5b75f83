"""The libraries of cuDNN's attention: which pieces are on disk, whose they are, and which load.

Nothing here needs a GPU. Files are found where wheels put them; a child process asks whether they load.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path

from attnsel.cli.probe import CudaLibraries, redact, run_script
from attnsel.environment.installed import distribution

# cuDNN 9's pieces that its graph API loads by name, and the one that loads them.
PIECES = (
    "libcudnn.so.9",
    "libcudnn_graph.so.9",
    "libcudnn_heuristic.so.9",
    "libcudnn_engines_precompiled.so.9",
    "libcudnn_engines_runtime_compiled.so.9",
)
_CUDNN_FOLDER = "nvidia/cudnn/lib"
_NVRTC = {12: ("nvidia/cuda_nvrtc/lib", "libnvrtc.so.12"), 13: ("nvidia/cu13/lib", "libnvrtc.so.13")}
NVRTC_PACKAGE = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}
_CUDNN_PACKAGES = {12: "nvidia-cudnn-cu12", 13: "nvidia-cudnn-cu13"}
_LOAD = """
import ctypes, json, sys
said = {}
for path in %r:
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        said[path] = str(error)
print(json.dumps(said))
"""


def look(cuda_build: str | None, roots: Iterable[str] | None = None) -> CudaLibraries:
    """The libraries of a torch built for ``cuda_build``, "12.8"; None: no CUDA build, nothing to look at.

    ``roots``: where packages lie; sys.path if left out.
    """
    if cuda_build is None or sys.platform != "linux":
        return CudaLibraries()
    cuda = 13 if cuda_build.partition(".")[0] == "13" else 12
    places = [Path(root or ".") for root in (sys.path if roots is None else roots)]
    folder = next((at for root in places if (at := root / _CUDNN_FOLDER).is_dir()), None)
    if folder is None or not (folder / PIECES[0]).is_file():
        return CudaLibraries(cuda)  # a torch with its own cuDNN, or a system's
    absent = [name for name in PIECES if not (folder / name).is_file()]
    nvrtc_folder, nvrtc = _NVRTC[cuda]
    files = [at for root in places if (at := root / nvrtc_folder / nvrtc).is_file()][:1]
    # Without a file the loader may still know one: conda's, a toolkit's.
    tried = [*map(str, files), *([] if files else [nvrtc])]
    tried += [str(folder / name) for name in PIECES if name not in absent]
    ran, said, trouble = run_script(_LOAD % (tried,))
    broken = {name: str(why) for name, why in said.items()} if ran else {tried[-1]: trouble}
    if not files and nvrtc in broken:
        del broken[nvrtc]
        absent.append(nvrtc)
    if files and not list(files[0].parent.glob("libnvrtc-builtins.so*")):
        absent.append("libnvrtc-builtins.so")
    packages = [d for name in _CUDNN_PACKAGES.values() if (d := distribution(name)) is not None]
    return CudaLibraries(
        cuda,
        tuple(absent),
        {Path(name).name: redact(why) for name, why in broken.items()},
        tuple(_foreign(packages, folder)),
        tuple(d.metadata["Name"] for d in packages) if len(packages) > 1 else (),
        dict(_ahead(os.environ.get("LD_LIBRARY_PATH", ""), folder)),
    )


def _foreign(packages: list[Distribution], folder: Path) -> Iterator[str]:
    """Pieces of another size than the package that lists them says."""
    for package in packages:
        for file in package.files or ():
            path = Path(str(file.locate()))
            ours = file.name in PIECES and path.parent == folder and path.is_file()
            if ours and file.size is not None and path.stat().st_size != file.size:
                yield f"{file.name} of {package.metadata['Name']} {package.version}"


def _ahead(variable: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Pieces that the loader finds elsewhere first: LD_LIBRARY_PATH goes before the wheels' own RUNPATH."""
    for name in PIECES:
        for place in filter(None, variable.split(":")):
            path = Path(place, name)
            if path.is_file():
                if path.resolve() != (folder / name).resolve():
                    yield name, redact(str(path.resolve()))
                break
