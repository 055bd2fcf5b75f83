"""What a replay file holds: one call, where it ran, and what happened. JSON; no tensor's numbers.

Lengths of sequences and tables of pages are kept, since the call would be another one without them. With
``ATTNSEL_REPLAY_DATA=1`` the numbers lie beside it in a file of ``torch.save``, which is read with
``weights_only=True``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from attnsel.base.model import FrozenModel
from attnsel.base.schemas import VERSIONS, stamped
from attnsel.environment import Environment
from attnsel.errors import InvalidInput, printable, short
from attnsel.params import AttentionParams
from attnsel.params.attention import MOST
from attnsel.params.layout import FORMATS
from attnsel.settings import Settings

MOST_BYTES = 16 << 20  # of a file; one has some 10,000
MOST_VALUES = 1 << 16  # of lengths and pages that are kept

Text = Annotated[str, AfterValidator(printable)]
Extent = Annotated[int, Field(ge=0, le=MOST)]


class TensorRecord(FrozenModel):
    """One tensor. Those of one ``storage`` are views of the same memory."""

    name: Literal[
        "q", "k", "v", "attention_mask", "attention_mask.q", "attention_mask.kv", "core_attention_bias",
        "alibi_slopes", "softmax_offset", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded",
        "cu_seqlens_kv_padded", "block_table", "dropout_seed",
    ]  # fmt: skip
    shape: tuple[Extent, ...] = Field(max_length=8)
    stride: tuple[Extent, ...] = Field(max_length=8)
    dtype: Literal["float64", "float32", "float16", "bfloat16", "bool", "int32", "int64"]
    device: Text = "cpu"
    storage: int = Field(ge=0, le=99, description="which memory it is a view of")
    storage_offset: Extent = Field(
        default=0, description="elements from the first 64-byte line that any view of this memory uses"
    )
    requires_grad: bool = False
    values: tuple[int, ...] | None = Field(
        default=None, max_length=MOST_VALUES, description="of lengths, pages and seeds, in order"
    )
    hidden: float | None = Field(default=None, ge=0, le=1, description="the part of a mask that is True")
    lengths: tuple[int, ...] | None = Field(
        default=None, max_length=MOST_VALUES, description="of a padding mask: real rows of each sequence"
    )

    @property
    def span(self) -> int:
        """Elements from the beginning of its memory to its own end."""
        if 0 in self.shape:
            return self.storage_offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self.storage_offset + last + 1


class Happened(FrozenModel):
    """What made the file. ``then``: the candidate that took over, "" for none."""

    kind: Literal["refused", "wrong numbers", "nothing runs"]
    candidate: Text = ""
    message: Text = ""
    code: Text = ""
    likely: tuple[Text, ...] = ()
    then: Text = ""


class Generator(FrozenModel):
    """PyTorch's generator of the call's device before the call ran again: dropout draws from it."""

    initial_seed: int = 0
    state: str = Field(default="", max_length=1 << 16, description="base64 of get_rng_state()")


class ReplayFile(FrozenModel):
    """All of it."""

    attnsel: Text
    time: Text = ""
    rank: int = Field(default=0, ge=0)
    happened: Happened
    config: str = Field(
        max_length=1 << 14, description="the call's static side, as JSON: attnsel/runtime/call.py"
    )
    params: AttentionParams
    settings: Settings
    environment: Environment
    generator: Generator = Generator()
    tensors: tuple[TensorRecord, ...] = Field(max_length=32)
    max_seqlen_q: int | None = Field(default=None, ge=0, le=MOST)
    max_seqlen_kv: int | None = Field(default=None, ge=0, le=MOST)
    data: Text = Field(default="", description="the file beside this one that has the numbers")
    data_left_out: Text = Field(default="", description="why there is none, where it was asked for")

    def as_dict(self) -> dict[str, Any]:
        return stamped("replay", self.model_dump(mode="json"))

    @property
    def static(self) -> dict[str, Any]:
        """``config`` as values. Raises InvalidInput for what is no call's."""
        try:
            held = json.loads(self.config)
        except (ValueError, RecursionError):
            held = None
        if not isinstance(held, dict) or held.get("qkv_format") not in FORMATS:
            raise InvalidInput("config", short(self.config), "is no call's")
        return held

    def named(self, name: str) -> TensorRecord | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)


_SCHEMA = re.compile(r"attnsel\.replay/(\d{1,6})")


def read_file(path: Path) -> ReplayFile:
    """Raises InvalidInput, in a line, for what is no replay file of a version that is read."""
    name = str(path)
    try:
        if not path.is_file():
            raise InvalidInput("FILE", name, "is no file" if path.exists() else "there is no such file")
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise InvalidInput("FILE", name, f"is larger than {MOST_BYTES >> 20} MiB; no replay file is")
        data = json.loads(text)
    except InvalidInput:
        raise
    except OSError as error:
        raise InvalidInput("FILE", name, error.strerror or str(error)) from None
    except RecursionError:
        raise InvalidInput("FILE", name, "is nested too deeply") from None
    except ValueError as error:
        raise InvalidInput("FILE", name, f"is no JSON: {short(error, str)}") from None
    return _checked(name, data)


def _checked(name: str, data: Any) -> ReplayFile:
    schema = data.get("schema") if isinstance(data, dict) else None
    found = _SCHEMA.fullmatch(schema) if isinstance(schema, str) else None
    if found is None:
        what = f"holds {schema}" if isinstance(schema, str) else "has no schema"
        raise InvalidInput("FILE", name, f"{short(what, str)}; needs a file of ATTNSEL_REPLAY_DIR")
    if int(found[1]) != VERSIONS["replay"]:
        age = "newer" if int(found[1]) > VERSIONS["replay"] else "older"
        version = short(data.get("attnsel"), str, 20)
        raise InvalidInput(
            "FILE",
            name,
            f"comes from attnsel {version}, which is {age}: {found[0]}; this one reads {VERSIONS['replay']}",
        )
    data.pop("schema")
    if isinstance(data.get("environment"), dict):
        data["environment"].pop("warnings", None)
    try:
        file = ReplayFile(**data)
    except InvalidInput as error:
        raise InvalidInput(f"{short(name, str)}: {error.field}", error.value, error.allowed) from None
    except (TypeError, RecursionError):
        raise InvalidInput("FILE", name, "is damaged") from None
    _check_tensors(name, file)
    return file


def _check_tensors(name: str, file: ReplayFile) -> None:
    names = [tensor.name for tensor in file.tensors]
    missing = [wanted for wanted in ("q", "k", "v") if wanted not in names]
    if missing or len(set(names)) < len(names):
        said = f"has no {missing[0]}" if missing else "has a tensor twice"
        raise InvalidInput(f"{short(name, str)}: tensors", names, said)
    for tensor in file.tensors:
        count = 1
        for size in tensor.shape:
            count *= size
        if len(tensor.shape) != len(tensor.stride):
            said = "must be as long as its shape"
            raise InvalidInput(f"{short(name, str)}: {tensor.name}.stride", tensor.stride, said)
        if tensor.values is not None and len(tensor.values) != count:
            said = f"must be {count} values"
            raise InvalidInput(f"{short(name, str)}: {tensor.name}.values", len(tensor.values), said)
    if Path(file.data).name != file.data:
        raise InvalidInput(f"{short(name, str)}: data", file.data, "must be a file in the same folder")
