"""Where it would run: a device and the versions of what is installed there.

``Environment.detect()`` looks at this machine, ``Environment.describe(gpu="H100", cudnn="9.1.0")``
builds one for a machine that is elsewhere. Rules read nothing but the result.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from functools import lru_cache
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from attnsel.base.model import FrozenModel
from attnsel.base.records import json_beside
from attnsel.base.suggestions import suggestion
from attnsel.environment.gpus import ARCHITECTURES, Gpu, architecture_of, look_up_gpu
from attnsel.environment.installed import component_versions
from attnsel.environment.read import Unread, unread
from attnsel.environment.releases import (
    FRONTENDS,
    OLDEST,
    NoCode,
    build_with,
    builds_of,
    fitting_build,
    no_code,
    torch_builds,
)
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput, printable, short
from attnsel.params.attention import LARGEST


def _read_version(value: Any) -> Version | None:
    if value is None or isinstance(value, Version):
        return value
    if isinstance(value, str) and value.strip().casefold() in ("none", ""):
        return None
    return Version.parse(tuple(value) if isinstance(value, list) else value)


VersionField = Annotated[
    Version | None,
    BeforeValidator(_read_version),
    PlainSerializer(lambda version: None if version is None else str(version), when_used="json"),
]

COMPONENTS = (
    "torch",
    "triton",
    "cudnn",
    "cudnn_frontend",
    "cuda",
    "python",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
    "transformer_engine",
)
"""The fields of an environment that hold a version."""

Missing = Literal["libnvrtc", "libcudnn"]


def _read_missing(value: Any) -> Any:
    """Names from a text with commas between; each once, in order."""
    names = value.replace(" ", "").split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        return names
    return tuple(sorted({name.removesuffix(".so") for name in names if name}))


class Device(FrozenModel):
    """One device. Sizes in bytes; None where unknown."""

    type: Literal["cuda", "rocm", "cpu", "mps", "xpu", "meta", "other"] = "cuda"
    name: Annotated[str, AfterValidator(printable)] = ""
    arch: int | None = Field(
        default=None, ge=0, le=9999, description="10 * major + minor of the compute capability"
    )
    memory: int | None = Field(default=None, ge=0, le=LARGEST)
    sm_count: int | None = Field(default=None, gt=0, le=LARGEST)
    shared_memory: int | None = Field(
        default=None, ge=0, le=LARGEST, description="largest shared memory of one block"
    )

    @property
    def target(self) -> str:
        """What a kernel is proven for: an architecture ("sm90"), or a device type without one ("cpu")."""
        return self.type if self.arch is None else f"sm{self.arch}"


@json_beside("warnings")
class Environment(FrozenModel):
    """A device and versions. A version of None means: not installed there.

    ``assumed`` names the fields nobody stated, and ``dtype`` where the call's is the GPU's (``half``); every
    report marks them. ``detected`` says that this
    is the machine in front of us, where only what can really run may be chosen.
    """

    device: Device
    torch: VersionField = None
    triton: VersionField = None
    cudnn: VersionField = None
    cudnn_frontend: VersionField = None
    cuda: VersionField = None
    python: VersionField = None
    flash_attn: VersionField = None
    flash_attn_3: VersionField = None
    flash_attn_4: VersionField = None
    transformer_engine: VersionField = None
    platform: Literal["linux", "darwin", "windows", "other"] = "linux"
    torch_flash: Literal["FA2", "FA3", "FA4", "other"] = Field(
        default="FA2", description="what answers torch's own flash attention: activate_flash_attention_impl"
    )
    missing: Annotated[tuple[Missing, ...], BeforeValidator(_read_missing)] = Field(
        default=(), description="libraries that are not there, or do not load"
    )
    assumed: tuple[str, ...] = ()
    detected: bool = False
    resolved: bool = Field(
        default=False, exclude=True, description="what is assumed stays: an answer was worked out with it"
    )

    @model_validator(mode="after")
    def _is_known(self) -> Environment:
        if not self.detected:  # what is here is what it is: INSTALL001 refuses it
            require_known_torch(self.torch)
        return self

    @property
    def arch(self) -> int | None:
        return self.device.arch

    @property
    def target(self) -> str:
        """What a kernel is proven for there."""
        return self.device.target

    @property
    def half(self) -> Literal["bf16", "fp16"]:
        """The 16-bit element type that its GPU computes in: what is asked where nobody states a dtype.

        bf16 came with Ampere; of AMD's with MI100 and RDNA 3 (v_mfma_…_bf16 and v_wmma_…_bf16 of their ISA
        documents). Intel's and Apple's take it in PyTorch, if not all at full speed.
        """
        device = self.device
        old = device.arch is not None and device.arch < 80
        if device.type == "rocm":
            old = re.search(r"gfx(?:8\d\d|90[0-69c]|10\d\d)\b", device.name) is not None
        return "fp16" if old else "bf16"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What cannot be true of one machine, in words; empty for a consistent environment."""
        return tuple(_impossible(self))

    @property
    def unread(self) -> tuple[Unread, ...]:
        """What is newer than anything that was read, and is answered as the newest that was."""
        return unread(self)

    def with_torch(self, torch: Any) -> Environment:
        """This machine with another torch installed, and of Triton, cuDNN and CUDA, where it has them, those
        that the wheel of that torch brings: they are then assumed. Raises InvalidInput."""
        version = _component("torch", torch)
        brought = _companions(self.device, {"torch": version, "python": self.python})
        names = [name for name in ("triton", "cudnn", "cuda") if getattr(self, name) is not None]
        assumed = tuple(sorted({*self.assumed, *names} - {"torch"}))
        changes = {name: brought[name] for name in names}
        return self.replace(**changes, torch=version, assumed=assumed, detected=False)

    @classmethod
    def describe(cls, gpu: str | None = "H100", **versions: Any) -> Environment:
        """An environment for a machine that is not here.

        ``gpu`` is a name from the catalogue, an architecture ("sm90", "gfx942"), or ``"cpu"``, ``"rocm"``,
        ``"mps"`` or ``"xpu"``. Versions go by the names in :data:`COMPONENTS`; what is left out is taken from
        the wheel of PyTorch that fits all of what was given and the GPU (attnsel/environment/releases.py),
        and marked as assumed. None means not installed.

        Raises InvalidInput for an unknown GPU, component or version, and for a PyTorch older than any that is
        known, whether it is stated or what else is stated came with it.
        """
        unknown = sorted(set(versions) - set(COMPONENTS))
        if unknown:
            meant = suggestion(unknown[0], ("gpu", *COMPONENTS))
            said = f"no such component: {meant} Allowed" if meant else "no such component; allowed"
            raise InvalidInput(unknown[0], versions[unknown[0]], f"{said}: {', '.join(COMPONENTS)}")
        given: dict[str, Version | None] = {}
        for name, value in versions.items():
            given[name] = _component(name, value)
        require_known_torch(given.get("torch"))
        if "torch" not in given:
            _require_known_companions(given)
        device = describe_device(gpu)
        filled: dict[str, Any] = {**_companions(device, given), **given}
        if device.type != "cuda":
            filled = {
                name: (None if name in ("cudnn", "cudnn_frontend", "cuda") and name not in given else value)
                for name, value in filled.items()
            }
        assumed = tuple(sorted(name for name in filled if name not in given and filled[name] is not None))
        return cls(device=device, assumed=assumed, **filled)

    @classmethod
    def detect(cls, device: Any = None) -> Environment:
        """This machine: one device of it (default: the current CUDA device, else the CPU).

        Works with torch, triton and cuDNN present or absent. Asking for a CUDA device initialises CUDA.
        """
        found = _detect("" if device is None else short(device, str))  # a ``torch.device``'s text is a key
        flash = _active_flash()
        return found if flash == "FA2" else _with_flash(found, flash)


