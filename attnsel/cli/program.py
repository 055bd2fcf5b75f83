"""Another program run inside a command of attnsel's, as ``python`` itself would run it."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from attnsel.cli.flags import THE_MACHINE
from attnsel.cli.form import OUTPUT, TEXT, Form, yes_or_no
from attnsel.cli.output import BAD_INPUT, ENDING, FOUND, INTERRUPTED, as_it_can, complain
from attnsel.environment import describe_device
from attnsel.errors import InvalidInput, in_words

if TYPE_CHECKING:
    from attnsel.diagnose.watching.session import Watch


FAILED = 1  # what Python exits with after an exception

Program = Annotated[str, Parameter(help="a script, a folder with a `__main__.py`, or with -m a module")]
Argument = Annotated[str, Parameter(allow_leading_hyphen=True, help="the program's own")]
IsModule = Annotated[bool, yes_or_no("a module, not a file", name=["-m", "--module"])]

WITH_VALUE: dict[str, frozenset[str]] = {
    "run": frozenset(),
    "watch": frozenset({"--gpu", "--out", "--output"}),
}
"""The commands that run a program, and their flags that take the word behind them."""


def own_words(words: list[str], with_value: Collection[str] = ()) -> list[str]:
    """A command's arguments with a ``--`` before the program: none of the program's flags is taken for ours.

    ``with_value``: flags of the command that take the word behind them.
    """
    for place, word in enumerate(words):
        if word == "--":
            return words
        if place and words[place - 1] in with_value:
            continue
        if not word.startswith("-"):
            return [*words[:place], "--", *words[place:]]
    return words


def _check(program: str, module: bool) -> None:
    """Raises InvalidInput where there is nothing to run."""
    if module:
        if not all(program.split(".")) or program == "__main__":
            raise InvalidInput("program", program, "must be the name of a module, such as package.train")
        try:
            found = importlib.util.find_spec(program) is not None
        except ModuleNotFoundError as error:
            if error.name is None or not f"{program}.".startswith(f"{error.name}."):
                raise  # a package of that name imports something that is missing
            found = False
        if not found:
            raise InvalidInput("program", program, "there is no such module")
        return
    if not os.path.exists(program):
        raise InvalidInput("program", program, "there is no such file")
    if os.path.isdir(program) and not (Path(program) / "__main__.py").is_file():
        raise InvalidInput("program", program, "must be a file, or a folder with a __main__.py")


def enter(program: str, module: bool, arguments: tuple[str, ...]) -> None:
    """sys.argv and sys.path as python itself would set them. Raises InvalidInput where nothing is to run."""
    sys.argv[:] = [program, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # python -P: no folder of the program's
        if module:
            sys.path[0] = os.getcwd()
        elif os.path.isfile(program):
            sys.path[0] = str(Path(program).resolve().parent)
    _check(program, module)


def execute(program: str, module: bool, hidden: str | None = None) -> int:
    """The program as ``__main__``, which it stays: what it made lives as long as under ``python`` itself, and
    is destroyed with the interpreter, in the same order.

    Its exceptions are told as python does: without the frames above it, and without those of files in the
    folder ``hidden``, which the program did not call.
    """
    try:
        code, names = _loaded(program, module)
        main = ModuleType("__main__")
        vars(main).update(names, __builtins__=builtins)
        if sys.version_info < (3, 14):
            vars(main)["__annotations__"] = {}
        _replaced.append(sys.modules["__main__"])
        sys.modules["__main__"] = main
        exec(code, vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        error = error.with_traceback(_below(error.__traceback__))
        if hidden is not None:
            _hide(error, hidden)
        # As python does, which keeps what the frames of the traceback hold until it exits.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return FOUND


_replaced: list[ModuleType] = []
"""The ``__main__`` that a program took the place of: that of the command, whose frames still run."""


def _loaded(program: str, module: bool) -> tuple[CodeType, dict[str, Any]]:
    """The program's code, and what its ``__main__`` has before its first line."""
    spec = None
    if module:
        spec = importlib.util.find_spec(program)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{program}.__main__")
    else:
        file = os.path.abspath(program)
        if pkgutil.get_importer(file) is None:
            names = {"__file__": file, "__package__": None, "__spec__": None}
            return _script(file), {
                **names,
                "__cached__": None,
                "__loader__": SourceFileLoader("__main__", file),
            }
        sys.path[: 0 if getattr(sys.flags, "safe_path", False) else 1] = [file]  # a folder, or a ZIP file
        spec = importlib.machinery.PathFinder.find_spec("__main__", [file])
    code = getattr(spec.loader, "get_code", lambda name: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        raise ImportError(f"no code object available for {program}")
    if module and spec.origin is not None:
        sys.argv[0] = spec.origin
    return code, {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__package__": spec.parent,
        "__spec__": spec,
        "__loader__": spec.loader,
    }


def _script(file: str) -> CodeType:
    """The code of a file, compiled or not."""
    with io.open_code(file) as opened:
        code: CodeType | None = pkgutil.read_code(opened)
    if code is not None:
        return code
    with io.open_code(file) as opened:
        return compile(opened.read(), file, "exec", dont_inherit=True)


def _below(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's own first frame on."""
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return tb


def _hide(error: BaseException, folder: str) -> None:
    """Takes the frames of a folder's files out of the tracebacks of an error and those that led to it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        one.__traceback__ = _outside(one.__traceback__, folder)


def _outside(tb: TracebackType | None, folder: str) -> TracebackType | None:
    kept = []
    while tb is not None:
        if not tb.tb_frame.f_code.co_filename.startswith(folder + os.sep):
            kept.append(tb)
        tb = tb.tb_next
    for first, following in zip(kept, [*kept[1:], None], strict=True):
        first.tb_next = following
    return kept[0] if kept else None


# ---- ``attnsel run``: a program written for flash_attn, where there is no flash_attn -------------------


def run(
    program: Program,
    /,
    *arguments: Argument,
    module: IsModule = False,
    force: Annotated[bool, yes_or_no("also over a flash_attn that works here")] = False,
    flash_attn: Annotated[bool, yes_or_no("beside --sdpa: take the name flash_attn as well")] = False,
    sdpa: Annotated[
        bool, yes_or_no("put attnsel in place of torch.nn.functional.scaled_dot_product_attention instead")
    ] = False,
    transformers: Annotated[
        bool,
        yes_or_no(
            'also register attn_implementation="attnsel" with transformers, and let "flash_attention_2" '
            "load, on attnsel's functions"
        ),
    ] = False,
    quiet: Annotated[bool, yes_or_no("do not say what is done", name=["-q", "--quiet"])] = False,
) -> int:
    """Run a program that imports flash_attn, unchanged, with attnsel's functions under that name.

    The name is taken where the real package is not installed or refuses a GPU of this machine (a T4, say);
    where it works, the program gets the real one. Everything after the program goes to the program: write
    attnsel's own flags before it.

        attnsel run train.py --lr 3e-4
        attnsel run -m package.train --lr 3e-4
        torchrun --nproc-per-node 2 -m attnsel run train.py

    With --sdpa it is torch.nn.functional.scaled_dot_product_attention that is attnsel's until the program
    ends, and not flash_attn; --flash-attn takes that name beside it. With --transformers models of
    transformers load attn_implementation="attnsel" or "flash_attention_2", which is flash_attn's.

    When the program has ended, a line says which kernels ran.

    Processes that the program makes through multiprocessing have all of it too; other programs that it starts
    do not.

    Exit code: the program's own; 1 after an exception; 2 where there is nothing to run.
    """
    enter(program, module, arguments)
    try:
        from attnsel.integrations import program as other_libraries  # needs torch

        flash = flash_attn or force or transformers or not sdpa
        done = other_libraries.put_in_place(
            flash_attn=flash, force=force, sdpa=sdpa, transformers=transformers
        )
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        complain(f"{error.name} is not installed here, and this program's attention runs on it")
        return BAD_INPUT
    if done and not quiet:
        complain(done)
    failed: object = True
    try:
        failed = execute(program, module)
    except SystemExit as left:  # as many programs end: sys.exit(main())
        failed = left.code
        raise
    finally:
        other_libraries.put_back(sdpa=sdpa, transformers=transformers)
        if done and not quiet and not failed:  # what a failed program says last is its own
            complain(other_libraries.what_ran())
    return int(failed)


# ---- ``attnsel watch``: an unmodified program, and what attention it runs ------------------------------


def watch(
    program: Program,
    /,
    *arguments: Argument,
    module: IsModule = False,
    gpu: Annotated[
        str | None,
        Parameter(
            group=THE_MACHINE, help="what would it run on this GPU (attnsel gpus); this machine if left out"
        ),
    ] = None,
    time: Annotated[bool, yes_or_no("also measure time, beside an estimate")] = False,
    memory: Annotated[bool, yes_or_no("also measure memory, beside an estimate")] = False,
    out: Annotated[
        str | None,
        Parameter(group=OUTPUT, help="a folder for one file per process: attnsel compare reads it"),
    ] = None,
    output: Annotated[
        str | None, Parameter(group=OUTPUT, help="write the report to this file, not to standard error")
    ] = None,
    live: Annotated[bool, yes_or_no("a table that grows while it runs", group=OUTPUT)] = False,
    form: Form = TEXT,
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
    form.require_one()
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
    with _told_at_the_end(Teller(session, form, gpu, out, output)) as teller, _shown(session, live), session:
        teller.exit_code = execute(
            program, module, hidden=str(Path(__file__).parents[1] / "diagnose" / "watching")
        )
    return teller.exit_code


class Teller:
    """Tells once what was seen, when the program has ended."""

    def __init__(
        self, session: Watch, form: Form, gpu: str | None, out: str | None, output: str | None
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
            with suppress(Exception):  # a program that closed standard error is told nothing there
                complain(f"the report could not be made: {in_words(error)}")

    def _tell(self) -> None:
        from attnsel.diagnose.watching.judge import write  # which asks the engine: when the program has ended

        watched = self.session.watched(gpu=self.gpu, exit_code=self.exit_code)
        if self.out is not None:
            try:
                write(self.out, watched)
            except OSError as error:
                complain(f"--out {self.out}: {error.strerror or error}")
        if watched.process.rank and self.output is None:
            return
        text = self.form.written(watched.document, watched.as_dict, width=80)
        if self.output is None:
            with suppress(Exception):  # closed, or a pipe that nobody reads: the program's own affair
                sys.stdout.flush()
            print(as_it_can(text, sys.stderr), file=sys.stderr)
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

    ours = [number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL]
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
