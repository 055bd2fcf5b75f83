"""Transcripts: what was typed and printed, which can be typed again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path


def retold(transcript: str, run: Callable[..., tuple[int, str, str]], folder: Path) -> str:
    """What was typed in a transcript, typed again in this folder, and what it prints now.

    A line ``$ attnsel ...`` is a command, ``$ cat FILE`` shows a file; ``$ cat call.py`` has the program that
    ``$ python call.py`` runs, and ``$ export ...`` the variables of the one command that follows.
    ``run(words, program, variables)`` gives the exit code and what was printed on both streams.
    """
    blocks, before, program, variables = [], "", "", dict[str, str]()
    for step in re.split(r"^\$ ", transcript, flags=re.MULTILINE)[1:]:
        typed, _, shown = step.partition("\n")
        command, *words = shlex.split(typed)
        if command == "export":
            variables = dict(word.split("=", 1) for word in words)
            before = f"$ {typed}\n"
        elif typed == "cat call.py":
            program = shown.rstrip("\n")
            before += f"$ {typed}\n{program}\n\n"
        elif command == "cat":
            blocks.append(f"$ {typed}\n{(folder / words[0]).read_text(encoding='utf-8').rstrip()}\n")
        else:
            assert command in ("attnsel", "python"), typed
            said = run(words, program if command == "python" else "", variables)
            blocks.append(before + as_text(typed, *said))
            before, variables = "", {}
    assert blocks, "nothing is typed in this transcript"
    return "\n".join(blocks)


def as_text(line: str, code: int, out: str, err: str) -> str:
    """A command, its exit code where that is not 0, what it printed, and what of that on standard error."""
    ended = f"--- exit code {code} ---\n" if code else ""
    return f"$ {line}\n{ended}{out}" + (f"--- standard error ---\n{err}" if err else "")
