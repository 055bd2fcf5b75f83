"""Any spelling of a GPU, and what is known of a card that is not in the machine.

NVIDIA's cards are rows of ``data/gpus.csv``, those too old for PyTorch of ``data/old_gpus.csv``, other
makers' of ``data/other_gpus.csv``, what they deliver on paper rows of ``data/gpu_figures.csv``. Shared memory
per block is a property of the architecture (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"). First toolkits are from CUDA's release notes, first cuDNN releases from cuDNN's support
matrices.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from math import log2
from typing import NamedTuple

from attnsel.base.rows import read_rows
from attnsel.environment.versions import Version


class Gpu(NamedTuple):
    """``arch``: 10 * major + minor, 90 is compute capability 9.0; 0 of another maker's. ``kind``: what is
    sold under that name; of a name of several cards "family". ``device``: cuda, rocm, xpu or mps. ``gfx``:
    AMD's target. ``sold_with``: GB, where it is sold with one or another, so that the name must say which."""

    name: str
    arch: int
    memory_gib: int | None
    sm_count: int | None
    kind: str = ""
    device: str = "cuda"
    gfx: str = ""
    sold_with: tuple[int, ...] = ()

    @property
    def target(self) -> str:
        """What decides about kernels: ``sm90``, ``gfx942``, ``xpu``."""
        return self.gfx or (f"sm{self.arch}" if self.arch else self.device)


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

WITHOUT_PYTORCH = frozenset({20, 21, 30, 32, 35, 53, 62})
"""Fermi, Kepler, and the Jetsons of Maxwell and Pascal: no PyTorch since 2.2 was published for them."""

OLDER = dict.fromkeys((*WITHOUT_PYTORCH, 37, 50, 52, 60, 61), Architecture(49_152))
"""PyTorch has kernels for K80, Maxwell and Pascal in its wheels up to CUDA 11.8 and 12.6; nobody else has."""

READ_AS = {107: 103}
"""Architectures whose kernels nobody has read, and which one answers for them: Rubin runs the code for sm100
(pytorch#190654), as B300 does."""


def architecture_of(arch: int | None) -> Architecture | None:
    """What is known of an architecture, or of the one that answers for it; None of any other."""
    read = READ_AS.get(arch or 0, arch or 0)
    return ARCHITECTURES.get(read) or OLDER.get(read)


def read_as(arch: int | None) -> int | None:
    """The architecture that answers for a newer one than any that was read; None of all others.

    A machine can have one that no row has: the newest before it answers.
    """
    if arch is None or arch < 100 or arch in ARCHITECTURES:
        return None
    return READ_AS.get(arch) or max(known for known in ARCHITECTURES if known < arch)


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
        memory, several = _sizes(row["memory_gb"])
        sms = int(row["sms"]) if row["sms"] else None
        gpu = Gpu(row["name"], int(row["arch"]), memory, sms, row["kind"], sold_with=several)
        found.named[_squeezed(gpu.name)] = gpu
        found.also.update(dict.fromkeys(row["also"].split(), gpu))
        if row["vgpu"]:
            found.virtual[row["vgpu"]] = gpu
        if row["familiar"]:
            familiar.append(gpu)
    return found._replace(familiar=tuple(sorted(familiar, key=lambda gpu: gpu.arch)))


def _sizes(text: str) -> tuple[int | None, tuple[int, ...]]:
    """The memory of a row: of one size, or which of several; neither where the system's is shared."""
    sizes = tuple(int(word) for word in text.split() if word != "shared")
    return (sizes[0], ()) if len(sizes) == 1 else (None, sizes)


def _squeezed(name: str) -> str:
    return name.casefold().replace(" ", "")


@lru_cache(maxsize=1)
def _others() -> dict[str, tuple[Gpu, ...]]:
    """The cards of other makers, by each of their names without blanks: first the one that is meant."""
    found: dict[str, tuple[Gpu, ...]] = {}
    for row in read_rows("attnsel.environment", "other_gpus"):
        memory, several = _sizes(row["memory_gb"])
        gpu = Gpu(row["name"], 0, memory, None, row["kind"], row["device"], row["gfx"], several)
        own = re.sub(r"\s\d+GB$", "", gpu.name).casefold()
        for key in dict.fromkeys((own.replace(" ", ""), *row["also"].split())):
            found[key] = (*found.get(key, ()), gpu)
    return found


