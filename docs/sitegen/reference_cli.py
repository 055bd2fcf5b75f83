"""``reference/cli/``: a page for every command with its flags, made from the help texts themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attnsel.cli import COMMANDS, build_app
from sitegen import docstring
from sitegen.model import File
from sitegen.tables import table

PATH, FOLDER = "reference/cli.md", "reference/cli"
_TOP = """\
# Commands

Each has a page, with every flag. `attnsel COMMAND --help` prints the same, of `explain` the flags that most
questions need (`--help-all`: all). What exit codes mean over all commands, and what `--json` promises:
[output](output.md). The shapes of the JSON: [schemas](schemas.md).
"""
_GROUP = re.compile(r"\*\*(?P<name>[^*]+)\*\*:")
_FLAG = re.compile(r"\* `(?P<names>[^`]+)`(?:: (?P<text>.*))?")
_DEFAULT = re.compile(r" ?\*\[default: (?P<value>[^\]]*)\]\*$| ?\*\*\[required\]\*\*$")
_LINK = re.compile(
    r"\]\((?=(?:\.\./)+[\w-]+/[\w-]+\.md\))"
)  # docstring.py writes them from a folder of the site


def files() -> Iterator[File]:
    """The list of commands, and a page for each."""
    rows = [
        (f'<a id="{name}"></a>[`attnsel {name}`](cli/{name}.md)', summary)
        for name, (_, summary) in COMMANDS.items()
    ]
    yield File(PATH, f"{_TOP}\n{table(('command', 'what it does'), rows)}\n", title="Commands")
    for name in COMMANDS:
        text = _LINK.sub("](../", command(name))  # a folder deeper
        yield File(f"{FOLDER}/{name}.md", f"{text}\n", trail=(("Commands", PATH),))


def command(name: str) -> str:
    """The page of one command: how it is called, what it says of itself, its flags by group."""
    app = build_app([name])[name]
    said = app.generate_docs(output_format="markdown", heading_level=2, usage_name=f"attnsel {name}")
    usage, _, rest = said.partition("```console\n")[2].partition("\n```\n")
    text, *groups = re.split(r"^(?=\*\*[^*\n]+\*\*:$)", rest.strip(), flags=re.M)
    parts = [
        f"# attnsel {name} {{#{name}}}",
        f"```console\n$ {usage.strip()}\n```",
        docstring.rendered(text),
    ]
    return "\n\n".join([*parts, *(_group(name, group) for group in groups)])


def _group(command: str, text: str) -> str:
    """The flags of one group, each an item with an anchor of its own: ``#explain--gpu``."""
    heading, _, rest = text.strip().partition("\n")
    found = _GROUP.fullmatch(heading)
    assert found is not None, heading
    name = found["name"]
    done = [f"## {name} {{#{command}-{re.sub(r'[^a-z]+', '-', name.lower()).strip('-')}}}", ""]
    for line in rest.strip().splitlines():
        flag = _FLAG.fullmatch(line)
        done.append(_item(command, flag["names"], flag["text"] or "") if flag else docstring.inline(line))
    return "\n".join(done)


def _item(command: str, names: str, text: str) -> str:
    default = _DEFAULT.search(text)
    said = docstring.inline(text[: default.start()] if default else text)
    if default:
        said += ". " if said else ""
        said += f"Default: `{default['value']}`" if default["value"] else "**Required**"
    first = names.split(",")[0].split()[0]
    anchor = f'<a id="{command}{first.lower()}"></a>' if first.startswith("--") else ""
    return f"- {anchor}`{names}`{': ' if said else ''}{said}"
