"""The examples and the benchmark run as their pages say. Figures are looked at for shape, never for speed."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys

import pytest

from paths import ROOT
from switches import without_switches

TRAIN = "examples/train_char_gpt.py"


def run(script: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script in a fresh process that finds this checkout; one thread, because tests share the machine."""
    environ = without_switches()
    environ |= {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "ATTNSEL_STRICT": "1"}
    environ |= variables  # strict: no call of an example looks like a mistake
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, encoding="utf-8", timeout=300)


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", text)]


def ran(script: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script that ends well."""
    pytest.importorskip("torch")
    done = run(script, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return done


def said(pattern: str, text: str) -> float:
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def test_the_first_call_is_computed_right_and_explained():
    first, second, *report = ran("examples/first_call.py").stdout.splitlines()
    (backend,) = re.findall(r"forward and backward: (\S+) ran$", first)
    assert said(r"out \[2, 256, 512\]; largest difference from float64: (\S+)", second) < 1e-5
    assert any(line.split()[:3] == ["1", "✔", backend] for line in report)


def test_the_question_from_python_is_answered_with_reasons_and_ways_out():
    done = run("examples/explain_from_python.py")  # without torch
    assert done.returncode == 0, done.stderr
    assert "CUDNN204: head_dim_qk is 192, needs at most 128" in done.stdout
    assert "upgrade cuDNN to ≥ 9.5.0: sdpa.flash → cudnn" in done.stdout
    assert "sdpa.flash pads head_dim_v 128 → 192: 64 MiB on every call" in done.stdout
    assert "adapt='never': sdpa.flash → sdpa.efficient" in done.stdout
    assert re.search(r"^RTX 4090, cuDNN", done.stdout, re.MULTILINE)


def test_training_names_what_runs_reports_it_and_learns():
    done = run(TRAIN, "--steps", 30, "--every", 5, "--length", 20, ATTNSEL_DEBUG="2")
    backend = re.search(r"attention runs on (\S+)", done.stdout)
    assert backend is not None, done.stderr
    assert f"layer 1: selected {backend[1]}" in done.stderr
    fell = losses(done.stdout)
    assert len(fell) == 6
    assert fell[-1] < fell[0] - 0.5
    assert done.stdout.rstrip("\n").partition("\n\nIn the morning ")[2]


def test_a_program_for_flash_attn_runs_and_a_t4_is_explained():
    done = ran("examples/flash_attn_on_turing.py")
    differences = [float(found) for found in re.findall(r"each sequence alone: (\S+)", done.stdout)]
    assert len(differences) == 2
    assert max(differences) < 5e-3
    planned = done.stdout.partition("what a T4 would run")[2]
    for what in ("flash_attn_varlen_func, training", "flash_attn_with_kvcache, one token"):
        assert re.search(rf"^{what}: (sdpa\.efficient|triton)$", planned, re.MULTILINE), planned
    assert planned.count("cannot: SDPA103") == 4, "FlashAttention itself, by either op, and why not"


def test_the_table_of_examples_names_each_and_no_other():
    text = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    linked = {name.rstrip("/") for name in re.findall(r"\]\(([^)]+)\)", text)}
    for name in linked:
        assert (ROOT / "examples" / name).exists(), name
    there = {
        path.name for path in (ROOT / "examples").iterdir() if path.suffix in ("", ".py", ".ipynb", ".yml")
    }
    assert there - {"__pycache__"} == {name.split("/")[0] for name in linked if not name.startswith("..")}


def test_the_slow_model_is_found_fixed_and_the_same():
    done = ran("examples/slow_model/compare.py", "--rounds", 1, "--length", 128)
    assert max(map(len, done.stdout.splitlines())) <= 80
    slow, fixed = done.stdout.partition("what attnsel watch says of after.py")[::2]
    assert re.search(r"before\.py:\d+ Attention\.forward +\(by hand\)", slow)
    assert "F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)" in " ".join(
        slow.split()
    )
    assert "sdpa.flash" in fixed
    assert "fix:" not in fixed
    (before, after) = re.search(r"loss after a step: (\S+) and (\S+)", fixed).groups()
    assert float(before) == pytest.approx(float(after), abs=2e-4)
    assert re.search(r"\d+\.\d times faster", fixed)


def test_packed_sequences_are_fine_tuned_and_lose_nothing():
    pytest.importorskip("transformers")
    told = ran("examples/finetune_packed.py", "--steps", 6, "--texts", 4, "--longest", 64).stdout
    assert said(r"loss padded \S+, packed \S+; apart by (\S+)", told) < 1e-5
    assert re.search(r"packed  \[1, \d+\], 4 sequences", told)
    fell = [float(found) for found in re.findall(r"step +\d+  loss (\S+)", told)]
    assert fell[-1] < fell[0] - 0.5


def test_a_model_for_transformer_engine_runs_here_and_is_right():
    told = ran("examples/from_transformer_engine.py").stdout
    assert said(r"each sequence alone in float64: (\S+)", told) < 1e-5
    assert "gradients of x and of the sinks: True" in told
    assert "num_splits = 2: not supported yet" in told
    assert "TransformerEngine 2.14.0 takes FusedAttention; attnsel takes" in told


def test_the_notebook_prints_what_stands_in_it_and_draws_its_figures():
    pytest.importorskip("nbclient")
    pytest.importorskip("matplotlib")
    import nbformat

    import notebooks

    assert notebooks.NOTEBOOKS
    for path in notebooks.NOTEBOOKS:
        written, now = nbformat.read(path, as_version=4), notebooks.executed(path)
        again = "python docs/tools/notebooks.py writes what it prints now"
        assert notebooks.printed(now) == notebooks.printed(written), again
        for new, old in zip(notebooks.figures(now), notebooks.figures(written), strict=True):
            assert size_of(new) == pytest.approx(size_of(old), rel=0.05), again
        assert path.stat().st_size <= notebooks.LARGEST
        assert not re.search(r"/(home|root|work|tmp|Users)/", path.read_text(encoding="utf-8"))


def size_of(png: str) -> tuple[int, int]:
    """Width and height of a PNG in base 64. Its pixels differ from one matplotlib to the next."""
    head = base64.b64decode(png)[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_ci_is_green_and_red_after_an_upgrade_by_the_action_the_hook_and_the_mark(tmp_path):
    """action.yml's own steps, typed into bash as a runner does; what pip would install is written down."""
    baseline, junit = ROOT / "examples/check_in_ci/attention.json", tmp_path / "out.xml"
    steps = re.findall(r"^ +run: (.+)$", (ROOT / "action.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(steps) == 2
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").write_text('#!/bin/sh\necho "$@" >> "$INSTALLED"\n')
    (tools / "attnsel").write_text(f'#!/bin/sh\nexec {sys.executable} -m attnsel "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environ = without_switches() | {"PYTHONPATH": str(ROOT), "PATH": f"{tools}:{os.environ['PATH']}"}
    environ |= {"ACTION_PATH": str(ROOT), "BASELINE": str(baseline), "GITHUB_WORKSPACE": str(ROOT)}
    environ |= {"JUNIT": str(junit), "INSTALLED": str(tmp_path / "installed")}
    for upgrade, code in (("", 0), ("torch=2.15,cudnn=9.26", 4)):
        script = "set -eo pipefail\n" + "\n".join(steps)
        done = subprocess.run(
            ["bash", "-c", script], env={**environ, "UPGRADE": upgrade}, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
    assert (tmp_path / "installed").read_text().splitlines() == [f"-m pip install --quiet {ROOT}"] * 2
    assert re.search(
        r"^::error file=examples/check_in_ci/attention.json,line=\d+,", done.stdout, re.MULTILINE
    )
    assert "<failure message=" in junit.read_text(encoding="utf-8")
    hook = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    entry, arguments = (re.search(rf"^ +{key}: (.+)$", hook, re.MULTILINE)[1] for key in ("entry", "args"))
    line = f"{entry} {arguments.strip('[]')}"
    assert subprocess.run(["bash", "-c", line], cwd=baseline.parent, env=environ).returncode == 0


def test_a_marked_test_fails_on_a_silent_fallback(tmp_path):
    pytest.importorskip("torch")
    text = (ROOT / "examples/check_in_ci/test_attention.py").read_text(encoding="utf-8")
    more = """

@pytest.mark.attention()
def test_nothing_ran():
    pass

@pytest.mark.attention(kernel="flash")
def test_no_such_kernel(qkv):
    pass

@pytest.mark.attention(max_score_bytes=1)
def test_scores(qkv):
    attend_capped(*qkv)
"""
    fallen = text.replace('kernel="by hand"', 'kernel="sdpa.flash"')
    (tmp_path / "test_attention.py").write_text(text, encoding="utf-8")
    (tmp_path / "test_fallen.py").write_text(fallen + more, encoding="utf-8")
    environ = {**without_switches(), "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "attnsel.integrations.pytest_plugin",
        "-q",
        str(tmp_path),
    ]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert "4 failed, 3 passed" in done.stdout, done.stdout
    for said in (
        "attend_capped: by hand ran, expected was sdpa.flash\n  why: written out: no kernel was asked for it",
        "fix: replace these lines: flex_attention(",
        "no attention ran that attnsel.watch() sees",
        "@pytest.mark.attention: kernel = 'flash': did you mean sdpa.flash?",
        "of scores or masks, expected were at most 1 B",
    ):
        assert said in done.stdout, said


def test_a_sequence_over_two_processes_trains_as_over_one():
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("no Gloo")
    script, size = "examples/long_context.py", ("--steps", 6, "--length", 64)
    alone = ran(script, *size)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(ROOT / script), *map(str, size)]
    both = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert both.returncode == 0, both.stderr
    assert "processes: 2; every step of attention runs on sdpa.flash" in both.stdout
    assert losses(both.stdout) == pytest.approx(losses(alone.stdout), abs=2e-4)
    assert "logits of the whole sequences [2, 64, 32]" in both.stdout
    assert len(losses(both.stdout)) == 3
