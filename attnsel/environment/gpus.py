"""Any spelling of a GPU, and what is known of a card that is not in the machine.

The cards are rows of ``data/gpus.csv``, what they deliver on paper rows of ``data/gpu_figures.csv``. Shared
memory per block is a property of the architecture (CUDA C++ Programming Guide, "Technical Specifications per
Compute Capability"). First toolkits are from CUDA's release notes, first cuDNN releases from cuDNN's support
matrices.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from math import log2
from typing import NamedTuple

from attnsel.base.rows import read_rows
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


class Figures(NamedTuple):
    """What a card delivers on paper, for estimates. ``tflops``: 1e12 operations per second, dense, for 16-bit
    inputs with float32 accumulation. Bandwidths in GB/s, 1e9 bytes; those between GPUs per direction."""

    tflops: float
    memory: float
    link: float
    link_name: str
    network: float | None = None
    per_node: int = 8
    bf16: bool = True  # tensor cores take bf16, not fp16 alone


class _Cards(NamedTuple):
    """By name without blanks, in small letters: every card, the same by their other names, and by the models
    in names of virtual GPUs. ``familiar``: those that are proposed and named as examples."""

    named: dict[str, Gpu]
    also: dict[str, Gpu]
    virtual: dict[str, Gpu]
    familiar: tuple[Gpu, ...]


@cache
def _cards() -> _Cards:
    found = _Cards({}, {}, {}, ())
    familiar = []
    for row in read_rows("attnsel.environment", "gpus"):
        memory, sms = (int(text) if text else None for text in (row["memory_gb"], row["sms"]))
        gpu = Gpu(row["name"], int(row["arch"]), memory, sms, row["kind"])
        found.named[gpu.name.casefold().replace(" ", "")] = gpu
        found.also.update(dict.fromkeys(row["also"].split(), gpu))
        if row["vgpu"]:
            found.virtual[row["vgpu"]] = gpu
        if row["familiar"]:
            familiar.append(gpu)
    return found._replace(familiar=tuple(sorted(familiar, key=lambda gpu: gpu.arch)))


def catalogue() -> dict[str, Gpu]:
    """Every card, by its name without blanks in small letters."""
    return _cards().named


def familiar() -> tuple[Gpu, ...]:
    """The cards that are proposed and named as examples, the oldest architecture first."""
    return _cards().familiar


@cache
def _figures() -> dict[str, Figures]:
    def number(text: str) -> float:
        return int(text) if text.isdigit() else float(text)

    return {
        row["gpu"]: Figures(
            tflops=number(row["tflops"]),
            memory=number(row["memory"]),
            link=number(row["link"]),
            link_name=row["link_name"],
            network=number(row["network"]) if row["network"] else None,
            bf16=look_up_gpu(row["gpu"]).arch >= 80,
        )
        for row in read_rows("attnsel.environment", "gpu_figures")
    }


def figures_of(name: str | None) -> Figures | None:
    """By any name of a GPU, the catalogue's or the driver's ("NVIDIA A100-SXM4-80GB"); None if unknown."""
    try:
        return _figures().get(look_up_gpu(name).name) if name else None
    except ValueError:
        return None


# ---- which card a name means --------------------------------------------------------------------------

# Names of several cards, which of them has to be said.
_SEVERAL = {
    f"rtx{n}": (f"Quadro RTX {n}", f"RTX A{n}", f"RTX {n} Ada", f"RTX PRO {n}") for n in (4000, 5000, 6000)
}
_RENUMBERED = {101: 110}  # Thor, up to CUDA 12.9 (CUDA Features Archive, 13.0)
_NO_NAME_TELLS = {"gh200": {120: 96, 480: 96, 624: 144}}  # what is printed there is the memory of its CPU
_AS_SOLD = ("b100", "b200", "gb200", "b300", "gb300")  # data sheets and systems give other memory: 180 or 192
_SMS_OF_A_SLICE = {"A100": 14, "A800": 14, "A30": 14}  # NVIDIA MIG User Guide: of each of seven, or of four


@cache
def _models() -> dict[tuple[str, bool], list[tuple[Spelling, Gpu]]]:
    found: dict[tuple[str, bool], list[tuple[Spelling, Gpu]]] = {}
    for gpu in catalogue().values():
        said = _parse(gpu.name)
        found.setdefault((said.model, said.laptop), []).append((said, gpu))
    return found


def look_up_gpu(name: str) -> Gpu:
    """A card by its name in the catalogue, the driver's or a shop's ("H100", "NVIDIA A100-SXM4-80GB",
    "4060 ti 16gb"), a slice of one ("NVIDIA A100-SXM4-40GB MIG 1g.5gb"), or an architecture ("sm90", "9.0").

    Raises ValueError: the nearest names where there is no such card, the reason where there is.
    """
    text = name.strip()
    if exact := catalogue().get(text.casefold().replace(" ", "")):
        return exact
    bare = re.fullmatch(r"(?:(?:sm|compute)_?(\d{2,3})[af]?|(\d{1,2})\.(\d))", text.casefold())
    if bare:
        arch = int(bare[1]) if bare[1] else 10 * int(bare[2]) + int(bare[3])
        arch = _RENUMBERED.get(arch, arch)
        if arch in ARCHITECTURES:
            return Gpu(f"sm{arch}", arch, None, None)
    if len(text) > _LONGEST:
        raise ValueError(
            f"unknown GPU: no name is longer than {_LONGEST} characters; attnsel gpus lists them"
        )
    said = _under_its_name(_parse(text))
    variants = _variants(said)
    if not variants and (several := _SEVERAL.get(said.model, _SEVERAL.get(f"rtx{said.model}"))):
        raise ValueError(f"unknown GPU: one of {_either(several)}; which?")
    if not variants:
        raise ValueError(_outside(text) or f"unknown GPU{_hint(said)}; {_THE_REST}")
    gpu = _fitting(said, variants)
    if gpu is None:
        known = _either(f"{own.name} ({own.memory_gib} GB)" for _, own in variants)
        raise ValueError(f"unknown GPU: there is {known}")
    return gpu if said.part is None else _part(gpu, said.part)


_THE_REST = "attnsel gpus lists all; or an architecture: " + ", ".join(f"sm{arch}" for arch in ARCHITECTURES)


def _variants(said: Spelling) -> list[tuple[Spelling, Gpu]]:
    """The cards of one model, first the one that is meant where nothing else is said; [] of none."""
    model = said.model
    if said.part and said.part.virtual and model in _cards().virtual:
        return [(said, _cards().virtual[model])]
    names = [model, f"rtx{model}", f"gtx{model}", model.removeprefix("quadro")]
    names.append(f"rtx{model.removeprefix('quadro')}")
    # Turing laptops have their desktop cards' figures, where no row says otherwise.
    for laptop in (True, False) if said.laptop else (False, True):
        for key in names:
            found = _models().get((key, laptop))
            if found and (not said.laptop or laptop or found[0][1].arch == 75):
                return found
    return []


def _under_its_name(said: Spelling) -> Spelling:
    """A spelling with another name's model; what the other name implies holds where nothing else was said."""
    also = _cards().also
    card = also.get(said.model, also.get(f"rtx{said.model}"))
    if card is None:
        return said
    own = _parse(card.name)
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
        for (model, laptop), variants in _models().items()
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


