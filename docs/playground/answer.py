"""The question of an address, put to the ``attnsel`` command as it stands.

What the page shows is what the command prints: the words of the address become its words, one for one, and
the same function reads them, plans and prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from urllib.parse import parse_qsl

from attnsel import cli

FORMS = ("json", "text", "markdown")
"""What is printed: ``--json``, the report, ``--markdown``."""

WIDTH = 80  # columns of the report
MOST = 4000  # characters of a question
GRID = ("rows", "cols", "kernel")
"""What makes a question one of ``attnsel can-i-use``."""

NOT_HERE = {
    **dict.fromkeys(("params", "env", "from-log", "cudnn-lib"), "reads a file"),
    "ask-library": "asks a libcudnn",
    **dict.fromkeys(("json", "short", "markdown", "html", "csv", "sources"), "is a form of output"),
    **dict.fromkeys(("help", "h", "version"), "is about the command"),
}


def ask(query: str, form: str = "json") -> str:
    """JSON of the answer to ``query``, a query string of flags without their dashes.

    ``words``: the command that is asked, without its form. ``code``: its exit code. ``out`` and ``err``: what
    it prints. Where it is no question for a page, ``code`` is 2 and ``err`` says why.
    """
    words: list[str] = []
    try:
        words = command(query)
        in_form = [] if form == "text" else [f"--{form}"]
        code, out, err = run([words[0], *in_form, *words[1:]])
    except ValueError as error:
        code, out, err = cli.BAD_INPUT, "", f"attnsel: {error}\n"
    return json.dumps({"words": words, "code": code, "out": out, "err": err})


def command(query: str) -> list[str]:
    """``gpu=H100&training`` as ``explain --gpu=H100 --training``. Raises ValueError."""
    if len(query) > MOST:
        raise ValueError(f"the question has {len(query)} characters; at most {MOST} are read")
    pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=100)
    names = {name.replace("_", "-") for name, _ in pairs}
    for name in sorted(names):
        if name in NOT_HERE:
            raise ValueError(f"--{name} {NOT_HERE[name]}: ask it on the command line")
    if "gpu" not in names:
        raise ValueError("--gpu is missing: a page has no GPU of its own, so name one, such as H100")
    words = [f"--{name}={value}" if value else f"--{name}" for name, value in pairs]
    return ["can-i-use" if names.intersection(GRID) else "explain", *words]


def run(words: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one ``attnsel`` command."""
    out, err = io.StringIO(), io.StringIO()
    os.environ["COLUMNS"] = str(WIDTH)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    return code, out.getvalue(), err.getvalue()
