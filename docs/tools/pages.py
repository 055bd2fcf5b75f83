"""The code blocks of README.md and docs/: found, run, and compared with what the pages say they print.

CONTRIBUTING.md, "Documentation", says what a page may hold. ``python docs/tools/update_docs.py`` writes
what the blocks print now; tests/docs/test_blocks.py compares. Only a page's Python is run in a process of its
own: ``python docs/tools/pages.py FILE`` runs it and prints what came of it as JSON.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests/support"))

from paths import IMPORTED_FROM, ROOT
from switches import without_switches

PAGES = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")))
LANGUAGES = ("console", "sh", "python", "json", "toml", "text")
SHOWN = "# → "  # before the value of an expression
BAD_INPUT = 2  # attnsel's exit code; a page shows no line that cannot be typed
PRINTED = "printed"  # a text block that holds what the Python block above it prints

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*) ?(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line``: of its first line of text, from 1; ``info``: what follows its language."""

    page: str
    line: int
    language: str
    info: str
    text: str

    @property
    def skipped(self) -> str:
        """Why it is not run: the reason behind ``skip:`` on its fence, or nothing."""
        return self._behind("skip")

    @property
    def file(self) -> str:
        """The file that the reader makes of it: the path behind ``file:`` or ``append:``, or nothing."""
        return self._behind("file") or self._behind("append")

    def _behind(self, word: str) -> str:
        first, _, rest = self.info.partition(":")
        return rest.strip() if first == word else ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str | None = None) -> list[Block]:
    """Every fenced block of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    return [
        Block(
            page,
            text.count("\n", 0, found.start("text")) + 1,
            found["language"],
            found["info"].strip(),
            found["text"],
        )
        for found in _FENCE.finditer(text)
    ]


def printed_below(found: list[Block], line: int) -> list[Block]:
    """The text block that says what the Python block at this line prints, if there is one."""
    return [
        block
        for above, block in itertools.pairwise(found)
        if above.line == line and (block.language, block.info) == ("text", PRINTED)
    ]


# ---- console blocks: attnsel's commands and what they print ---------------------------------------------


def commands(text: str) -> list[str]:
    """The lines behind ``$ ``, each with the lines that a backslash at its end continues it on."""
    found: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            while line.endswith("\\"):
                line += "\n" + next(lines, "")
            found.append(line.removeprefix("$ "))
    return found


def as_printed(text: str) -> str:
    """A console block as its commands would fill it now."""
    parts = []
    for command in commands(text):
        code, printed = run_command(command)
        assert code != BAD_INPUT, f"attnsel takes no such line: {command}"
        parts.append(f"$ {command}\n{printed.rstrip()}\n")
    return "\n".join(parts)


def run_command(line: str) -> tuple[int, str]:
    """The exit code of ``attnsel …`` and what it prints, 80 columns wide, under the default policy."""
    from attnsel import Policy, settings
    from attnsel.cli import main

    words = shlex.split(line.replace("\\\n", " "), comments=True)
    assert words[:1] == ["attnsel"], f"a console block holds attnsel's commands only, not {line!r}"
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    here = os.getcwd()
    try:
        os.chdir(ROOT)  # pages name files as they lie in a checkout
        with contextlib.redirect_stdout(out), settings.override(policy=Policy()):
            code = main(words[1:])
    finally:
        os.chdir(here)
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    out.flush()
    return code, out.buffer.getvalue().decode()


# ---- sh blocks: lines to paste --------------------------------------------------------------------------

_RUN = ("explain", "can-i-use", "rules", "rule")  # quick; of other commands the flags are looked at
_ASKS_FOR_MORE = (
    "--ask-library",
    "--cudnn-lib",
    "--params",
    "--env",
)  # a library, or files that are not here
_PROGRAMS = ("python", "pytest", "ruff", "bash")


def complaints(block: Block) -> list[str]:
    """What is wrong with the lines of a ``sh`` block: one line of text each."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        for part in re.split(r" && | \| ", re.sub(r" > \S+$", "", line)):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words and (complaint := _complaint(words, block)):
                found.append(f"{block}: {part.strip()}: {complaint}")
    return found