# ---- names taken apart ---------------------------------------------------------------------------------

_LONGEST = 100
"""Characters of the longest name that is read; the driver's buffer has 96 (nvml.h, DEVICE_NAME_V2)."""

_MAKERS = re.compile(r"nvidia|geforce|tesla|\((?:nvgpu|r|tm|c)\)|[®™]")
_WORDS = re.compile(r"[\s_\-/(),]+")
_MEMORY = re.compile(r"(\d{1,4})(?:gi?b|g)")
_JOINED_MEMORY = re.compile(r"(.*\d[a-z]+)(\d{1,3})gi?b")  # "rtx4060ti16gb"; of "rtx306012gb" nobody knows
_FORMS = re.compile(r"(sxm|pcie|pci|nvl|hbm)\d*e?|oam|active|fhhl|dgxs|cnx")
_FORM_OF = {"sxm": "sxm", "pcie": "pcie", "pci": "pcie", "nvl": "nvl", "fhhl": "pcie", "active": "pcie"}
_NOISE = {
    *("gpu", "gpus", "graphics", "card", "generation", "gen", "edition", "design", "with", "workstation"),
    *("tensor", "core", "accelerator", "corporation", "lovelace", "jetson", "hgx", "dgx", "grid", "module"),
    *("developer", "kit", "devkit", "superchip", "ac", "lc"),
}
_COUNT = re.compile(r"^\d{1,3}\s*[x×](?:\s+(?=\w)|(?=[a-z]))|[\s(]+[x×]\s?\d{1,3}\)?$")  # "8x H100", "T4 x2"
_RACK = re.compile(r"nvl(?:[48]|36|72|144)")  # "GB300 NVL72" is a rack of them; "H100 NVL" is a card
_MIG = re.compile(r"\s*\bmig[\s_-]+(?:\dc\.)?(\d)g\.(\d{1,3})gb(?:\+[a-z.+]+)?\s*$")
_VGPU = re.compile(r"-(?:(\d)-)?(\d{1,3})[abcq]$")


class Slice(NamedTuple):
    """A part of a card. ``gpcs``: of a MIG instance; None of a virtual GPU that takes turns with others."""

    gib: int
    gpcs: int | None
    virtual: bool = False

    def __str__(self) -> str:
        return f"vGPU {self.gib}GB" if self.virtual else f"MIG {self.gpcs}g.{self.gib}gb"


class Spelling(NamedTuple):
    """A name taken apart: "NVIDIA A100-SXM4-40GB" is model "a100", 40 GiB, form "sxm"."""

    model: str
    gib: int | None = None
    form: str = ""
    laptop: bool = False
    part: Slice | None = None