def _component(name: str, value: Any) -> Version | None:
    try:
        return _read_version(value)
    except ValueError as error:
        raise InvalidInput(name, value, str(error)) from None


def require_known_torch(torch: Version | None) -> None:
    """Raises InvalidInput for a PyTorch older than any that is known."""
    if torch is not None and torch < OLDEST:
        allowed = f"must be {OLDEST.major}.{OLDEST.minor} or newer: what an older PyTorch runs is not known"
        raise InvalidInput("torch", str(torch), allowed)


def _require_known_companions(given: dict[str, Version | None]) -> None:
    """Raises InvalidInput for what only a PyTorch older than any that is known came with."""
    for name in ("cuda", "triton"):
        version = given.get(name)
        oldest = min(getattr(build, name) for build in torch_builds())
        if version is not None and version < oldest:
            older = f"an older one came with PyTorch before {OLDEST.major}.{OLDEST.minor}, which is not known"
            allowed = f"must be {oldest.major}.{oldest.minor} or newer where no torch is stated: {older}"
            raise InvalidInput(name, str(version), allowed)


def describe_device(gpu: str | None) -> Device:
    """A device from a GPU name, an architecture (also "gfx90a:sramecc+"), ``"cpu"`` or None. Raises
    InvalidInput."""
    if gpu is not None and not isinstance(gpu, str):
        raise InvalidInput("gpu", gpu, "must be the name of a GPU, an architecture such as sm90, or cpu")
    wanted = "" if gpu is None else re.sub(r"^(gfx\w+)(?::\w+[+-])+$", r"\1", gpu.strip().casefold())
    if gpu is None or wanted == "cpu":
        return Device(type="cpu", name="CPU")
    if wanted == "mps":
        return Device(type="mps", name=wanted)
    if wanted == "xpu":
        return Device(type="xpu", name=wanted)
    if wanted == "rocm" or re.fullmatch(r"gfx(\d{3,4}|\d{2}[a-f])", wanted):
        return Device(type="rocm", name=wanted)  # rules read an architecture from its name
    try:
        card = look_up_gpu(gpu)
    except ValueError as error:
        raise InvalidInput("gpu", gpu, str(error)) from None
    return _device_of(card)


