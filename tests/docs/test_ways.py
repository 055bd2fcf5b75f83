"""The pages that follow a call and a question name what is called, in the order of the first calls."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import attnsel
from attnsel import AttentionParams, Environment, attention, select
from paths import ROOT

PAGES = ROOT / "docs/explanation"
WORDS = ("base", "environment", "errors", "params", "verdicts")  # floors 1 to 5: what is spoken in
STATED = {"torch": "2.9.0", "cuda": "12.8", "triton": "3.5.0", "python": "3.12", "cudnn": "9.1.0"}


def file_of(code: Any) -> str:
    """Where a function stands in the repository; empty for those of others."""
    path = Path(code.co_filename)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


def followed(run: Callable[[], Any]) -> list[tuple[str, str]]:
    """File and name of each function of the product that is called, in the order of the first calls."""
    called: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = file_of(frame.f_code) if event == "call" else ""
        if file.startswith(("attnsel/", "rules/", "backends/")):
            name = frame.f_code.co_name
            owner = frame.f_locals.get("self")
            called.setdefault((file, name if owner is None else f"{type(owner).__name__}.{name}"))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return list(called)


def named(page: str) -> Iterator[tuple[str, str]]:
    """File and name of each row of a page's table."""
    for line in (PAGES / page).read_text(encoding="utf-8").splitlines():
        row = re.search(r"\| `([\w.]+)` \| `([\w/.]+)` \|", line)
        if row:
            yield row[2], row[1]


def room_of(file: str) -> str:
    top, *rest = Path(file).parts
    return top if top != "attnsel" else rest[0].removesuffix(".py")


def a_first_call() -> None:
    q, k, v = (torch.ones(1, rows, 2, 8) for rows in (5, 7, 7))
    attention(q, k, v)


def a_question() -> None:
    env = Environment.describe("H100", cudnn_frontend="1.20.0", **STATED)
    select(AttentionParams(head_dim_qk=192, head_dim_v=128), env).report()


def told_in_order(page: str, run: Callable[[], None]) -> tuple[list[str], list[str]]:
    """The files of a page, and the rooms a call goes through, where the page names its functions in order."""
    assert len((PAGES / page).read_text(encoding="utf-8").splitlines()) <= 40
    run()  # what is loaded and detected once in a process is no part of the way
    attnsel.clear_cache()
    called = followed(run)
    told = list(named(page))
    assert len(told) > 10
    assert [one for one in called if one in told] == told
    rooms = dict.fromkeys(room for file, _ in called if (room := room_of(file)) not in WORDS)
    return list(dict.fromkeys(file for file, _ in told)), list(rooms)


def test_the_way_of_a_call() -> None:
    files, rooms = told_in_order("way-of-a-call.md", a_first_call)
    assert len(rooms) <= 9
    assert rooms == list(dict.fromkeys(map(room_of, files)))


def test_the_way_of_a_question() -> None:
    files, _ = told_in_order("way-of-a-question.md", a_question)
    assert len(files) <= 7
