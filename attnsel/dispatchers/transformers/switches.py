"""What a user of transformers may set that decides about attention, and what of it holds here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from attnsel.base.rows import read_rows
from attnsel.environment import Environment
from attnsel.environment.installed import installed_version
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.verdicts.dispatch import switches_in

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

_COLUMNS = tuple(map(Version.parse, ("4.48.3", "4.53.3", "4.57.6", "5.0.0", "5.23.0")))
_LINES = {
    (row["subject"], Version.parse(row["release"])): (row["file"], row["lines"])
    for row in read_rows("attnsel.dispatchers.transformers", "lines")
}
"""File of src/transformers and its lines, by subject, for each of the five."""


def source(subject: str, release: Version) -> str:
    """Where it is written, in the nearest release that is not newer and whose lines are known."""
    nearest = max((known for known in _COLUMNS if known <= release), default=_COLUMNS[0])
    file, lines = _LINES[subject, nearest]
    return f"{file}, lines {lines}, transformers {nearest}"


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


_FORCE_GQA = "TRANSFORMERS_SDPA_FORCE_GQA"

SWITCHES = switches_in("attnsel.dispatchers.transformers")

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
