"""What the doctor makes of a machine: each finding with its level and what to do about it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, NamedTuple

from attnsel.backends.registry import CANDIDATES, OLDEST_TORCH
from attnsel.base.records import json_fields
from attnsel.base.rows import read_rows
from attnsel.cli.probe import CudaLibraries, Probe, ProbedMachine, read_version, redact, run_script
from attnsel.environment import Environment
from attnsel.environment.installed import FLASH_ATTN, distribution
from attnsel.environment.releases import Build, build_with, default_build
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput, printable
from attnsel.settings import VARIABLES, Settings, configure, unknown_variables


@cache
def _known() -> dict[str, dict[str, str]]:
    return {row["code"]: row for row in read_rows("attnsel.cli", "findings")}


@json_fields("code", "level", "text", "consequence", "fix")
class Finding(NamedTuple):
    """``code``: of ``data/findings.csv``, which says how bad it is and what follows from it."""

    code: str
    text: str
    fix: str

    @classmethod
    def of(cls, code: str, **seen: Any) -> Finding:
        """A row, with what was seen in the place of its braces."""
        row = _known()[code]
        return cls(code, row["text"].format(**seen), row["fix"].format(**seen))

    @property
    def level(self) -> str:
        return _known()[self.code]["level"]

    @property
    def consequence(self) -> str:
        return _known()[self.code]["consequence"]


class PlainCall(NamedTuple):
    """What a plain call got on one device; ``verdicts`` is a code or a word per candidate."""

    device: int
    dtype: str
    training: bool
    backend: str | None
    verdicts: dict[str, dict[str, Any]]


def find(machine: ProbedMachine, calls: list[PlainCall], more: Iterable[Finding] = ()) -> list[Finding]:
    """Everything that is wrong or worth knowing, ``more`` with it, the worst first."""
    found = [
        *_settings(os.environ),
        *_libraries(machine),
        *more,
        *_plugins(machine),
        *_torch(machine),
        *_devices(machine, calls),
    ]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.level))


def settings_in_force() -> Settings | None:
    """The settings of this process; None where a variable holds what it cannot."""
    try:
        return configure()
    except InvalidInput:
        return None


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The ATTNSEL_ variables that are set."""
    return {
        printable(name): printable(redact(value))
        for name, value in sorted(environ.items())
        if name.startswith("ATTNSEL_")
    }


def _settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        configure()
    except InvalidInput as error:
        yield Finding.of("DOCTOR001", error=redact(str(error)), field=error.field)
    for name, meant in unknown_variables(environ).items():
        fix = f"did you mean {meant}?" if meant else f"allowed: {', '.join(VARIABLES)}"
        yield Finding.of("DOCTOR002", name=printable(name), fix=fix)


def _libraries(machine: ProbedMachine) -> Iterator[Finding]:
    for name, probe in machine.probes.items():
        if name == "cudnn_frontend" and _NO_LIBCUDNN in probe.trouble:
            yield _frontend_alone(machine, probe)
        elif probe.loads is False and name not in FLASH_ATTN:  # those have an explanation of their own
            package = "nvidia-cudnn-frontend" if name == "cudnn_frontend" else name
            lacking = _LACKING.search(probe.trouble)
            fix = f"reinstall it: pip install --force-reinstall {package}"
            if lacking and lacking[1] != name:  # triton 3.2 wants setuptools, and does not ask pip for it
                fix = f"it needs the package {lacking[1]}: pip install {lacking[1]}"
            yield Finding.of("DOCTOR003", name=name.replace("_", "-"), probe=probe, fix=fix)


_LACKING = re.compile(r"No module named '(\w+)")
_NO_LIBCUDNN = "cudnnGetVersion"  # the first symbol that cudnn-frontend looks for, when it is imported


def _frontend_alone(machine: ProbedMachine, probe: Probe) -> Finding:
    """cudnn-frontend without a libcudnn that it can open: it is whole, and cuDNN is what lacks."""
    env = machine.environments[0] if machine.environments else None
    if env is None or env.device.type != "cuda":
        return Finding.of("DOCTOR004", probe=probe)
    return Finding.of("DOCTOR005", probe=probe, cuda=12 if env.cuda is None else env.cuda.major)


def _plugins(machine: ProbedMachine) -> Iterator[Finding]:
    for found, probe in machine.plugins:
        if found.plugin is None:
            yield Finding.of("DOCTOR006", found=found, trouble=redact(found.trouble))
        elif probe.loads is False:
            yield Finding.of("DOCTOR007", found=found, trouble=probe.trouble)


