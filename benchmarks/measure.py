"""How the benchmarks measure and tell: paired timings, rows with a budget, a table, a JSON file."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")


class Recorded(Protocol):
    """What a record has rows of."""

    def as_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Row:
    """One measured figure. ``median`` and the quartiles are in ``unit``; ``budget`` None: for information.

    ``bound`` says which side of the budget is good. ``baseline`` and ``ratio`` are medians too, of what was
    measured beside it and of the quotient, pair by pair.
    """

    group: str
    what: str
    unit: str
    median: float
    low: float
    high: float
    samples: int
    budget: float | None = None
    bound: str = "at most"
    baseline: float | None = None
    ratio: float | None = None
    note: str = ""

    @property
    def within(self) -> bool | None:
        if self.budget is None:
            return None
        return self.median <= self.budget if self.bound == "at most" else self.median >= self.budget

    def as_dict(self) -> dict[str, Any]:
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {**rounded, "within": self.within}


def row(group: str, what: str, unit: str, samples: Sequence[float], **rest: Any) -> Row:
    """A row from samples: their median and quartiles."""
    if len(samples) == 1:
        low = median = high = samples[0]
    else:
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Row(group, what, unit, median, low, high, len(samples), **rest)


# ---- timing -----------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """Microseconds per call of two things timed side by side; the lists belong together index by index."""

    first: list[float]
    second: list[float]

    def differences(self) -> list[float]:
        return [a - b for a, b in zip(self.first, self.second, strict=True)]

    def ratio(self) -> float:
        return statistics.median(a / b for a, b in zip(self.first, self.second, strict=True))


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection in the middle of a sample."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def per_call(call: Callable[[], Any], calls: int) -> float:
    """Microseconds per call, over ``calls`` of them."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / calls / 1e3


def pairs(first: Callable[[], Any], second: Callable[[], Any], *, count: int, calls: int = 20) -> Pairs:
    """A B, B A, A B …: what the machine does meanwhile falls on both."""
    per_call(first, 100), per_call(second, 100)
    seen = Pairs([], [])
    with quiet():
        for i in range(count):
            order = (0, 1) if i % 2 == 0 else (1, 0)
            for which in order:
                seen[which].append(per_call((first, second)[which], calls))
    return seen


# ---- telling ----------------------------------------------------------------------------------------


def steps(named: Sequence[tuple[str, Callable[[], list[Row]]]]) -> Iterator[Row]:
    """Run the sections one by one."""
    sections = dict(named)
    for name in progress(list(sections)):
        yield from sections[name]()


def progress(things: Sequence[T]) -> Iterator[T]:
    """One after the other. The line that says which is drawn between them, never during one."""
    console = Console(stderr=True)
    columns = (TextColumn("[{task.completed}/{task.total}] {task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=len(things))
        for thing in things:
            bar.update(task, description=str(thing), refresh=True)
            yield thing
            bar.update(task, advance=1, refresh=True)


def show(title: str, rows: Iterable[Row]) -> None:
    """The rows as a table; what is over budget stands out."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("what", ratio=1)
    for name in ("budget", "median", "quartiles", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("within", no_wrap=True)
    group = None
    for r in rows:
        if r.group != group:
            table.add_section()
            table.add_row(f"[bold]{r.group}[/]")
            group = r.group
        sign = {"at most": "≤", "at least": "≥"}[r.bound]
        table.add_row(
            f"  {r.what}" + (f" [dim]({r.note})[/]" if r.note else ""),
            "" if r.budget is None else f"{sign} {number(r.budget)} {r.unit}",
            f"{number(r.median)} {r.unit}" if r.samples else "",
            f"{number(r.low)} – {number(r.high)}" if r.samples > 1 else "",
            "" if r.ratio is None else f"{r.ratio:.2f}",
            {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[r.within],
        )
    console = Console()
    # A pipe gets what a wide terminal would, so that no column is cut.
    (console if console.is_terminal else Console(width=132)).print(table)


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def record(name: str, rows: Sequence[Recorded], **more: Any) -> dict[str, Any]:
    """Everything a reader needs to judge the figures, and nothing about whose machine it was."""
    changes = git("status", "--porcelain", "--", "attnsel", "rules", "backends")
    return {
        "benchmark": name,
        "date": datetime.now(timezone.utc).date().isoformat(),
        **more,
        "commit": git("rev-parse", "HEAD"),
        "modified": None if changes is None else bool(changes),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "load_average_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        },
        "versions": {
            "python": platform.python_version(),
            **{
                package: version_of(package)
                for package in ("torch", "triton", "pydantic", "cyclopts", "rich")
            },
        },
        "rows": [r.as_dict() for r in rows],
    }


def write(path: Path, recorded: dict[str, Any]) -> None:
    """Whole or not at all: who reads, or stops this, never finds half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(recorded, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git(*arguments: str) -> str | None:
    """What git says, without touching the index; None outside a checkout, be it within somebody else's."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
