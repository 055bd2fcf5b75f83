"""What a replay file holds: one call, where it ran, and what happened. JSON; no tensor's numbers.

Lengths of sequences and tables of pages are kept, since the call would be another one without them. A call
leaves such a file (``attnsel/runtime/leave_replay.py``), and ``attnsel replay`` makes a program of it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from attnsel.base.model import FrozenModel
from attnsel.base.records import stamped, versions
from attnsel.environment import Environment
from attnsel.errors import InvalidInput, printable, short
from attnsel.params import AttentionParams
from attnsel.params.attention import MOST
from attnsel.params.layout import FORMATS
from attnsel.settings import Settings

MOST_VALUES = 1 << 16  # of lengths and pages that are kept

Text = Annotated[str, AfterValidator(printable)]
Extent = Annotated[int, Field(ge=0, le=MOST)]
Number = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


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
    values: tuple[Number, ...] | None = Field(
        default=None, max_length=MOST_VALUES, description="of lengths, pages and seeds, in order"
    )
    hidden: float | None = Field(default=None, ge=0, le=1, description="the part of a mask that is True")
    lengths: tuple[Number, ...] | None = Field(
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

    initial_seed: int = Field(default=0, ge=-(1 << 63), lt=1 << 64)
    state: tuple[Annotated[int, Field(ge=0, le=255)], ...] = Field(
        default=(), max_length=64, description="bytes of torch.cuda.get_rng_state(); a CPU's is too long"
    )


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


def checked(name: str, data: dict[str, Any]) -> ReplayFile:
    """What a file of that name holds. Raises InvalidInput, in a line, for what is no file of this version."""
    wanted = f"attnsel.replay/{versions()['replay']}"
    given = dict(data)
    schema = given.pop("schema", "no schema")
    if schema != wanted:
        by = f" of attnsel {given['attnsel']}" if "attnsel" in given else ""
        said = short(f"holds {schema}{by}", str)
        raise InvalidInput("FILE", name, f"{said}; needs {wanted}, a file of ATTNSEL_REPLAY_DIR")
    if isinstance(given.get("environment"), dict):  # warnings are worked out again
        given["environment"] = {k: v for k, v in given["environment"].items() if k != "warnings"}
    try:
        file = ReplayFile(**given)
    except InvalidInput as error:
        raise InvalidInput(f"{short(name, str)}: {error.field}", error.value, error.allowed) from None
    except (TypeError, RecursionError):
        raise InvalidInput("FILE", name, "is damaged") from None
    names = [tensor.name for tensor in file.tensors]
    if names[:3] != ["q", "k", "v"]:
        raise InvalidInput(f"{short(name, str)}: tensors", names, "must begin with q, k and v")
    for tensor in file.tensors:
        if len(tensor.shape) != len(tensor.stride):
            said = "must be as long as its shape"
            raise InvalidInput(f"{short(name, str)}: {tensor.name}.stride", tensor.stride, said)
    return file
