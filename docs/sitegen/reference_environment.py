"""``reference/environment.md``: the variables that attnsel reads, made from the fields that they set."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from attnsel.policy import Policy
from attnsel.settings import VARIABLES, Settings
from sitegen import docstring
from sitegen.model import File
from sitegen.reference_python import default_of, type_words
from sitegen.tables import table

PATH = "reference/environment.md"
_TOP = """\
# Environment variables

Each sets a field of [`attnsel.Settings`](python.md#attnsel.Settings) or of its
[`attnsel.Policy`](python.md#attnsel.Policy), which `attnsel.configure()` and `attnsel.override()` set too.
How they work together, and what is printed and checked: [settings.md](settings.md).

They are read once, when attnsel first needs a setting. An empty one counts as not set. A wrong value ends a
command, or raises [`InvalidInput`](python.md#attnsel.InvalidInput), and names the variable.
"""


def files() -> Iterator[File]:
    """The page of the variables."""
    rows = [
        (
            f'<a id="{variable}"></a><code>{variable.replace("_", "_<wbr>")}</code> sets `{field}`',
            f"{values(_field(field))}; default {default_of(_field(field)) or 'none'}",
            docstring.inline(_field(field).description or ""),
        )
        for variable, field in VARIABLES.items()
    ]
    head = ("variable", "values", "meaning")
    yield File(PATH, f"{_TOP}\n{table(head, rows)}\n", title="Environment variables")


def _field(name: str) -> FieldInfo:
    return {**Settings.model_fields, **Policy.model_fields}[name]


def values(info: FieldInfo) -> str:
    """What may be typed for a field: words of a shell rather than of Python."""
    words = type_words(info.annotation)
    if words == "`bool`":
        return "`1`, `0`"
    if words.startswith("tuple"):
        return "names, commas between"
    if "ByteSize" in words:
        return "a size, such as `2GiB`"
    if "`str`" in words:
        return "text"
    return words.replace("'", "")
