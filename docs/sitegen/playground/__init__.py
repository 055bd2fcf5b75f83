"""The playground: the planner in the browser, as files of the site under ``playground/``.

The page and its scripts are written by hand in ``docs/playground``. Made here: the form, from the command's
own flags; the answer to the first question, by the engine itself; and Python for the browser (``bundle.py``).
"""

from __future__ import annotations

import ast
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
FIRST = "gpu=H100&cudnn=9.1.0&head-dim-qk=192&head-dim-v=128&training"
"""The question of the page as it opens."""

_SCRIPTS = ("style.css", "theme.js", "app.js", "ask.js", "fields.js", "markdown.js", "worker.js")


def files() -> Iterator[File]:
    """The page, its scripts, and Python for the browser. Raises bundle.NotFetched."""
    built = bundle.build()
    for name in _SCRIPTS:
        yield File(f"playground/{name}", (PAGES / name).read_text(encoding="utf-8"))
    for name, content in built.files.items():
        yield File(f"playground/python/{name}", content)
    yield File("playground/index.html", page(built))


def page(built: bundle.Bundle) -> str:
    """The HTML: the form is of use, and the first question answered, before any script has run."""
    answers = first_answers()
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


def first_answers() -> dict[str, Any]:
    """What the engine says to the first question, by form; a setting of this machine says nothing in it."""
    script = f"import answer; print([answer.ask({FIRST!r}, form) for form in answer.FORMS])"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATTNSEL_")}
    path = os.pathsep.join([str(PAGES), str(bundle.ROOT)])
    run = [sys.executable, "-c", script]
    clean["PYTHONPATH"] = path
    said = ast.literal_eval(subprocess.run(run, env=clean, check=True, capture_output=True, text=True).stdout)
    return {form: json.loads(text) for form, text in zip(glue().FORMS, said, strict=True)}
