"""A program that a command runs is ``__main__`` as under python: its names, its end, the order of its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paths import IMPORTED_FROM

pytest.importorskip("torch")

PROGRAM = """
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
OURS = {"run": ["run", "--quiet"], "watch": ["watch", "--output", os.devnull]}

RANK = """
import sys
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

class Model(torch.nn.Linear):
    def forward(self, x):
        q = super().forward(x)
        return F.scaled_dot_product_attention(q, q, q)

dist.init_process_group("gloo")
model = DistributedDataParallel(Model(16, 16))
for _ in range(2):
    model(torch.randn(1, 2, 8, 16)).sum().backward()
unfinished = dist.all_reduce(torch.ones(100), async_op=True)
if "--destroy" in sys.argv:
    dist.destroy_process_group()
if "--five" in sys.argv:
    sys.exit(5)
"""


def python(*words: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
    )


def ours(command: str, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    find = f"import sys; sys.path.append({str(IMPORTED_FROM)!r})"
    code = f"{find}; from attnsel.cli import main; sys.exit(main())"
    return python("-c", code, *OURS[command], *words, cwd=cwd)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", ["train.py", "--seven"]),
        pytest.param("watch", ["train.py", "--raise"], marks=pytest.mark.slow),
        ("watch", ["-m", "package"]),
        pytest.param("run", ["package"], marks=pytest.mark.slow),
    ],
    ids=["exit", "exception", "module", "folder"],
)
def test_its_names_live_and_end_as_under_python(command, words, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(PROGRAM)
    plain, done = python(*words, cwd=tmp_path), ours(command, *words, cwd=tmp_path)
    assert (done.stdout, done.returncode) == (plain.stdout, plain.returncode)
    assert "at exit: first\n" in plain.stdout
    assert "ValueError: mine" in done.stderr or "--raise" not in words


def test_objects_of_the_program_outlive_the_report(tmp_path):
    """An object that ends early may wait for another rank, or take away what the report asks."""
    (tmp_path / "train.py").write_text(PROGRAM)
    find = f"import os, sys; sys.path.append({str(IMPORTED_FROM)!r}); os.dup2(1, 2)"
    code = f"{find}; from attnsel.cli import main; sys.exit(main())"
    said = python("-c", code, "watch", "train.py", cwd=tmp_path).stdout
    assert said.index("No attention was seen") < said.index("at exit: first") < said.index("gone: first")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words", "code"),
    [
        ("watch", [], 0),
        ("watch", ["--destroy"], 0),
        ("watch", ["--five"], 1),
        ("run", [], 0),
        ("run", ["--destroy"], 0),
    ],
)
def test_two_ranks_of_ddp_end(command, words, code, tmp_path):
    (tmp_path / "train.py").write_text(RANK)
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
    ]
    given = ["-m", "attnsel", *(["watch"] if command == "watch" else OURS[command]), "train.py", *words]
    alone = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(IMPORTED_FROM)}
    done = python(*launch, *given, cwd=tmp_path, **alone)
    assert done.returncode == code, done.stderr
    if not code:  # else one rank ends the other
        assert done.stderr.count("2 calls of attention, 2 backward") == (command == "watch")
    assert ("exitcode  : 5" in done.stderr) == ("--five" in words)