def _device_of(card: Gpu) -> Device:
    known, kind = architecture_of(card.arch), cast(Any, card.device)
    return Device(
        type=kind,
        name=f"{card.name} ({card.gfx})" if card.gfx else card.name,  # rules read AMD's target from its name
        arch=card.arch or None,
        memory=None if card.memory_gib is None else card.memory_gib << 30,
        sm_count=card.sm_count,
        shared_memory=None if known is None else known.shared_memory,
    )


def _companions(device: Device, given: dict[str, Version | None]) -> dict[str, Version | None]:
    """What comes with the wheel of PyTorch that was likely meant: versions of every component it decides."""
    build = fitting_build(device.arch, given)
    return {
        "torch": build.torch,
        "triton": build.triton,
        "cudnn": build.cudnn,
        "cuda": build.cuda,
        "cudnn_frontend": FRONTENDS[-1],
        "python": build.python,
    }


def without_code(env: Environment) -> NoCode | None:
    """Whether no wheel of the torch and CUDA that were stated has code for a described GPU.

    An assumed version refuses nothing here. Where torch is installed it tells itself: ``attnsel doctor``.
    """
    if env.detected or env.device.type != "cuda" or env.arch is None or env.torch is None:
        return None
    torch = None if "torch" in env.assumed else env.torch
    cuda = None if "cuda" in env.assumed else env.cuda
    return no_code(env.arch, torch, cuda)


def _no_such_wheel(env: Environment) -> list[str]:
    """What was stated and came in no wheel of PyTorch's; it can have been built from source."""
    if env.detected or env.device.type != "cuda" or env.torch is None or not builds_of(env.torch):
        return []
    minor, found = f"torch {env.torch.major}.{env.torch.minor}", []
    stated = {name for name in ("torch", "cuda", "python") if name not in env.assumed}
    if {"torch", "cuda"} <= stated and env.cuda is not None and build_with(env.torch, env.cuda) is None:
        wheel = f"no wheel of {minor} has CUDA {env.cuda.major}.{env.cuda.minor}"
        found.append(f"{wheel}: built from source or stated wrongly")
    pythons = builds_of(env.torch)[0].pythons
    if {"torch", "python"} <= stated and env.python is not None and env.python.minor not in pythons:
        wheel = f"no wheel of {minor} is for Python {env.python.major}.{env.python.minor}"
        found.append(f"{wheel}, only for 3.{pythons[0]} to 3.{pythons[-1]}")
    return found


