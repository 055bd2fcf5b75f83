"""``attnsel run``: somebody else's program, as python would run it, with flash_attn where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnsel.cli import main
from attnsel.cli.program import own_words
from paths import IMPORTED_FROM
from tables import each

PROGRAM = """
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
    if "--spawn" in sys.argv:
        torch.multiprocessing.spawn(work, nprocs=1)
    if "--fail" in sys.argv:
        raise helper.Wrong("mine")
    sys.exit(7)
"""
HELPER = """
import attnsel.flash_attn
VERSION = attnsel.flash_attn.__version__
class Wrong(ValueError): pass
"""


@pytest.fixture
def program(tmp_path) -> Path:
    pytest.importorskip("torch")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "helper.py").write_text(HELPER)
    (folder / "train.py").write_text(PROGRAM)
    return folder / "train.py"


def python(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """From another folder than the program's: it must find its neighbours all the same."""
    find = f"import sys; sys.path.append({str(IMPORTED_FROM)!r})"
    code = f"{find}; from attnsel.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "run", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=240)


def test_a_program_gets_its_arguments_its_folder_and_its_exit_code(program, tmp_path):
    done = python(program, "--help", "--force", "-m", "--spawn", cwd=tmp_path)
    said, child = done.stdout.splitlines()
    assert said == "['--help', '--force', '-m', '--spawn'] torch.Size([1, 4, 2, 16])"
    assert child == "child True", "a spawned process finds flash_attn too"
    assert done.returncode == 7
    assert done.stderr.startswith("attnsel: flash_attn 2.")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_module_fails_as_python_would_tell_it(program):
    done = python("--quiet", "-m", "train", "--fail", cwd=program.parent)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{program}", line ')
    assert lines[-1] == "helper.Wrong: mine"


@each(
    "words, told",
    [
        (["nowhere.py"], "nowhere.py: there is no such file"),
        (["-m", "nowhere.at.all"], "nowhere.at.all: there is no such module"),
        (["."], "must be a file, or a folder with a __main__.py"),
        ([], "PROGRAM"),
    ],
)
def test_nothing_to_run_is_one_line(words, told, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnsel"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


@each(
    "given, parsed",
    [
        (["a.py", "--force"], ["--", "a.py", "--force"]),
        (["--force", "a.py", "-q"], ["--force", "--", "a.py", "-q"]),
        (["-m", "pack.age", "-m"], ["-m", "--", "pack.age", "-m"]),
        (["--", "a.py"], ["--", "a.py"]),
        (["--help"], ["--help"]),
    ],
)
def test_flags_after_the_program_are_the_programs(given, parsed):
    assert own_words(given) == parsed