@lru_cache(maxsize=1)
def _old() -> dict[str, Gpu]:
    """The cards that are too old for PyTorch, by their models and by their other names."""
    found: dict[str, Gpu] = {}
    for row in read_rows("attnsel.environment", "old_gpus"):
        memory, _ = _sizes(row["memory_gb"])
        gpu = Gpu(row["name"], int(row["arch"]), memory, None, row["kind"])
        found.update(dict.fromkeys((_squeezed(gpu.name), *row["also"].split()), gpu))
    return found


@lru_cache(maxsize=1)
def catalogue() -> dict[str, Gpu]:
    """Every card, by its name without blanks in small letters; NVIDIA's first."""
    others = (gpu for gpus in _others().values() for gpu in gpus)
    return _cards().named | {_squeezed(gpu.name): gpu for gpu in (*others, *_old().values())}


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
    for gpu in _cards().named.values():
        said = _parse(gpu.name)
        found.setdefault((said.model, said.laptop), []).append((said, gpu))
    return found


def look_up_gpu(name: str) -> Gpu:
    """A card by its name in the catalogue, the driver's or a shop's ("H100", "NVIDIA A100-SXM4-80GB",
    "7900xtx", "Intel(R) Arc(TM) B580 Graphics", "Mac Studio M3 Ultra 256GB"), a slice of one ("NVIDIA
    A100-SXM4-40GB MIG 1g.5gb"), or an architecture ("sm90", "9.0").

    Raises ValueError: the nearest names where there is no such card, the reason where there is.
    """
    if found := known_gpu(name):
        return found
    text = name.strip().replace("_", " ")
    raise ValueError(_outside(text) or f"unknown GPU{_hint(text, _maker(text))}; {_THE_REST}")


def known_gpu(name: str) -> Gpu | None:
    """The same, and None where there is no such card: to find the nearest names takes long."""
    text = name.strip()
    joined = _squeezed(text)
    if exact := _cards().named.get(joined):  # without the cards of other makers, which take a while to read
        return exact
    bare = re.fullmatch(r"(?:(?:sm|compute)_?(\d{2,3})[af]?|(\d{1,2})\.(\d))", text.casefold())
    if bare:
        arch = int(bare[1]) if bare[1] else 10 * int(bare[2]) + int(bare[3])
        arch = _RENUMBERED.get(arch, arch)
        if architecture_of(arch):
            return Gpu(f"sm{arch}", arch, None, None)
    if len(text) > _LONGEST:
        raise ValueError(
            f"unknown GPU: no name is longer than {_LONGEST} characters; attnsel gpus lists them"
        )
    if exact := catalogue().get(joined):
        return exact
    text = text.replace("_", " ")
    maker = _maker(text)
    if maker in ("", "cuda") and (found := _of_nvidia(text)):
        return found
    if maker != "cuda" and (found := _of_others(text, maker)):
        return found
    if maker in ("", "cuda") and (found := _too_old(text)):
        return found
    if sized := re.fullmatch(r"(.*\d\w*)[\s-]+(\d{1,3})", text.casefold()):
        with suppress(ValueError):  # "A100-80"
            if found := known_gpu(f"{sized[1]} {sized[2]}GB"):
                return found
    said = _parse(text)
    if several := _SEVERAL.get(said.model, _SEVERAL.get(f"rtx{said.model}")):
        fitting = [gpu for gpu in map(look_up_gpu, several) if said.gib and _sold_with(gpu, said.gib)]
        if len({gpu.arch for gpu in fitting}) == 1:
            return fitting[0]
        raise ValueError(f"unknown GPU: one of {_either(several)}; which?")
    return None


def _with_more(gpu: Gpu, gib: int) -> Gpu | None:
    """A GeForce whose board others filled with more memory, up to four times as much: "4090 48GB",
    "2080 Ti 22GB" (weicj/2080Ti-LLM-Toolbox#2), "RTX 4080S 32GB" (syv-ai/qwen38-27b-rtx3090#149)."""
    own = gpu.memory_gib or 0
    return gpu._replace(name=f"{gpu.name} {gib}GB", memory_gib=gib) if own < gib <= 4 * own else None


