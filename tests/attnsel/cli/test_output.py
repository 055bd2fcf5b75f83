"""How wide, how long and in which form an answer is printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache

import pytest

from attnsel import settings
from attnsel.cli.flags import FLAGS
from attnsel.report.markdown import code, escape, fenced, table
from paths import IMPORTED_FROM
from tables import each

QUESTIONS = [
    "--gpu H100",
    "--gpu T4 --dtype fp16",
    "--gpu cpu",
    "--gpu H100 --cudnn 9.1.0 --head-dim 192,128 --layout thd --causal",
    "--gpu T4 --softcap 3 --layout thd --causal --cudnn 9.1",
    "--gpu H100 --backend cudnn --softcap 3",
    "--gpu B200 --torch 2.11 --max-seqlen-q 1 --max-seqlen-kv 8192 --num-gqa-groups 4 --inference",
    "--gpu H100 --fp8-recipe current --cudnn 9.20.0 --inference --no-causal",
    "--gpu V100 --dtype fp32 --mask arbitrary",
]


@pytest.fixture(autouse=True)
def _plain_process(monkeypatch):
    for name in (*settings.VARIABLES, "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    settings.configure()
    yield
    monkeypatch.undo()
    settings.configure()


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


# ---- the width ----------------------------------------------------------------------------------------


def test_columns_decide_also_where_nobody_sees_it(run, monkeypatch):
    widths = {}
    for columns in ("60", "100", "140", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        widths[columns] = widest(run("explain --gpu H100 --cudnn 9.1.0 --head-dim 192,128")[1])
    assert widths["60"] <= 60 < widths["100"] <= 100 < widths["140"] <= 140 < widths["200"] <= 200


def test_a_table_has_the_columns_too(run, monkeypatch):
    line = "matrix --gpu H100 --rows head_dim=64,128 --cols seqlen=128:2560:+256"
    assert run(line)[1].count("head_dim_qk ↓") > 1
    monkeypatch.setenv("COLUMNS", "200")
    assert run(line)[1].count("head_dim_qk ↓") == 1


# ---- one screen ---------------------------------------------------------------------------------------


@each("question", QUESTIONS)
def test_a_short_answer_is_one_screen(run, question):
    code_, out, err = run(f"explain {question} --short")
    lines = out.splitlines()
    assert (code_, err) == (run(f"explain {question} --json")[0], "")
    assert len(lines) <= 12
    assert widest(out) <= 80
    told = json.loads(run(f"explain {question} --json")[1])
    assert lines[0].startswith(told["backend"] or ("cudnn cannot run", "Nothing runs"))
    names = [candidate["name"] for candidate in told["candidates"]]
    assert sum(re.search(rf"\b{re.escape(name)}", out) is not None for name in names) >= 8


# ---- Markdown -----------------------------------------------------------------------------------------


HOSTILE = [
    "[x](http://a.b)", "<script>", "*x*", "_x_", "`x`", "a|b", "# x", "@someone", "#12", "~~x~~", "$x$",
    "&lt;", "![i](u)", "\\*x*", "\x1b[2J", "a\nb", "\u202e", "www.a.b", "https://a.b", "|", "``x``",
]  # fmt: skip


@each("text", HOSTILE)
def test_nothing_in_a_text_is_markup(text):
    shown = escape(text)
    assert shown.isprintable()
    unescaped = re.sub(r"\\.", "", shown.replace("<!-- -->", "\0"))
    assert not set("`*_[]<>#|~$!&") & set(unescaped)
    assert not re.search(r"@\w|://|www\.", unescaped)


@each("text", HOSTILE)
def test_nothing_ends_a_code_too_early(text):
    shown = code(text)
    ticks = re.match("`+", shown)[0]
    inner = shown[len(ticks) : -len(ticks)]
    assert shown.isprintable()
    assert ticks not in inner
    assert (inner[:1] == "`") is (inner[-1:] == "`") is False
    assert table(("a", "b"), [(code(text), "x")]).count("\n") == 2
    row = table(("a", "b"), [(code(text), "x")]).splitlines()[-1]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3


def test_a_block_is_ended_by_nothing_in_it():
    assert fenced("````\nx", "text") == "`````text\n````\nx\n`````"


# ---- completion ---------------------------------------------------------------------------------------


@cache
def script(shell: str) -> str:
    code_ = "import sys; from attnsel.cli import main; c = main(['completion', sys.argv[1]]);"
    code_ += "print(sorted({'torch', 'triton'} & set(sys.modules)), file=sys.stderr); sys.exit(c)"
    done = subprocess.run(
        [sys.executable, "-c", code_, shell],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=IMPORTED_FROM,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    return done.stdout


@each("shell", ["bash", "zsh", "fish"])
def test_every_flag_is_completed_in(shell):
    text = script(shell)
    for flag in FLAGS:
        for name in flag.names:
            assert (name.lstrip("-") if shell == "fish" else name) in text, name
    for word in ("H100", "RTX4090", "bf16", "padding_causal", "mxfp8", "windows"):
        assert word in text, word


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@each(
    "typed, completed",
    [
        (["ex"], ["explain"]),
        (["explain", "--num-h"], ["--num-heads"]),
        (["explain", "--heads", "8", "--kv-h"], ["--kv-heads"]),
        (["explain", "--gpu", "H"], ["H100", "H200"]),
        (["explain", "--training", "--gpu", "RTX409"], ["RTX4090"]),
        (["matrix", "--attn-mask-type", "arb"], ["arbitrary"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes(typed, completed):
    words = " ".join(f"'{word}'" for word in ["attnsel", *typed])
    ask = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _attnsel; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script('bash')}\n{ask}"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert set(completed) <= set(done.stdout.split()), done.stderr
    last = typed[-1].casefold()
    assert all(word.casefold().startswith(last) for word in done.stdout.split())
