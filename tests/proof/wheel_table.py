"""Writes attnsel/environment/data/flash_attn_wheels.csv: which wheels flash-attn's release workflow built.

    python tests/proof/wheel_table.py CHECKOUT    # of github.com/Dao-AILab/flash-attention, with its tags

Of each tag the matrix of ``.github/workflows/publish.yml`` is read. It uploads the package to PyPI only after
every wheel of the matrix was built, so tags that PyPI does not list are left out: their builds failed. Which
releases PyPI lists is asked of pip. Wheels built for a nightly of torch are left out too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from itertools import product
from typing import Any

from packaging.version import Version

from package_index import write_rows

OLDEST = Version("2.3.6")


def _git(checkout: str, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", checkout, *arguments], check=True, capture_output=True, text=True
    ).stdout


def _published() -> set[str]:
    command = [sys.executable, "-m", "pip", "index", "versions", "flash-attn"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"[\w.]+", told.partition("Available versions:")[2].splitlines()[0]))


def _has_old_abi(torch: str, torch_cuda: int) -> bool:
    """PyTorch's blog on 2.6: of its CUDA builds the one for 12.6 has the new ABI; from 2.7 on all have."""
    minor = Version(torch).release[:2]
    return minor < (2, 6) or (minor == (2, 6) and torch_cuda < 126)


def _rows(release: str, text: str) -> list[tuple[str, ...]]:
    """The rows of a release, one for each CUDA and torch."""
    import yaml

    matrix: dict[str, Any] = yaml.safe_load(text)["jobs"]["build_wheels"]["strategy"]["matrix"]
    newest_cuda: dict[str, int] = ast.literal_eval(re.findall(r"maxv = (\{.*?\})", text)[0])
    whole = "cu${WHEEL_CUDA_VERSION}" not in text
    built: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    new_abi_alone: set[str] = set()
    axes = ("python-version", "torch-version", "cuda-version", "cxx11_abi")
    for values in product(*(matrix[axis] for axis in axes)):
        point = dict(zip(axes, values, strict=True))
        if any(all(point[k] == v for k, v in row.items()) for row in matrix["exclude"]):
            continue
        torch, python = Version(point["torch-version"]), Version(point["python-version"])
        if torch.is_devrelease or torch.major < 2:
            continue
        digits = point["cuda-version"].split(".")
        name = f"cu{digits[0]}{digits[1]}" if whole else f"cu{digits[0]}"
        minor = f"{torch.major}.{torch.minor}"
        if int(digits[0]) >= 12 and not _has_old_abi(minor, newest_cuda[minor]):
            new_abi_alone.add(minor)
        if python.minor not in built[name][minor]:
            built[name][minor].append(python.minor)
    rows: list[tuple[str, ...]] = []
    for name, by_torch in built.items():
        for minor, pythons in sorted(by_torch.items(), key=lambda item: Version(item[0])):
            first, last = min(pythons), max(pythons)
            assert sorted(pythons) == list(range(first, last + 1)), (release, name, minor)
            rows.append(
                (release, name, minor, f"3.{first}-3.{last}", "" if minor in new_abi_alone else "yes")
            )
    return rows


def table(checkout: str) -> list[tuple[str, ...]]:
    published = _published()
    tags = [tag.removeprefix("v") for tag in _git(checkout, "tag", "--list", "v*").split()]
    releases = sorted((tag for tag in tags if tag in published and Version(tag) >= OLDEST), key=Version)
    return [
        row
        for release in reversed(releases)
        for row in _rows(release, _git(checkout, "show", f"v{release}:.github/workflows/publish.yml"))
    ]


if __name__ == "__main__":
    columns = ("release", "cuda", "torch", "pythons", "old_abi")
    print(write_rows("flash_attn_wheels", columns, table(sys.argv[1]), "publish.yml"))
