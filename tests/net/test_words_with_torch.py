"""Words of what runs attention: what ``ATTNSEL_DEBUG`` tells, errors of calls, watch, run and replay.
``test_words.py`` has the rest, and says how a change is accepted.

Each file is a transcript, whose programs and commands run in a process of their own, with nothing told yet,
on the machine of ``forked.py``. What is chosen there does not depend on the build of torch: ``sdpa.flash`` on
a CPU is in every release that attnsel runs on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnsel
from transcripts import retold

pytest.importorskip("torch")

HERE = Path(__file__).parent
WORDS = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / "words_with_torch").iterdir())
}
assert len(WORDS) >= 29, "outputs are gone"

pytestmark = [
    # syrupy, where it writes a file that is not named after its test. The names here are what was asked.
    pytest.mark.filterwarnings(r"ignore:\s*Can not relate snapshot:UserWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="each program runs in a forked process"),
]

# What the transcripts watch and run.
TRAIN = """
import sys
import torch
from pages import zeros
from torch.nn import functional as F

def step(q):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)

def by_hand(q):
    return torch.softmax(q @ q.transpose(-2, -1) / 8.0, dim=-1) @ q

q = zeros(1, 2, 8, 64)
for _ in range(3):
    step(q)
by_hand(q)
F.scaled_dot_product_attention(q, q, q, attn_mask=zeros(8, 8))
print("the program's own words")
sys.exit(7)
"""
FLASH = """
import torch
from flash_attn import flash_attn_func
from pages import zeros

q = zeros(1, 8, 2, 64, dtype=torch.bfloat16)
print(flash_attn_func(q, q, q, causal=True).shape)
print(torch.nn.functional.scaled_dot_product_attention(q, q, q).shape)
"""
QUIET = "print('no attention')\n"


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    kept = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "COV")
    environ = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTHONUTF8": "1", "COLUMNS": "80"}
    environ["PYTHONPATH"] = str(Path(attnsel.__file__).parents[1])  # the attnsel that is tested
    command = [sys.executable, str(HERE / "forked.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, encoding="utf-8") as process:
        yield process
        process.stdin.close()


@pytest.mark.parametrize("name", WORDS)
def test_a_program_says(name, server, says, tmp_path):
    def run(words: list[str], program: str, variables: dict[str, str]) -> tuple[int, str, str]:
        asked = {"environ": variables, "folder": str(tmp_path)}
        asked |= {"program": f"\n{program}\n"} if program else {"command": words}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        said = json.loads(server.stdout.readline())
        return said["code"], said["out"], said["err"]

    # Of mistakes in calls, what is evaluated.
    lines = re.findall("^>>> (.*)", WORDS[name], re.MULTILINE)
    files = {"train.py": TRAIN, "flash.py": FLASH, "quiet.py": QUIET, "lines.txt": "\n".join(lines)}
    files |= {"exits.py": f"{FLASH}raise SystemExit"}
    for file, text in files.items():
        (tmp_path / file).write_text(text.lstrip(), encoding="utf-8")
    says(name, retold(WORDS[name], run, tmp_path))
