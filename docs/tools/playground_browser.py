"""The playground in a real browser that reaches nothing but a server of this machine."""

from __future__ import annotations

import functools
import http.server
import io
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import playground_questions
from attnsel import cli
from sitegen import playground

FOLDER = "some/folder"  # below the root of the server: every path of the page is relative
UP, FAILED = "html[data-python=up]", "html[data-python=failed]"
MOST = 120_000  # ms until Python is up, on a machine with much else to do


def why_not() -> str:
    """Why no browser can be driven here; empty where one can."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install -e . --group browser"
    return "" if browser() else "no Chromium is installed (CHROMIUM names one)"


def browser() -> str:
    """The browser's program, or nothing."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), "")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(root: Path) -> Iterator[str]:
    """``python -m http.server`` for ``root``; the address of the playground in it."""
    handler = functools.partial(_Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{FOLDER}/playground/"
        server.shutdown()


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser of Playwright's."""
    from playwright.sync_api import sync_playwright

    quiet = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser(), args=quiet)
        yield started
        started.close()


class Watched:
    """A page of a context of its own, and what must not happen in it."""

    def __init__(self, started: Any, **options: Any) -> None:
        self.context = started.new_context(**options)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.context.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname or "data"))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):  # a breach of the page's policy is an error
            self.problems.append(f"{message.type}: {message.text}")

    def open(self, address: str) -> Any:
        """The page once Python is up there."""
        self.page.goto(address)
        self.page.wait_for_selector(UP, timeout=MOST)
        return self.page

    def close(self) -> None:
        self.context.close()


def write(root: Path) -> None:
    """The playground's files below ``root``, where ``served`` looks for them. Raises bundle.NotFetched."""
    for file in playground.files():
        place = root / FOLDER / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.content if isinstance(file.content, bytes) else file.content.encode())


def go(page: Any, query: str) -> dict[str, Any]:
    """Ask ``query`` as a link on the page would: by form of output what the command said there."""
    said: dict[str, Any] = page.evaluate("async (query) => (await import('./app.js')).go(query)", query)
    return said


def printed(words: list[str]) -> tuple[int, str, str]:
    """What ``attnsel`` prints, 80 columns wide: exit code, standard output, standard error.

    ``--as transformers`` takes the release that is installed, and ``--model`` its code. In a browser none is,
    so none is here.
    """
    out, err = io.StringIO(), io.StringIO()
    no_release = patch("attnsel.dispatchers.transformers.switches.installed_version", lambda *names: None)
    no_code = patch("attnsel.diagnose.models.source._asks_transformers", lambda: False)
    with redirect_stdout(out), redirect_stderr(err), no_release, no_code:
        code = cli.main(words)
    return code, out.getvalue(), err.getvalue()


def differing(page: Any, queries: Iterable[str]) -> tuple[Counter[int], list[str]]:
    """Ask ``queries`` here and in the browser: how often each exit code was given; those answered otherwise.

    JSON is compared as it is printed, byte for byte, with the exit code and what stands on standard error; of
    every tenth question the report and Markdown too; and what the page shows with the answer that it got.
    """
    codes: Counter[int] = Counter()
    different: list[str] = []
    os.environ["COLUMNS"] = "80"
    for number, query in enumerate(queries):
        said, words = go(page, query), playground_questions.words(query)
        if number % 10 == 0:
            text = page.evaluate("async (query) => (await import('./app.js')).ask(query, 'text')", query)
            said = {**said, "text": text}
        else:
            said = {"json": said["json"]}
        for form, answer in said.items():
            in_form = [] if form == "text" else [f"--{form}"]
            here = (words, *printed([words[0], *in_form, *words[1:]]))
            if here != (answer["words"], answer["code"], answer["out"], answer["err"]):
                different.append(f"{form}: {query}")
        answer = said["json"]
        codes[answer["code"]] += 1
        refused = answer["code"] == cli.BAD_INPUT
        shown = page.text_content("#error" if refused else "#panel-json pre")
        meant = answer["err"].removeprefix("attnsel: ").strip() if refused else answer["out"]
        if shown != meant or page.is_visible("#error") != refused or page.is_visible("#tabs") == refused:
            different.append(f"shown: {query}")
    return codes, different
