"""Programs and commands on a machine that is the same everywhere, each in a process of its own.

Run as a script, it imports torch and attnsel once and then forks for each line of JSON on standard input:
``{"program": text or "command": [words], "environ": {}, "folder": path}``. It answers with a line
``{"code": 0, "out": "", "err": ""}``.

The machine: an x86_64 CPU under Linux, Python 3.12.3, torch 2.13.0, triton 3.7.1 and nothing else that
matters, host node0, process 4711, 2026-11-23 06:00 UTC, attnsel 1.2.3.
"""

from __future__ import annotations

import collections
import datetime
import importlib.metadata
import json
import math
import mmap
import os
import platform
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

# What must be fixed inside attnsel, before it is imported: no public name would do.
PRIVATE = {"attnsel._version": {"__version__": "1.2.3"}}

INSTALLED = {"torch": "2.13.0", "triton": "3.7.1"}
PYTHON = (3, 12, 3)
NOW = datetime.datetime(2026, 11, 23, 6, tzinfo=datetime.timezone.utc)


def fix_the_machine() -> None:
    """Everything that an output may show of a machine. torch is imported by its real versions first."""
    import cyclopts  # noqa: F401
    import pydantic  # noqa: F401
    import rich.console  # noqa: F401
    import torch

    torch.set_num_threads(1)
    # A build for CUDA or ROCm says so; which devices there are is hidden by the one who starts this.
    torch.version.cuda = torch.version.hip = None
    torch.backends.mps.is_available = lambda: False
    for name, values in PRIVATE.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    real = importlib.metadata.distributions

    def distributions(*, name: str = "", **more: Any) -> Iterator[Any]:
        if not name:
            yield from real(**more)
        elif name in INSTALLED:
            yield types.SimpleNamespace(
                version=INSTALLED[name], files=(), requires=(), metadata={"Name": name}
            )

    importlib.metadata.distributions = distributions
    entry_points = importlib.metadata.entry_points

    def no_plugins(**wanted: Any) -> Any:
        ours = str(wanted.get("group", "")).startswith("attnsel")
        return importlib.metadata.EntryPoints(()) if ours else entry_points(**wanted)

    importlib.metadata.entry_points = no_plugins
    for function, answer in (("system", "Linux"), ("machine", "x86_64"), ("node", "node0")):
        setattr(platform, function, lambda answer=answer: answer)
    platform.python_version = lambda: ".".join(map(str, PYTHON))

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return NOW.astimezone(tz)

    datetime.datetime = Fixed
    sys.modules["pages"] = types.ModuleType("pages")
    vars(sys.modules["pages"]).update(zeros=zeros)
    import attnsel
    import attnsel.decision  # under Python's own version

    Version = collections.namedtuple("Version", "major minor micro releaselevel serial")
    actual, sys.version_info = sys.version_info, Version(*PYTHON, "final", 0)
    try:  # remembered from here on
        attnsel.Environment.detect()
        attnsel.Environment.detect("cpu")
    finally:
        sys.version_info = actual
    # Imported once for all: the programs take less time so.
    import attnsel.cli.program

    _ = attnsel.DotProductAttention, attnsel.attention, attnsel.watch
    os.getpid = lambda: 4711


def zeros(*shape: int, dtype: Any = None) -> Any:
    """``torch.zeros`` at the beginning of a page: reports give the alignment, which is the allocator's else.

    Programs import it from ``pages``.
    """
    import torch

    dtype = dtype or torch.float32
    return torch.frombuffer(mmap.mmap(-1, dtype.itemsize * math.prod(shape)), dtype=dtype).view(shape)


def perform(asked: dict[str, Any]) -> int:
    """In the forked process: the program or the command. The exit code."""
    os.chdir(asked["folder"])
    os.environ.update({"COLUMNS": "80", "HOME": asked["folder"], **asked["environ"]})
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{asked['folder']}/.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
        setattr(sys, name, os.fdopen(number, "w", encoding=encoding, closefd=False))
    sys.path.insert(0, "")
    try:
        if "command" in asked:
            from attnsel.cli import main

            sys.argv = ["attnsel", *asked["command"]]
            return main(asked["command"])
        sys.argv = ["call.py"]
        exec(compile(asked["program"], "call.py", "exec"), {"__name__": "__main__", "__file__": "call.py"})
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def serve() -> None:
    fix_the_machine()
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            os._exit(perform(asked))
        _, status = os.waitpid(child, 0)
        said = {"code": os.waitstatus_to_exitcode(status)}
        for name in ("out", "err"):
            with open(f"{asked['folder']}/.{name}", encoding="utf-8") as file:
                said[name] = file.read()
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    serve()
