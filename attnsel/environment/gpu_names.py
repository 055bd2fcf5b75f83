"""Names of GPUs taken apart, and what is not an NVIDIA GPU that attnsel plans for: no figures here."""

from __future__ import annotations

import re
from typing import NamedTuple

LONGEST = 100
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


def take_apart(name: str) -> Spelling:
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
_INTEL = re.compile(r"\b(?:intel|arc|iris|xe|ponte vecchio|pvc|flex \d+|max 1[15]\d0|b580|a770|a750)\b")
_APPLE = re.compile(r"\bapple\b|\bm[1-9][\s-]?(?:pro|max|ultra)?$")
_OTHERS = re.compile(r"\b(?:tpu|trainium|inferentia|gaudi|ascend|cerebras|groq)\b")
_RUBIN_CPX = re.compile(r"\brubin[\s-]?cpx\b")
_RUBIN = re.compile(r"\b(?:vera[\s-]?)?rubin\b|\bv?r[123]00\b|\bnvl144\b|^(?:sm_?107[af]?|10\.7)$")

# LLVM's AMDGPU user guide, "Processors".
_GFX = {"mi100": "gfx908", "mi2[15]0x?": "gfx90a", "mi3[02][05][ax]?": "gfx942", "mi35[05]x?": "gfx950"}


def outside(name: str) -> str | None:
    """In one sentence, why a GPU that exists is not one to plan for under this name; None of any other."""
    text = " ".join(name.casefold().split())
    if _AMD.search(text):
        gfx = next((gfx for model, gfx in _GFX.items() if re.search(rf"\b{model}\b", text)), None)
        return f"a GPU of AMD's: ask for {gfx or 'rocm, or its architecture such as gfx1100'} instead"
    if _INTEL.search(text):
        return "a GPU of Intel's: ask for xpu instead"
    if _APPLE.search(text):
        return "a GPU of Apple's: ask for mps instead"
    if _OTHERS.search(text):
        return "not a GPU: attnsel knows no kernels for it"
    if _RUBIN_CPX.search(text):
        return "Rubin CPX: its compute capability is not known yet"
    if _RUBIN.search(text):
        return "Rubin (compute capability 10.7, since CUDA 13.4): no rule knows it yet; the nearest is B300"
    if re.fullmatch(r"(?:sm|compute)_?88|8\.8", text):
        return "an architecture of which NVIDIA lists no GPU; compilers take it since CUDA 13.0"
    bare = re.fullmatch(r"(?:sm_?|compute_?)?([1-6])\.?(\d)", text)
    if bare or _OLD.fullmatch(re.sub(r"[\s_-]+|jetson|pcie|sxm2?|\d+gb", "", _MAKERS.sub(" ", text))):
        return "older than Volta (sm70), the oldest architecture that attnsel plans for"
    return None
