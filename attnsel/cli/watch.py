"""``attnsel watch``: an unmodified program, and what attention it runs."""

from __future__ import annotations

import json as json_format
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from attnsel.cli.flags import OUTPUT, THE_MACHINE, Json, Markdown, one_form
from attnsel.cli.output import BAD_INPUT, complain
from attnsel.cli.program import enter, execute
from attnsel.diagnose.watching.files import write
from attnsel.environment import describe_device
from attnsel.errors import InvalidInput, in_words

if TYPE_CHECKING:
    from attnsel.diagnose.watching.session import Watch


def watch(
    program: Annotated[str, Parameter(help="a script, a folder with a `__main__.py`, or with -m a module")],
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, help="the program's own")],
    module: Annotated[
        bool, Parameter(name=["-m", "--module"], negative="", show_default=False, help="a module, not a file")
    ] = False,
    gpu: Annotated[
        str | None,
        Parameter(
            group=THE_MACHINE, help="what would it run on this GPU (attnsel gpus); this machine if left out"
        ),
    ] = None,
    time: Annotated[
        bool, Parameter(negative="", show_default=False, help="also measure time, beside an estimate")
    ] = False,
    memory: Annotated[
        bool, Parameter(negative="", show_default=False, help="also measure memory, beside an estimate")
    ] = False,
    out: Annotated[
        str | None, Parameter(group=OUTPUT, help="a folder for one file per process: attnsel report reads it")
    ] = None,
    output: Annotated[
        str | None, Parameter(group=OUTPUT, help="write the report to this file, not to standard error")
    ] = None,
    live: Annotated[
        bool,
        Parameter(group=OUTPUT, negative="", show_default=False, help="a table that grows while it runs"),
    ] = False,
    markdown: Markdown = False,
    json: Json = False,
) -> int:
    """Run a program unchanged, and tell what attention it ran, where, how often, and what would be better.

    Seen are F.scaled_dot_product_attention, with the operator that really ran, forward and backward;
    nn.MultiheadAttention, flex_attention, flash_attn, TransformerEngine, transformers and diffusers; and
    attention written by hand. Results are bit for bit those without it. Everything after the program goes
    to the program: write attnsel's own flags before it.

        attnsel watch train.py --lr 3e-4
        attnsel watch --gpu H100 -m package.train --lr 3e-4
        torchrun --nproc-per-node 2 -m attnsel watch --out seen/ train.py

    The report goes to standard error when the program ends, however it ends; of several ranks, rank 0
    tells its own, and with --out each leaves a file.

    Exit code: the program's own; 1 after an exception; 2 where there is nothing to run.
    """
    one_form(markdown=markdown, json=json)
    if gpu is not None:
        describe_device(gpu)
    _check_places(out, output)
    enter(program, module, arguments)
    try:
        from attnsel.diagnose.watching.session import Watch  # needs torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        complain("torch is not installed here, and this program's attention runs on it")
        return BAD_INPUT
    folder = os.getcwd() if module else str(Path(program).resolve().parent)
    session = Watch(time=time, memory=memory, program=folder)
    form = "json" if json else "markdown" if markdown else "text"
    with _told_at_the_end(Teller(session, form, gpu, out, output)) as teller, _shown(session, live), session:
        teller.exit_code = execute(
            program, module, hidden=str(Path(__file__).parents[1] / "diagnose" / "watching")
        )
    return teller.exit_code


class Teller:
    """Tells once what was seen, when the program has ended."""

    def __init__(
        self, session: Watch, form: str, gpu: str | None, out: str | None, output: str | None
    ) -> None:
        self.session, self.form, self.gpu, self.out, self.output = session, form, gpu, out, output
        self.exit_code = 0
        self._process = os.getpid()

    def tell(self) -> None:
        """Once, and in the process that began. What goes wrong here is told, and is not the program's end."""
        if self._process != os.getpid():
            return
        self._process = -1
        try:
            self._tell()
        except Exception as error:
            complain(f"the report could not be made: {in_words(error)}")

    def _tell(self) -> None:
        watched = self.session.watched(gpu=self.gpu, exit_code=self.exit_code)
        if self.out is not None:
            try:
                write(self.out, watched)
            except OSError as error:
                complain(f"--out {self.out}: {error.strerror or error}")
        if watched.process.rank and self.output is None:
            return
        if self.form == "json":
            text = json_format.dumps(watched.as_dict(), indent=2)
        else:
            text = watched.markdown() if self.form == "markdown" else watched.report()
        if self.output is None:
            if sys.stdout is not None:
                sys.stdout.flush()
            print(text, file=sys.stderr)
        elif not watched.process.rank:
            try:
                Path(self.output).write_text(f"{text}\n", encoding="utf-8")
            except OSError as error:
                complain(f"--output {self.output}: {error.strerror or error}")


@contextmanager
def _told_at_the_end(teller: Teller) -> Iterator[Teller]:
    """Tells when the block ends: by itself, by an exception, by sys.exit, or by a signal, which then ends the
    process as it would without us."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        teller.exit_code = 128 + number
        try:
            teller.tell()
        finally:
            os.kill(os.getpid(), number)

    names = ("SIGTERM", "SIGHUP")  # SIGHUP is not on Windows
    numbers = [number for name in names if (number := getattr(signal, name, None)) is not None]
    ours = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, leave)
    try:
        yield teller
    except SystemExit as error:
        code = error.code
        teller.exit_code = code if isinstance(code, int) else 0 if code is None else 1
        raise
    finally:
        for number in ours:
            if signal.getsignal(number) is leave:  # else the program has one of its own
                signal.signal(number, signal.SIG_DFL)
        teller.tell()


@contextmanager
def _shown(session: Watch, live: bool) -> Iterator[None]:
    """A table on standard error that grows while the program runs, where a person looks."""
    if not live or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live

    with Live(
        get_renderable=lambda: _table(session),
        console=Console(file=sys.stderr),
        refresh_per_second=2,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    ):
        yield


def _table(session: Watch) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("calls", "backward", "ran", "where")
    sites = sorted(session.sites, key=lambda site: -site.calls)
    for site in sites[:15]:
        cells = (f"{site.calls:,}", f"{site.backward_calls:,}", site.candidate or site.forward, site.where)
        table.add_row(*map(Text, cells))
    return table


def _check_places(out: str | None, output: str | None) -> None:
    """Raises InvalidInput for what cannot be written, before the program runs for hours."""
    if out is not None and os.path.exists(out) and not os.path.isdir(out):
        raise InvalidInput("--out", out, "must be a folder; it is made where there is none")
    if output is not None and (os.path.isdir(output) or not os.path.isdir(os.path.dirname(output) or ".")):
        raise InvalidInput("--output", output, "must be a file in a folder that there is")
