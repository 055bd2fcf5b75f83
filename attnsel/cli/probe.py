"""What is really here, asked in child processes: a library that crashes on import is only a finding."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from attnsel.base.processes import python
from attnsel.environment import Environment, Missing
from attnsel.environment.installed import FLASH_ATTN, distribution, flash_attn_versions
from attnsel.environment.versions import Version
from attnsel.plugins import Found, PluginWarning, load_plugins

_TIMEOUT = 120  # seconds; a first import of torch from a network disk takes a minute

# Distributions by the names pip lists them under.
DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton", "triton-windows"),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cudnn_frontend": ("nvidia-cudnn-frontend",),
    **{component: (name,) for component, name in FLASH_ATTN.items()},
}

# Each prints one JSON object on its last line; what a library prints before that is let go.
_SCRIPTS: dict[str, str] = {
    "torch": """
import json, torch
from attnsel import Environment
cuda = torch.cuda.is_available()
names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if cuda else [None]
print(json.dumps({
    "version": torch.__version__,
    "cuda_build": torch.version.cuda,
    "hip_build": torch.version.hip,
    "cuda_available": cuda,
    "new_abi": getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", None),
    "arch_list": torch.cuda.get_arch_list() if cuda else [],
    "devices": [Environment.detect(name).model_dump(mode="json") for name in names],
}))
""",
    "triton": "import json, triton; print(json.dumps({'version': triton.__version__}))",
    "cudnn_frontend": """
import json, cudnn
print(json.dumps({"version": cudnn.__version__, "cudnn": cudnn.backend_version()}))
""",
    # Each the module that runs, and in it the function that is called: a folder that an uninstallation left
    # behind can be imported, too.
    "flash_attn": """
import json
import torch, flash_attn_2_cuda
from flash_attn import flash_attn_func
print(json.dumps({"version": None}))
""",
    "flash_attn_3": """
import json
from flash_attn_interface import flash_attn_func
print(json.dumps({"version": None}))
""",
    "flash_attn_4": """
import json
from flash_attn.cute.interface import flash_attn_func
print(json.dumps({"version": None}))
""",
}


class Probe(NamedTuple):
    """One component: the version pip lists, whether it loads (None: not tried), what it said."""

    installed: str | None
    loads: bool | None
    said: dict[str, Any]
    trouble: str = ""


_NOTHING: Mapping[str, str] = MappingProxyType({})


class FlashFacts(NamedTuple):
    """What there is of FlashAttention, and of those who use it, beside whether the packages load."""

    packages: Mapping[str, str] = _NOTHING  # distributions by name, with their full versions
    strangers: Mapping[str, str] = _NOTHING  # modules of their names that are not theirs, and whose
    cute: str | None = None  # whose files flash_attn.cute are, where two packages brought some
    unmet: tuple[str, ...] = ()  # what flash-attn-4 says it needs and does not find
    built_for: Mapping[str, str] = _NOTHING  # flash-attn: cuda, torch, abi, as its wheel was named

    @property
    def anything(self) -> bool:
        """Whether there is anything of FlashAttention here."""
        return bool(self.strangers or set(FLASH_ATTN.values()) & set(self.packages))


class CudaLibraries(NamedTuple):
    """What is wrong with cuDNN's and NVRTC's files. Empty: nothing, or there is no cuDNN in a wheel."""

    cuda: int = 12  # the major release of CUDA that they are for
    absent: tuple[str, ...] = ()  # pieces that the folder of libcudnn lacks, and NVRTC
    broken: Mapping[str, str] = _NOTHING  # files that do not load, and what the loader said
    foreign: tuple[str, ...] = ()  # files that are not as the package that lists them brought them
    owners: tuple[str, ...] = ()  # two packages that write into one folder
    ahead: Mapping[str, str] = _NOTHING  # pieces that LD_LIBRARY_PATH puts first, and from where

    @property
    def missing(self) -> tuple[Missing, ...]:
        """What an environment has to be without."""
        gone = (*self.absent, *self.broken)
        cudnn = any("libcudnn" in name for name in gone) or bool(self.foreign)
        nvrtc = any("libnvrtc" in name for name in gone)
        return (*(["libcudnn"] if cudnn else []), *(["libnvrtc"] if nvrtc else []))  # type: ignore[arg-type]


class ProbedMachine(NamedTuple):
    """Everything the doctor looks at."""

    probes: dict[str, Probe]
    environments: tuple[Environment, ...]
    gpus_in_sight: tuple[str, ...]  # what the driver lists, torch or no torch
    plugins: tuple[tuple[Found, Probe], ...] = ()
    flash: FlashFacts = FlashFacts()
    cuda: CudaLibraries = CudaLibraries()
    driver_unasked: bool = False  # no nvidia-ml-py, which asks the driver for its GPUs


def examine() -> ProbedMachine:
    """Look at this machine. Nothing risky is imported in this process."""
    installed = {name: _installed(distributions) for name, distributions in DISTRIBUTIONS.items()}
    to_try = [name for name in _SCRIPTS if installed[name] is not None]
    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = dict(zip(to_try, pool.map(lambda name: run_script(_SCRIPTS[name]), to_try), strict=True))
        gpus = _gpus_in_sight()
    probes = {name: Probe(version, *answers.get(name, (None, {}, ""))) for name, version in installed.items()}
    devices = probes["torch"].said.get("devices", [])
    environments = tuple(Environment(**device) for device in devices)
    if not environments:
        # torch cannot be asked; what it would run on is then the CPU, without torch.
        environments = (_without_torch(installed),)
    plugins = _plugins(torch=bool(probes["torch"].loads))
    return ProbedMachine(probes, environments, gpus, plugins, driver_unasked=_driver_unasked(gpus))


def _plugins(torch: bool) -> tuple[tuple[Found, Probe], ...]:
    """Every plug-in, and whether its kernel's module loads (without torch nobody can tell)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # the doctor says it in its own words
        every = load_plugins()
    probed = []
    for found in every:
        probe = Probe(found.distribution, None, {}, found.trouble)
        if found.plugin is not None and torch:
            module, _, name = found.plugin.kernel.partition(":")
            kernel = f"k.{name}" if name else "k"
            script = f"import {module} as k; {kernel}.forward, {kernel}.backward; print('{{}}')"
            probe = Probe(found.distribution, *run_script(script))
        probed.append((found, probe))
    return tuple(probed)


