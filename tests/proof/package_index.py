"""Writes attnsel/environment/data/pypi.csv: which builds of a recipe's packages PyPI has for Linux x86_64.

    python tests/proof/package_index.py

Asks ``pip index versions``, so it needs a package index. Development builds are left out: pip takes one only
where it is asked to.
"""

from __future__ import annotations

import csv
import datetime
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "nvidia-cudnn-cu11",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "triton",
    "flash-attn",
    "flash-attn-4",
)


def write_rows(name: str, columns: Sequence[str], rows: Iterable[Sequence[str]], source: str) -> Path:
    """A file of facts anew, under its old comments: these rows, with their source and the day."""
    path = ROOT / "attnsel" / "environment" / "data" / f"{name}.csv"
    comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    read = str(datetime.datetime.now(datetime.timezone.utc).date())
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"{line}\n" for line in comments)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, "source", "read"])
        writer.writerows([*row, source, read] for row in rows)
    return path


def builds_of(package: str) -> list[str]:
    """Its versions as the index writes them, oldest first. Raises ValueError where it lists none."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "--pre", package]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120).stdout
    listed = re.search(r"Available versions: (.*)", said)
    if listed is None:
        raise ValueError(f"the index lists no version of {package}")
    versions = [text for text in listed[1].split(", ") if Version(text) >= Version("1")]
    return sorted((text for text in versions if not Version(text).is_devrelease), key=Version)


if __name__ == "__main__":
    found = [(package, version) for package in PACKAGES for version in builds_of(package)]
    print(write_rows("pypi", ("package", "version"), found, "pip index versions"))