def _of_nvidia(text: str) -> Gpu | None:
    """One of NVIDIA's cards; None where the text names none. Raises ValueError for a variant that is none."""
    stated = _SM.search(text.casefold())
    said = _under_its_name(_parse(_SM.sub(" ", text.casefold()) if stated else text))
    variants = _variants(said) or _covered(said)
    if not variants:
        return None
    gpu = _fitting(said, variants)
    if gpu is None and not said.laptop:
        laptops = [own for own in _models().get((said.model, True), ()) if own[1].memory_gib == said.gib]
        gpu = laptops[0][1] if len(laptops) == 1 else None
    if gpu is None and variants[0][1].kind == "GeForce":
        gpu = _with_more(variants[0][1], said.gib or 0)
    if gpu is None:
        raise ValueError(f"unknown GPU: there is {_either(_with_memory(own) for _, own in variants)}")
    if stated and gpu.arch != _RENUMBERED.get(int(stated[1]), int(stated[1])):
        raise ValueError(f"unknown GPU: {gpu.name} is sm{gpu.arch}, not sm{stated[1]}")
    return gpu if said.part is None else _part(gpu, said.part)


def _too_old(text: str) -> Gpu | None:
    """A card that no PyTorch was published for; None where the text names none."""
    said = _parse(text)
    models = ([f"{said.model}{said.gib}gb"] if said.gib else []) + [said.model]
    keys = (f"{series}{model}" for model in models for series in ("", "gtx", "gt", "gts", "quadro"))
    return next((_old()[key] for key in keys if key in _old()), None)


def _with_memory(gpu: Gpu) -> str:
    return f"{gpu.name} ({' or '.join(map(str, gpu.sold_with or (gpu.memory_gib,)))} GB)"


_THE_REST = "attnsel gpus lists all; or an architecture: " + ", ".join(f"sm{arch}" for arch in ARCHITECTURES)


def _variants(said: Spelling) -> list[tuple[Spelling, Gpu]]:
    """The cards of one model, first the one that is meant where nothing else is said; [] of none."""
    model = said.model
    if said.part and said.part.virtual and model in _cards().virtual:
        return [(said, _cards().virtual[model])]
    names = [model, f"rtx{model}", f"gtx{model}", model.removeprefix("quadro")]
    names.append(f"rtx{model.removeprefix('quadro')}")
    # Where no row says otherwise, laptops with Turing or an older Quadro have the figures of the bare name,
    # which a Quadro P3200 or M1200 has alone.
    for laptop in (True, False) if said.laptop else (False, True):
        for key in names:
            found = _models().get((key, laptop))
            if found and (not said.laptop or laptop or _same_in_laptops(found[0][1])):
                return found
    return []


def _same_in_laptops(gpu: Gpu) -> bool:
    return gpu.arch == 75 or (gpu.arch < 70 and gpu.kind == "workstation")


def _covered(said: Spelling) -> list[tuple[Spelling, Gpu]]:
    """The cards of a name that says one thing twice ("AGX Thor T5000", "DGX Spark / GB10"); [] of others."""

    def variants(key: str) -> list[tuple[Spelling, Gpu]]:
        return _variants(_under_its_name(Spelling(key, laptop=said.laptop)))

    named: set[Gpu] = set()
    for key in _runs(said.words, lambda key: bool(variants(key))):
        if key is None:
            return []
        named.add(variants(key)[0][1])
    return [(_parse(gpu.name), gpu) for gpu in named] if len(named) == 1 else []


def _runs(words: Sequence[str], known: Callable[[str], bool]) -> Iterator[str | None]:
    """The longest runs of words that are known when joined, from left to right, without what says nothing of
    which card it is; None for a word that is in none."""
    start = 0
    while start < len(words):
        ends = range(len(words), start, -1)
        end = next((end for end in ends if known("".join(words[start:end]))), None)
        if end is not None:
            yield "".join(words[start:end])
        elif not _says_nothing("aside").fullmatch(words[start]):
            yield None
        start = end or start + 1


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
    exact = list(filter(None, (_sold_with(gpu, gib) for gpu in kept)))
    if not exact and not said.form:
        exact = [gpu for _, gpu in variants if gpu.memory_gib == gib]
    return exact[0] if exact else None


