"""What package indexes have beyond the tables is listed; one that does not answer is told in a line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from attnsel.environment.read import everything_read
from attnsel.environment.versions import Version
from attnsel.environment.wheels import on_pypi
from package_index import main, released

FILES = {
    "files": [
        {"filename": "torch-98.0-cp312-cp312-manylinux_2_28_x86_64.whl"},
        {"filename": "torch-98.0.1.dev20261120-cp312-cp312-manylinux_2_28_x86_64.whl"},
        {"filename": "torch-98.1-cp312-cp312-manylinux_2_28_x86_64.whl", "yanked": "wrong"},
        {"filename": "torch-99.0rc1-cp312-cp312-manylinux_2_28_x86_64.whl"},
        {"filename": "torch-2.6.0.tar.gz"},
    ]
}


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """A package index on this machine: what it answers, by package."""
    pages: dict[str, object] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.strip("/").rpartition("/")[2])
            self.send_response(200 if page is not None else 404)
            self.end_headers()
            self.wfile.write(json.dumps(page).encode())

        def log_message(self, *args: object) -> None:
            """Nothing on standard error."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
    yield pages
    server.shutdown()
    server.server_close()


def page(package: str, *versions: str) -> dict[str, object]:
    return {"files": [{"filename": f"{package.replace('-', '_')}-{version}.tar.gz"} for version in versions]}


def test_finished_releases_count_that_were_not_withdrawn(index: dict[str, object]) -> None:
    index["torch"] = FILES
    assert released("torch") == ["2.6.0", "98.0"]
    index["flash-attn-4"] = page("flash-attn-4", "4.0.0b36", "4.0.0b99")
    assert released("flash-attn-4") == ["4.0.0b36", "4.0.0b99"]


def test_what_is_newer_than_any_that_was_read_is_listed(
    index: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    for row in everything_read().values():
        for package in row.packages:
            listed = on_pypi().get(package, (row.newest,))
            index[package] = page(package, *(v for v in listed if not row.unread(Version.parse(v))))
    assert main(["--newer"]) == 0
    assert "nothing beyond the tables" in capsys.readouterr().out
    index["torch"], index["triton"] = FILES, page("triton", "3.0.0", "99.1")
    assert main(["--newer"]) == 4
    told = capsys.readouterr().out.splitlines()
    read = everything_read()["torch"]
    assert told[0] == f"torch: 98.0 not read; the newest read is {read.newest}, on {read.on}"
    assert told[1].startswith("triton: 99.1 not read")
    assert told[2:] == ["triton: 99.1 not in pypi.csv"]


def test_an_index_that_does_not_answer_is_told_in_a_line(
    index: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--newer"]) == 74
    [told] = capsys.readouterr().err.splitlines()
    assert told == "package_index: the index did not answer about torch: HTTP Error 404: Not Found"
