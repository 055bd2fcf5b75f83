"""Writes attnsel/environment/data/pypi.csv: which builds of a recipe's packages PyPI has for Linux x86_64.

    python tests/proof/package_index.py            # writes the table
    python tests/proof/package_index.py --newer    # lists what the index has beyond the tables

The first asks ``pip index versions``. The second asks PyPI's simple index (PEP 691; another one by
PIP_INDEX_URL) about each package of attnsel/environment/data/read.csv: which releases are newer than any that
was read, and which builds are in no row of pypi.csv. Development builds are left out, which pip takes only
where it is asked to.

Exit code of --newer: 0 there is nothing beyond the tables, 4 there is something, 74 the index did not answer.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from attnsel.cli.output import CHECK_FAILED, FOUND, bar
from attnsel.environment import versions
from attnsel.environment.read import Read, everything_read
from attnsel.environment.wheels import on_pypi

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


# ---- what the index has beyond the tables ---------------------------------------------------------------


NO_ANSWER = 74  # EX_IOERR of sysexits.h
_SECONDS = 20  # that one answer may take
_MOST_BYTES = 64 << 20


def released(package: str) -> list[str]:
    """Its releases as the simple index lists them, oldest first; none that was withdrawn, no development
    build, and no candidate where there are finished ones. Raises OSError and ValueError."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    asked = urllib.request.Request(
        f"{index}/{package}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(asked, timeout=_SECONDS) as answer:
        listed = json.loads(answer.read(_MOST_BYTES))
    named = re.compile(rf"{re.sub('-', '[-_.]', package)}-(?P<version>[^-]+?)(-.*|\.tar\.gz|\.zip)$", re.I)
    there = {
        match["version"]
        for file in listed["files"]
        if not file.get("yanked") and (match := named.match(file["filename"]))
    }
    parsed = sorted(_parsed(text) for text in there)
    finished = [one for one in parsed if not one.is_prerelease]
    return [str(one) for one in finished or parsed if not one.is_devrelease]


def _parsed(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0.dev0")


def beyond(row: Read, package: str, listed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of the releases of a package those that are newer than any that was read, and those that are newer than
    the rows of pypi.csv, where it has the package."""
    unread = [text for text in listed if row.unread(versions.Version.parse(text)) is not None]
    rows = on_pypi().get(package)
    newest = Version(rows[-1]) if rows else None
    return unread, [text for text in listed if newest is not None and Version(text) > newest]


def told(row: Read, package: str, listed: Sequence[str]) -> Iterator[str]:
    """What is to be read, and what the table lacks, in words."""
    unread, lacking = beyond(row, package, listed)
    if unread:
        yield f"{package}: {', '.join(unread)} not read; the newest read is {row.newest}, on {row.on}"
    if lacking:
        yield f"{package}: {', '.join(lacking)} not in pypi.csv"


def list_newer(ask: Callable[[str], list[str]] = released) -> int:
    """Print what the index has beyond the tables."""
    asked = [(row, package) for row in everything_read().values() for package in row.packages]
    found: list[str] = []
    with bar("asking the package index", len(asked)) as move:
        for done, (row, package) in enumerate(asked, 1):
            try:
                found += told(row, package, ask(package))
            except (OSError, ValueError, KeyError) as error:
                print(f"package_index: the index did not answer about {package}: {error}", file=sys.stderr)
                return NO_ANSWER
            move(done)
    print("\n".join(found) if found else "the package index has nothing beyond the tables")
    return CHECK_FAILED if found else FOUND


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="The table of what PyPI has, and what PyPI has beyond the tables."
    )
    parser.add_argument("--newer", action="store_true", help="list what is beyond the tables; write nothing")
    if parser.parse_args(arguments).newer:
        return list_newer()
    found = [(package, version) for package in PACKAGES for version in builds_of(package)]
    print(write_rows("pypi", ("package", "version"), found, "pip index versions"))
    return FOUND


if __name__ == "__main__":
    sys.exit(main())
