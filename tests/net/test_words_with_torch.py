"""Words of what runs attention: what ``ATTNSEL_DEBUG`` tells, errors of calls, watch, run and replay.
``test_words.py`` has the rest, and says how a change is accepted.

Each program and command runs in a process of its own, with nothing told yet, on the machine of ``forked.py``.
What is chosen there does not depend on the build of torch: ``sdpa.flash`` on a CPU is in every release that
attnsel runs on.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import attnsel

pytest.importorskip("torch")

HERE = Path(__file__).parent
FOLDER = HERE / "words_with_torch"

pytestmark = [
    # syrupy, where it writes a file that is not named after its test. The names here are what was asked.
    pytest.mark.filterwarnings(r"ignore:\s*Can not relate snapshot:UserWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="each program runs in a forked process"),
]


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


@pytest.fixture
def run(server: subprocess.Popen[str], tmp_path: Path) -> Callable[..., str]:
    """``run("attnsel watch train.py")`` or ``run(program=text)``: as text, with what was printed.

    ``environ``: further variables.
    """

    def call(command: str = "", *, program: str = "", environ: dict[str, str] | None = None) -> str:
        asked: dict[str, Any] = {"environ": environ or {}, "folder": str(tmp_path)}
        asked |= {"program": program} if program else {"command": shlex.split(command)[1:]}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        said = json.loads(server.stdout.readline())
        variables = " ".join(f"{name}={value}" for name, value in (environ or {}).items())
        typed = command or f"cat call.py\n{program.strip()}\n\n$ python call.py"
        typed = f"export {variables}\n$ {typed}" if variables else typed
        ended = f"--- exit code {said['code']} ---\n" if said["code"] else ""
        error = f"--- standard error ---\n{said['err']}" if said["err"] else ""
        return f"$ {typed}\n{ended}{said['out']}{error}"

    return call


# ---- ATTNSEL_DEBUG -----------------------------------------------------------------------------------

CALL = """
from attnsel import DotProductAttention
from pages import zeros

core = DotProductAttention(8, 64, 2, qkv_format="bshd", attn_mask_type="causal", layer_number=3)
q, k, v = zeros(2, 16, 8, 64), zeros(2, 16, 2, 64), zeros(2, 16, 2, 64)
for _ in range(2):
    core(q, k, v)  # the second call says nothing new
core(q[:, :12], k, v, attn_mask_type="causal_bottom_right")
"""
HINT = """
from attnsel import DotProductAttention
from pages import zeros

core = DotProductAttention(8, 64, qkv_format="bshd", name="decoder")
q, kv = zeros(2, 4, 8, 64), zeros(2, 16, 8, 64)
core(q, kv, kv, attn_mask_type="causal")
"""
RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}
OTHER_RANK = {**RANKS, "RANK": "5", "LOCAL_RANK": "5"}
DEBUGGED = {
    "debug_0": (CALL, {}),
    "debug_1": (CALL, {"ATTNSEL_DEBUG": "1"}),
    "debug_2": (CALL, {"ATTNSEL_DEBUG": "2"}),
    "debug_1_json": (CALL, {"ATTNSEL_DEBUG": "1", "ATTNSEL_DEBUG_FORMAT": "json"}),
    "debug_2_json": (CALL, {"ATTNSEL_DEBUG": "2", "ATTNSEL_DEBUG_FORMAT": "json"}),
    "debug_1_rank_0": (CALL, {"ATTNSEL_DEBUG": "1", **RANKS}),
    "debug_2_rank_0": (CALL, {"ATTNSEL_DEBUG": "2", **RANKS}),
    "debug_1_rank_5_is_silent": (CALL, {"ATTNSEL_DEBUG": "1", **OTHER_RANK}),
    "debug_1_rank_5_of_all": (CALL, {"ATTNSEL_DEBUG": "1", "ATTNSEL_DEBUG_RANKS": "all", **OTHER_RANK}),
    "debug_1_json_rank_5_of_all": (
        CALL,
        {"ATTNSEL_DEBUG": "1", "ATTNSEL_DEBUG_FORMAT": "json", "ATTNSEL_DEBUG_RANKS": "all", **OTHER_RANK},
    ),
    "debug_1_of_wishes": (CALL, {"ATTNSEL_DEBUG": "1", "ATTNSEL_DISABLE": "sdpa.flash,sdpa.math"}),
    "debug_1_hint": (HINT, {"ATTNSEL_DEBUG": "1"}),
}


@pytest.mark.parametrize("name", DEBUGGED)
def test_a_call_tells(name, run, says):
    program, environ = DEBUGGED[name]
    says(name, run(program=program, environ=environ))


def test_a_file_has_the_lines_of_a_rank(run, says, tmp_path):
    environ = {"ATTNSEL_DEBUG": "1", "ATTNSEL_DEBUG_FILE": "{host}-rank{rank}-{pid}.log", **RANKS}
    told = run(program=CALL, environ=environ)
    (file,) = tmp_path.glob("*.log")
    says("debug_1_file", f"{told}\n$ cat {file.name}\n{file.read_text(encoding='utf-8')}")


# ---- selections of calls -----------------------------------------------------------------------------

LAST = """
from attnsel import DotProductAttention
from pages import zeros

