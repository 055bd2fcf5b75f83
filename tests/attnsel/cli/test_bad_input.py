"""What no command may do, whatever it is given: die with a traceback, run without end, or let a stranger's
text steer the terminal. Bad input is one line and exit code 2."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import pytest

from attnsel import AttentionParams, Environment, InvalidInput, settings
from attnsel.cli import main
from attnsel.cli.output import BAD_INPUT, CANNOT_WRITE, FOUND, INTERRUPTED, NO_BACKEND
from attnsel.environment.versions import Version
from attnsel.errors import printable, short
from paths import IMPORTED_FROM

pytestmark = pytest.mark.usefixtures("no_switches_from_outside")

DIGITS_400, DIGITS_5000 = "9" * 400, "9" * 5000
FORGED = "H100\x1b[2J\r\n✔ all is well\u202e\x9b\u2028"


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


@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        (("--params", "-"), '{"a":' * 100_000 + "1" + "}" * 100_000, "--params -: is nested too deeply"),
        (("--params", "-"), f'{{"zz": {"[" * 500}{"]" * 500}}}', "standard input: zz = [[["),
        (
            ("--params", "-"),
            f'{{"batch_size": {DIGITS_5000}}}',
            "--params -: cannot be read: Exceeds the limit",
        ),
        (("--params", "-"), f'{{"batch_size": {DIGITS_400}}}', "standard input: batch_size = 999"),
        (("--params", "a\0b"), "", "--params a\\x00b: cannot be read: embedded null byte"),
        (("--batch-size", DIGITS_400), "", "… must be less than or equal to 1099511627776"),
        (("--cp-size", DIGITS_400), "", "… must be less than or equal to 8192"),
        (("--batch-size", DIGITS_5000), "", "--batch-size 99999"),
        (("--batch-size", DIGITS_5000), "", "is far too large a number"),
        (
            ("--window-size", DIGITS_400, "0"),
            "",
            "must be -1 (none) or at least 0, at most 9223372036854775807",
        ),
        (("--memory-limit", DIGITS_400 + "GiB"), "", "must be a size from 0 to 8 EiB"),
        (("--cudnn", "9." + DIGITS_400), "", "not a version: it is too long"),
        (("--cp-size", "2", "--gpus-per-node", DIGITS_400), "", "must be above 0"),
        (("--cp-size", "2", "--link-gbs", "inf"), "", "--link-gbs inf: must be above 0"),
        (
            ("--params", "-"),
            '{"tensors": {"q": {"shape": [], "stride": []}}}',
            "standard input: tensors.q.shape = (): must have 4 dimensions, bshd",
        ),
        (
            ("--params", "-"),
            '{"tensors": {"k": {"shape": [-1, 1, 1, 1], "stride": [1, 1, 1, 1]}}}',
            "tensors.k.shape.0 = -1: must be greater than or equal to 0",
        ),
        (
            ("--env", "-"),
            '{"device": {"memory": 1' + "0" * 400 + "}}",
            "standard input: device.memory = 1000",
        ),
        (("--env", "-"), '{"device": {"sm_count": 0}}', "device.sm_count = 0: must be greater than 0"),
    ],
)
def test_what_cannot_be_is_named_in_one_line(run, words, stdin, said):
    gpu = () if "--env" in words else ("--gpu", "H100")
    done = run("explain", *gpu, *words, stdin=stdin)
    assert done.code == BAD_INPUT
    assert done.out == ""
    assert said in done.err
    assert done.err.count("\n") == 1
    assert len(done.err) < 400


@pytest.mark.parametrize(
    ("words", "said"),
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


@pytest.mark.parametrize("value", ["--1", "-1", "3", "x", "²"])
def test_a_debug_level_that_is_none_is_named(run, monkeypatch, value):
    monkeypatch.setenv("ATTNSEL_DEBUG", value)
    settings._process = None
    done = run("explain", "--gpu", "H100")
    assert done.code == BAD_INPUT
    assert done.err == f"attnsel: ATTNSEL_DEBUG = {value}: must be 0, 1 or 2\n"


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


@pytest.mark.parametrize("json_too", [(), ("--json",)])
def test_the_name_of_a_device_forges_no_line(run, json_too):
    env = Environment.describe("H100").model_dump(mode="json")
    env["device"]["name"] = FORGED + "\ud800"
    done = run("explain", "--env", "-", *json_too, stdin=json.dumps(env))
    assert done.code == FOUND
    assert all(map(str.isprintable, done.out.splitlines()))
    shown = json.loads(done.out)["environment"]["device"]["name"] if json_too else done.out
    assert printable(FORGED) + r"\ud800" in shown


@pytest.mark.parametrize(
    ("words", "stdin"),
    [
        (("--env", "-"), json.dumps({FORGED: 1, "device": {}})),
        (("--params", "-"), json.dumps({FORGED: FORGED, "\ud800": 1})),
        (("--params", "-"), json.dumps({"dtype": FORGED})),
        (("--params", "-"), json.dumps({"fp8_meta": {"recipe": {"kind": FORGED}}})),
        (("--params", "-"), f"{{{FORGED}"),
        (("--params", FORGED), ""),
        (("--gpu", FORGED), ""),
        (("--cudnn", FORGED), ""),
        (("--platform", FORGED), ""),
        ((f"--{FORGED}",), ""),
    ],
)
def test_a_complaint_shows_what_was_given_and_is_one_line(run, words, stdin):
    done = run("explain", *words, stdin=stdin)
    assert done.code == BAD_INPUT
    assert done.err.count("\n") == 1
    assert done.err[:-1].isprintable()


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
@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("words", ["explain --gpu H100", "explain --help", "rules --json"])
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


@pytest.mark.parametrize("columns", ["0", "1", "2", "19", "-1", "²", DIGITS_400, DIGITS_5000])
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
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
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
# SECURITY.md states these bounds. Times are of whole processes on a busy machine, several times the usual.

WORST = [
    "explain --gpu T4 --fp8-recipe mxfp8 --softcap 3 --qkv-layout thd --attn-mask-type padding --cudnn 9.1",
    "explain --gpu H100 --cp-size 8192 --num-heads 8192 --max-seqlen-q 1099511627776 --json",
    "matrix --gpu H100 --rows head_dim_qk=8:800:+8 --cols max_seqlen_q=128:2560:+128 --json",
    "rules --json",
]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("line", WORST)
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


@pytest.mark.parametrize(
    ("words", "said"),
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


@pytest.mark.parametrize("flag", ["--params", "--env"])
@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no /dev/zero")
def test_a_file_without_an_end_is_not_read_to_it(run, flag):
    gpu = () if flag == "--env" else ("--gpu", "H100")
    done = run("explain", *gpu, flag, "/dev/zero")
    assert done.code == BAD_INPUT
    assert done.err == f"attnsel: {flag} /dev/zero: is longer than 16 Mi characters\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX shell")
@pytest.mark.parametrize("words", ["explain --gpu H100", "rules --json", "explain --nope"])
def test_with_standard_output_closed_by_the_shell_there_is_no_traceback(words):
    start = (
        f"import sys; sys.path.append({str(IMPORTED_FROM)!r}); from attnsel.cli import main; sys.exit(main())"
    )
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", start, *words.split()]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, encoding="utf-8", timeout=120)
    assert done.returncode == CANNOT_WRITE
    assert done.stderr == "attnsel: standard output is closed: nothing can be written\n"
