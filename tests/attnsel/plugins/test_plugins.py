"""Candidates from other packages: installed like any other, asked about, run, and left out when broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnsel.params import AttentionParams
from attnsel.plugins import CandidateRecord
from attnsel.rules.takes import FEATURES, WORDS
from paths import ROOT
from plugin_packages import Answer, answers, by_hand, python
from tables import rows_of

SAMPLE = ROOT / "examples" / "plugin"

BROKEN = rows_of(__file__, "broken_plugins.csv")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the sample, as pip installs it. From a copy: setuptools builds in the source."""
    pytest.importorskip("setuptools")
    source, site = tmp_path_factory.mktemp("source") / "sample", tmp_path_factory.mktemp("site")
    shutil.copytree(SAMPLE, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return site


CPU, H100 = "explain --gpu cpu --dtype fp32 --json", "explain --gpu H100"
REFUSED = {
    "--head-dim-qk 100": "SAMPLE001",
    "--max-seqlen-q 65536": "SAMPLE002",
    "--softcap 30": "SAMPLE000",
    "--return-lse --window-size 8 0": "SAMPLE000",
}
AXES = "--rows head_dim_qk=64,100 --cols dtype=fp32,fp16 --gpu cpu --csv --kernel sample.plain"
ASKED = [CPU, H100, f"{H100} --json", f"{H100} --seqlen 32k --json", *(f"{CPU} {words}" for words in REFUSED)]
ASKED += [
    "rules --candidate sample.plain --json",
    "rule sample001",
    "rule SAMPLE000",
    f"can-i-use {AXES}",
    "doctor",
]


@pytest.fixture(scope="module")
def told(installed: Path) -> dict[str, Answer]:
    return answers(ASKED, installed)


def candidates(answer: Answer) -> dict[str, Any]:
    return {c["name"]: c for c in answer.json()["candidates"]}


def test_explain_ranks_it_where_its_maker_says_and_else_below_what_is_proven(told: dict[str, Answer]) -> None:
    ranked = candidates(told[CPU])
    assert list(ranked)[:2] == ["sample.plain", "sdpa.flash"]
    assert told[CPU].json()["backend"] == "sample.plain"
    assert ranked["sdpa.flash"]["placed_by"] == "PREF005"
    ranked = candidates(told[f"{H100} --json"])
    assert ranked["sample.plain"]["unproven"]
    order = list(ranked)
    assert order.index("sdpa.efficient") < order.index("sample.plain") < order.index("sdpa.math")
    assert "sample-attention 1.2.3 declares no proof" in " ".join(told[H100].stdout.split())


def test_its_rules_refuse_with_codes_and_have_pages(told: dict[str, Answer]) -> None:
    for words, code in REFUSED.items():
        reasons = candidates(told[f"{CPU} {words}"])["sample.plain"]["reasons"]
        assert [reason["code"] for reason in reasons] == [code], words
    codes = {page["code"] for page in told["rules --candidate sample.plain --json"].json()}
    assert {"SAMPLE000", "SAMPLE001", "SAMPLE002"} <= codes
    page = told["rule sample001"].stdout
    assert "sample_attention's README" in page
    assert "attnsel explain --gpu cpu --head-dim-qk 100" in page
    assert "gqa" in told["rule SAMPLE000"].stdout


def test_a_grid_and_the_doctor_ask_about_it(told: dict[str, Answer]) -> None:
    cells = told[f"can-i-use {AXES}"]
    assert cells.code == 0, cells.stderr
    assert "SAMPLE001" in cells.stdout
    assert "SAMPLE000" in cells.stdout
    text = told["doctor"].stdout
    assert "sample.plain  sample-attention 1.2.3  ✔ loads" in text
    assert "sample.plain     ✔ ←" in text


def test_what_it_says_it_holds_is_what_a_call_may_take(told: dict[str, Answer]) -> None:
    (reason,) = candidates(told[f"{H100} --seqlen 32k --json"])["sample.plain"]["reasons"]
    assert reason["code"] == "MEMORY001"
    assert "384 GiB scores" in reason["message"]  # 3 * 4 bytes * 2 * 16 * 32768 ** 2


def test_policies_name_it(installed: Path) -> None:
    assert answers([CPU], installed, ATTNSEL_BACKENDS="tiled,sample.plain")[CPU].json()["backend"] == "tiled"
    told = answers([CPU], installed, ATTNSEL_DISABLE="sample.plan")[CPU]
    assert told.code == 2
    assert "sample.plain" in told.stderr, "a name that nobody has is an error with all names"


def test_its_name_is_known_in_a_process_that_imported_nothing_else(tmp_path: Path) -> None:
    site = by_hand(tmp_path, "acme", "PLUGIN = plugin()")
    policy = "from attnsel.policy import Policy; assert Policy({}='acme').{} == 'acme'"
    current = "from attnsel.settings import current; assert current().policy.{} == ('acme',)"
    for code, environ in (
        (policy.format("backend", "backend"), {}),
        (policy.format("allow", "allow[0]"), {}),
        (policy.format("deny", "deny[0]"), {}),
        (current.format("allow"), {"ATTNSEL_BACKENDS": "acme"}),
        (current.format("deny"), {"ATTNSEL_DISABLE": "acme"}),
    ):
        done = python(code, site, **environ)
        assert done.returncode == 0, done.stderr


RUNS = """
import attnsel, sys, warnings
assert "sample_attention" not in sys.modules
warnings.simplefilter("error")
import sample_attention.planning  # the package may come first
import torch, attnsel
assert "sample_attention.kernel" not in sys.modules, "imported before it was chosen"
torch.manual_seed(0)
core = attnsel.DotProductAttention(4, (16, 24), num_gqa_groups=2, qkv_format="bshd")
tensors = [torch.randn(2, 9, h, d, requires_grad=True) for h, d in ((4, 16), (2, 16), (2, 24))]
out = core(*tensors)
assert core.last_selection.backend == "sample.plain", core.last_selection.report()
grads = torch.autograd.grad(out.square().sum(), tensors)
with attnsel.override(backend="tiled"):
    wanted = core(*tensors)
    assert core.last_selection.backend == "tiled"
wanted_grads = torch.autograd.grad(wanted.square().sum(), tensors)
torch.testing.assert_close(out, wanted)
torch.testing.assert_close(grads, wanted_grads)
compiled = torch.compile(lambda q, k, v: attnsel.attention(q, k, v, attn_mask_type="causal"),
                         fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(*tensors).flatten(2), out)
warnings.simplefilter("ignore", attnsel.debug.CopyWarning)
core(*[t.half() for t in tensors])
assert core.last_selection.backend != "sample.plain"
forced = attnsel.attention(*tensors, attn_mask_type="causal", backend="sample.plain")
torch.testing.assert_close(forced.flatten(2), out)
try:
    attnsel.attention(*tensors, softcap=3.0, backend="sample.plain")
except attnsel.NoBackendError as error:
    assert "SAMPLE000" in str(error)
else:
    raise AssertionError("softcap was dropped")
"""


def test_it_runs_and_its_own_tests_pass_where_it_is_installed(installed: Path) -> None:
    done = python(RUNS, installed)
    assert done.returncode == 0, done.stderr
    run = "import pytest, sys; sys.exit(pytest.main(['-p', 'no:cacheprovider', 'tests']))"
    done = python(f"import os; os.chdir({str(SAMPLE)!r}); {run}", installed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


FORWARD_ALONE = """
import torch
from attnsel.backends.contract import Result
def forward(spec, inputs):
    q, k, v = inputs[:3]
    return Result((spec.softmax_scale * (q @ k.mT)).softmax(-1) @ v)
"""
TWO_KERNELS = """
import warnings, torch, attnsel
from attnsel.debug import FallbackWarning
q, k, v = torch.randn(3, 2, 40, 4, 16)
warnings.simplefilter("error")
with torch.no_grad():  # without a backward: its first call is compared with tiled
    out = attnsel.attention(q, k, v, attn_mask_type="no_mask", backend="other")
torch.testing.assert_close(out, attnsel.attention(q, k, v, attn_mask_type="no_mask", backend="tiled"))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    out = attnsel.attention(q, k, v)
assert [w.category for w in caught] == [FallbackWarning], caught
assert "no attribute 'forward'" in str(caught[0].message), caught[0].message
torch.testing.assert_close(out, attnsel.attention(q, k, v, backend="tiled"))
"""


def test_a_kernel_that_is_none_gives_way_and_one_without_training_needs_no_backward(tmp_path: Path) -> None:
    """What else a kernel may do: test_misbehaving_plugins.py."""
    none = "PLUGIN = plugin(proven={'cpu'}, place='before sdpa.flash')"
    by_hand(tmp_path, "acme", none, kernel="def backward(*a): pass")
    other = "PLUGIN = plugin(name='other', family='OTHER', kernel='other_kernel')"
    done = python(TWO_KERNELS, by_hand(tmp_path, "other", other, kernel=FORWARD_ALONE))
    assert done.returncode == 0, done.stderr


BESIDE_BROKEN_ONES = """
import attnsel
from attnsel.backends.registry import CANDIDATES
from attnsel.plugins import load_plugins
from attnsel.rules import REGISTRY
env = attnsel.Environment.describe("cpu")
for length in (64, 65):
    p = attnsel.AttentionParams(dtype="fp32", max_seqlen_q=length)
    assert attnsel.select(p, env).backend == "sample.plain"
assert len(CANDIDATES) == 12 and not [code for code in REGISTRY.pages if code.startswith("ACME")]
assert REGISTRY.pages["SDPA003"].module == "attnsel.rules.sdpa.common"
print(*(f"{one.entry!r} of {one.distribution}: {one.trouble}" for one in load_plugins()), sep="\\n")
"""


def test_a_broken_one_is_named_once_and_left_out(tmp_path: Path, installed: Path) -> None:
    for number, broken in enumerate(BROKEN):
        by_hand(tmp_path, f"acme{number}", broken["planning"])
    done = python(BESIDE_BROKEN_ONES, tmp_path, installed)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "left out" in line]
    assert len(said) == 4
    assert f"{len(BROKEN) - 3} more attnsel plug-ins are left out" in said[3]
    assert "'acme0 = acme0_planning:PLUGIN' of acme0 1.0 is left out" in said[0]
    for number, broken in enumerate(BROKEN):
        assert f"'acme{number} = acme{number}_planning:PLUGIN' of acme{number} 1.0: " in done.stdout
        assert broken["told"] in done.stdout, broken["wrong"]


def test_the_doctor_names_a_broken_one(tmp_path: Path) -> None:
    by_hand(tmp_path, "acme", "raise OSError('the wheel is for another machine')")
    other = "PLUGIN = plugin(name='other', family='OTHER', kernel='other_kernel')"
    by_hand(tmp_path, "other", other, kernel="import gone")
    told = answers(["doctor --json"], tmp_path)["doctor --json"]
    assert told.code == 4
    assert "PluginWarning" not in told.stderr
    answer = told.json()
    errors = " ".join(f["text"] for f in answer["findings"] if f["level"] == "error")
    assert "'acme = acme_planning:PLUGIN' of acme 1.0 is left out" in errors
    assert "the wheel is for another machine" in errors
    assert [(each["name"], each["loads"]) for each in answer["plugins"]] == [(None, False), ("other", False)]
    assert answer["plugins"][1]["distribution"] == "other 1.0"
    assert "gone" in answer["plugins"][1]["trouble"]


def test_two_of_one_name_leave_the_first(tmp_path: Path) -> None:
    by_hand(tmp_path, "acme", "PLUGIN = plugin()")
    by_hand(tmp_path, "acme2", "PLUGIN = plugin(family='OTHER')")
    done = answers([CPU], tmp_path)[CPU]
    assert "name = 'acme': taken by acme 1.0" in done.stderr
    assert [c["name"] for c in done.json()["candidates"]].count("acme") == 1


# What it takes

FREE = {  # fields that every kernel of the contract takes, whatever their value
    "batch_size", "num_heads", "head_dim_qk", "softmax_scale", "page_size",
    "core_attention_bias_shape", "alibi_slopes_shape",
    "cp_comm_type", "fp8_meta",  # say nothing without cp_size and fp8
}  # fmt: skip


def test_every_field_of_a_call_is_taken_by_a_word() -> None:
    """A new argument must get a word here, or plug-ins older than it would drop it."""
    spoken = {feature.field.split(".")[0] for feature in FEATURES}
    assert set(AttentionParams.model_fields) - spoken - FREE == {"dtype", "cp_size"}
    assert [word for word in WORDS if word not in (CandidateRecord.__doc__ or "")] == []
