"""The GPU catalogue: what is known about a card that is not in the machine, by any of its names.

The rows and their sources are in ``attnsel/environment/gpu_catalogue.py``. Shared memory per block is a
property of the architecture (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
First toolkits are from CUDA's release notes, first cuDNN releases from cuDNN's support matrices.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from math import log2
from typing import NamedTuple

from attnsel.environment.gpu_catalogue import ALIASES, BLOCKS, SEVERAL, VGPU
from attnsel.environment.gpu_catalogue import FAMILIAR as NAMES
from attnsel.environment.gpu_names import LONGEST, Slice, Spelling, outside, take_apart
from attnsel.environment.versions import Version


class Gpu(NamedTuple):
    name: str
    arch: int  # 10 * major + minor: 90 is compute capability 9.0
    memory_gib: int | None
    sm_count: int | None
    kind: str = ""  # data center, workstation, GeForce, Jetson or mining


class Architecture(NamedTuple):
    """``shared_memory``: the most that one block may ask for, in bytes. ``cuda``: the first toolkit that
    compiles for it; ``cudnn``: the first release with attention for it. None: older than what is asked."""

    shared_memory: int
    cuda: Version | None = None
    cudnn: Version | None = None


_CUDNN_8_9, _CUDNN_9_7 = Version(8, 9), Version(9, 7)

ARCHITECTURES: dict[int, Architecture] = {
    70: Architecture(98_304),
    72: Architecture(98_304),
    75: Architecture(65_536, Version(10)),
    80: Architecture(166_912, Version(11)),
    86: Architecture(101_376, Version(11, 1)),
    87: Architecture(166_912),
    89: Architecture(101_376, Version(11, 8)),
    90: Architecture(232_448, Version(11, 8), _CUDNN_8_9),
    100: Architecture(232_448, Version(12, 8), _CUDNN_9_7),
    103: Architecture(232_448, Version(12, 9), _CUDNN_9_7),
    110: Architecture(232_448, Version(12, 8), _CUDNN_9_7),
    120: Architecture(101_376, Version(12, 8), _CUDNN_9_7),
    121: Architecture(101_376, Version(12, 9), _CUDNN_9_7),
}


def _read_catalogue() -> dict[str, Gpu]:
    cards = {}
    for kind, arch, rows in BLOCKS:
        for row in rows.split(";"):
            name, memory, sms = row.strip().rsplit(None, 2)
            gib, count = (None if text == "-" else int(text) for text in (memory, sms))
            cards[name.casefold().replace(" ", "")] = Gpu(name, arch, gib, count, kind)
    return cards


CATALOGUE: dict[str, Gpu] = _read_catalogue()
"""Every card, by its name without blanks."""

FAMILIAR: tuple[Gpu, ...] = tuple(CATALOGUE[name.casefold().replace(" ", "")] for name in NAMES)
"""The cards that are proposed and named as examples."""

_RENUMBERED = {101: 110}  # Thor, up to CUDA 12.9 (CUDA Features Archive, 13.0)
_NO_NAME_TELLS = {"gh200": {120: 96, 480: 96, 624: 144}}  # what is printed there is the memory of its CPU
_AS_SOLD = ("b100", "b200", "gb200", "b300", "gb300")  # data sheets and systems give other memory: 180 or 192
_SMS_OF_A_SLICE = {"A100": 14, "A800": 14, "A30": 14}  # NVIDIA MIG User Guide: of each of seven, or of four


def _models() -> dict[tuple[str, bool], list[tuple[Spelling, Gpu]]]:
    found: dict[tuple[str, bool], list[tuple[Spelling, Gpu]]] = {}
    for gpu in CATALOGUE.values():
        said = take_apart(gpu.name)
        found.setdefault((said.model, said.laptop), []).append((said, gpu))
    return found


_MODELS = _models()


def look_up_gpu(name: str) -> Gpu:
    """A card by its name in the catalogue, the driver's or a shop's ("H100", "NVIDIA A100-SXM4-80GB",
    "4060 ti 16gb"), a slice of one ("NVIDIA A100-SXM4-40GB MIG 1g.5gb"), or an architecture ("sm90", "9.0").

    Raises ValueError: the nearest names where there is no such card, the reason where there is.
    """
    text = name.strip()
    if exact := CATALOGUE.get(text.casefold().replace(" ", "")):
        return exact
    bare = re.fullmatch(r"(?:(?:sm|compute)_?(\d{2,3})[af]?|(\d{1,2})\.(\d))", text.casefold())
    if bare:
        arch = int(bare[1]) if bare[1] else 10 * int(bare[2]) + int(bare[3])
        arch = _RENUMBERED.get(arch, arch)
        if arch in ARCHITECTURES:
            return Gpu(f"sm{arch}", arch, None, None)
    if len(text) > LONGEST:
        raise ValueError(f"unknown GPU: no name is longer than {LONGEST} characters; attnsel gpus lists them")
    said = _under_its_name(take_apart(text))
    variants = _variants(said)
    if not variants and (several := SEVERAL.get(said.model, SEVERAL.get(f"rtx{said.model}"))):
        raise ValueError(f"unknown GPU: one of {_either(several)}; which?")
    if not variants:
        raise ValueError(outside(text) or f"unknown GPU{_hint(said)}; {_THE_REST}")
    gpu = _fitting(said, variants)
    if gpu is None:
        known = _either(f"{own.name} ({own.memory_gib} GB)" for _, own in variants)
        raise ValueError(f"unknown GPU: there is {known}")
    return gpu if said.part is None else _part(gpu, said.part)


_THE_REST = "attnsel gpus lists all; or an architecture: " + ", ".join(f"sm{arch}" for arch in ARCHITECTURES)


def _variants(said: Spelling) -> list[tuple[Spelling, Gpu]]:
    """The cards of one model, first the one that is meant where nothing else is said; [] of none."""
    model = said.model
    if said.part and said.part.virtual and model in VGPU:
        return [(said, CATALOGUE[VGPU[model].casefold().replace(" ", "")])]
    names = [model, f"rtx{model}", f"gtx{model}", model.removeprefix("quadro")]
    names.append(f"rtx{model.removeprefix('quadro')}")
    # Turing laptops have their desktop cards' figures, where no row says otherwise.
    for laptop in (True, False) if said.laptop else (False, True):
        for key in names:
            found = _MODELS.get((key, laptop))
            if found and (not said.laptop or laptop or found[0][1].arch == 75):
                return found
    return []


def _under_its_name(said: Spelling) -> Spelling:
    """A spelling with another name's model; what the other name implies holds where nothing else was said."""
    name = ALIASES.get(said.model, ALIASES.get(f"rtx{said.model}"))
    if name is None:
        return said
    own = take_apart(name)
    return said._replace(model=own.model, gib=said.gib or own.gib, form=said.form or own.form)