def _torch(machine: ProbedMachine) -> Iterator[Finding]:
    probe, triton = machine.probes["torch"], machine.probes["triton"]
    if probe.installed is None:
        yield Finding.of("DOCTOR008")
        return
    version = read_version(probe.installed)
    if version is not None and version < OLDEST_TORCH:
        yield Finding.of("DOCTOR009", version=version, oldest=".".join(map(str, OLDEST_TORCH)))
    if not probe.loads:
        return
    cuda_build = probe.said.get("cuda_build")
    if machine.gpus_in_sight and not cuda_build and not probe.said.get("hip_build"):
        yield Finding.of("DOCTOR010", gpu=machine.gpus_in_sight[0], torch=probe.installed)
    if machine.gpus_in_sight and cuda_build and not probe.said.get("cuda_available"):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        code, gpu = "DOCTOR012" if hidden else "DOCTOR011", machine.gpus_in_sight[0]
        yield Finding.of(code, gpu=gpu, torch=probe.installed, cuda=cuda_build)
    if version is not None and (cuda_build or probe.said.get("hip_build")):
        yield from _triton(version, read_version(triton.installed))
        wheel = build_with(version, read_version(cuda_build))
        if wheel is not None and machine.environments[0].platform == "linux":
            yield from _cudnn(wheel, machine.environments[0].cudnn)
    frontend = machine.probes["cudnn_frontend"].said.get("cudnn")
    loaded = machine.environments[0].cudnn
    second = None if frontend is None else Version.parse(int(frontend))
    if loaded is not None and second not in (None, loaded):
        yield Finding.of("DOCTOR013", loaded=loaded, second=second)


def _triton(torch: Version, triton: Version | None) -> Iterator[Finding]:
    """A torch wheel names one triton: another minor version breaks torch.compile and may break kernels."""
    build = default_build(torch)
    if build is not None and triton is not None and build.triton[:2] != triton[:2]:
        yield Finding.of("DOCTOR014", torch=torch, its=build.triton, triton=triton)


def _cudnn(wheel: Build, cudnn: Version | None) -> Iterator[Finding]:
    """A torch wheel names one cuDNN, and torch loads no older minor (torch/backends/cudnn/__init__.py)."""
    if cudnn is None or cudnn[:2] == wheel.cudnn[:2]:
        return
    newer = cudnn.major == wheel.cudnn.major and cudnn > wheel.cudnn
    yield Finding.of("DOCTOR015" if newer else "DOCTOR016", wheel=wheel, cudnn=cudnn)


def _devices(machine: ProbedMachine, calls: list[PlainCall]) -> Iterator[Finding]:
    for number, env in enumerate(machine.environments):
        name = f"device {number} ({env.device.name})"
        for warning in env.warnings:
            yield Finding.of("DOCTOR017", device=name, warning=warning)
        for newer in env.unread:
            yield Finding.of("DOCTOR018", device=name, newer=newer)
        built_for = machine.probes["torch"].said.get("arch_list") or []
        if env.device.type == "cuda" and built_for and not runs_on(env, built_for):
            yield Finding.of("DOCTOR019", device=name, arch=env.arch, built_for=", ".join(built_for))
        if env.device.type not in ("cuda", "rocm"):
            continue
        slow = [c for c in calls if c.device == number and c.dtype != "fp32" and _slow(c.backend)]
        for call in slow:
            kind, gets = "training" if call.training else "inference", call.backend or "no backend"
            yield Finding.of("DOCTOR020", device=name, dtype=call.dtype, kind=kind, gets=gets)
    if not machine.gpus_in_sight and all(env.device.type == "cpu" for env in machine.environments):
        yield Finding.of("DOCTOR021" if machine.driver_unasked else "DOCTOR022")


def _slow(backend: str | None) -> bool:
    return backend is None or CANDIDATES[backend].last_resort


def runs_on(env: Environment, built_for: list[str]) -> bool:
    """Whether a build's code runs on a device: same major and no newer minor, or PTX that is no newer."""
    arch = env.arch
    if arch is None:
        return True
    for entry in built_for:
        kind, _, digits = entry.partition("_")
        number = int("".join(filter(str.isdecimal, digits)) or 0)
        binary = kind == "sm" and number // 10 == arch // 10 and number <= arch
        # "sm_90a" and "sm_100f" are binaries too; the letter only narrows what runs them.
        if binary or (kind == "compute" and number <= arch):
            return True
    return False


# ---- The libraries of cuDNN's attention: which pieces are on disk, whose they are, and which load ------
# Nothing here needs a GPU. Files are found where wheels put them; a child process asks whether they load.


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


# ---- What the doctor makes of cuDNN's and NVRTC's files ------------------------------------------------


def find_cuda(found: CudaLibraries, env: Environment) -> Iterator[Finding]:
    """Each thing that is wrong with them, and the line that mends it."""
    nvrtc = f"pip install --force-reinstall {NVRTC_PACKAGE[found.cuda]}"
    release = f"=={env.cudnn}.*" if env.cudnn is not None else ""
    cudnn = f"pip install --force-reinstall --no-deps 'nvidia-cudnn-cu{found.cuda}{release}'"
    for name in found.absent:
        of_nvrtc = name.startswith("libnvrtc")
        needs = "cuDNN compiles its attention with it" if of_nvrtc else "cuDNN's graphs need it"
        yield Finding.of("DOCTOR023", name=name, needs=needs, fix=nvrtc if of_nvrtc else cudnn)
    for name, why in found.broken.items():
        fix = nvrtc if name.startswith("libnvrtc") else cudnn
        yield Finding.of("DOCTOR024", name=name, why=why, fix=fix)
    for name in found.foreign:
        yield Finding.of("DOCTOR025", name=name, fix=cudnn)
    if found.owners:
        both, owners = " and ".join(found.owners), " ".join(found.owners)
        yield Finding.of("DOCTOR026", both=both, owners=owners, fix=cudnn)
    if found.ahead:
        places = ", ".join(f"{name} from {path}" for name, path in found.ahead.items())
        yield Finding.of("DOCTOR027", places=places)