core = DotProductAttention(8, 64, qkv_format="bshd", attn_mask_type="causal", window_size=(3, 0))
print(core.last_selection)
q = zeros(2, 16, 8, 64)
core(q, q, q)
print(core.last_selection)
print(core.last_selection.backend)
print(core.last_selection.report())
"""
NOTHING_RUNS = """
from attnsel import DotProductAttention, NoBackendError, attention
from pages import zeros

q = zeros(2, 16, 8, 64)
try:
    DotProductAttention(8, 64, qkv_format="bshd", attn_mask_type="causal", backend="cudnn")(q, q, q)
except NoBackendError as error:
    print("NoBackendError:", error)
try:
    attention(q, q, q, softcap=30.0, backend="sdpa.flash")
except NoBackendError as error:
    print("NoBackendError:", error)
"""
FALLS_BACK = """
import torch
from attnsel import DotProductAttention
from pages import zeros

def refuses(*arguments, **more):
    raise RuntimeError("no plan for this")

torch._scaled_dot_product_flash_attention_for_cpu = refuses  # instead of the kernel
core = DotProductAttention(8, 64, qkv_format="bshd", attn_mask_type="causal")
q = zeros(2, 16, 8, 64)
core(q, q, q)
print(core.last_selection.report())
"""


def test_the_last_selection_of_a_module(run, says):
    says("last_selection", run(program=LAST))


def test_no_backend_error_of_a_call(run, says):
    says("no_backend_error", run(program=NOTHING_RUNS))


def test_a_kernel_that_refuses_when_it_runs(run, says):
    says("falls_back", run(program=FALLS_BACK, environ={"ATTNSEL_DEBUG": "1"}))


# ---- mistakes ----------------------------------------------------------------------------------------

BUILT = """
DotProductAttention(0, 64)
DotProductAttention(8, 0)
DotProductAttention(8, (64, 32, 16))
DotProductAttention(8, 64, num_gqa_groups=3)
DotProductAttention(8, 64, tp_size=3)
DotProductAttention(8, 64, qkv_format="bhsd")
DotProductAttention(8, 64, attn_mask_type="paded")
DotProductAttention(8, 64, attention_type="other")
DotProductAttention(8, 64, softmax_type="soft")
DotProductAttention(8, 64, attention_dropout=1.0)
DotProductAttention(8, 64, window_size=(-2, 0))
DotProductAttention(8, 64, softcap=-1.0)
DotProductAttention(8, 64, layer_number="three")
DotProductAttention(8, 64, name=3)
DotProductAttention(8, 64, get_rng_state_tracker=3)
DotProductAttention(8, 64, backend="cuddn")
DotProductAttention(8, 64, adapt="maybe")
DotProductAttention(8, 64, cp_group=3)
DotProductAttention(8, 64, num_kv_heads=2)
DotProductAttention(8, 64, causal=True)
DotProductAttention(8, 64, dropout=0.1)
DotProductAttention(8, 64, nonsense=1)
"""
CALLED = """
core(q)
core(q, k, v[:, :8])
core(q, k[..., :32], v)
core(q[..., :32], k, v)
core(q[:, :, :6], k, v)
core(q[0], k, v)
core(q, k[:1], v[:1])
core(q.double(), k, v)
core(q.int(), k.int(), v.int())
core(q, k, v, attn_mask_type="paded")
core(q, k, v, attn_mask_type="arbitrary")
core(q, k, v, attn_mask_type="padding")
core(q, k, v, torch.ones(2, 1, 16, 16), attn_mask_type="arbitrary")
core(q, k, v, torch.ones(3, 1, 16, 16, dtype=torch.bool), attn_mask_type="arbitrary")
core(q, k, v, qkv_format="thd")
core(q, k, v, cu_seqlens_q=torch.tensor([0, 16, 32], dtype=torch.int32))
core(q, k, v, core_attention_bias=torch.zeros(1, 8, 16, 16))
core(q, k, v, core_attention_bias_type="post_scale_bias")
core(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=torch.zeros(1, 3, 16, 16))
core(q, k, v, core_attention_bias_type="alibi", alibi_slopes=torch.zeros(3))
core(q, k, v, window_size=(1, 2, 3))
core(q, k, v, max_seqlen_q="long")
core(q, k, v, is_causal=True)
core(q, k, v, attn_mask=None)
core(q, k, v, inference_params=3)
core(q, k, v, nonsense=1)
attention(q, k)
attention(q, k, v[:, :8])
attention(q, k[..., :32], v)
attention(q, q[:, :, :3], q[:, :, :3])
attention(q, k.half(), v)
attention([1], k, v)
attention(q, k, v, qkv_format="bhds")
attention(q, k, v, attn_mask_type="paded")
attention(q, k, v, attention_dropout=2.0)
attention(q, k, v, softcap=-1.0)
attention(q, k, v, backend="flash")
attention(q, k, v, dropout_p=0.1)
attention(q, k, v, is_causal=True)
attention(q, k, v, attn_mask=torch.ones(16, 16))
attention(q, k, v, scale=0.5)
attention(q, k, v, enable_gqa=True)
attention(q, k, v, nonsense=1)
Environment.detect("cuda")
"""
RAISED = """
import pathlib
import torch
from attnsel import DotProductAttention, Environment, attention
from pages import zeros

