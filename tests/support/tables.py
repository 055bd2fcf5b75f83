"""Rows of data within one test."""

from __future__ import annotations

import csv
import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest


def each(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """``pytest.mark.parametrize`` as one test: every row is run, and all that fail are told.

    Fixtures are made once, so what a row writes (files, variables) the next one finds.
    """
    fields = names.replace(" ", "").split(",") if isinstance(names, str) else names
    table = [dict(zip(fields, row if len(fields) > 1 else (row,), strict=True)) for row in rows]
    assert table, "no rows, so nothing is tested"

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def test(**fixtures: Any) -> None:
            failed = []
            for row in table:
                try:
                    function(**fixtures, **row)
                except (Exception, pytest.fail.Exception):
                    failed.append(f"{row}\n{traceback.format_exc(limit=-3)}")
            if failed:
                pytest.fail(f"{len(failed)} of {len(table)} rows:\n\n" + "\n".join(failed), pytrace=False)

        asked = inspect.signature(function)
        left = [p for name, p in asked.parameters.items() if name not in fields]
        test.__signature__ = asked.replace(parameters=left)  # type: ignore[attr-defined]
        return test

    return decorate


def rows_of(test: str | Path, name: str) -> list[dict[str, str]]:
    """The rows of a CSV that lies beside a test or below it, by column. It may begin with remarks (``#``)."""
    lines = (Path(test).parent / name).read_text(encoding="utf-8").splitlines(keepends=True)
    return list(csv.DictReader(dropwhile(lambda line: line[0] == "#", lines)))


def cells_of(test: str, name: str) -> list[list[str]]:
    """The rows of a text that lies beside a test: cells between bars, a row a line. ``#`` begins a remark."""
    lines = Path(test).with_name(name).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split(" | ")] for line in lines if line and line[0] != "#"]
