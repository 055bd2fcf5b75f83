"""Notebooks of examples/, run from their first cell to their last.

``python docs/tools/notebooks.py`` runs all of them and writes what they print and draw into them; nothing of
cells tagged ``this-machine``, whose outputs differ from one to the next.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # these pages are about this checkout
    _ROOT = Path(__file__).resolve().parents[2]
    sys.path[1:1] = [str(_ROOT), str(_ROOT / "tests/support")]

import nbformat
from nbclient import NotebookClient

from paths import ROOT
from switches import without_switches

NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))
LARGEST = 200_000  # bytes of a file, with its outputs


def executed(path: Path) -> Any:
    """The notebook with new outputs, run by this Python against this checkout; raises CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    clean = without_switches()
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    client.execute(env={**clean, "PYTHONPATH": str(ROOT), "MPLBACKEND": _INLINE})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        if "this-machine" in cell.metadata.get("tags", ()):
            cell.outputs = []
    return notebook


_INLINE = "module://matplotlib_inline.backend_inline"


def printed(notebook: Any) -> list[str]:
    """What each code cell prints."""
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def figures(notebook: Any) -> list[str]:
    """Every PNG that a cell draws, in base 64."""
    return [
        output.data["image/png"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]


def main() -> None:
    for path in NOTEBOOKS:
        nbformat.write(executed(path), path)
        print(f"{path.relative_to(ROOT).as_posix()}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