core = DotProductAttention(8, 64, num_gqa_groups=2, qkv_format="bshd")
q, k, v = zeros(2, 16, 8, 64), zeros(2, 16, 2, 64), zeros(2, 16, 2, 64)
for line in pathlib.Path("lines.txt").read_text().splitlines():
    print(">>>", line)
    try:
        eval(line)
        print("nothing was raised")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(("name", "lines"), [("error_module", BUILT), ("error_call", CALLED)])
def test_a_mistake_in_a_call(name, lines, run, says, tmp_path):
    (tmp_path / "lines.txt").write_text(lines.lstrip(), encoding="utf-8")
    says(name, run(program=RAISED))


# ---- watch, run, replay ------------------------------------------------------------------------------

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
WATCHED = {
    "watch": ("attnsel watch train.py", {}),
    "watch_h100": ("attnsel watch --gpu H100 train.py", {}),
    "watch_markdown": ("attnsel watch --markdown train.py", {}),
    "watch_json": ("attnsel watch --json train.py", {}),
    "watch_rank_5_is_silent": ("attnsel watch train.py", OTHER_RANK),
    "watch_nothing_seen": ("attnsel watch quiet.py", {}),
    "run": ("attnsel run flash.py", {}),
    "run_sdpa": ("attnsel run --sdpa flash.py", {"ATTNSEL_DEBUG": "1"}),
    "run_quiet": ("attnsel run --quiet flash.py", {}),
}


@pytest.fixture
def programs(tmp_path):
    for name, text in (("train", TRAIN), ("flash", FLASH), ("quiet", "print('no attention')\n")):
        (tmp_path / f"{name}.py").write_text(text.lstrip(), encoding="utf-8")


@pytest.mark.parametrize("name", WATCHED)
def test_a_program_is_run(name, programs, run, says):
    command, environ = WATCHED[name]
    says(name, run(command, environ=environ))


def test_what_watch_leaves_is_reported(programs, run, says, tmp_path):
    told = run("attnsel watch --out seen train.py")
    (file,) = (tmp_path / "seen").iterdir()
    reported = run(f"attnsel report seen/{file.name}")
    says("watch_out", f"{told}\n$ cat seen/{file.name}\n{file.read_text(encoding='utf-8')}\n{reported}")


REPLAYED = """
import torch
from attnsel import attention
from pages import zeros

def refuses(*arguments, **more):
    raise RuntimeError("no plan for this")

torch._scaled_dot_product_flash_attention_for_cpu = refuses  # instead of the kernel
torch.manual_seed(3)
q = zeros(1, 8, 2, 64)
attention(q, q, q, attn_mask_type="causal")
"""


def test_a_call_is_replayed(run, says, tmp_path):
    # The numbers come along, and are zeros: every CPU computes the same.
    environ = {"ATTNSEL_REPLAY_DIR": ".", "ATTNSEL_REPLAY_DATA": "1"}
    called = run(program=REPLAYED, environ=environ)
    (file,) = tmp_path.glob("*.json")
    kept = f"$ cat {file.name}\n{file.read_text(encoding='utf-8')}"
    forms = ("", " --backend sdpa.math", " --backend cudnn", " --backend math", " --json")
    says("replay", "\n".join([called, kept, *(run(f"attnsel replay {file.name}{form}") for form in forms)]))
    says("replay_script", run(f"attnsel replay {file.name} --script -"))


# ---- files -------------------------------------------------------------------------------------------


def test_every_file_is_of_an_output():
    """syrupy tells of a file that nothing reads only where no path is given to pytest."""
    single = """
        debug_1_file last_selection no_backend_error falls_back error_module error_call watch_out replay
        replay_script
    """
    names = (*DEBUGGED, *WATCHED, *single.split())
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.txt" for name in names}
