"""What is allowed and wanted: a question asked under another policy may have another answer."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, WrapValidator

from attnsel.backends.registry import CANDIDATES, complete
from attnsel.base.model import FrozenModel
from attnsel.base.suggestions import candidate_suggestion
from attnsel.errors import short
from attnsel.params.attention import LARGEST
from attnsel.verdicts.measured import Figures, read_figures


def _read_names(value: Any) -> Any:
    """``"cudnn, triton"`` from an environment variable, or any sequence of names."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (list, tuple, set, frozenset)):
        if not all(isinstance(name, str) for name in value):
            raise ValueError(f"must be names of candidates; allowed: {', '.join(CANDIDATES)}")
        names = tuple(sorted(value) if isinstance(value, (set, frozenset)) else value)
        if any(name not in CANDIDATES for name in names):
            complete()  # only a name that is not ours needs them
        for name in names:
            if name not in CANDIDATES:
                meant = candidate_suggestion(name, CANDIDATES)
                said = f"{short(name)} is no candidate" + (f": {meant} Allowed" if meant else "; allowed")
                raise ValueError(f"{said}: {', '.join(CANDIDATES)}")
        return names
    return value


def _read_name(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value in ("", "auto")):
        return None
    return _read_names([value])[0]


_SIZE = re.compile(r"\d*\.?\d+ *[A-Za-z]*")


def _read_size(value: Any, read: Any) -> Any:
    if value is None or (isinstance(value, str) and value.strip().casefold() == "none"):
        return None
    whole = not isinstance(value, str) or _SIZE.fullmatch(value.strip())  # pydantic stops at the unit
    try:
        amount = read(value) if whole else None
    except (ValueError, OverflowError):
        amount = None
    if amount is None or not 0 <= amount <= LARGEST:
        raise ValueError("must be a size from 0 to 8 EiB such as 2GiB, 500MB or a number of bytes")
    return amount


def _read_file(value: Any, read: Any) -> Any:
    if value is None or value == "" or isinstance(value, Figures):  # read once: the same content for ever
        return value or None
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError("must be the name of a file that attnsel explain --measure wrote")
    return read_figures(value)


Size = Annotated[ByteSize | None, WrapValidator(_read_size)]
Names = Annotated[tuple[str, ...], BeforeValidator(_read_names)]


class Policy(FrozenModel):
    """What is allowed and preferred. The default allows everything that is right and prefers speed."""

    backend: Annotated[str | None, BeforeValidator(_read_name)] = Field(
        default=None, description="run this candidate or raise with its reasons; never another"
    )
    allow: Names = Field(default=(), description="only these candidates, in this order of preference")
    deny: Names = Field(default=(), description="never these candidates")
    adapt: Literal["auto", "never"] = Field(
        default="auto", description="whether a call may be changed exactly (a mask folded, a copy made)"
    )
    allow_known_bugs: tuple[str, ...] = Field(
        default=(), description="BUG codes to ignore, for those who know their build is patched"
    )
    deterministic: bool = Field(default=False, description="refuse what is not deterministic")
    preview: bool = Field(default=False, description="let rules refuse that are still tried out")
    memory_limit: Size = Field(
        default=None,
        description="most memory, such as 2GiB, that a call may take for scores, masks, copies and tiles",
    )
    figures: Annotated[Figures | None, WrapValidator(_read_file)] = Field(
        default=None,
        description="a file of explain --measure: what was measured here goes before what was published",
    )