def _parse(name: str) -> Spelling:
    """The model, and what is said of its variant. Nothing is looked up."""
    text = _COUNT.sub("", _MAKERS.sub(" ", name.casefold()).strip())
    part, mig, virtual = None, _MIG.search(text), _VGPU.search(text)
    if mig:
        part = Slice(int(mig[2]), int(mig[1]))
        text = text[: mig.start()]
    elif virtual:
        part = Slice(int(virtual[2]), int(virtual[1]) if virtual[1] else None, virtual=True)
        text = text[: virtual.start()]
    gib, form, laptop = None, "", False
    model: list[str] = []
    text = re.sub(r"(laptop|mobile)", r" \1 ", text)
    text = re.sub(r"max[\s-]?q", "max-q", re.sub(r"(\d)\s+(gi?b)\b", r"\1\2", text))
    max_q = "max-q" in text
    for word in _WORDS.split(text.replace("max-q", " ")):
        memory, shape = _MEMORY.fullmatch(word), _FORMS.fullmatch(word)
        if memory and model:
            gib = int(memory[1])
        elif _RACK.fullmatch(word):
            continue
        elif shape:
            form = form or _FORM_OF.get(shape[1] or word, "")
        elif word in ("laptop", "mobile", "notebook"):
            laptop = True
        elif word not in _NOISE:
            model.append(word)
    joined = _JOINED_MEMORY.fullmatch(model[-1]) if model else None
    if joined:
        model[-1], gib = joined[1], int(joined[2])
    if "pro" in "".join(model) and "blackwell" in model:
        model.remove("blackwell")
    if "ada" in model:  # "RTX Ada 6000"
        model.sort(key=lambda word: word == "ada")
    if max_q and any("pro" in word for word in model):
        form = "max-q"
    if "server" in model:
        model.remove("server")
        form = "server"
    return Spelling("".join(model), gib, form, laptop or (max_q and form != "max-q"), part)


# ---- what is not in the catalogue ---------------------------------------------------------------------

_OLD = re.compile(
    r"p4|p6|p40|p100|k10|k20x?|k40[cmst]?|k80|m6|m10|m40|m60|gp100|quadro[pkm]\d{3,4}m?|[pkm]\d{4}m?"
    r"|(?:gtx|gt|gts)?(?:[4-9][1-9][05]|10[1-8]0)(?:ti|m|max)*|gtxtitan(?:x|z|black)?|titan(?:x|xp|z|black)"
    r"|mx[123]\d0|tx[12]|tegrax[12]|nano"
)
_AMD = re.compile(r"\b(?:amd|radeon|instinct|firepro|ryzen|mi\d{2,3}[axp]?|rx[\s-]?\d{3,4}\w*|w[67]\d00x?)\b")
_OTHERS = {  # what a name has that is one of these, and what is said of it
    r"\b(?:intel|arc|iris|xe|ponte vecchio|pvc|flex \d+|max 1[15]\d0|b580|a770|a750)\b": (
        "a GPU of Intel's: ask for xpu instead"
    ),
    r"\bapple\b|\bm[1-9][\s-]?(?:pro|max|ultra)?$": "a GPU of Apple's: ask for mps instead",
    r"\b(?:tpu|trainium|inferentia|gaudi|ascend|cerebras|groq)\b": (
        "not a GPU: attnsel knows no kernels for it"
    ),
    r"\brubin[\s-]?cpx\b": "Rubin CPX: its compute capability is not known yet",
    r"\b(?:vera[\s-]?)?rubin\b|\bv?r[123]00\b|\bnvl144\b|^(?:sm_?107[af]?|10\.7)$": (
        "Rubin (compute capability 10.7, since CUDA 13.4): no rule knows it yet; the nearest is B300"
    ),
    r"^(?:(?:sm|compute)_?88|8\.8)$": (
        "an architecture of which NVIDIA lists no GPU; compilers take it since CUDA 13.0"
    ),
}

# LLVM's AMDGPU user guide, "Processors".
_GFX = {"mi100": "gfx908", "mi2[15]0x?": "gfx90a", "mi3[02][05][ax]?": "gfx942", "mi35[05]x?": "gfx950"}


def _outside(name: str) -> str | None:
    """In one sentence, why a GPU that exists is not one to plan for under this name; None of any other."""
    text = " ".join(name.casefold().split())
    if _AMD.search(text):
        gfx = next((gfx for model, gfx in _GFX.items() if re.search(rf"\b{model}\b", text)), None)
        return f"a GPU of AMD's: ask for {gfx or 'rocm, or its architecture such as gfx1100'} instead"
    for pattern, what in _OTHERS.items():
        if re.search(pattern, text):
            return what
    bare = re.fullmatch(r"(?:sm_?|compute_?)?([1-6])\.?(\d)", text)
    if bare or _OLD.fullmatch(re.sub(r"[\s_-]+|jetson|pcie|sxm2?|\d+gb", "", _MAKERS.sub(" ", text))):
        return "older than Volta (sm70), the oldest architecture that attnsel plans for"
    return None
