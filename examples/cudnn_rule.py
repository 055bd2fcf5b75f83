"""From "libcudnn refuses this" to a rule: ask the real library, field by field, on GPUs that are not here.

    python examples/cudnn_rule.py                          # head dimensions, in training
    python examples/cudnn_rule.py --without CUDNN235       # as if that rule were still to be written
    python examples/cudnn_rule.py --field softcap --values 0,30 --call is_training=false

1. One field of a call takes several values, on several architectures; each is a question.
2. libcudnn 9.8 or newer is asked. It plans for a described GPU: no GPU and no driver are needed.
3. The rules are asked the same, at the versions that answered.
4. Where the library refuses and no rule does, a rule is missing: the requirement that fits what was seen, and
   the text of a rule to start from.

docs/how-to/add-a-cudnn-rule.md goes on from there.
"""

from __future__ import annotations

import argparse
import ast
from textwrap import fill
from typing import Any, NamedTuple

try:
    from attnsel import AttentionParams, Environment, InvalidInput
    from attnsel.backends.cudnn.ask.client import Library
    from attnsel.backends.cudnn.ask.libraries import Missing, device_json
    from attnsel.cli.explain_more import by_library, by_rules, outcome
    from attnsel.rules import REGISTRY
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs {missing.name}: pip install -e '.[examples]'") from None

WIDTH = 14  # columns of a cell


class Cell(NamedTuple):
    """One question. ``kind``: what to call the two answers together (attnsel/cli/explain_more.py)."""

    kind: str
    codes: tuple[str, ...]
    library: str  # its words, where it refuses

    @property
    def text(self) -> str:
        code = self.codes[0] if self.codes else ""
        marks = {"agree": "✖" if self.library else "✔", "false accept": "? no rule", "false reject": "!"}
        return f"{marks.get(self.kind, self.kind)} {code}".strip()


def literal(text: str) -> Any:
    """A number, a bool or a text."""
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (SyntaxError, ValueError):
        return text


def ask(library: Any, versions: dict[str, str], call: dict[str, Any], arch: int) -> Cell:
    """Library and rules about ``call``, on a GPU of that architecture."""
    p = AttentionParams(**call)
    machine = Environment.describe(f"sm{arch}", **versions)
    device = machine.device
    described = device_json(arch, device.name, device.memory, device.sm_count)
    said, verdict = by_library(library, p, described), by_rules(p, machine)
    return Cell(outcome(verdict, said), verdict.codes, said.words if said.supported is False else "")


def requirement(values: list[Any], refused: list[Any]) -> str:
    """What was seen, as a rule says it: a bound where a bound fits, else the values that run."""
    runs = [value for value in values if value not in refused]
    numbers = all(type(value) in (int, float) for value in values)
    if runs and numbers and max(runs) < min(refused):
        return f"AtMost({max(runs)!r})"
    if runs and numbers and min(runs) > max(refused):
        return f"AtLeast({min(runs)!r})"
    return f"OneOf({', '.join(map(repr, runs))})" if runs else 'FreeText("…")'


def skeleton(field: str, values: list[Any], missing: dict[int, dict[Any, str]], cudnn: str) -> str:
    """The text of a rule. ``missing``: by architecture the values without a rule, with libcudnn's words."""
    refused = [value for value in values if any(value in cells for cells in missing.values())]
    runs = [value for value in values if value not in refused]
    example = f'\n    passes={{"{field}": {runs[-1]!r}}},' if runs else ""
    return f'''@asked(
    "CUDNN…",  # the next code of its file: attnsel rules --ranges --family CUDNN
    when=cudnn(">={cudnn}"),  # asked of this release alone: ask others
    arch={tuple(missing)!r},
    requires={{"{field}": {requirement(values, refused)}}},
    fires_on={{"{field}": {refused[0]!r}}},{example}
)
def name_of_the_limit(p: AttentionParams, env: Environment) -> bool:
    """A full statement of the limit

    Fix: what a user can do.
    Source: libcudnn, asked.
    """
    return True  # or which calls it is about: p.is_training

Its row in rules/cudnn/data/asked.csv:

CUDNN…,{cudnn} (refused),{" and ".join(f"sm{arch}" for arch in missing)},'''


def calls_of(options: argparse.Namespace) -> dict[Any, dict[str, Any]]:
    """The fields of a call for each value. Raises InvalidInput for one that cannot be."""
    given = (pair.partition("=") for pair in options.call)
    rest = {"is_training": True, **{name: literal(value) for name, _, value in given}}
    calls = {value: {**rest, options.field: value} for value in map(literal, options.values.split(","))}
    for call in calls.values():
        AttentionParams(**call)
    return calls


def sweep(library: Any, options: argparse.Namespace) -> None:
    calls, archs = calls_of(options), [int(arch) for arch in options.arch.split(",")]
    versions = library.versions()
    print(f"cuDNN {versions['cudnn']}, cudnn-frontend {versions['cudnn_frontend']}")
    print("\n" + "".join(f"{head:<{WIDTH}}" for head in (options.field, *map("sm{}".format, archs))).rstrip())
    missing: dict[int, dict[Any, str]] = {}
    for value, call in calls.items():
        row = {arch: ask(library, versions, call, arch) for arch in archs}
        print(f"{value!s:<{WIDTH}}" + "".join(f"{cell.text:<{WIDTH}}" for cell in row.values()).rstrip())
        for arch, cell in row.items():
            if cell.kind == "false accept":
                missing.setdefault(arch, {})[value] = cell.library
    print("\n✔ both accept   ✖ both refuse   ? only the library refuses   ! only the rules")
    if not missing:
        print("No rule is missing here. What a code means: attnsel rule CODE")
        return
    words = dict.fromkeys(text for cells in missing.values() for text in cells.values())
    print("\nlibcudnn's words where no rule refuses:")
    for text in words:
        print(fill(text, 78, initial_indent="  ", subsequent_indent="    "))
    print("\nA rule to start from:\n")
    print(skeleton(options.field, list(calls), missing, versions["cudnn"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--field", default="head_dim_qk", help="of AttentionParams")
    parser.add_argument("--values", default="64,128,136,192,256,264", help="of the field, by commas")
    parser.add_argument("--arch", default="80,90,100,120", help="architectures, by commas")
    parser.add_argument("--call", nargs="*", default=[], metavar="FIELD=VALUE", help="the rest of the call")
    parser.add_argument("--cudnn-lib", help="libcudnn, a file or folder; the environment's if left out")
    parser.add_argument("--without", default="", metavar="CODE", help="leave this rule out")
    options = parser.parse_args()
    if options.without and REGISTRY.pages.pop(options.without.upper(), None) is None:
        parser.error(f"there is no rule {options.without}")
    try:
        calls_of(options)
        with Library(options.cudnn_lib) as library:
            sweep(library, options)
    except Missing as missing:
        raise SystemExit(f"libcudnn was not asked: {missing}") from None
    except (InvalidInput, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