def _sold_with(gpu: Gpu, gib: int) -> Gpu | None:
    """The card with that much memory, which the name decides of some; None of one that has other."""
    if gpu.memory_gib is None and (not gpu.sold_with or gib in gpu.sold_with):
        return gpu._replace(memory_gib=gib, sold_with=())
    return gpu if gpu.memory_gib == gib else None


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


# ---- the cards of other makers ------------------------------------------------------------------------


def _of_others(text: str, maker: str) -> Gpu | None:
    """A card of AMD's, Intel's or Apple's; None where the text names none. Every word of it must be one of a
    card's, or say nothing of which card it is. Raises ValueError where the card has no such variant."""
    words, gib, gfx = _words_of_others(text, maker)
    known = {key: gpus for key, gpus in _others().items() if maker in ("", gpus[0].device)}
    named: list[tuple[Gpu, ...]] = []
    for key in _runs(words, known.__contains__):
        if key is None:
            return None
        named.append(known[key])
    named = [gpus for gpus in named if gpus[0].kind != "family"] or named
    if not named and (maker or gfx):
        named = [_others()[_NO_MODEL[maker or "rocm"]]]
    if not named:
        return None
    variants = named[0]
    if len({gpus[0] for gpus in named}) > 1:  # Linux calls some by all that the chip is in
        if "/" not in text or len({gpus[0].gfx or gpus[0].name for gpus in named}) > 1:
            return None
        same = {gpus[0].memory_gib for gpus in named}
        variants = (variants[0]._replace(memory_gib=same.pop() if len(same) == 1 else None),)
    fitting = [variants[0]] if gib is None else [each for gpu in variants if (each := _sold_with(gpu, gib))]
    if not fitting:
        raise ValueError(f"unknown GPU: there is {_either(map(_with_memory, variants))}")
    gpu = fitting[0]
    if gfx and gpu.gfx not in ("", gfx):
        raise ValueError(f"unknown GPU: {gpu.name} is {gpu.gfx}, not {gfx}")
    return gpu._replace(gfx=gfx) if gfx else gpu


def _words_of_others(text: str, maker: str) -> tuple[list[str], int | None, str]:
    """The words of a name, without the maker's own; the memory and AMD's target that it says."""
    text = _COUNT.sub("", text.casefold().strip())
    gfx = re.search(r"gfx\d{2,3}[\da-f]", text)
    for pattern, instead in (*_spellings(maker), *_spellings("others")):
        text = pattern.sub(instead, text)
    words: list[str] = []
    gib = None
    for word in filter(None, _WORDS.split(re.sub(r"(\d)\s+(gi?b)\b", r"\1\2", text))):
        if (memory := _MEMORY.fullmatch(word)) and words:
            gib = int(memory[1])
        else:
            words.append(word)
    return words, gib, gfx[0] if gfx else ""


_NO_MODEL = {"rocm": "radeongraphics", "xpu": "intelgraphics", "mps": "applesilicon"}

# ---- what was meant -----------------------------------------------------------------------------------


def _hint(text: str, maker: str) -> str:
    """Models written almost so, then those of the same series that are near in number."""
    said = _parse(text)
    if not re.search(r"\d", said.model) or re.match(r"(?:sm|compute|gfx)\d", said.model):
        return ""
    written = {f"rtx{said.model}" if said.model[0].isdigit() else said.model}
    known = [(gpus[0].name, key) for key, gpus in _others().items() if maker in ("", gpus[0].device)]
    if maker in ("", "cuda"):
        known += [(own[0][1].name, key) for (key, laptop), own in _models().items() if laptop == said.laptop]
    if maker != "cuda":
        words = _words_of_others(text, maker)[0]
        written |= {"".join(words), next((word for word in words if re.search(r"\d", word)), "")}
    ranks: dict[str, tuple[int, float, float]] = {}
    for name, key in known:
        for rank in filter(None, (_likeness(key, each) for each in written)):
            ranks[name] = min(rank, ranks.get(name, rank))
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
    """Octaves between the numbers of two models of one series ("h#", "rtx#ti"); None beyond two octaves."""
    if re.sub(r"\d+", "#", one) != re.sub(r"\d+", "#", other):
        return None
    numbers = [int(re.sub(r"\D", "", text)[:6] or 0) for text in (one, other)]
    octaves = abs(log2(numbers[0] / numbers[1])) if all(numbers) else 9.0
    return octaves if octaves < 2 else None


