"""Programs that call attention in every way that is watched, and all that is told of each call.

``programs/*.txt`` holds them: a title, the lines of a program, and after ``|`` what is seen of it: the
question with every field that is not the default, what ran, what was made, and for an H100 the best kernel
with reason and fix, and what of these is otherwise on the CPU that ran it. What stands behind ``|`` was read
against the program, and says *changed* from then on. ``models.txt``: as libraries and papers write it.
What changed is accepted as tests/support/records.py says.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

import attnsel  # noqa: E402
from attnsel import Environment  # noqa: E402
from attnsel.diagnose.watching import observe as sites  # noqa: E402
from attnsel.diagnose.watching.judge import judge  # noqa: E402
from attnsel.diagnose.watching.session import watch  # noqa: E402
from records import Record  # noqa: E402

FOLDER = Path(__file__).parent / "programs"
FILES = sorted(FOLDER.glob("*.txt"))
FLASH = {
    "flash_attn.flash_attn_interface": (2, "2.8.3"),
    "flash_attn_interface": (3, "3.0.0"),
    "flash_attn.cute.interface": (4, "4.0.0b36"),
}
THEIRS = ("flash_attn", "transformer_engine")
H100 = Environment.describe("H100", torch="2.9.1", cudnn="9.10.2")
CPU = Environment.describe("cpu", torch=torch.__version__)


def flash_attn(name: str) -> ModuleType:
    """A package's functions with the signatures that they have, which give q or what is packed with it."""
    from emulated_flash_attn import RECORD, signature

    module = ModuleType(name)
    generation, version = FLASH[name]
    for function in RECORD[str(generation)][version]["functions"]:

        def run(*args: Any, **kwargs: Any) -> Any:
            first = next(iter([*args, *kwargs.values()]))
            return first * 1.0

        run.__module__, run.__signature__ = name, signature(generation, version, function)  # type: ignore[attr-defined]
        setattr(module, function, run)
    return module


@contextmanager
def packages() -> Iterator[None]:
    """They can be imported inside, and what a program puts beside them is gone afterwards."""
    made = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute")}
    made |= {name: flash_attn(name) for name in FLASH}
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(THEIRS)}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(THEIRS)]:
            del sys.modules[name]
        sys.modules.update(before)


def told_of(code: str) -> list[str]:
    """What is seen of a program."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "F": F, "nn": torch.nn, "math": math, "attnsel": attnsel}
    names |= {"INF": -math.inf, "t": torch.randn, "hidden": lambda *s: torch.ones(*s, dtype=torch.bool)}
    names["namespace"] = SimpleNamespace
    with packages(), watch() as w:
        exec(compile(code, "<program>", "exec"), names)
    lines = [f"asked: {fields(p)}" for p in names.get("asked", ())]
    for seen, site in zip(w.sites, judge(w.sites, CPU, H100), strict=True):
        (here,) = judge([seen], CPU) if seen.api == "F.scaled_dot_product_attention" else (site,)
        told = site.model_dump(exclude_defaults=True, exclude={"params", "materialised"})
        where = re.sub(r"(attnsel/\S+):\d+", r"\1", told.pop("where"))
        lines.append(f"{where}: {told.pop('api')}")
        if site.params is not None:
            lines.append(f"  asks: {fields(site.params)}")
        made = [f"{one.what} {one.bytes}" for one in site.materialised]
        lines += [f"  makes: {', '.join(made)}"] * bool(made)
        for name, value in told.items():
            values = value if isinstance(value, tuple) else (value,)
            lines += [f"  {name}: {one}" for one in values]
        for name in ("best", "why", "fix"):
            if (value := getattr(here, name)) and value not in (getattr(site, name), site.candidate):
                lines.append(f"  on the CPU, {name}: {value if isinstance(value, str) else '; '.join(value)}")
    unseen = [one for one in w.recorder.unseen if not one.startswith("torch.compile made")]
    return [*lines, *(f"not seen: {one}" for one in unseen)]


def fields(p: attnsel.AttentionParams) -> str:
    return " ".join(f"{name}={value}" for name, value in p.model_dump(exclude_defaults=True).items())


def retold(text: str) -> str:
    blocks = []
    for block in text.strip().split("\n\n"):
        title, *lines = block.splitlines()
        code = [line for line in lines if not line.startswith("| ")]
        blocks.append("\n".join([title, *code, *(f"| {line}" for line in told_of("\n".join(code)))]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_what_is_seen_of_programs(path: Path, record: Record) -> None:
    record.holds(path, retold(path.read_text(encoding="utf-8")).splitlines())


def test_places_beyond_the_bound_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "MOST_PLACES", 2)
    book = sites.Book()
    for where in "abcad":
        book.tally(where, sites.Seen("aten", "k")).calls += 1
    assert [(one.where, one.calls) for one in book.sites()] == [("a", 2), ("b", 1), ("elsewhere", 2)]
    assert book.dropped == 2
