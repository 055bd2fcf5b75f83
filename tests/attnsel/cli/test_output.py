"""How wide, how long and in which form an answer is printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest

from attnsel.cli.flags import FLAGS
from tables import each

pytestmark = pytest.mark.usefixtures("no_switches_from_outside")

QUESTIONS = [
    "--gpu cpu",
    "--gpu T4",
    "--gpu V100 --dtype fp32",
    "--gpu RTX4090 --heads 32 --kv-heads 8 --seqlen 8k",
    "--gpu H100 --cudnn 9.1.0 --head-dim 192,128 --training",
    "--gpu MI300X",
    "--gpu H100 --backend cudnn --softcap 3",
    "--gpu H100 --fp8-recipe current --cudnn 9.20.0 --inference --no-causal",
]


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_columns_decide_also_where_nobody_sees_it(run, monkeypatch):
    widths = {}
    for columns in ("60", "100", "140", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        widths[columns] = widest(run("explain --gpu H100 --cudnn 9.1.0 --head-dim 192,128")[1])
    assert widths["60"] <= 60 < widths["100"] <= 100 < widths["140"] <= 140 < widths["200"] <= 200
    line = "can-i-use --gpu H100 --rows head_dim=64,128 --cols seqlen=128:2560:+256"
    assert run(line)[1].count("head_dim_qk ↓") == 1
    monkeypatch.delenv("COLUMNS")
    assert run(line)[1].count("head_dim_qk ↓") > 1


@each("question", QUESTIONS)
def test_a_short_answer_is_one_screen(run, question):
    code_, out, err = run(f"explain {question} --short")
    code_of_json, said, _ = run(f"explain {question} --json")
    told, lines = json.loads(said), out.splitlines()
    assert (code_, err) == (code_of_json, "")
    assert len(lines) <= 12
    assert widest(out) <= 80
    assert "…" not in out  # nothing is cut
    assert ("Assumed: " in out) == bool(set(told["environment"]["assumed"]) - {"dtype"})
    assert told["backend"] is None or " a GPU " not in out
    assert lines[0].startswith(told["backend"] or ("cudnn cannot run", "Nothing runs"))
    names = [candidate["name"] for candidate in told["candidates"]]
    assert sum(re.search(rf"\b{re.escape(name)}", out) is not None for name in names) >= 8


def test_help_is_one_screen_and_all_flags_are_asked_for(run):
    brief, whole = run("explain --help")[1], run("explain --help-all")[1]
    assert len(brief.splitlines()) <= 60
    assert all(name in whole and name not in brief for name in ("--softcap", "--cp-size", "--sources"))


# ---- completion ---------------------------------------------------------------------------------------


@each("shell", ["bash", "zsh", "fish"])
def test_every_flag_is_completed_in(run, shell):
    status, text, err = run(f"completion {shell}")
    assert (status, err) == (0, "")
    for flag in FLAGS:
        for name in flag.names:
            assert (name.lstrip("-") if shell == "fish" else name) in text, name
    for word in ("H100", "RTX4090", "bf16", "padding_causal", "mxfp8", "windows"):
        assert word in text, word


COMPLETED = [
    ("ex", ["explain"]),
    ("explain --num-h", ["--num-heads"]),
    ("explain --heads 8 --kv-h", ["--kv-heads"]),
    ("explain --gpu H", ["H100", "H200"]),
    ("explain --training --gpu RTX409", ["RTX4090"]),
    ("can-i-use --attn-mask-type arb", ["arbitrary"]),
    ("completion z", ["zsh"]),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(run):
    asked = run("completion bash")[1]
    for typed, _ in COMPLETED:
        count = len(typed.split())
        asked += f'\nCOMP_WORDS=(attnsel {typed}); COMP_CWORD={count}; _attnsel; echo "${{COMPREPLY[@]}}"'
    clean = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "--norc", "-c", asked], capture_output=True, text=True, env=clean)
    for (typed, completed), line in zip(COMPLETED, done.stdout.splitlines(), strict=True):
        last = typed.split()[-1].casefold()
        assert set(completed) <= set(line.split()), done.stderr
        assert all(word.casefold().startswith(last) for word in line.split())
