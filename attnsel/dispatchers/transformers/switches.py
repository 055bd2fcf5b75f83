"""What a user of transformers may set that decides about attention, and what of it holds here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from attnsel.environment import Environment
from attnsel.environment.installed import installed_version
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.verdicts.dispatch import Switch

# ---- The releases of transformers that were read, and the lines that its statements come from ----------
# Facts that differ from release to release were looked for in every release of ``READ``; lines are given for
# five of them, the nearest not newer than the one asked about.


_READ = (
    "4.48.3", "4.50.3", "4.51.3", "4.53.3", "4.54.1", "4.55.4", "4.56.2", "4.57.6", "5.0.0", "5.1.0", "5.2.0",
    "5.3.0", "5.4.0", "5.6.2", "5.8.1", "5.10.4", "5.12.1", "5.13.1", "5.14.1", "5.16.1", "5.18.0", "5.20.2",
    "5.21.1", "5.22.2", "5.23.0", "5.24.0",
)  # fmt: skip
READ = tuple(map(Version.parse, _READ))
NEWEST = READ[-1]

# Of src/transformers; the releases are 4.48.3, 4.53.3, 4.57.6, 5.0.0 and 5.23.0.
_COLUMNS = (READ[0], READ[3], READ[7], READ[8], READ[-2])
_MODELING, _SDPA, _MASKS = "modeling_utils.py", "integrations/sdpa_attention.py", "masking_utils.py"
_FLASH, _FLEX, _IMPORTS = (
    "modeling_flash_attention_utils.py",
    "integrations/flex_attention.py",
    "utils/import_utils.py",
)
_LINES: dict[str, tuple[tuple[str, str], ...]] = {
    "resolve": (
        (_MODELING, "1460-1558"), (_MODELING, "2217-2352"), (_MODELING, "2631-2731"),
        (_MODELING, "1802-1931"), (_MODELING, "1710-1885"),
    ),
    "names": tuple((_MODELING, n) for n in ("1489", "2268", "2700", "1900", "1849")),
    "flash_check": tuple((_MODELING, n) for n in ("1634", "2424", "2391", "1557", "1513-1652")),
    "sdpa_check": tuple((_MODELING, n) for n in ("1735", "2626", "2562", "1729", "1654")),
    "flex_check": tuple((_MODELING, n) for n in ("1766", "2657", "2598", "1775", "1685")),
    "flash_package": tuple((_IMPORTS, n) for n in ("927", "1099", "1189", "886", "1306")),
    "heads": tuple((_SDPA, n) for n in ("29-31", "40-42", "30-70", "28-62", "43-137")),
    "is_causal": tuple((_SDPA, n) for n in ("45", "56", "78", "77", "159")),
    "softcap": tuple((_SDPA, n) for n in ("17-27", "24-34", "47-57", "39-48", "108-111")),
    "mask": (("modeling_attn_mask_utils.py", "244"), *((_MASKS, n) for n in ("199", "219", "212", "267"))),
    "flash_call": tuple((_FLASH, n) for n in ("231", "403", "453-590", "491-630", "622-850")),
    "flex_call": tuple((_FLEX, n) for n in ("12", "227", "235", "235", "258")),
    "weights": (("models/llama/modeling_llama.py", "283"), *((_SDPA, n) for n in ("34", "54", "45", "112"))),
}  # fmt: skip


def source(subject: str, release: Version) -> str:
    """Where it is written, in the nearest release that is not newer and whose lines are known."""
    place = max((n for n, known in enumerate(_COLUMNS) if known <= release), default=0)
    file, lines = _LINES[subject][place]
    return f"{file}, lines {lines}, transformers {_COLUMNS[place]}"


def read_for(release: Version) -> tuple[str, str]:
    """The release whose source answers for this one, and why it is another one."""
    if release in READ:
        return str(release), ""
    older = [known for known in READ if known < release]
    if not older:
        return str(READ[0]), "no older release was read"
    if release > NEWEST:
        return str(NEWEST), "no newer release was read"
    return str(older[-1]), "the nearest older release that was read"


_BOOL = ("true", "false")
_FORCE_GQA = "TRANSFORMERS_SDPA_FORCE_GQA"

SWITCHES = (
    Switch(
        "attn_implementation",
        (),
        "eager, sdpa, flash_attention_2, flash_attention_3, flash_attention_4, flex_attention, one of these "
        "after paged|, or a kernel of the Hub as ORG/NAME or hub:ORG/NAME; not set: sdpa, else eager",
        "from_pretrained, from_config, set_attn_implementation",
    ),
    Switch("transformers", (), "the release", "transformers.__version__"),
    Switch("kernels", _BOOL, "whether the package kernels is there, for the Hub", "pip install kernels"),
    Switch("_supports_sdpa", _BOOL, "what the model's class says", "PreTrainedModel._supports_sdpa"),
    Switch(
        "_supports_flash_attn",
        _BOOL,
        "what the model's class says (_supports_flash_attn_2 before 4.54)",
        "PreTrainedModel._supports_flash_attn",
    ),
    Switch(
        "_supports_flex_attn", _BOOL, "what the model's class says", "PreTrainedModel._supports_flex_attn"
    ),
    Switch(
        "_compatible_flash_implementations",
        (),
        "what the model's class says, with commas (transformers 5.3)",
        "PreTrainedModel._compatible_flash_implementations",
    ),
    Switch("output_attentions", _BOOL, "the weights of attention are asked for", "configuration_utils.py"),
    Switch("torch_compile", _BOOL, "the model runs in a compiled graph", "torch.compile"),
    Switch(
        "allow_all_kernels", _BOOL, "load kernels outside kernels-community", "from_pretrained, since 5.3"
    ),
    Switch(
        _FORCE_GQA,
        ("0", "1"),
        "enable_gqa whatever the mask",
        "integrations/sdpa_attention.py, line 44, 5.23.0",
    ),
)

_KERNEL = re.compile(r"[^/:]+/[^/:@]+(@[^/:]+)?(:[^/:]+)?")  # integrations/hub_kernels.py, line 815, 5.23.0
_HUB = {
    "flash_attention_2": "kernels-community/flash-attn2",
    "flash_attention_3": "kernels-community/vllm-flash-attn3",
    "flash_attention_4": "kernels-community/flash-attn4",
}
"""modeling_flash_attention_utils.py, lines 66 to 74, 5.23.0; modeling_utils.py, lines 163 and 164, 5.0.0."""
_VLLM_3, _AITER, _METAL = (
    f"kernels-community/{name}" for name in ("vllm-flash-attn3", "aiter-flash-attn", "metal-flash-sdpa")
)
_WITH_SINKS = (
    (Version(5, 3), (_VLLM_3,)),
    (Version(5, 4), (_VLLM_3, "flash_attention_4")),
    (Version(5, 18), (_VLLM_3, "flash_attention_4", _METAL, _AITER)),
)
"""_compatible_flash_implementations of gpt-oss, since which release (models/gpt_oss/modeling_gpt_oss.py)."""
_DEVICES = {_VLLM_3: ("cuda",), _AITER: ("rocm",), _METAL: ("mps",), _HUB["flash_attention_4"]: ("cuda",)} | {
    _HUB["flash_attention_2"]: ("cuda", "xpu")
}
"""FLASH_ATTN_KERNEL_DEVICES, modeling_flash_attention_utils.py, lines 87 to 94, 5.24.0; since 5.18."""
_HUB_4 = "kernels-community/flash-attn"  # modeling_utils.py, line 2784, 4.56.2, and line 2662, 4.57.6


class Switches(NamedTuple):
    """The switches, read."""

    implementation: str | None  # without paged| and hub:
    release: Version
    assumed_release: bool
    kernels: bool
    sdpa: bool
    flash: bool
    flex: bool
    model_flags_set: bool
    output_attentions: bool
    compiled: bool
    all_kernels: bool
    force_gqa: bool
    compatible: tuple[str, ...]  # flash implementations that the model's class names, () where it names none

    def replaced(self, name: str, device: str) -> str:
        """What a model that names its flash implementations runs in place of another: the first that is built
        for the device.

        Source: _check_and_adjust_attn_implementation, modeling_utils.py, lines 1816 to 1831 of 5.3.0 and 1752
        to 1773 of 5.24.0.
        """
        wants_flash = "flash" in name and not name.startswith("flex")
        if not self.compatible or name in self.compatible or not wants_flash or self.release < (5, 3):
            return name
        if self.release < (5, 18):
            return self.compatible[0]
        built = (one for one in self.compatible if device in _DEVICES.get(_HUB.get(one, one), (device,)))
        return next(built, self.compatible[0])

    def hub_fallback(self, name: str, device: str, other: bool) -> str:
        """The Hub's kernel that transformers takes where the package is missing; "" for none. ``other``:
        FlashAttention 2 or 3 is there, which before 5.4 is enough to look no further."""
        if name not in _HUB or self.release < (4, 56) or not (self.kernels and self.flash):
            return ""
        if self.release < (5, 4) and (other or (name == "flash_attention_4" and self.release >= (5,))):
            return ""
        aiter = {"flash_attention_2": Version(5, 20), "flash_attention_3": Version(5, 13)}.get(name)
        if device == "rocm" and aiter is not None and self.release >= aiter:
            return _AITER
        if self.release >= (5,):
            return _HUB[name]
        return _HUB_4 if name == "flash_attention_2" else _VLLM_3


def is_hub(name: str) -> bool:
    return _KERNEL.fullmatch(name) is not None


def held(env: Environment) -> dict[str, str]:
    """What holds in this process. A model is not looked at."""
    made = {}
    release = installed_version("transformers")
    if release is not None:
        made["transformers"] = str(release)
    made["kernels"] = "true" if installed_version("kernels") is not None else "false"
    if os.environ.get(_FORCE_GQA) in ("0", "1"):
        made[_FORCE_GQA] = os.environ[_FORCE_GQA]
    return made


def read_switches(switches: Mapping[str, str], p: AttentionParams) -> Switches:
    """What is not said of the model's class is as classes of such questions have it: those with sinks, and
    from 5.21 on those with a soft cap, say _supports_sdpa = False; none with ALiBi has flex_attention.

    Raises InvalidInput for a release or a name that cannot be one.
    """

    def flag(name: str, otherwise: bool) -> bool:
        return switches[name] == "true" if name in switches else otherwise

    text = switches.get("attn_implementation", "")
    release = _release(switches)
    paged = text.startswith("paged|") and release >= (5,)  # before: names of their own, such as sdpa_paged
    name = (text.removeprefix("paged|") if paged else text).removeprefix("hub:")
    if text and not name:
        raise InvalidInput("attn_implementation", text, "must name an implementation")
    models = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    sinks = p.softmax_type != "vanilla"
    compatible = switches.get("_compatible_flash_implementations")
    if compatible is None and sinks:
        compatible = ",".join(next((names for since, names in reversed(_WITH_SINKS) if release >= since), ()))
    return Switches(
        implementation=name or None,
        release=release,
        assumed_release="transformers" not in switches,
        kernels=flag("kernels", False),
        sdpa=flag(models[0], not sinks and not (p.softcap and release >= (5, 21))),
        flash=flag(models[1], True),
        flex=flag(models[2], p.core_attention_bias_type != "alibi"),
        model_flags_set=any(model in switches for model in models),
        output_attentions=flag("output_attentions", False),
        compiled=flag("torch_compile", False),
        all_kernels=flag("allow_all_kernels", False),
        force_gqa=switches.get(_FORCE_GQA) == "1",
        compatible=tuple(one.strip() for one in (compatible or "").split(",") if one.strip()),
    )


def _release(switches: Mapping[str, str]) -> Version:
    text = switches.get("transformers")
    if text is None:
        return NEWEST
    try:
        release = Version.parse(text)
    except (ValueError, TypeError):
        raise InvalidInput("transformers", text, "must be a version, such as 5.23.0") from None
    if release < (4, 48):
        raise InvalidInput(
            "transformers", text, "must be 4.48 or newer: before it each model chose by itself"
        )
    return release
