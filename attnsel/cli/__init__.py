"""The ``attnsel`` command. Each command is imported when it is called."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnsel._version import __version__
from attnsel.cli.output import (
    BAD_INPUT,
    BROKEN_PIPE,
    CANNOT_WRITE,
    FOUND,
    INTERRUPTED,
    complain,
    discard_output,
    only_what_it_can,
    output_failed,
    plain_warnings,
    settle_width,
)
from attnsel.errors import InvalidInput, short

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

COMMANDS = {
    "explain": ("attnsel.cli.explain:explain", "which kernel runs, why the others cannot, how to get them"),
    "can-i-use": (
        "attnsel.cli.can_i_use:can_i_use",
        "which kernels have a feature, where and since when; what runs over a grid",
    ),
    "compare": (
        "attnsel.cli.compare:compare",
        "which answers another machine changes, and why; of many ranks who differs",
    ),
    "check": ("attnsel.cli.check:check", "whether attention is still what a baseline says, for CI"),
    "rules": ("attnsel.cli.known:rules", "everything that is known, one entry per rule"),
    "rule": ("attnsel.cli.known:rule", "the page of one rule: why, since when, how sure, examples"),
    "gpus": ("attnsel.cli.known:gpus", "the GPUs that --gpu knows"),
    "prove": (
        "attnsel.cli.prove:prove",
        "the GPU tests and the kernel benchmark on this card, into one file",
    ),
    "run": ("attnsel.cli.program:run", "a program that imports flash_attn, where there is no flash_attn"),
    "replay": ("attnsel.cli.replay:replay", "a call that was refused or came out wrong, as a short program"),
    "watch": ("attnsel.cli.program:watch", "an unmodified program, and what attention it runs"),
    "doctor": ("attnsel.cli.doctor:doctor", "what is installed, what runs here, what is wrong"),
    "completion": ("attnsel.cli.completion:completion", "a script that completes commands in a shell"),
}


def build_app(argv: Sequence[str], every_flag: bool = True) -> App:
    """The application, which imports nothing but the command that ``argv`` names.

    ``every_flag``: also the flags of a question that ``argv`` does not name.
    """
    from cyclopts import App  # late: it takes twice as long to load as Python itself

    app = App(
        name="attnsel",
        help="Which attention kernel will run, why each of the others cannot, and the way to a faster one.",
        version=__version__,
        help_format="markdown",
        suppress_keyboard_interrupt=False,
    )
    for place, (name, (target, summary)) in enumerate(COMMANDS.items()):
        named = name in argv[:1]
        command = target if every_flag or not named else _with_flags_of(target, argv)
        # Beside a command's own page the summary would replace its docstring.
        about = getattr(command, "help", None) if named else summary
        app.command(command, name=name, help=about, sort_key=place)
    return app


def _with_flags_of(target: str, argv: Sequence[str]) -> Any:
    """A command that reads ``argv``, and need not read anything else."""
    module, _, name = target.partition(":")
    command = getattr(importlib.import_module(module), name)
    fitted = getattr(command, "with_flags_of", None)
    return command if fitted is None else fitted(argv)


def _call(words: list[str]) -> Any:
    """What a command returns; a mistake in what was typed is told."""
    if words == ["--version"]:
        print(__version__)
        return FOUND
    from cyclopts import CycloptsError

    def call(every_flag: bool) -> Any:
        app = build_app(words, every_flag)
        return app(words, exit_on_error=False, print_error=False, result_action="return_value")

    try:
        try:
            every = "--help-all" in words
            words = [word.replace("--help-all", "--help") if every else word for word in words]
            return call(every)
        except CycloptsError:  # nothing was done yet, and a flag that is meant may be among the others
            return call(every_flag=True)
    except (CycloptsError, InvalidInput) as error:
        complain(_in_words(error, words))
        return BAD_INPUT


def _in_words(error: CycloptsError | InvalidInput, words: list[str]) -> str:
    from attnsel.cli.suggest import in_words  # every flag there is: for a mistake alone

    return in_words(error, words, list(COMMANDS))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never a traceback for what a user typed."""
    words = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed: print() would take standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    runs = bool(words) and COMMANDS.get(words[0], ("",))[0].startswith("attnsel.cli.program:")
    if sys.stdout is None and not runs:
        complain("standard output is closed: nothing can be written")
        return CANNOT_WRITE
    for stream in () if runs else (sys.stdout, sys.stderr):  # a program's are its own, also when it ends
        only_what_it_can(stream)
    try:
        if runs:
            from attnsel.cli.program import WITH_VALUE, own_words

            words[1:] = own_words(words[1:], WITH_VALUE[words[0]])
            code = _call(words)  # warnings are the program's
        else:
            if argv is None:
                gc.set_threshold(100_000)  # nearly all that a command makes lives until it ends
            settle_width()
            with plain_warnings():
                code = _call(words)
            if argv is None:
                gc.freeze()  # and goes with the process, which would search it again: a quarter of the time
        if not runs:
            sys.stdout.flush()
        return code if isinstance(code, int) else FOUND
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()  # nobody reads on (| head)
        return BROKEN_PIPE
    except (OSError, OverflowError, RecursionError) as error:
        if not isinstance(error, OSError) or not output_failed():
            if runs:  # the program's
                raise
            # What no reader of files foresaw: a path, a number or a depth that the system refuses.
            complain(f"what was given cannot be read: {short(error, str, 200)}")
            return BAD_INPUT
        discard_output()
        complain(f"standard output cannot be written: {error.strerror or error}")
        return CANNOT_WRITE