def _too_old(arch: int, cuda: Version, first: Version) -> str:
    """A toolkit that does not compile for ``arch``: what it has for the same major version runs there."""
    family, wanted = 10 * (arch // 10), f"CUDA {first.major}.{first.minor} or newer"
    base = ARCHITECTURES.get(family)
    if family == arch or base is None or base.cuda is None or cuda < base.cuda:
        return f"sm{arch} needs {wanted}, not {cuda}"
    return f"sm{arch} runs the code for sm{family} of CUDA {cuda}; what is compiled there needs {wanted}"


def _impossible(env: Environment) -> list[str]:
    """Contradictions inside one environment. They are said, not corrected."""
    found = _no_such_wheel(env)
    arch, cudnn, cuda = env.arch, env.cudnn, env.cuda
    known = architecture_of(arch)
    if known and known.cuda and cuda and cuda < known.cuda and without_code(env) is None:
        found.append(_too_old(env.device.arch or 0, cuda, known.cuda))
    if known and known.cudnn and cudnn and cudnn < known.cudnn:
        found.append(f"sm{arch} is not known to cuDNN {cudnn}: attention for it begins with {known.cudnn}")
    if env.device.type != "cuda" and "cudnn" not in env.assumed and cudnn and not env.detected:
        found.append(f"cuDNN {cudnn} has no use on a {env.device.type} device")
    two, four = env.flash_attn, env.flash_attn_4
    if not env.detected and two is not None and four is not None and (2, 8) <= two < (2, 9):
        # SkyRL#2132; where it happened attnsel doctor says it, by the files' hashes.
        found.append(f"flash-attn {two} brings an old flash_attn/cute: install flash-attn-4 last")
    return found


@lru_cache(maxsize=64)
def _detect(device: str) -> Environment:
    versions: dict[str, Any] = component_versions()
    torch_version = versions["torch"]
    found = Device(type="cpu", name=platform.machine() or "CPU")
    if torch_version is not None and importlib.util.find_spec("torch") is not None:
        found, loaded = _ask_torch(device)
        versions.update(loaded)
    elif device not in ("", "cpu"):
        raise InvalidInput("device", device, "only 'cpu' can be detected without torch installed")
    systems: dict[str, Any] = {"Linux": "linux", "Darwin": "darwin", "Windows": "windows"}
    return Environment(
        device=found, platform=systems.get(platform.system(), "other"), detected=True, **versions
    )


def _active_flash() -> Any:
    """What stands behind torch's flash kernels now: a program may change it at any time (torch 2.10)."""
    registry = sys.modules.get("torch.nn.attention._registry")
    active = getattr(registry, "_FLASH_ATTENTION_ACTIVE", None)
    name = active[0] if isinstance(active, tuple) and active else active
    return "FA2" if name is None else name if name in ("FA3", "FA4") else "other"


@lru_cache(maxsize=64)
def _with_flash(env: Environment, flash: Any) -> Environment:
    return env.replace(torch_flash=flash)


def _ask_torch(device: str) -> tuple[Device, dict[str, Version | None]]:
    """The device and the versions torch really loaded, which beat what package metadata says."""
    import torch

    try:
        wanted = torch.device(device) if device else None
    except RuntimeError as error:
        raise InvalidInput("device", device, f"not a torch device: {error}") from None
    if wanted is None:
        wanted = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded: dict[str, Version | None] = {}
    if torch.version.cuda:
        loaded["cuda"] = Version.parse(torch.version.cuda)
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidInput("device", device, "torch sees no CUDA device here; allowed: 'cpu'")
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            arch_name = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
            name = _in_catalogue(f"{properties.name} {arch_name}")
            return Device(type="rocm", name=name, memory=properties.total_memory), loaded
        # What is loaded decides, not what pip lists: a wheel may sit there unused.
        try:
            number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        except RuntimeError:
            pass  # older than the one torch was built with: it stays what pip lists, and doctor says it
        else:
            loaded["cudnn"] = None if number is None else Version.parse(int(number))
        arch = 10 * properties.major + properties.minor
        shared = getattr(properties, "shared_memory_per_block_optin", None)
        if not shared and (known := architecture_of(arch)):
            shared = known.shared_memory
        return Device(
            type="cuda",
            name=properties.name.removeprefix("NVIDIA "),
            arch=arch,
            memory=properties.total_memory,
            sm_count=properties.multi_processor_count,
            shared_memory=shared,
        ), loaded
    known_types = ("cpu", "mps", "xpu", "meta")
    kind: Any = wanted.type if wanted.type in known_types else "other"
    if kind == "xpu" and torch.xpu.is_available():
        found = torch.xpu.get_device_properties(wanted)
        return Device(type=kind, name=_in_catalogue(found.name), memory=found.total_memory), loaded
    name = (platform.machine() or "CPU") if kind == "cpu" else wanted.type
    mps = torch.backends.mps
    if kind == "mps" and mps.is_available() and hasattr(mps, "get_name"):  # since PyTorch 2.10
        name = _in_catalogue(mps.get_name())
    return Device(type=kind, name=name), loaded


def _in_catalogue(printed: str) -> str:
    """``MI300X (gfx942)``: the catalogue's name of what a driver prints; that itself where it has none, as of
    a target that HSA_OVERRIDE_GFX_VERSION made another."""
    try:
        return _device_of(look_up_gpu(printed)).name
    except ValueError:
        return " ".join(dict.fromkeys(printed.split()))
