"""The reference is made from the code: what is added there stands on its page without another edit."""

from __future__ import annotations

import json
import re
import sys
import types
from typing import Annotated, Literal

import pytest

pytest.importorskip("griffe")

from cyclopts import Parameter
from pydantic import BaseModel, Field

import attnsel
import pages
from attnsel import settings
from attnsel.base.schemas import PRINTED_BY, VERSIONS
from attnsel.cli import COMMANDS
from attnsel.cli.flags import FLAGS
from paths import ROOT
from sitegen import reference_cli, reference_environment, reference_python, reference_schemas
from sitegen.markdown import lines_of

PYTHON = {file.path: str(file.content) for file in reference_python.files()}


def only(files) -> str:
    (file,) = files
    return str(file.content)


# ---- commands -------------------------------------------------------------------------------------------


def test_every_command_has_its_part_and_every_flag_its_anchor():
    page = only(reference_cli.files())
    assert re.findall(r"^## attnsel (\S+) \{#(\S+)\}$", page, re.M) == [(name, name) for name in COMMANDS]
    for flag in FLAGS:
        assert f'<a id="explain{flag.name}"></a>`{", ".join(flag.names)}' in page, flag.name


def test_a_new_command_and_a_new_flag_stand_on_the_page(monkeypatch):
    def probe(*, depth: Annotated[int, Parameter(help="how *deep*")] = 3, file: str) -> int:
        """Look under it.

        Without --depth it looks at the surface, as docs/how-to/ask.md says.

            attnsel probe --depth 4

        Exit code: 0 something is there.
        """
        return depth

    module = types.ModuleType("probe_of_a_test")
    module.probe = probe  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, "probe", (f"{module.__name__}:probe", "what lies below"))
    page = only(reference_cli.files())
    assert "| [`attnsel probe`](#probe) | what lies below |" in page
    part = page.partition("## attnsel probe {#probe}\n")[2]
    assert "```console\n$ attnsel probe" in part
    assert "Without `--depth` it looks at the surface, as [how-to/ask](../how-to/ask.md) says." in part
    assert "```text\nattnsel probe --depth 4\n```" in part
    assert '- <a id="probe--depth"></a>`--depth INT`: how \\*deep\\*. Default: `3`' in part
    assert '- <a id="probe--file"></a>`--file STR`: **Required**' in part


# ---- Python ---------------------------------------------------------------------------------------------


def test_every_public_name_has_its_part():
    page = PYTHON["reference/python.md"]
    for name in dir(attnsel):
        if not name.startswith("_"):
            assert f"## {name} {{#attnsel.{name}}}" in page, name


def test_what_pages_and_examples_import_is_documented():
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in pages.PAGES]
    texts += [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))]
    found = re.findall(r"^\s*from (attnsel[\w.]*) import ([\w, ]+)$", "\n".join(texts), re.M)
    parts = {anchor for text in PYTHON.values() for anchor in re.findall(r"\{#(attnsel[\w.]+)\}", text)}
    public = [(module, names) for module, names in found if module in reference_python.MODULES]
    assert len(public) > 10
    assert not {f"{module}.{name.strip()}" for module, names in public for name in names.split(",")} - parts


def test_arguments_have_their_shapes_and_errors_their_links():
    page = PYTHON["reference/python.md"]
    part = page.partition("{#attnsel.attention}")[2].partition("\n## ")[0]
    assert "    block_table: Tensor | None = None,\n" in part
    assert "- `block_table`: int32 [b, n]; k and v are then pools of pages, [pages, page_size, g, d]" in part
    assert "Raises [InvalidInput](#attnsel.InvalidInput) naming the argument" in part
    assert "unknown" not in part, "what takes misspelt arguments is no argument"


def test_what_pydantic_or_the_engine_calls_is_left_out():
    for name in ("model_post_init", "model_copy", "rewritten", "derive"):
        assert f"AttentionParams.{name}" not in PYTHON["reference/python.md"]
    assert "AttentionParams.replace" in PYTHON["reference/python.md"]


def test_a_new_field_stands_in_its_table_with_type_default_and_meaning():
    class Call(BaseModel):
        mode: Literal["a", "b"] = Field(default="a", description="one | the other")
        size: tuple[int, int] | None = None
        name: str

    assert reference_python.fields(Call).splitlines()[2:] == [
        "| `mode` | `'a'`, `'b'` | `'a'` | one \\| the other |",
        "| `size` | (`int`, `int`) or `None` | `None` |  |",
        "| `name` | `str` | required |  |",
    ]


def test_every_category_of_warning_is_listed():
    page = PYTHON["reference/python.md"].partition("## Warnings")[2]
    from attnsel import debug, plugins

    found = [value for module in (debug, plugins, settings) for value in vars(module).values()]
    warnings = [value for value in found if isinstance(value, type) and issubclass(value, Warning)]
    assert len(warnings) > 5
    for warning in warnings:
        assert f"`{warning.__module__}.{warning.__name__}`" in page


# ---- variables ------------------------------------------------------------------------------------------


def test_every_variable_has_its_row_and_its_meaning():
    rows = re.findall(r'^\| <a id="(\w+)"></a>.*\| ([^|]+) \|$', only(reference_environment.files()), re.M)
    assert [variable for variable, _ in rows] == list(settings.VARIABLES)
    assert not [variable for variable, meaning in rows if not meaning.strip()]


def test_a_new_variable_stands_on_the_page(monkeypatch):
    monkeypatch.setitem(settings.VARIABLES, "ATTNSEL_OF_A_TEST", "preview")
    page = only(reference_environment.files())
    assert '"ATTNSEL_OF_A_TEST"></a>`ATTNSEL_OF_A_TEST` | `preview` | `1`, `0` | `False` | let rules' in page


# ---- JSON -----------------------------------------------------------------------------------------------


def test_every_shape_says_who_prints_it():
    assert list(PRINTED_BY) == list(VERSIONS)


@pytest.mark.parametrize("name", VERSIONS)
def test_every_key_of_a_shape_has_its_row(name):
    text = reference_schemas.page(name, VERSIONS[name])
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.M))
    document = json.loads((reference_schemas.FOLDER / f"{name}-{VERSIONS[name]}.json").read_text("utf-8"))
    shapes = [document, *document.get("$defs", {}).values()]
    for shape in shapes:
        for key in shape.get("properties", {}):
            assert key in rows
    assert all(f"{name}-{version}.json" in text for version in range(1, VERSIONS[name] + 1))


def test_a_new_key_stands_on_its_page_with_the_keys_inside_it():
    shape = {
        "properties": {
            "items": {
                "type": "array",
                "items": {"type": "object", "properties": {"x": {"type": ["null", "integer"]}}},
            },
            "kind": {"enum": ["a", "b"]},
            "found": {"type": "object", "additionalProperties": {"type": "object", "properties": {"y": {}}}},
            "params": {"$ref": "#/$defs/params"},
        },
        "required": ["items", "found", "params"],
    }
    rows = [
        line.strip("| ").split(" | ")[:2] for line in reference_schemas.keys("test", shape).splitlines()[2:]
    ]
    assert rows == [
        ["`items`", "list of object"],
        ["`items[].x`", "integer or null; may be missing"],
        ["`kind`", '`"a"`, `"b"`; may be missing'],
        ["`found`", "object whose keys are data"],
        ["`found.*.y`", "any value; may be missing"],
        ["`params`", "[params](#params)"],
    ]


def test_pages_of_the_reference_have_code_blocks_that_close():
    texts = [*PYTHON.values(), only(reference_cli.files())]
    assert all(sum(line.fence for line in lines_of(text)) % 2 == 0 for text in texts)
