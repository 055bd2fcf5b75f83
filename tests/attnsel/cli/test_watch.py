"""``attnsel watch``: somebody else's program, its output and exit code its own, and the report beside it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attnsel.cli import main
from attnsel.cli.program import WITH_VALUE, own_words
from paths import IMPORTED_FROM
from tables import each

pytest.importorskip("torch")

PROGRAM = """
import sys
import torch
from torch.nn import functional as F

def step(q):
    return F.scaled_dot_product_attention(q, q, q)

q = torch.ones(1, 2, 8, 8)
for _ in range(3):
    step(q)
print(sys.argv[1:])
if "--fail" in sys.argv:
    step(q[..., :5] @ q)
if "--wait" in sys.argv:
    print("waiting", flush=True)
    sys.stdin.read()
sys.exit(7 if "--seven" in sys.argv else 0)
"""


@pytest.fixture
def program(tmp_path) -> Path:
    made = tmp_path / "train.py"
    made.write_text(PROGRAM)
    return made


def command(*words: object) -> list[str]:
    find = f"import sys; sys.path.append({str(IMPORTED_FROM)!r})"
    code = f"{find}; from attnsel.cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, "watch", *map(str, words)]


def watched(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), cwd=cwd, capture_output=True, text=True, timeout=240)


def test_output_arguments_and_exit_code_are_the_program_s(program, tmp_path):
    done = watched(program, "--seven", "--json", "-m", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (7, "['--seven', '--json', '-m']\n")
    assert "train.py:7 step" in done.stderr
    assert "3 calls" in done.stderr
    assert all(len(line) <= 80 for line in done.stderr.splitlines())


def test_an_exception_shows_the_program_s_frames_alone(program, tmp_path):
    done = watched("--out", "seen", program, "--fail", cwd=tmp_path)
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr
    assert "watching" not in done.stderr.split("Traceback")[1].split("RuntimeError")[0]
    (file,) = (tmp_path / "seen").iterdir()
    process, site = map(json.loads, file.read_text().splitlines())
    assert (process["schema"], process["exit_code"]) == ("attnsel.watch-process/1", 1)
    assert (site["schema"], site["calls"]) == ("attnsel.watch-site/2", 3)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, -15, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_a_signal_ends_the_program_as_ever_and_its_file_is_whole(program, tmp_path, number, code):
    # What runs in the background of a shell ignores Ctrl-C, and so would what it starts.
    interrupt = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    python, flag, code_, *words = command("--out", "seen", program, "--wait")
    with subprocess.Popen(
        [python, flag, f"{interrupt}; {code_}", *words],
        cwd=tmp_path,
        stdin=subprocess.PIPE,  # open until the program has ended: it waits for no time
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert any(line == b"waiting\n" for line in iter(running.stdout.readline, b""))
        running.send_signal(number)
        assert running.wait(timeout=240) == code
    (file,) = (tmp_path / "seen").iterdir()
    process, site = map(json.loads, file.read_text().splitlines())
    assert (process["exit_code"], site["calls"]) == (128 + number, 3)


@pytest.mark.slow
@each("form", ["--json", "--markdown"])
def test_the_report_goes_to_a_file_in_the_form_that_is_asked_for(program, tmp_path, form):
    done = watched("--gpu", "H100", form, "--output", "told", program, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "told").read_text()
    if form == "--json":
        told = json.loads(text)
        assert (told["schema"], told["asked"]["device"]["arch"]) == ("attnsel.watch/2", 90)
        assert [site["calls"] for site in told["sites"]] == [3]
    else:
        assert "| where | calls |" in text


@pytest.mark.slow
def test_under_torchrun_each_rank_leaves_its_file_and_rank_0_tells(program, tmp_path):
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    words = ["-m", "attnsel", "watch", "--out", "seen", str(program)]
    done = subprocess.run([*run, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("calls of attention") == 1
    assert sorted(file.name.split("-")[1] for file in (tmp_path / "seen").iterdir()) == ["rank0", "rank1"]


@each(
    "words, told",
    [
        (["nowhere.py"], "there is no such file"),
        (["--gpu", "H1000X", "p.py"], "H1000X"),
        (["--json", "--markdown", "p.py"], "one form at a time"),
        (["--output", "no/such/folder/x", "p.py"], "must be a file in a folder"),
        (["--out", __file__, "p.py"], "must be a folder"),
    ],
)
def test_bad_input_is_one_line(words, told, capsys):
    assert main(["watch", *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


def test_values_of_our_flags_are_not_taken_for_the_program():
    words = ["--gpu", "H100", "--json", "train.py", "--gpu", "x"]
    assert own_words(words, WITH_VALUE["watch"]) == [
        "--gpu",
        "H100",
        "--json",
        "--",
        "train.py",
        "--gpu",
        "x",
    ]
