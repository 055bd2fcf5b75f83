"""Writes into README.md and docs/ what their code blocks print now.

    python docs/tools/update_docs.py            # every page
    python docs/tools/update_docs.py README.md docs/how-to/ask.md

Written are what stands below ``$ attnsel …`` lines, the values behind ``# → `` and the text blocks marked
``printed``, the tables that are made from recorded results, and, with every page, README's pictures. A page
whose Python fails, or needs a package that is not installed here, keeps what it says from there on and is
named; the exit code is 1.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # these pages are about this checkout
    _ROOT = Path(__file__).resolve().parents[2]
    sys.path[1:1] = [str(_ROOT), str(_ROOT / "tests/support")]

import pages
import pictures
import typed_pages
from attnsel.dispatchers import DISPATCHERS, switches_of
from pages import SHOWN, Block, printed_below
from paths import ROOT

BUDGETS = "benchmarks/results/budgets.json"
PEERS = "benchmarks/results/peers.json"
WALK = "benchmarks/results/rule-walk.json"
TRANSFORMS = "benchmarks/results/transforms-cpu.json"
_MADE = re.compile(r"(<!-- made from (\S+) by \S+ -->\n).*?(<!-- end -->)", re.DOTALL)


def up_to_date(page: str, text: str, told: Callable[[str], Any] = print) -> str:
    """The page's text with everything that it prints as it is now."""
    return with_commands(
        page, with_tables(with_python(page, text, told))
    )  # Python first: it has line numbers


def with_commands(page: str, text: str) -> str:
    if typed_pages.is_typed(pages.blocks(page, text)):
        return with_session(page, text)
    for block in reversed(pages.blocks(page, text)):
        if block.language == "console":
            text = _replaced(text, block, pages.as_printed(block.text))
    return text


def with_session(page: str, text: str) -> str:
    """A page that is typed from top to bottom; what it shows with ``[…]`` stays where that is still right."""
    with tempfile.TemporaryDirectory() as work:
        printed = typed_pages.typed(page, Path(work), text)
    for ran in reversed(printed):
        if ran.block.language == "console" and not typed_pages.agrees(ran.block.text, ran.text):
            text = _replaced(text, ran.block, ran.text)
    return text


def with_tables(text: str) -> str:
    return _MADE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def with_python(page: str, text: str, told: Callable[[str], Any]) -> str:
    found = pages.blocks(page, text)
    if not any(block.language == "python" and not (block.skipped or block.file) for block in found):
        return text
    lines = text.splitlines()
    outputs: list[tuple[Block, str]] = []
    for ran in pages.run_python(page):
        if ran.missing or ran.error:
            told(f"{page}:{ran.line}: " + (f"needs {ran.missing}" if ran.missing else ran.error))
            continue
        for line, _, now in ran.shown:
            lines[line - 1] = lines[line - 1].partition(SHOWN)[0] + SHOWN + now
        outputs += [(block, ran.printed) for block in printed_below(found, ran.line)]
    text = "\n".join(lines) + "\n"
    for block, printed in reversed(outputs):
        text = _replaced(text, block, printed)
    return text


def _replaced(text: str, block: Block, new: str) -> str:
    lines = text.splitlines(keepends=True)
    first = block.line - 1
    lines[first : first + block.text.count("\n")] = [new]
    return "".join(lines)


# ---- tables from recorded results ---------------------------------------------------------------------


