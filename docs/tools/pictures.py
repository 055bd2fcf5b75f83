"""Pictures of README.md: what ``attnsel explain`` prints on a terminal, in its own colours, as SVG.

    python docs/tools/update_docs.py     # writes docs/images/ as well

Light and dark. No picture fetches anything: text is set in the reader's own monospaced font, each run of it
stretched to its columns, as rich does it.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from paths import IMPORTED_FROM, ROOT
from switches import without_switches

FOLDER = ROOT / "docs/images"
COMMAND = "attnsel explain --gpu H100 --cudnn 9.1.0 --head-dim-qk 192 --head-dim-v 128 --training"
BEYOND = "  To get flash_attn.3"  # the first line that is not on the first screen
WIDTH = 80
_FONTS = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"


def _rgb(colour: str) -> tuple[int, int, int]:
    digits = colour.removeprefix("#")
    return int(digits[0:2], 16), int(digits[2:4], 16), int(digits[4:6], 16)


def _theme(background: str, foreground: str, colours: str) -> TerminalTheme:
    """black, red, green, yellow, blue, magenta, cyan, white: each has 4.5 : 1 against the background."""
    ansi = [_rgb(colour) for colour in colours.split()]
    return TerminalTheme(_rgb(background), _rgb(foreground), ansi, ansi)


THEMES = {
    "light": _theme("#f6f8fa", "#0d1117", "1f2328 cf222e 116329 7d4e00 0550ae 8250df 1b5f66 59636e"),
    "dark": _theme("#151b23", "#e6edf3", "9198a1 ff7b72 3fb950 d29922 79c0ff d2a8ff 39c5cf d1d9e0"),
}


def printed() -> list[str]:
    """The lines of the first screen, with the colours that attnsel gives them."""
    keep = without_switches()
    terminal = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    keep.pop("NO_COLOR", None)
    done = subprocess.run(
        [sys.executable, "-m", *COMMAND.split()],
        env={**keep, **terminal, "PYTHONPATH": str(IMPORTED_FROM)},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    lines = done.stdout.splitlines()
    return lines[: next(i for i, line in enumerate(lines) if line.startswith(BEYOND))]


def svg(lines: list[str], theme: TerminalTheme) -> str:
    """Lines with ANSI colours, below the command, as a picture."""
    console = Console(record=True, width=WIDTH + 2, file=io.StringIO(), force_terminal=True, highlight=False)
    words = COMMAND.replace(" --head-dim-qk", " \\\n    --head-dim-qk")
    console.print(Text(f" $ {words}\n", style="bold"), soft_wrap=True)
    for line in lines:
        console.print(Text(" ") + Text.from_ansi(line), soft_wrap=True)
    form = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = form.replace("Fira Code, monospace", _FONTS)
    form = form.replace("<svg ", '<svg role="img" aria-label="What attnsel explain prints" ', 1)
    drawn = console.export_svg(title="attnsel explain", theme=theme, code_format=form, unique_id="report")
    return re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE).rstrip() + "\n"


def pictures() -> Iterator[tuple[Path, str]]:
    """Each picture's file and what it holds now."""
    lines = printed()
    for name, theme in THEMES.items():
        yield FOLDER / f"report-{name}.svg", svg(lines, theme)


def shown(picture: str) -> list[tuple[str, str]]:
    """The texts of a picture in order, each with its style: the same with any release of rich."""
    styles = dict(re.findall(r"\.report-(r\d+) \{ ([^}]*) \}", picture))
    return [
        (styles[name], text)
        for name, text in re.findall(r'<text class="report-(r\d+)"[^>]*>([^<]*)</text>', picture)
    ]