def redact(text: str) -> str:
    """Without home folder, user name and host name: findings are pasted into public bug reports."""
    home = os.path.expanduser("~")  # "~" where there is none
    if len(home) > 1:
        text = text.replace(home, "~")
    user = os.environ.get("USER") or os.environ.get("USERNAME") or ""
    if user:
        text = re.sub(rf"(?<=[\\/]){re.escape(user)}(?=[\\/]|$)", "USER", text)
    host = platform.node()
    return text.replace(host, "HOST") if len(host) > 3 else text


def _installed(distributions: tuple[str, ...]) -> str | None:
    """The version of the first of these that is installed, as pip would list it."""
    return next((found.version for found in map(distribution, distributions) if found is not None), None)


def read_version(text: str | None) -> Version | None:
    """A version, or None where there is none or it is not one: a finding is not worth a crash."""
    try:
        return None if text is None else Version.parse(text)
    except ValueError:
        return None


def _without_torch(installed: dict[str, str | None]) -> Environment:
    versions = {name: read_version(version) for name, version in installed.items() if name != "torch"}
    versions |= flash_attn_versions()
    described = Environment.describe(
        "cpu", torch=None, **versions, python=".".join(map(str, sys.version_info[:3]))
    )
    return described.replace(detected=True, assumed=())


def run_script(script: str) -> tuple[bool, dict[str, Any], str]:
    """Whether a script ran, the object it printed, and in one line what went wrong."""
    try:
        done = subprocess.run(
            python(script),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return False, {}, f"no answer within {_TIMEOUT} s"
    except OSError as error:
        return False, {}, redact(f"no Python to ask: {error}")
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = f"signal {-done.returncode}"
        return False, {}, f"killed by {name}"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return False, {}, redact(lines[-1] if lines else f"exit code {done.returncode}")
    try:
        said = json.loads(done.stdout.strip().splitlines()[-1])
    except (json.JSONDecodeError, IndexError):
        return False, {}, "an answer that cannot be read"
    return True, said, ""


_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")  # one folder for each, on Linux
_ASK_THE_DRIVER = """
import json, pynvml
pynvml.nvmlInit()
handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
print(json.dumps({"gpus": [name if isinstance(name, str) else name.decode() for name in names]}))
"""


def _gpus_in_sight() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs the driver knows (NVML); without nvidia-ml-py "NVIDIA GPU" for each."""
    if _has_nvml():
        answered, said, _ = run_script(_ASK_THE_DRIVER)
        if answered:
            return tuple(said["gpus"])
    try:
        return ("NVIDIA GPU",) * len(list(_DRIVER_FOLDER.iterdir()))
    except OSError:
        return ()


def _has_nvml() -> bool:
    return importlib.util.find_spec("pynvml") is not None


def _driver_unasked(gpus: tuple[str, ...]) -> bool:
    """Whether there is a driver, and for want of a package its GPUs have no names or are not seen."""
    return not _has_nvml() and (bool(gpus) or shutil.which("nvidia-smi") is not None)