def budgets_table() -> str:
    """The rows of the budgets benchmark that have a budget, and where they were measured."""
    record = json.loads((ROOT / BUDGETS).read_text(encoding="utf-8"))
    lines = ["| what | budget | noise | median | instructions |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        if row["budget"] is None:
            continue
        sign, unit = "≤" if row["bound"] == "at most" else "≥", row["unit"]
        over = "" if row["within"] else " (over)"
        median = row["missing"] or f"{_figure(row['median'], unit)}{over}"
        noise = _figure(row["noise"], unit) if row["noise"] else ""
        count = row["instructions"] or 0
        counted = f"{count:,}" if 0 < count < 1e7 else f"{count / 1e6:,.0f} million" if count else ""
        budget = f"{sign} {_figure(row['budget'], unit)}"
        lines.append(f"| {row['group']}: {row['what']} | {budget} | {noise} | {median} | {counted} |")
    return "\n".join([*lines, "", _measured(record)]) + "\n"


def peers_table() -> str:
    """What choosing costs in other libraries (benchmarks/peers.py), and how each was called."""
    record = json.loads((ROOT / PEERS).read_text(encoding="utf-8"))
    lines = ["| library | a call that repeats | a new question | what was called |", "|---|---|---|---|"]
    for row in record["rows"]:
        hit, miss = ("" if us is None else _figure(us, "µs") for us in (row["hit"], row["miss"]))
        name = f"{row['name']} {row['version'] or ''}".rstrip()
        lines.append(f"| {name} | {hit} | {miss} | {row['how']} |")
    return "\n".join([*lines, "", _measured(record)]) + "\n"


def _measured(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    where = f"{machine['cores']} cores, {machine['cpu']}, {machine['system']}"
    which = f"Python {versions['python']}, torch {versions['torch']}"
    load = (
        f"{record['load_average_start']:.1f} at its start and {machine['load_average_1min']:.1f} at its end"
    )
    return f"Measured on {record['date']}: {where}, {which}, load average {load}."


def _figure(value: float, unit: str) -> str:
    if unit == "µs" and value >= 1000:
        value, unit = value / 1000, "ms"
    return f"{value:,.0f} {unit}" if unit == "/s" else f"{value:.3g} {unit}".rstrip()


def transforms_table() -> str:
    """What PyTorch does around a call, by candidate: right, or which error (tests/proof/transforms.py)."""
    record = json.loads((ROOT / TRANSFORMS).read_text(encoding="utf-8"))
    rows = record["outcomes"]
    columns = list(next(iter(rows.values())))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    lines += [
        f"| {name} | {' | '.join(cells[column] for column in columns)} |" for name, cells in rows.items()
    ]
    return "\n".join([*lines, "", f"Tried with torch {record['torch']}."]) + "\n"


def switches_table() -> str:
    """What may be set of each library that has a chooser of its own."""
    lines = ["| library | switch | may be | meaning |", "|---|---|---|---|"]
    for dispatcher in DISPATCHERS:
        for switch in switches_of(dispatcher).values():
            values = ", ".join(f"`{value}`" for value in switch.values) or "any"
            meaning = switch.meaning.replace("|", "\\|")
            lines.append(f"| {dispatcher} | `{switch.name}` | {values} | {meaning} |")
    return "\n".join(lines) + "\n"


def walk_table() -> str:
    """Step, command and seconds of a newcomer's walk (docs/tools/walk.py)."""
    record = json.loads((ROOT / WALK).read_text(encoding="utf-8"))
    lines = ["| step | command | seconds |", "|---|---|---|"]
    last = ""
    for row in record["steps"]:
        step = "" if row["step"] == last else row["step"]
        command, pipe, _ = row["command"].partition(" | ")  # in a cell a pipe reads differently on GitHub
        more = " and more" if row["more"] or pipe else ""
        lines.append(f"| {step} | `{command}`{more} | {row['seconds']:g} |")
        last = row["step"]
    total = sum(row["seconds"] for row in record["steps"])
    lines.append(f"| **all** | | **{total:.0f}** |")
    where = f"{record['machine']['cores']} cores, Python {record['python']}"
    busy = f"load average {record['load_average_1min']:g}"
    lines += [
        "",
        f"Measured on {record['date']}: {where}, {busy}, packages near. Reading comes on top.",
    ]
    return "\n".join(lines) + "\n"


def floors_picture() -> str:
    """The floors of pyproject's contract, and of each room the first sentence of its docstring."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contract = text[text.index('id = "floors"') :]  # Python 3.10 reads no TOML
    floors = re.findall(r'"(.+)"', contract[contract.index("layers = [") : contract.index("\n]")])
    lines = ["```text"]
    for number, floor in zip(range(len(floors), 0, -1), floors, strict=True):
        for place, room in enumerate(floor.split(" | ")):
            lines.append(f"{'' if place else number:>2}  {room:16}  {_first_sentence(room)}".rstrip())
    return "\n".join([*lines, "```"]) + "\n"


def _first_sentence(room: str) -> str:
    """Of a module's or package's docstring, without the full stop."""
    folder = ROOT / room if room in ("rules", "backends") else ROOT / "attnsel" / room
    package = folder / "__init__.py"
    path = package if package.is_file() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"[.;]\s|\.$", docstring.partition("\n\n")[0].replace("\n", " "))[0].replace("`", "")


TABLES: dict[str, Callable[[], str]] = {
    BUDGETS: budgets_table,
    PEERS: peers_table,
    WALK: walk_table,
    TRANSFORMS: transforms_table,
    "switches": switches_table,
    "pyproject.toml": floors_picture,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="README.md or docs/….md; all if left out")
    failures: list[str] = []
    asked = parser.parse_args()
    for page in asked.pages or pages.PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        try:
            new = up_to_date(page, text, failures.append)
        except Exception:  # of a command; the other pages are written all the same
            failures.append(f"{page}: {traceback.format_exc()}")
            continue
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"{page}: written")
    for path, drawn in pictures.pictures() if not asked.pages else ():
        if not path.exists() or pictures.shown(path.read_text(encoding="utf-8")) != pictures.shown(drawn):
            path.parent.mkdir(exist_ok=True)
            path.write_text(drawn, encoding="utf-8")
            print(f"{path.relative_to(ROOT).as_posix()}: written")
    print("\n".join(failures), file=sys.stderr, end="\n" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
