"""How wide, how long and in which form an answer is printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from attnsel import AttentionParams, Environment, Policy, select, settings
from attnsel.cli.flags import FLAGS
from attnsel.report.markdown import code, escape, fenced, render_markdown, table
from attnsel.report.short import render_short
from paths import IMPORTED_FROM

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


def test_without_columns_it_is_eighty(run):
    assert widest(run("explain --gpu H100 --cudnn 9.1.0 --head-dim 192,128")[1]) <= 80


def test_a_table_has_the_columns_too(run, monkeypatch):
    line = "matrix --gpu H100 --rows head_dim=64,128 --cols seqlen=128:2560:+256"
    assert run(line)[1].count("head_dim_qk ↓") > 1
    monkeypatch.setenv("COLUMNS", "200")
    assert run(line)[1].count("head_dim_qk ↓") == 1


# ---- one screen ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", QUESTIONS)
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


def test_a_short_answer_in_lines():
    env = Environment.describe("H100", cudnn="9.1.0")
    p = AttentionParams(head_dim_qk=192, head_dim_v=128)
    lines = render_short(select(p, env), 80).splitlines()
    assert lines[0].startswith("sdpa.")
    assert any(line.startswith(" 1 ✔ sdpa.") for line in lines)
    assert any(line.startswith("   ✖ cudnn           CUDNN204") for line in lines)
    assert any(line.endswith("not installed") for line in lines)
    assert any(line.startswith("To get cudnn: pip install") for line in lines)


# ---- Markdown -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", QUESTIONS)
def test_markdown_holds_what_the_report_holds(run, question):
    _, out, _ = run(f"explain {question} --markdown")
    told = json.loads(run(f"explain {question} --json")[1])
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(told["candidates"])
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}
    for candidate in told["candidates"]:
        assert sum(f"| `{candidate['name']}` |" in row for row in rows) == 1
    assert out.count("```") % 2 == 0
    for code_ in set(re.findall(r"\b[A-Z]+\d{3}\b", run(f"explain {question}")[1])):
        assert code_ in out


def test_markdown_of_a_plan_over_ranks_is_a_block(run):
    out = run("explain --gpu H100 --cp-size 2 --markdown")[1]
    assert out.count("```text") == 2
    assert out.rstrip().endswith("```")


def test_sources_stand_in_markdown_too(run):
    line = "explain --gpu H100 --cudnn 9.1.0 --head-dim 192,128 --markdown"
    assert "Source: " not in run(line)[1]
    assert "Source: " in run(f"{line} --sources")[1]


@pytest.mark.parametrize("line", ["matrix --gpu H100 --rows head_dim=64,512 --cols seqlen=1k,2k", "rules"])
def test_tables_of_other_commands(run, line):
    code_, out, _ = run(f"{line} --markdown")
    rows = [row for row in out.splitlines() if row.startswith("| ")]
    assert code_ == 0
    assert len(rows) > 3
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


HOSTILE = [
    "[x](http://a.b)", "<script>", "*x*", "_x_", "`x`", "a|b", "# x", "@someone", "#12", "~~x~~", "$x$",
    "&lt;", "![i](u)", "\\*x*", "\x1b[2J", "a\nb", "\u202e", "www.a.b", "https://a.b", "|", "``x``",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_a_text_is_markup(text):
    shown = escape(text)
    assert shown.isprintable()
    unescaped = re.sub(r"\\.", "", shown.replace("<!-- -->", "\0"))
    assert not set("`*_[]<>#|~$!&") & set(unescaped)
    assert not re.search(r"@\w|://|www\.", unescaped)


@pytest.mark.parametrize("text", HOSTILE)
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


def test_python_has_both_forms():
    selection = select(AttentionParams(), Environment.describe("H100"), policy=Policy(deny=("cudnn",)))
    assert "policy · deny=('cudnn',)" in render_markdown(selection)
    assert render_short(selection).startswith("sdpa.cudnn runs")


# ---- completion ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_flag_is_completed_in(shell):
    text = script(shell)
    for flag in FLAGS:
        for name in flag.names:
            assert (name.lstrip("-") if shell == "fish" else name) in text, name
    for word in ("H100", "RTX4090", "bf16", "padding_causal", "mxfp8", "windows"):
        assert word in text, word


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
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


@pytest.mark.parametrize(
    ("shell", "check"), [("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]), ("fish", ["fish", "-n"])]
)
def test_the_shell_itself_reads_the_script(shell, check, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    file = tmp_path / "completion"
    file.write_text(script(shell), encoding="utf-8")
    done = subprocess.run([*check, str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("attnsel ex", "explain"),
        ("attnsel explain --num-h", "--num-heads"),
        ("attnsel explain --dtype b", "bf16"),
        ("attnsel matrix --attn-mask-type arb", "arbitrary"),
    ],
)
def test_fish_completes(typed, completed, tmp_path):
    file = tmp_path / "attnsel.fish"
    file.write_text(script("fish"), encoding="utf-8")
    ask = ["fish", "--no-config", "-c", f"source {file}; complete -C '{typed}'"]
    done = subprocess.run(ask, capture_output=True, text=True, env={**os.environ, "HOME": str(tmp_path)})
    assert completed in [line.split("\t")[0] for line in done.stdout.splitlines()], done.stderr
