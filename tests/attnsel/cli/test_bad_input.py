"""What no command may do, whatever it is given: die with a traceback, run without end, or let a stranger's
text steer the terminal. Bad input is one line and exit code 2."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import pytest

from attnsel import AttentionParams, InvalidInput
from attnsel.cli import main
from attnsel.cli.output import BAD_INPUT, CANNOT_WRITE, FOUND, INTERRUPTED, NO_BACKEND
from attnsel.environment.versions import Version
from attnsel.errors import short
from paths import IMPORTED_FROM
from tables import each

pytestmark = pytest.mark.usefixtures("no_switches_from_outside")

DIGITS_400, DIGITS_5000 = "9" * 400, "9" * 5000


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys, monkeypatch):
    """``run("explain", "--params", "-", stdin="{}")``"""

    def call(*words: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(words)
        return Done(code, *capsys.readouterr())

    return call


def child(*words: str, code: str = "sys.exit(main())", **how: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    start = f"import sys; sys.path.append({str(IMPORTED_FROM)!r}); from attnsel.cli import main; {code}"
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120, **how}
    return subprocess.run([sys.executable, "-c", start, *words], text=True, encoding="utf-8", **how)


# ---- one line, and code 2 ----------------------------------------------------------------------------


@each(
    "words, said",
    [
        (("run", "-m", "../../x"), "program = ../../x: must be the name of a module"),
        (("run", "-m", "__main__"), "program = __main__: must be the name of a module"),
        (("run", "x" * 400), "there is no such file"),
        (("run", "a\0b"), "program = a\\x00b: there is no such file"),
        (
            ("matrix", "--gpu", "H100", "--rows", "head_dim_qk=64\x1b[2J", "--cols", "dtype=bf16"),
            "--rows head_dim",
        ),
        (("rule", "A\x1b[2J"), "no rule 'A\\x1b[2J'"),
        (("explain", "a\x1b[2J\x07"), "unexpected: a\\x1b[2J\\x07"),
        (("explain", "--a\x1b[2J"), "there is no flag --a\\x1b[2J"),
    ],
)
def test_of_other_commands_too(run, words, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    done = run(*words)
    assert done.code == BAD_INPUT
    assert said in done.err
    assert done.err.count("\n") == 1
    assert done.err.strip().isprintable()


def test_a_value_that_cannot_be_written_is_named_all_the_same():
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert short(Broken()) == "<Broken that cannot be shown>"
    assert short(nested) == "<list that cannot be shown>"
    with pytest.raises(InvalidInput, match="must be less than"):
        AttentionParams(batch_size=10**5000)
    with pytest.raises(ValueError, match="not a version"):
        Version.parse((10**5000,))


# ---- what strangers wrote ----------------------------------------------------------------------------


def test_what_a_library_said_once_forges_no_line(capsys):
    from attnsel.cli.output import print_text

    print_text("✔ one\n" + "no\x1b[2A\x9bengine\r\u202e")
    assert capsys.readouterr().out == "✔ one\nno\\x1b[2A\\x9bengine\\r\\u202e\n"


def test_a_variable_forges_no_finding(monkeypatch):
    from attnsel.cli.findings import variables

    assert variables({"ATTNSEL_X\n": "a\nFindings: nothing is wrong\x1b[2J"}) == {
        "ATTNSEL_X\\n": "a\\nFindings: nothing is wrong\\x1b[2J"
    }


# ---- where it is written -----------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@each("words, buffered", [("explain --gpu H100", ""), ("explain --help", "1"), ("rules --json", "")])
def test_output_that_cannot_be_written_is_one_line(words, buffered):
    with open("/dev/full", "w") as full:
        done = child(*words.split(), stdout=full, env={**os.environ, "PYTHONUNBUFFERED": buffered})
    assert done.returncode == CANNOT_WRITE
    assert done.stderr == "attnsel: standard output cannot be written: No space left on device\n"


def test_a_closed_output_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["explain", "--gpu", "H100"]) == CANNOT_WRITE
    monkeypatch.undo()
    assert capsys.readouterr().err == "attnsel: standard output is closed: nothing can be written\n"


def test_a_closed_error_output_leaves_standard_output_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["explain", "--nope"]) == BAD_INPUT
    assert capsys.readouterr().out == ""


@each("columns", ["0", "1", "2", "19", "-1", "²", DIGITS_400, DIGITS_5000])
def test_help_comes_to_an_end_in_any_width(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    for words in (("--help",), ("explain", "--help")):
        assert run(*words).code == 0
    assert 20 <= int(os.environ["COLUMNS"]) <= 1000


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


def test_an_interrupt_while_a_command_is_imported_is_no_traceback(monkeypatch, capsys):
    class Interrupted:
        def find_spec(self, name: str, *rest: Any) -> None:
            if name == "attnsel.cli.rules":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "attnsel.cli.rules", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert main(["rules"]) == INTERRUPTED
    assert capsys.readouterr() == ("", "")


# ---- how much it takes -------------------------------------------------------------------------------
# SECURITY.md states these bounds; the time is of the processor.

WORST = [
    "explain --gpu T4 --fp8-recipe mxfp8 --softcap 3 --qkv-layout thd --attn-mask-type padding --cudnn 9.1",
    "explain --gpu H100 --cp-size 8192 --num-heads 8192 --max-seqlen-q 1099511627776 --json",
    "matrix --gpu H100 --rows head_dim_qk=8:800:+8 --cols max_seqlen_q=128:2560:+128 --json",
    "rules --json",
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


@each(
    "words, said",
    [
        ("--rows head_dim_qk=1:200:+1 --cols max_seqlen_q=1:200:+1", "makes 40000 cells with --rows"),
        ("--rows head_dim_qk=1:15000:+1,20000:40000:+1 --cols dtype=bf16", "holds more than 20000 values"),
        (f"--rows head_dim_qk={DIGITS_5000}:1:+1 --cols dtype=bf16", "must be a value, FIRST:LAST"),
    ],
)
def test_a_grid_has_a_bounded_number_of_cells(run, words, said):
    done = run("matrix", "--gpu", "H100", *words.split())
    assert done.code == BAD_INPUT
    assert said in done.err
    assert done.err.count("\n") == 1


@each("flag", ["--params", "--env"])
@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no /dev/zero")
def test_a_file_without_an_end_is_not_read_to_it(run, flag):
    gpu = () if flag == "--env" else ("--gpu", "H100")
    done = run("explain", *gpu, flag, "/dev/zero")
    assert done.code == BAD_INPUT
    assert done.err == f"attnsel: {flag} /dev/zero: is longer than 16 Mi characters\n"
