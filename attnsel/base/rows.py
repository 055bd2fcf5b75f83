"""Facts as rows: the CSV files that lie in ``data/`` beside the code that reads them.

A line that begins with "#" is a comment. A file of facts has the columns ``source`` and ``read``: where a row
is from, and the day somebody read it there (2026-11-23).
"""

from __future__ import annotations

import csv
import pkgutil


def read_rows(package: str, name: str, folder: str = "") -> list[dict[str, str]]:
    """The rows of ``data/NAME.csv`` in a package, by column; a cell with nothing in it is "", and so are
    those that are left out at the end of a row.

    The package is imported, and none that lies in a ``folder/`` of it.
    """
    content = pkgutil.get_data(package, f"{folder}data/{name}.csv")
    assert content is not None, f"{package} is not read from files"
    lines = (line for line in content.decode().splitlines() if line[:1] not in ("", "#"))
    return list(csv.DictReader(lines, restval=""))
