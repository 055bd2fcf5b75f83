"""Facts as rows: the CSV files that lie in ``data/`` beside the code that reads them.

A line that begins with "#" is a comment. A file of facts has the columns ``source`` and ``read``: where a row
is from, and the day somebody read it there (2026-11-23).
"""

from __future__ import annotations

import csv
import importlib.util
import os
from typing import Any


def read_rows(package: str, name: str) -> list[dict[str, str]]:
    """The rows of ``data/NAME.csv`` in a package, by column; a cell with nothing in it is ""."""
    spec = importlib.util.find_spec(package)  # which loads no package: rows are read before anything is
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{package} is not read from files")
    loader: Any = spec.loader
    content = loader.get_data(os.path.join(os.path.dirname(spec.origin), "data", f"{name}.csv"))
    return list(csv.DictReader(line for line in content.decode().splitlines() if line[:1] not in ("", "#")))
