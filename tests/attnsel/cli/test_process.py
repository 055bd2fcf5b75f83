"""How the process ends: where nothing can be written, by a signal, and what the largest questions take.
What a single process shows, with children where no other way shows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from attnsel import AttentionParams, Environment, select
from attnsel.cli import main
from attnsel.cli.output import BAD_INPUT, CANNOT_WRITE, FOUND, NO_BACKEND
from paths import IMPORTED_FROM
from tables import each

pytestmark = pytest.mark.usefixtures("no_switches_from_outside")


def child(*words: str, code: str = "sys.exit(main())", **how: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    start = f"import sys; sys.path.append({str(IMPORTED_FROM)!r}); from attnsel.cli import main; {code}"
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120, **how}
    return subprocess.run([sys.executable, "-c", start, *words], text=True, encoding="utf-8", **how)


# ---- where it is written -----------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@each("words, buffered", [("explain --gpu H100", ""), ("explain --help", "1"), ("rules --json", "")])
def test_output_that_cannot_be_written_is_one_line(words, buffered):
    with open("/dev/full", "w") as full:
        done = child(*words.split(), stdout=full, env={**os.environ, "PYTHONUNBUFFERED": buffered})
    assert done.returncode == CANNOT_WRITE
    assert done.stderr == "attnsel: standard output cannot be written: No space left on device\n"


def test_a_closed_output_is_one_line_and_a_closed_error_output_leaves_the_other_alone(monkeypatch, capsys):
    with monkeypatch.context() as only:
        only.setattr(sys, "stdout", None)
        assert main(["explain", "--gpu", "H100"]) == CANNOT_WRITE
    assert capsys.readouterr().err == "attnsel: standard output is closed: nothing can be written\n"
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["explain", "--nope"]) == BAD_INPUT
    assert capsys.readouterr().out == ""


# ---- how it begins ------------------------------------------------------------------------------------


HEAVY = "torch triton cudnn numpy rich.table rich.progress attnsel.diagnose"
ENGINE = "pydantic attnsel.params attnsel.rules attnsel.backends attnsel.selection attnsel.decision"


@each(
    "words, absent",
    [
        ("--version", f"{ENGINE} cyclopts rich attnsel.cli.program"),
        ("--help", f"{ENGINE} attnsel.cli.flags attnsel.cli.program"),
        ("completion bash", f"{ENGINE} attnsel.cli.flags"),
        ("rule CUDNN204", f"{HEAVY} rich attnsel.decision attnsel.selection.evaluate attnsel.cli.flags"),
        ("explain --gpu H100", f"{HEAVY} rich attnsel.dispatchers.te attnsel.context_parallel"),
    ],
)
def test_a_command_loads_what_it_needs(words, absent):
    done = child(*words.split(), code="code = main(); print(*sys.modules, file=sys.stderr); sys.exit(code)")
    assert done.returncode == 0
    loaded = done.stderr.split()
    for name in absent.split():
        assert not [module for module in loaded if f"{module}.".startswith(f"{name}.")]


def test_importing_attnsel_loads_nothing_of_it():
    start = f"import sys; sys.path.append({str(IMPORTED_FROM)!r}); before = set(sys.modules); import attnsel;"
    script = "print(*sorted(set(sys.modules) - before)); attnsel.settings.VariableWarning, attnsel.Policy"
    done = subprocess.run([sys.executable, "-c", f"{start} {script}"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["attnsel", "attnsel._version"]), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGPIPE there")
def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        f"'{sys.executable}' -m attnsel rules | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        cwd=IMPORTED_FROM,
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminal there")
def test_colours_only_on_a_terminal():
    import pty

    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(IMPORTED_FROM)
        os.environ.update(TERM="xterm", COLUMNS="80")
        os.environ.pop("NO_COLOR", None)
        os.execv(sys.executable, [sys.executable, "-m", "attnsel", "explain", "--gpu", "H100"])
    out = b""
    try:
        while part := os.read(fd, 65536):
            out += part
    except OSError:
        pass  # how Linux says that the other end is closed
    os.waitpid(pid, 0)
    assert "\x1b[32m✔".encode() in out
    assert b"\x1b[1mcudnn" in out
    assert "\x1b" not in select(AttentionParams(), Environment.describe("H100")).report()


# ---- how it ends -------------------------------------------------------------------------------------

HANGS = """
from attnsel.backends.cudnn.ask import client
client._WORKER = "import time; time.sleep(600)"
client.find_cudnn = lambda wanted: "libcudnn.so.9"
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libcudnn is asked on Linux")
@each("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_folder_behind(tmp_path, number):
    start = f"import sys; sys.path.append({str(IMPORTED_FROM)!r}); from attnsel.cli import main\n{HANGS}"
    env = {**os.environ, "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", start, "explain", "--gpu", "H100", "--ask-library"]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as asking:
        until = time.monotonic() + 60
        while not any(tmp_path.glob("attnsel-*/stderr.log")) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.2)  # so that it waits for its child
        asking.send_signal(number)
        _, err = asking.communicate(timeout=60)
    assert (asking.returncode, err) == (128 + number, b"")
    assert list(tmp_path.glob("attnsel-*")) == []


# ---- how much it takes -------------------------------------------------------------------------------
# SECURITY.md states these bounds; the time is of the processor.

WORST = [
    "explain --gpu H100 --cp-size 8192 --num-heads 8192 --max-seqlen-q 1099511627776 --json",
    "can-i-use --gpu H100 --rows head_dim_qk=8:800:+8 --cols max_seqlen_q=128:2560:+128 --json",
]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
@each("line", WORST)
def test_the_largest_questions_take_seconds_and_little_memory(line):
    # Not ru_maxrss, which begins with the memory of whoever started the process.
    used = "import os, re; code = main(); told = open('/proc/self/status').read(); "
    used += "peak = int(re.search(r'VmHWM:\\s+(\\d+)', told)[1]) >> 10; "
    used += "print(sum(os.times()[:2]), peak, file=sys.stderr); sys.exit(code)"
    done = child(*line.split(), code=used)
    assert done.returncode in (FOUND, NO_BACKEND)
    seconds, mib = done.stderr.split()
    assert float(seconds) < 20
    assert float(mib) < 300