def _complaint(words: list[str], block: Block) -> str:
    if words[:1] == ["attnsel"]:
        return command_complaint(words[1:], run=not block.skipped)
    if "attnsel" in words and words[words.index("attnsel") - 1] == "-m":
        return command_complaint(words[words.index("attnsel") + 1 :])
    if words[0] not in _PROGRAMS and not block.skipped:
        return "what is neither attnsel nor python is not run: say why on the fence, as 'sh skip: reason'"
    ours = ("attnsel/", "examples/", "benchmarks/", "tests/", ".ci/")
    missing = [word for word in words if word.startswith(ours) and not (ROOT / word).exists()]
    return f"there is no {missing[0]}" if missing else ""


def command_complaint(words: list[str], *, run: bool = True) -> str:
    """What the command line says against these words; nothing if it takes them. ``run`` False: as flags."""
    if run and words[:1] and words[0] in _RUN and not set(words) & set(_ASKS_FOR_MORE):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            code, _ = run_command(shlex.join(["attnsel", *words]))
        return "" if code in (0, 3) else f"exit code {code}: {errors.getvalue().strip()}"
    from cyclopts import CycloptsError

    from attnsel.cli import build_app
    from attnsel.cli.program import WITH_VALUE, own_words

    if words[:1] and words[0] in WITH_VALUE:
        words = [words[0], *own_words(words[1:], WITH_VALUE[words[0]])]
    try:
        build_app(words).parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return str(error)
    return ""


# ---- Python blocks: one process and one namespace for a page ----------------------------------------------


@dataclass
class Ran:
    """What came of a Python block. ``shown``: line, what the page says, what it is now."""

    line: int
    printed: str = ""
    shown: list[tuple[int, str, str]] = field(default_factory=list)
    missing: str = ""  # a package that is not installed
    error: str = ""


def run_python(page: str) -> list[Ran]:
    """Every Python block of a page, in order, in a new process; ends where a package is missing."""
    clean = without_switches()
    one_process = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", __file__, page],
        env={**clean, **one_process, "PYTHONPATH": str(IMPORTED_FROM), "PYTHONUTF8": "1", "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"{page}: {done.stderr}")
    return [Ran(**found) for found in json.loads(done.stdout.splitlines()[-1])]


def _run_here(page: str) -> list[Ran]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found: list[Ran] = []
    for block in blocks(page):
        if block.language != "python" or block.skipped or block.file:
            continue
        ran = Ran(block.line)
        found.append(ran)
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                _execute(block, namespace, ran)
        except ImportError as error:
            first: BaseException = error
            while first.__cause__ is not None:
                first = first.__cause__
            if not isinstance(first, ModuleNotFoundError) or (first.name or "attnsel").startswith("attnsel"):
                ran.error = _of_the_page(error)
            else:
                ran.missing = str(first.name)
                break
        except BaseException as error:
            ran.error = _of_the_page(error)
        ran.printed = out.getvalue()
    return found


def _of_the_page(error: BaseException) -> str:
    """A traceback without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _execute(block: Block, namespace: dict[str, Any], ran: Ran) -> None:
    lines = block.text.splitlines()
    for node in ast.parse(block.text).body:
        shown = lines[(node.end_lineno or 1) - 1].partition(SHOWN)[2]
        line = block.line + (node.end_lineno or 1) - 1
        ast.increment_lineno(node, block.line - 1)
        if shown and isinstance(node, ast.Expr):
            value = eval(compile(ast.Expression(node.value), block.page, "eval"), namespace)
            ran.shown.append((line, shown.rstrip(), repr(value)))
        else:
            exec(compile(ast.Module([node], []), block.page, "exec"), namespace)


if __name__ == "__main__":
    del sys.path[:2]  # this folder and tests/support: a page's own imports find none of our helpers
    print(json.dumps([asdict(ran) for ran in _run_here(sys.argv[1])]))