def _fitting(said: Spelling, variants: list[tuple[Spelling, Gpu]]) -> Gpu | None:
    """The first variant with the memory and the form that were said; None where none has both."""
    gib = _NO_NAME_TELLS.get(said.model, {}).get(said.gib or 0, said.gib)
    forms = {own.form for own, _ in variants}
    if said.form == "nvl" and "nvl" not in forms:
        return None  # its name is not all that tells it from others: "A100 NVL" is no card
    form = said.form if said.form in forms else ""
    kept = [gpu for own, gpu in variants if (gib is None and not said.form) or own.form == form]
    if gib is None:
        return kept[0]
    if said.model in _AS_SOLD:
        kept = [gpu for gpu in kept if gpu.memory_gib and abs(gpu.memory_gib - gib) < 0.08 * gib]
        return kept[0] if kept else None
    exact = [gpu for gpu in kept if gpu.memory_gib in (gib, None)]
    if not exact and not said.form:
        exact = [gpu for _, gpu in variants if gpu.memory_gib == gib]
    return exact[0] if exact else None


def _part(gpu: Gpu, part: Slice) -> Gpu:
    """A MIG instance, or a virtual GPU: the card's architecture and its own share of the memory."""
    whole = gpu.memory_gib or 0
    wrong = part.gib > whole or (part.gpcs is not None and not 1 <= part.gpcs <= 7)
    if wrong or (part.gpcs is not None and gpu.arch not in (80, 90, 100, 103, 120)):
        raise ValueError(f"unknown GPU: {gpu.name} has no {part}")
    sms = gpu.sm_count
    if part.gpcs is not None:
        each = _SMS_OF_A_SLICE.get(gpu.name.split()[0])
        sms = None if each is None else each * part.gpcs
    return gpu._replace(name=f"{gpu.name} {part}", memory_gib=part.gib, sm_count=sms)


def _hint(said: Spelling) -> str:
    """Models written almost so, then those of the same series that are near in number."""
    if not re.search(r"\d", said.model):
        return ""
    written = f"rtx{said.model}" if said.model[0].isdigit() else said.model
    ranks = {
        variants[0][1].name: rank
        for (model, laptop), variants in _MODELS.items()
        if laptop == said.laptop and (rank := _likeness(model, written))
    }
    near = sorted(ranks, key=lambda name: ranks[name])[:2]
    return f" (did you mean {_either(near)}?)" if near else ""


def _likeness(model: str, written: str) -> tuple[int, float, float] | None:
    """The smaller the nearer; None where nobody would mean that model."""
    alike = difflib.SequenceMatcher(None, model, written).ratio()
    apart = _apart(model, written)
    if alike > 0.86:
        return 0, 1.0 if apart is None else apart, 1 - alike
    if apart is not None:
        return 1, apart, 1 - alike
    return (2, 1 - alike, 0.0) if alike > 0.6 else None


def _apart(one: str, other: str) -> float | None:
    """Octaves between the numbers of two models of one series ("h#", "rtx#ti"); None beyond one octave."""
    if re.sub(r"\d+", "#", one) != re.sub(r"\d+", "#", other):
        return None
    numbers = [int(re.sub(r"\D", "", text)[:6] or 0) for text in (one, other)]
    octaves = abs(log2(numbers[0] / numbers[1])) if all(numbers) else 9.0
    return octaves if octaves < 1 else None


def _either(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
