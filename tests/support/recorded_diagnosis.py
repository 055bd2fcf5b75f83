"""What recorded_calls/{cli,logs,ranks,watching}.txt ask by: a small world around a function each."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from attnsel import Environment
from attnsel.cli import probe
from attnsel.cli.form import Form
from attnsel.cli.program import Teller, _told_at_the_end
from attnsel.diagnose.ranks import lines
from attnsel.diagnose.watching import observe as measure
from attnsel.diagnose.watching import observe as places
from attnsel.diagnose.watching import sdpa
from attnsel.diagnose.watching.judge import Watched
from attnsel.diagnose.watching.observe import Seen, Tally
from attnsel.diagnose.watching.record import Process, Site
from attnsel.environment.installed import FLASH_ATTN
from attnsel.errors import InvalidInput

# ---- a watched program ---------------------------------------------------------------------------------

FOLDERS = {
    "program": "/nowhere/program",
    "packages": places._SITE[0],
    "python": places._STANDARD[0],
    "attnsel": places._HERE,
    "checkout": os.path.dirname(places._HERE),
}


def place(*frames: str, depth: int = 1, **variables: str) -> places.Place:
    """Where a call stands: ``folder:file:function`` of each frame, the outermost, a program's own, first."""
    kept = places.Places(FOLDERS["program"])
    call: Any = kept.here
    for number, frame in reversed([*enumerate(frames)]):
        folder, file, name = frame.split(":")
        path = os.path.join(FOLDERS[folder], file) if folder else file
        given = depth if call == kept.here else ""
        names = {"_inner": call}
        lines = "\n" * number + f"def {name}():\n    return _inner({given})"
        exec(compile(lines, path, "exec"), names)
        call = names[name]
    with patch.dict(os.environ, variables):
        call()
        return call()  # found once more


def compilations(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is told of torch.compile, by Dynamo's counters at the beginning and at the end."""
    module = SimpleNamespace(counters=before)
    with patch.dict(sys.modules, {"torch._dynamo.utils": module}):
        made = sdpa.Compilations()
        module.counters = after
        return made.lines()


def measured(
    calls: int = 4, out: Any = None, *, gpu: bool = True, capturing: bool = False, **asked: Any
) -> Any:
    """What is kept of calls and their backward, on a GPU or a CPU whose clock goes faster and faster."""
    now, said = [0.0], []

    def clock() -> float:
        now[0] += 1.0 + now[0]
        return now[0]

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            said.append("event") if enable_timing and "event" not in said else None

        def record(self) -> None:
            self.at = clock()

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, ended: Any) -> float:
            assert ended.waited
            return ended.at - self.at

    memory = iter(range(100, 10**6, 7))
    cuda = {"is_initialized": lambda: gpu, "is_current_stream_capturing": lambda: capturing, "Event": Event}
    cuda |= {
        "reset_peak_memory_stats": lambda: said.append("reset"),
        "memory_allocated": lambda: next(memory),
    }
    cuda |= {"max_memory_allocated": lambda: 1000 + 10 * next(memory)}
    tally = Tally("a.py:1", Seen("aten", "x"))
    with contextlib.ExitStack() as stack:
        for name, fake in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, fake))
        stack.enter_context(patch.object(measure, "perf_counter", clock))
        for _ in range(calls):
            with measure.Meter(**{"time": False, "memory": False, **asked}) as meter:
                pass
            meter.file(tally, out)
            leaf = torch.ones(2, requires_grad=True)
            product = leaf * 2
            measure.time_backward(tally, product.grad_fn)
            product.sum().backward()
        measure.record_medians([tally])
    kept = {name: value for name, value in tally.extra.items() if not name.startswith("_")}
    return kept, [*tally.notes], len(said)


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def told(form: str = "text", calls: int = 1, site: dict[str, Any] | None = None, **how: Any) -> Any:
    """What a watched program leaves: standard error, and the files, by their names."""
    given = {
        "out": None,
        "output": None,
        "gpu": None,
        **{k: how.pop(k) for k in ("out", "output", "gpu") if k in how},
    }
    seen: list[Any] = []

    def watched(**asked: Any) -> Watched:
        seen.append(asked)
        sites = (
            (Site(where="a.py:1 f", api="aten", forward="x", calls=calls, **(site or {})),) if calls else ()
        )
        about = {"attnsel": "1.2.3", "program": "p.py", "environment": Environment.describe("cpu"), **how}
        return Watched(Process(**about), sites)

    error = io.StringIO()
    with tempfile.TemporaryDirectory() as name, _inside(name), contextlib.redirect_stderr(error):
        Path("file").write_text("")
        written = Form(markdown=form == "markdown", json=form == "json")
        session = SimpleNamespace(watched=watched)
        teller = Teller(session, written, given["gpu"], given["out"], given["output"])
        teller.exit_code = 3
        teller.tell()
        teller.tell()
        files = {
            path.relative_to(name).as_posix(): [line[:48] for line in path.read_text().splitlines()[:6]]
            for path in sorted(Path(name).rglob("*"))
            if path.is_file() and path.name != "file"
        }
    lines = [line[:70] for line in error.getvalue().splitlines()[:2]]
    lines = [" ".join(line.split(": ")[:2]) if line.startswith("attnsel") else line for line in lines]
    return seen, lines, files


def ended(error: BaseException | None = None) -> Any:
    """What is told of a program that ends so, and whether signals are handled as before."""
    said: list[int] = []
    teller: Any = SimpleNamespace(exit_code=0, tell=lambda: said.append(teller.exit_code))
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(BaseException), _told_at_the_end(teller):
        said.append(signal.getsignal(signal.SIGTERM) != before)
        if error is not None:
            raise error
    return said, signal.getsignal(signal.SIGTERM) == before


# ---- many ranks, and a machine that the doctor sees --------------------------------------------------------


def read(content: bytes, longest: int = 1 << 22) -> list[Any]:
    """The lines of a file, and what was in the way."""
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as name, patch.object(lines, "LONGEST", longest):
        path = Path(name) / "lines"
        path.write_bytes(content)
        try:
            found += lines.lines_of(str(path), lambda done: None)
        except InvalidInput as error:
            found.append(error.allowed)
    return found


def machine(gpu: str = "H100", flash: dict[str, Any] | None = None, here: Any = (), **probes: Any) -> Any:
    """A probed machine: of components by name the version, and why it does not load."""
    version, said = here or ("2.8.0", {"cuda_build": "12.8", "cuda_available": True, "new_abi": True})
    known = {**dict.fromkeys(probe.DISTRIBUTIONS, probe.Probe(None, None, {}))}
    known["torch"] = probe.Probe(version, True, said)
    for name, about in probes.items():
        installed, *trouble = about
        known[name] = probe.Probe(installed, not trouble, {"version": installed}, *trouble)
    packages = {FLASH_ATTN[name]: known[name].installed for name in FLASH_ATTN if known[name].installed}
    facts = dict(flash or {})
    facts["packages"] = {**packages, **facts.get("packages", {})}
    env = Environment.describe(gpu, torch=version, cuda=said.get("cuda_build"))
    return probe.ProbedMachine(known, (env,), ("GPU",), flash=probe.FlashFacts(**facts))


NAMES = {one.__name__: one for one in (compilations, ended, machine, measured, patch, place, read, told)}
NAMES |= {one.__name__: one for one in (Site, Process, SimpleNamespace, Watched)}
