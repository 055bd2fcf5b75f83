"""A pytest plugin: every result as a line of a file, written at once, so that a killed run loses none.

    python -m pytest -p record_tests --record FILE --shard 0/4 tests/gpu

Run again with the same file it goes on behind what was run, the test that ended the process included.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

_LONGEST = 2000  # characters of a failure's message


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("record")
    group.addoption("--record", type=Path, required=True, metavar="FILE")
    group.addoption("--shard", default="0/1", metavar="I/N", help="every Nth test, from the Ith on")
    group.addoption("--only", default="", metavar="WORDS", help="tests with one of these words in their name")
    group.addoption("--again", default="", metavar="TEST", help="this test alone, by its whole name")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(config.getoption("--record")), "attnsel-recorder")


class _Recorder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.session: pytest.Session | None = None
        self.phases: list[pytest.TestReport] = []

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        shard, shards = map(int, config.getoption("--shard").split("/"))
        met = {line["test"] for line in read(self.path) if "test" in line}
        again, only = config.getoption("--again"), config.getoption("--only")
        words = [word.strip() for word in only.split(",") if word.strip()]
        wanted = [item for item in items if item.nodeid == again or (not again and _has(item, words))]
        mine = wanted[shard::shards]
        errors = 0 if self.session is None else self.session.testsfailed  # files that cannot be imported
        self._write({"planned": {item.nodeid: _shows(item) for item in mine}, "errors": errors})
        items[:] = [item for item in mine if item.nodeid not in met]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.phases = []
        self._write({"test": nodeid, "outcome": "unfinished"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.phases.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcomes = [report.outcome for report in self.phases]
        outcome = next((o for o in ("failed", "skipped") if o in outcomes), "passed")
        message = "\n".join(_message(r) for r in self.phases if r.outcome == outcome != "passed")
        seconds = round(sum(report.duration for report in self.phases), 3)
        self._write({"test": nodeid, "outcome": outcome, "seconds": seconds, "message": message[-_LONGEST:]})
        if outcome == "failed" and self.session is not None and _device_lost():
            self.session.shouldstop = "after a fault of the device nothing runs in this process"

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _has(item: pytest.Item, words: list[str]) -> bool:
    return not words or any(word in item.nodeid for word in words)


def _shows(item: pytest.Item) -> Any:
    """What a test shows, where its folder's conftest.py says so; otherwise None."""
    return dict(item.user_properties).get("shows")


def _message(report: pytest.TestReport) -> str:
    """Without the name of whose machine it was, which paths tell."""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        text = str(report.longrepr[2]).removeprefix("Skipped: ")
    else:
        text = report.longreprtext
    return text.replace(sys.prefix, "<python>").replace(str(Path.home()), "~")


def _device_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record; a last one that is cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]
