"""``attnsel run --sdpa``: somebody else's program, unchanged, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paths import IMPORTED_FROM

PROGRAM = """
import multiprocessing, sys
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as by_name

def work():
    print("child", F.scaled_dot_product_attention.__module__)

if __name__ == "__main__":
    q = torch.zeros(1, 2, 4, 16)
    print(F.scaled_dot_product_attention(q, q, q).shape, by_name.__module__)
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
    sys.exit(3)
"""


# After the program, in the same process: what F has then.
AROUND = """
import sys; sys.path.append({home!r})
import attnsel.cli
code = 0
try:
    code = attnsel.cli.main()
except SystemExit as ended:
    code = ended.code
import torch
print("after", torch.nn.functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention)
sys.exit(code)
"""


@pytest.mark.slow
def test_sdpa_in_the_program_and_its_children_and_not_afterwards(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(PROGRAM)
    around = AROUND.format(home=str(IMPORTED_FROM))
    command = [sys.executable, "-c", around, "run", "--sdpa", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=240
    )
    mine = "attnsel.f_sdpa.function"
    assert done.stdout.splitlines() == [
        f"torch.Size([1, 2, 4, 16]) {mine}",
        f"child {mine}",
        "after True",
    ], done.stderr
    assert done.returncode == 3
    assert "F.scaled_dot_product_attention is attnsel's" in done.stderr
    assert done.stderr.count("\n") == 1
