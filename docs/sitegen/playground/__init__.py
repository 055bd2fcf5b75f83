"""The playground: the planner in the browser, as files of the site under ``playground/``.

The page and its scripts are written by hand in ``docs/playground``. Made here: the form, from the command's
own flags; the answer to the first question, by the engine itself; and Python for the browser (``bundle.py``).
"""

from __future__ import annotations

import ast
import csv
import gzip
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from types import ModuleType
from typing import Any

from attnsel._version import __version__
from attnsel.rules import REGISTRY
from sitegen.model import File
from sitegen.playground import bundle, form

PAGES = bundle.ROOT / "docs" / "playground"
with (PAGES / "presets.csv").open(encoding="utf-8", newline="") as _file:
    PRESETS = {
        row["name"]: row["query"]
        for row in csv.DictReader(line for line in _file if not line.startswith("#"))
    }
"""Questions that the page offers, by name."""
FIRST = next(iter(PRESETS.values()))
"""The question of the page as it opens."""

_SCRIPTS = ("style.css", "theme.js", "app.js", "ask.js", "fields.js", "markdown.js", "worker.js")


def files() -> Iterator[File]:
    """The page, its scripts, and Python for the browser. Raises bundle.NotFetched."""
    built = bundle.build()
    for name in _SCRIPTS:
        yield File(f"playground/{name}", (PAGES / name).read_text(encoding="utf-8"))
    for name, content in built.files.items():
        yield File(f"playground/python/{name}", content)
    answers = prepared()
    yield File("playground/answers.json", json.dumps(answers))
    yield File("playground/index.html", page(built, answers[FIRST]))


def page(built: bundle.Bundle, answers: dict[str, Any]) -> str:
    """The HTML: the form is of use, and the first question answered, before any script has run."""
    loaded = {name: content for name, content in built.files.items() if not name.startswith("rest.")}
    start = {
        "first": FIRST,
        "answers": answers,
        "codes": sorted(REGISTRY.pages),
        "bytes": {name: len(content) for name, content in loaded.items()},
        "lock": built.lock,
        "edition": hashlib.sha256(b"".join(built.files.values())).hexdigest()[:12],
    }
    parts = {
        "VERSION": escape(__version__),
        "FORM": form.html(form.fields(glue().NOT_HERE)),
        "FIRST_REPORT": escape(answers["text"]["out"]),
        "LOADED": f"{sum(map(len, loaded.values())) / 1e6:.1f}",
        "LOADED_GZIP": f"{sum(map(_sent, loaded.values())) / 1e6:.1f}",
        "PRESETS": "".join(
            f'<li><a href="?{escape(query)}" data-question>{escape(name)}</a></li>'
            for name, query in PRESETS.items()
        ),
        "START": json.dumps(start).replace("<", "\\u003c"),
    }
    html = (PAGES / "index.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        html = html.replace("{{" + name + "}}", text)
    return html


def _sent(content: bytes) -> int:
    """Bytes of a file as a server sends it that compresses."""
    return min(len(content), len(gzip.compress(content, 9)))


def glue() -> ModuleType:
    """``docs/playground/answer.py``, as it runs in the browser."""
    spec = importlib.util.spec_from_file_location("attnsel_playground_answer", PAGES / "answer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepared() -> dict[str, dict[str, Any]]:
    """What the engine says to each preset, by form. As in the browser neither a setting of this machine nor a
    transformers that is installed has a say in it."""
    asked = list(PRESETS.values())
    script = f"""
import answer
from attnsel.diagnose.models import source
source._asks_transformers = lambda: False
print([[answer.ask(query, form) for form in answer.FORMS] for query in {asked!r}])
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATTNSEL_")}
    path = os.pathsep.join([str(PAGES), str(bundle.ROOT)])
    run = [sys.executable, "-c", script]
    clean["PYTHONPATH"] = path
    said = ast.literal_eval(subprocess.run(run, env=clean, check=True, capture_output=True, text=True).stdout)
    return {
        query: {form: json.loads(text) for form, text in zip(glue().FORMS, texts, strict=True)}
        for query, texts in zip(asked, said, strict=True)
    }
