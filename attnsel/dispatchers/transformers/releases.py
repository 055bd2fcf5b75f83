"""The releases of transformers that were read, and the lines that its statements come from.

Facts that differ from release to release were looked for in every release of ``READ``; lines are given for
five of them, the nearest not newer than the one asked about.
"""

from __future__ import annotations

from attnsel.environment.versions import Version

_READ = (
    "4.48.3", "4.50.3", "4.51.3", "4.53.3", "4.54.1", "4.55.4", "4.56.2", "4.57.6", "5.0.0", "5.1.0", "5.2.0",
    "5.3.0", "5.4.0", "5.6.2", "5.8.1", "5.10.4", "5.12.1", "5.13.1", "5.14.1", "5.16.1", "5.18.0", "5.20.2",
    "5.21.1", "5.22.2", "5.23.0",
)  # fmt: skip
READ = tuple(map(Version.parse, _READ))
NEWEST = READ[-1]

# Of src/transformers; the releases are 4.48.3, 4.53.3, 4.57.6, 5.0.0 and 5.23.0.
_COLUMNS = (READ[0], READ[3], READ[7], READ[8], READ[-1])
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
