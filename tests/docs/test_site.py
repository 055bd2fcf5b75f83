"""The documentation site: what its builder's strict mode cannot see. It needs the group docs.

The builder stops at a warning; docs/sitegen/check.py at a link, an anchor or a page that leads nowhere and at
what is fetched from elsewhere; the gate builds all of it. Here: that a fault stops it and leaves the old
site, and that what is added to the code stands on its page without another edit.
"""

from __future__ import annotations

import json
import re
import types

import pytest

pytest.importorskip("zensical", reason="the site is built with: pip install --group docs")
pytest.importorskip("selectolax", reason="the site is built with: pip install --group docs")
pytest.importorskip("griffe", reason="the site is built with: pip install --group docs")
pytest.importorskip("tomllib", reason="the site is built with Python 3.11 or newer")


import attnsel
from attnsel import settings
from attnsel.cli import COMMANDS
from attnsel.cli.flags import FLAGS
from attnsel.pages.can_i_use import all_features
from attnsel.rules import REGISTRY, load_all
from json_schemas import path_of
from sitegen import can_i_use, reference_cli, reference_environment, reference_python, rules, sources
from sitegen.build import SiteError, build
from sitegen.markdown import deep_lists, plain_fences
from sitegen.model import File

load_all()
SETTINGS = (sources.DOCS / "zensical.toml").read_text(encoding="utf-8")
PAGES = {path: sources.site_path(path) for path in sources._checkout_pages()}


def text_of(generator: types.ModuleType) -> str:
    return "\n".join(str(file.content) for file in generator.files())


# ---- what is added to the code ------------------------------------------------------------------------


def test_every_command_flag_name_and_variable_has_its_part():
    commands, python, environment = map(text_of, (reference_cli, reference_python, reference_environment))
    assert re.findall(r"^# attnsel (\S+) \{#(\S+)\}$", commands, re.M) == [(name, name) for name in COMMANDS]
    for flag in FLAGS:
        assert f'<a id="explain{flag.name}"></a>`{", ".join(flag.names)}' in commands, flag.name
    for name in dir(attnsel):
        assert name.startswith("_") or f"## {name} {{#attnsel.{name}}}" in python, name
    part = python.partition("{#attnsel.attention}")[2].partition("\n## ")[0]
    assert "- `block_table`: int32 [b, n]; k and v are then pools of pages, [pages, page_size, g, d]" in part
    assert "Raises [InvalidInput](#attnsel.InvalidInput) naming the argument" in part
    rows = re.findall(r'^\| <a id="(\w+)"></a>.*\| ([^|]+) \|$', environment, re.M)
    assert [variable for variable, meaning in rows if meaning.strip()] == list(settings.VARIABLES)


def test_a_rule_that_is_added_is_in_its_lists_its_cell_and_the_json(added_rule, monkeypatch):
    few = {name: all_features()[name] for name in ("sliding-window", "softcap", "mla")}
    monkeypatch.setattr(can_i_use, "all_features", lambda: few)
    monkeypatch.setattr(can_i_use, "GPUS", ("sm75", "sm90"))

    def made() -> dict[str, str]:
        can_i_use.matrix.cache_clear()
        return {file.path.removeprefix("can-i-use/"): file.content for file in can_i_use.files()}

    before, count = made(), len(REGISTRY.pages)
    assert not any("CUDNN999" in text for text in (*before.values(), rules.family_page("CUDNN")))
    added = added_rule()
    (row,) = (line for line in rules.family_page("CUDNN").splitlines() if "CUDNN999" in line)
    title = "On Hopper a sliding window is refused &#124; by a &#60;test&#62; of the &#42;site&#42;"
    assert row == f"| [CUDNN999](CUDNN999.md) | {title} | `cudnn` | cuDNN &#62;= 9.8.0, sm90 |"
    assert f"{count + 1} rules" in rules.index_page()
    assert "quokka" in rules.page_file(added, rules._links(playground=False)).content
    after = made()
    can_i_use.matrix.cache_clear()
    jsonschema = pytest.importorskip("jsonschema")
    data = json.loads(after["matrix.json"])
    jsonschema.validate(data, json.loads(path_of("can-i-use").read_text(encoding="utf-8")))
    asked = ("sliding-window", "cudnn", "sm90")
    (cell,) = (c for c in data["cells"] if (c["feature"], c["kernel"], c["gpu"]) == asked)
    assert (cell["state"], cell["unlocked_at"]) == ("version", "9.7.1")  # the rule holds since 9.8.0
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"sliding-window.md", "index.md", "matrix.json", "matrix.markdown"}
    assert "[CUDNN999](../rules/CUDNN999.md)" in after["sliding-window.md"]


