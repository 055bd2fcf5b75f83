"""``attnsel run`` and ``attnsel watch``: somebody else's program is ``__main__`` as under python, with its
names, arguments, output and end; what is ours comes beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paths import IMPORTED_FROM

pytest.importorskip("torch")

START = f"import sys; sys.path.append({str(IMPORTED_FROM)!r}); "
OURS = START + "from attnsel.cli import main; sys.exit(main())"


def python(*words: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    how: dict[str, Any] = {"capture_output": True, "text": True, "encoding": "utf-8", "timeout": 240}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=os.environ | variables, **how)


def ours(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return python("-c", OURS, *words, cwd=cwd)


# ---- its names live and end as under python ------------------------------------------------------------

THINGS = """
import atexit, sys

class Thing:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print("gone:", self.name, flush=True)

def step():
    local = Thing("local")
    if "--raise" in sys.argv:
        raise ValueError("mine")
    if "--seven" in sys.argv:
        sys.exit(7)

first, second = Thing("first"), Thing("second")
atexit.register(lambda: print("at exit:", sys.modules["__main__"].first.name, flush=True))
known = {name: globals()[name] for name in ("__name__", "__file__", "__package__", "__cached__", "__doc__")}
print(known, type(__loader__).__name__, type(__builtins__).__name__, getattr(__spec__, "name", None))
print(sys.argv)
step()
"""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run --quiet", ["train.py", "--seven"]),
        pytest.param("watch", ["train.py", "--raise"], marks=pytest.mark.slow),
        ("watch", ["-m", "package"]),
        pytest.param("run --quiet", ["package"], marks=pytest.mark.slow),
    ],
    ids=["exit", "exception", "module", "folder"],
)
def test_its_names_live_and_end_as_under_python(command, words, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    for file in ("train.py", "package/__main__.py"):
        (tmp_path / file).write_text(THINGS)
    plain, done = python(*words, cwd=tmp_path), ours(*command.split(), *words, cwd=tmp_path)
    assert (done.stdout, done.returncode) == (plain.stdout, plain.returncode)
    assert "at exit: first\n" in plain.stdout
    assert "ValueError: mine" in done.stderr or "--raise" not in words


def test_objects_of_the_program_outlive_the_report(tmp_path):
    """An object that ends early may wait for another rank, or take away what the report asks."""
    (tmp_path / "train.py").write_text(THINGS)
    said = python("-c", f"import os; os.dup2(1, 2); {OURS}", "watch", "train.py", cwd=tmp_path).stdout
    assert said.index("No attention was seen") < said.index("at exit: first") < said.index("gone: first")


# ---- run: flash_attn, or F.scaled_dot_product_attention, where there is none ----------------------------

FLASH = """
import sys
import helper
from flash_attn import flash_attn_func
import torch

def work(rank):
    import flash_attn
    print("child", flash_attn.__version__ == helper.VERSION)

if __name__ == "__main__":
    q = torch.zeros(1, 4, 2, 16, dtype=torch.float16)
    print(sys.argv[1:], flash_attn_func(q, q, q, causal=True).shape)
    torch.multiprocessing.spawn(work, nprocs=1)
    raise helper.Wrong("mine")
"""
HELPER = """
import attnsel.flash_attn
VERSION = attnsel.flash_attn.__version__
class Wrong(ValueError): pass
"""


def test_a_program_gets_its_arguments_its_folder_and_its_traceback(tmp_path):
    folder = tmp_path / "project"  # another than that of the command: it finds its neighbours all the same
    folder.mkdir()
    (folder / "helper.py").write_text(HELPER)
    (folder / "train.py").write_text(FLASH)
    done = ours("run", folder / "train.py", "--help", "--force", "-m", cwd=tmp_path)
    said, child = done.stdout.splitlines()
    assert said == "['--help', '--force', '-m'] torch.Size([1, 4, 2, 16])"
    assert child == "child True", "a spawned process finds flash_attn too"
    assert done.returncode == 1
    note, traceback, frame, *_, last = done.stderr.splitlines()
    assert note.startswith("attnsel: flash_attn 2.")
    assert traceback == "Traceback (most recent call last):"
    assert frame.startswith(f'  File "{folder / "train.py"}", line ')
    assert last == "helper.Wrong: mine"


# ---- watch ----------------------------------------------------------------------------------------------

STEPS = """
import sys
import torch
from torch.nn import functional as F

def step(q):
    return F.scaled_dot_product_attention(q, q, q)

q = torch.ones(1, 2, 8, 8)
for _ in range(3):
    step(q)
print(sys.argv[1:], flush=True)
if "--fail" in sys.argv:
    step(q[..., :5] @ q)
if "--wait" in sys.argv:
    sys.stdin.read()
sys.exit(7 if "--seven" in sys.argv else 0)
"""


@pytest.fixture
def program(tmp_path) -> Path:
    made = tmp_path / "train.py"
    made.write_text(STEPS)
    return made


def test_output_arguments_and_exit_code_are_the_program_s(program, tmp_path):
    done = ours(
        "watch", "--gpu", "H100", "--output", "told", "--json", program, "--seven", "-m", cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "['--seven', '-m']\n", "")
    told = json.loads((tmp_path / "told").read_text())
    assert (told["schema"], told["asked"]["device"]["arch"]) == ("attnsel.watch/3", 90)
    assert [site["calls"] for site in told["sites"]] == [3]


def test_an_exception_shows_the_program_s_frames_alone(program, tmp_path):
    done = ours("watch", "--out", "seen", program, "--fail", cwd=tmp_path)
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr
    assert "watching" not in done.stderr.split("Traceback")[1].split("RuntimeError")[0]
    assert "train.py:7 step" in done.stderr
    assert "3 calls" in done.stderr
    (file,) = (tmp_path / "seen").iterdir()
    process, site = map(json.loads, file.read_text().splitlines())
    assert (process["schema"], process["exit_code"]) == ("attnsel.watch-process/1", 1)
    assert (site["schema"], site["calls"]) == ("attnsel.watch-site/3", 3)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, -15, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_a_signal_ends_the_program_as_ever_and_its_file_is_whole(program, tmp_path, number, code):
    # What runs in the background of a shell ignores Ctrl-C, and so would what it starts.
    interrupt = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    words = ["watch", "--out", "seen", str(program), "--wait"]
    pipe = subprocess.PIPE  # standard input stays open until the program has ended: it waits for no time
    with subprocess.Popen(
        [sys.executable, "-c", interrupt + OURS, *words], cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=pipe
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"['--wait']\n"
        running.send_signal(number)
        assert running.wait(timeout=240) == code
    (file,) = (tmp_path / "seen").iterdir()
    process, site = map(json.loads, file.read_text().splitlines())
    assert (process["exit_code"], site["calls"]) == (128 + number, 3)
