"""One axis of a matrix: ``head_dim_qk=64,128``, ``max_seqlen_q=1024:16384:*2``, ``gpu=A100,H100``."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple, get_origin

from pydantic import TypeAdapter, ValidationError

from attnsel.base.model import invalid_input
from attnsel.cli.flags import ALIASES, plain_type
from attnsel.cli.numbers import read_count
from attnsel.environment import COMPONENTS
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.params.recipes import KINDS

MACHINE = ("gpu", *COMPONENTS)
_NUMBER = "([0-9]{1,20}(?:k|K|Ki|M|Mi)?)"  # int() refuses texts of thousands of digits
_RANGE = re.compile(f"{_NUMBER}:{_NUMBER}:([+*]){_NUMBER}")
MOST_CELLS = 20_000
"""Of a grid: some 10 s on one core, and 200 MiB."""


_ALSO = {name.lstrip("-").replace("-", "_"): field for field, names in ALIASES.items() for name in names}
_ALSO |= {"head_dim": "head_dim_qk", "seqlen": "max_seqlen_q", "seq_len": "max_seqlen_q"}
"""Other names of fields. Of the last the other field follows unless it is stated."""


class Axis(NamedTuple):
    """A field and its values, each with the text a user would call it by."""

    field: str
    labels: tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def of_machine(self) -> bool:
        return self.field in MACHINE


def read_axis(flag: str, text: str) -> Axis:
    """Raises InvalidInput naming ``flag`` for an unknown field or a value the field cannot take."""
    if not text.isprintable():
        raise InvalidInput(flag, text, "must hold no control characters")
    name, equals, values = text.partition("=")
    field = name.strip().replace("-", "_")
    field = _ALSO.get(field, field)
    fields = [*AttentionParams.model_fields, "fp8_recipe", *MACHINE]
    if not equals or not values.strip():
        raise InvalidInput(flag, text, "must be FIELD=VALUE,VALUE,… or FIELD=FIRST:LAST:+STEP (or :*FACTOR)")
    if field not in fields or field in ("tensors", "fp8_meta"):
        allowed = ", ".join(name for name in fields if name not in ("tensors", "fp8_meta"))
        raise InvalidInput(flag, text, f"there is no field {field!r}; allowed: {allowed}")
    found: dict[str, None] = {}
    for part in values.split(","):
        found |= dict.fromkeys(_spread(flag, part.strip()))
        if len(found) > MOST_CELLS:
            raise InvalidInput(flag, part, f"holds more than {MOST_CELLS} values")
    labels = tuple(found)
    return Axis(field, labels, tuple(_read_value(flag, field, label) for label in labels))


def _spread(flag: str, part: str) -> list[str]:
    """The values that one part between commas stands for: itself, or a range with both ends."""
    match = _RANGE.fullmatch(part)
    if match is None:
        if part and ":" not in part:
            return [part]
        raise InvalidInput(flag, part, "must be a value, FIRST:LAST:+STEP or FIRST:LAST:*FACTOR")
    first, last, step = (read_count(flag, match[number]) for number in (1, 2, 4))
    grows = step >= 1 if match[3] == "+" else step >= 2 and first >= 1
    if not grows or first > last:
        raise InvalidInput(flag, part, "must rise: FIRST at most LAST, a STEP of 1 or a FACTOR of 2 or more")
    values: list[str] = []
    while first <= last:
        values.append(str(first))
        if len(values) > MOST_CELLS:
            raise InvalidInput(flag, part, f"holds more than {MOST_CELLS} values")
        first = first + step if match[3] == "+" else first * step
    return values


def _read_value(flag: str, field: str, label: str) -> Any:
    """A label as the field's own type, checked as far as one field alone can be."""
    if field in MACHINE:
        return label
    if field == "fp8_recipe":
        if label not in KINDS:
            raise InvalidInput(flag, f"{field}={label}", f"must be one of {', '.join(KINDS)}")
        return label
    info = AttentionParams.model_fields[field]
    kind, optional = plain_type(info.annotation)
    if optional and label.casefold() == "none":
        return None
    if kind is int:
        try:
            return _checked(flag, field, label, read_count(flag, label))
        except InvalidInput as error:
            raise InvalidInput(flag, f"{field}={label}", error.allowed) from None
    pair = kind == tuple[int, int]
    value: Any = label.split("x") if get_origin(kind) is tuple else label
    if pair and len(value) != 2:
        raise InvalidInput(flag, f"{field}={label}", "must be two numbers such as 128x0")
    return _checked(flag, field, label, value)


def _checked(flag: str, field: str, label: str, value: Any) -> Any:
    info = AttentionParams.model_fields[field]
    checked: Any = info.annotation
    for bound in info.metadata:  # not the Field itself, whose other names belong to the model
        checked = Annotated[checked, bound]
    try:
        return TypeAdapter(checked).validate_python(value)
    except ValidationError as error:
        allowed = invalid_input(error).allowed
        raise InvalidInput(flag, f"{field}={label}", allowed) from None