def _either(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


# ---- names taken apart ---------------------------------------------------------------------------------

_LONGEST = 100
"""Characters of the longest name that is read; the driver's buffer has 96 (nvml.h, DEVICE_NAME_V2)."""


@lru_cache(maxsize=16)
def _spellings(use: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    """The patterns that ``data/gpu_spellings.csv`` has for a use, and what is written instead."""
    rows = (row for row in read_rows("attnsel.environment", "gpu_spellings") if row["use"] == use)
    return tuple((re.compile(row["pattern"]), row["instead"]) for row in rows)


@lru_cache(maxsize=16)
def _says_nothing(use: str) -> re.Pattern[str]:
    """Words that say nothing of which card it is."""
    return re.compile("|".join(pattern.pattern for pattern, _ in _spellings(use)))


_MAKERS = re.compile(r"nvidia|geforce|tesla|\((?:nvgpu|r|tm|c)\)|[®™]")
_SM = re.compile(r"\bsm\s?(\d{2,3})[af]?\b")
_WORDS = re.compile(r"[\s_\-/(),]+")
_MEMORY = re.compile(r"(\d{1,4})(?:gi?b|g)")
_JOINED_MEMORY = re.compile(r"(.*\d[a-z]+)(\d{1,3})gi?b")  # "rtx4060ti16gb"; of "rtx306012gb" nobody knows
_FORMS = re.compile(r"(sxm|pcie|pci|nvl|hbm)\d*e?|oam|active|fhhl|dgxs|cnx")
_FORM_OF = {"sxm": "sxm", "pcie": "pcie", "pci": "pcie", "nvl": "nvl", "fhhl": "pcie", "active": "pcie"}
_COUNT = re.compile(
    r"^\d{1,3}\s*[x×*](?:\s+(?=\w)|(?=[a-z]))|[\s(]+[x×*]\s?\d{1,3}\)?$"
)  # "8x H100", "T4 x2"
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
    words: tuple[str, ...] = ()  # of the model


def _maker(text: str) -> str:
    """``cuda``, ``rocm``, ``xpu`` or ``mps`` where a name says whose it is; "" elsewhere."""
    folded = text.casefold()
    return next((device for theirs, device in _spellings("maker") if theirs.search(folded)), "")


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
    for pattern, instead in _spellings("nvidia"):
        text = pattern.sub(instead, text)
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
        elif not _says_nothing("noise").fullmatch(word):
            model.append(word)
    joined = _JOINED_MEMORY.fullmatch(model[-1]) if model else None
    if joined:
        model[-1], gib = joined[1], int(joined[2])
    if "pro" in "".join(model):
        model = [word for word in model if word not in ("blackwell", "bw")]
    if "ada" in model:  # "RTX Ada 6000"
        model.sort(key=lambda word: word == "ada")
    for word, place in (("pro", int(model[:1] == ["rtx"])), ("agx", 0)):  # "RTX 6000 Pro", "Orin AGX"
        if word in model:
            model.remove(word)
            model.insert(place, word)
    if max_q and any("pro" in word for word in model):
        form = "max-q"
    if "server" in model:
        model.remove("server")
        form = "server"
    return Spelling(
        "".join(model), gib, form, laptop or (max_q and form != "max-q"), part, tuple(filter(None, model))
    )


# ---- what is not in the catalogue ---------------------------------------------------------------------


def _outside(name: str) -> str | None:
    """In one sentence, why a GPU that exists is not one to plan for under this name; None of any other."""
    text = " ".join(name.casefold().split())
    for pattern, what in _spellings("outside"):
        if pattern.search(text):
            return what
    model = re.sub(r"[\s_-]+|developer|dev|kit|jetson|pcie|sxm2?|\d+gb$", "", _MAKERS.sub(" ", text))
    for pattern, what in _spellings("old"):
        if pattern.fullmatch(model):
            return what
    return None