def test_every_code_is_in_the_list_of_its_family_once():
    pages = "".join(map(rules.family_page, rules.families()))
    listed = re.findall(r"^\| \[([A-Z]+\d{3})\]\(\1\.md\)", pages, re.M)
    assert sorted(listed) == sorted([*REGISTRY.pages, *REGISTRY.removed])


# ---- building and checking ----------------------------------------------------------------------------

FILES = [
    File("index.md", "# Home\n\n[ask](how-to/ask.md) [data](data.json)\n"),
    File("how-to/ask.md", "# Ask: at length\n\n```sh\nattnsel doctor\n```\n"),
    File("data.json", b"{}\n"),
    File("assets/logo.svg", "<svg xmlns='http://www.w3.org/2000/svg'/>"),
    *(File(f"assets/{name}", "") for name in re.findall(r'"assets/([\w-]+\.(?:css|js))"', SETTINGS)),
]


def test_a_site_replaces_the_one_before_it_as_a_whole_and_a_fault_leaves_it(tmp_path):
    output = tmp_path / "deep" / "site"
    build([*FILES, File("old.txt", "old")], output)
    done = build(FILES, output, "https://example.org/attnsel/")
    assert (done.pages, done.folder) == (3, output)  # with 404.html
    assert not (output / "old.txt").exists()
    assert 'href="https://example.org/attnsel/how-to/ask/"' in (output / "how-to/ask/index.html").read_text()
    assert "- [Ask: at length](https://example.org/attnsel/how-to/ask/)" in (output / "llms.txt").read_text()
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    for fault, told in {
        "[x](gone.md)": "page does not exist",
        "<a href='../gone/'>x</a>": "leads nowhere",
        "<img src='https://example.org/a.png'>": "fetches https://example.org/a.png",
        "<p id='twice'></p><p id='twice'></p>": "stands there 2 times",
    }.items():
        with pytest.raises(SiteError, match=told):
            build([*FILES, File("how-to/bad.md", f"# Bad\n\n{fault}\n")], output)
        assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    assert [path.name for path in output.parent.iterdir()] == ["site"], "nothing is left beside it"


def test_markdown_of_github_becomes_the_sites():
    text = "```sh skip: why\nls\n```\n\n1. x\n   ```text printed\n   y\n   ```\n"
    assert plain_fences(text) == text.replace("```sh skip: why", "```sh").replace("text printed", "text")
    for text, new in {
        "1. a\n   b\n\n   c\n2. d\n": "1.  a\n    b\n\n    c\n\n2.  d\n",
        "in the year\n1984. So\n": "in the year\n1984\\. So\n",
        "said:\n- a\n  - b\n": "said:\n\n-   a\n    -   b\n",
        "- a\n\n  ```sh\n  - b\n    c\n  ```\n\nd\n": "-   a\n\n    ```sh\n    - b\n      c\n    ```\n\nd\n",
        "```text\n- a\n  - b\n```\n": "```text\n- a\n  - b\n```\n",
    }.items():
        assert deep_lists(text) == new
    links = sources._Places("docs/how-to/ask.md", "how-to/ask.md", PAGES, {"rules/index.md"}, "")
    for target, place in {
        "run.md#part": "run.md#part",
        "../../CONTRIBUTING.md#checks": "../contributing.md#checks",
        "../../README.md#set-up": "../index.md",
        "../../rules": "../rules/index.md",
        "../../attnsel/settings.py": None,
        "gone.md": "gone.md",
    }.items():
        assert links(target) == place
