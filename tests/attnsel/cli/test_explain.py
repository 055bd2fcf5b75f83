"""The command line: what is asked with flags and files, how it is answered, how mistakes are told."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from attnsel import AttentionParams, Environment, Policy, select, settings
from attnsel.cli import main, question
from attnsel.cli.flags import FLAGS
from attnsel.environment import COMPONENTS
from attnsel.pages.commands import DESCRIBED_AFTERWARDS
from paths import IMPORTED_FROM
from tables import each

pytestmark = pytest.mark.usefixtures("no_switches_from_outside")


def asked(monkeypatch, line: str) -> tuple[AttentionParams, Environment, Policy]:
    """What reaches the engine."""
    got = []
    monkeypatch.setattr(
        "attnsel.cli.as_dispatcher.select", lambda p, e, policy: got.append((p, e, policy)) or select(p, e)
    )
    assert main(line.split()) in (0, 3)
    return got[0]


# ---- the flags follow the models --------------------------------------------------------------------


def test_every_field_of_a_call_has_a_flag_or_a_reason_not_to():
    flags = {flag.field for flag in FLAGS if flag.part == "params"}
    assert set(AttentionParams.model_fields) - flags == {"tensors", "fp8_meta"}
    assert flags - set(AttentionParams.model_fields) == {"fp8_recipe", "mask_dtype", "tensor_rank"}


def test_every_component_and_wish_has_a_flag():
    machine = {flag.field for flag in FLAGS if flag.part == "machine"}
    assert machine == {"gpu", *COMPONENTS, *DESCRIBED_AFTERWARDS}
    switches = {flag.field for flag in FLAGS if flag.part == "policy"}
    assert set(Policy.model_fields) - switches == {"deterministic"}, "--deterministic is a field of the call"


# ---- explain -----------------------------------------------------------------------------------------


@each(
    "words, expected",
    [
        ("", {}),
        ("--head-dim-qk 192 --head-dim-v 128", {"head_dim_qk": 192, "head_dim_v": 128}),
        ("--inference", {"is_training": False}),
        ("--training", {"is_training": True}),
        ("--deterministic --no-cuda-graph", {"deterministic": True}),
        ("--window-size 128 0", {"window_size": (128, 0)}),
        ("--window-size -1 -1 --attn-mask-type no_mask", {"attn_mask_type": "no_mask"}),
        ("--max-seqlen-kv -1", {}),
        ("--dtype float16", {"dtype": "fp16"}),
        ("--softcap 30.5", {"softcap": 30.5}),
        (
            "--core-attention-bias-type alibi --alibi-slopes-shape 2 16",
            {"core_attention_bias_type": "alibi", "alibi_slopes_shape": (2, 16)},
        ),
        (
            "--fp8-recipe mxfp8",
            {"fp8": True, "fp8_meta": {"recipe": {"kind": "mxfp8", "fp8_dpa": True}}},
        ),
        (
            "--qkv-layout paged_kv_bshd_bshd_bshd --kv-cache paged --page-size 16 --inference",
            {
                "qkv_layout": "paged_kv_bshd_bshd_bshd",
                "kv_cache": "paged",
                "page_size": 16,
                "is_training": False,
            },
        ),
    ],
)
def test_flags_say_what_the_model_says(monkeypatch, words, expected):
    p, _, _ = asked(monkeypatch, f"explain --gpu H100 {words}")
    assert p == AttentionParams(**expected)


@each(
    "words, expected",
    [
        ("--gpu H100 --cudnn 9.1.0", Environment.describe("H100", cudnn="9.1.0")),
        ("--gpu sm80 --triton none", Environment.describe("sm80", triton=None)),
        ("--gpu cpu", Environment.describe("cpu")),
        ("--gpu A100 --cudnn-frontend 1.9", Environment.describe("A100", cudnn_frontend="1.9")),
        ("--gpu A100 --platform windows", Environment.describe("A100").replace(platform="windows")),
    ],
)
def test_a_machine_that_is_elsewhere(monkeypatch, words, expected):
    assert asked(monkeypatch, f"explain {words}")[1] == expected


def test_this_machine_is_the_default(monkeypatch):
    here = Environment.describe("H200").replace(detected=True)
    monkeypatch.setattr(question.Environment, "detect", lambda: here)
    assert asked(monkeypatch, "explain")[1] is here


def test_this_machine_with_another_version_is_no_longer_this_machine(monkeypatch):
    here = Environment.describe("H200").replace(detected=True)
    monkeypatch.setattr(question.Environment, "detect", lambda: here)
    env = asked(monkeypatch, "explain --cudnn 9.5.0")[1]
    assert str(env.cudnn) == "9.5.0"
    assert "cudnn" not in env.assumed
    assert not env.detected
    assert env.device == here.device


@each(
    "words, expected",
    [
        ("", Policy()),
        ("--backend triton", Policy(backend="triton")),
        ("--allow tiled,sdpa.math", Policy(allow=("tiled", "sdpa.math"))),
        ("--deny cudnn --adapt never", Policy(deny=("cudnn",), adapt="never")),
        ("--allow-known-bugs bug001,BUG002", Policy(allow_known_bugs=("BUG001", "BUG002"))),
        ("--allow-known-bugs all", Policy(allow_known_bugs=("all",))),
    ],
)
def test_switches(monkeypatch, words, expected):
    assert asked(monkeypatch, f"explain --gpu H100 {words}")[2] == expected


def test_variables_of_a_policy_hold_and_flags_win(monkeypatch):
    monkeypatch.setenv("ATTNSEL_DISABLE", "cudnn")
    monkeypatch.setenv("ATTNSEL_ADAPT", "never")
    settings.configure()
    policy = asked(monkeypatch, "explain --gpu H100 --adapt auto")[2]
    assert policy == Policy(deny=("cudnn",))


def test_json_is_the_selection(run):
    code, out, _ = run("explain --gpu A100 --json")
    told = json.loads(out)
    assert code == 0
    assert told == json.loads(select(AttentionParams(), Environment.describe("A100")).to_json())


def test_a_file_is_the_base_and_flags_win(run, tmp_path, monkeypatch):
    file = tmp_path / "call.json"
    file.write_text('{"head_dim_qk": 96, "num_heads": 8, "is_training": false}')
    p, _, _ = asked(monkeypatch, f"explain --gpu H100 --params {file} --num-heads 4 --training")
    assert p == AttentionParams(head_dim_qk=96, num_heads=4)


def test_an_answer_can_be_asked_again(run, tmp_path, monkeypatch):
    first = run("explain --gpu A100 --cudnn 9.5.0 --head-dim-qk 96 --fp8-recipe delayed --json")[1]
    file = tmp_path / "answer.json"
    file.write_text(first)
    p, env, _ = asked(monkeypatch, f"explain --params {file} --env {file}")
    assert p.model_dump(mode="json") == json.loads(first)["params"]
    assert env == Environment.describe("A100", cudnn="9.5.0")
    env = asked(monkeypatch, f"explain --params {file} --env {file} --gpu H100 --cudnn 9.6.0")[1]
    assert (env.arch, str(env.cudnn)) == (90, "9.6.0")


def test_a_dash_reads_standard_input(monkeypatch, tmp_path):
    source = tmp_path / "stdin"
    source.write_text('{"tensors": {"q": {"shape": [2, 8, 1, 64], "stride": [512, 64, 64, 1]}}}')
    with source.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        p, _, _ = asked(monkeypatch, "explain --gpu H100 --params -")
    assert p.tensors.q.shape == (2, 8, 1, 64)


# ---- mistakes ----------------------------------------------------------------------------------------


@each(
    "flag, text, told",
    [
        ("--params", '{"num_heads": 4,\n}', "is no JSON: line 2, column 1"),
        ("--params", "[1]", "must hold a JSON object"),
        ("--params", '{"num_head": 4}', "num_head = 4: there is no such field"),
        ("--params", '{"num_heads": 6, "num_gqa_groups": 4}', "num_gqa_groups = 4: must divide num_heads"),
        ("--env", '{"device": {"arch": 90}, "cudnn": "nine"}', "cudnn = nine: not a version"),
        ("--env", "{", "is no JSON: line 1, column 2"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(run, tmp_path, flag, text, told):
    file = tmp_path / "input.json"
    file.write_text(text)
    code, _, err = run(["explain", flag, str(file), *(["--gpu", "H100"] if flag == "--params" else [])])
    assert code == 2
    assert str(file) in err
    assert told in err, err


# ---- the whole process -------------------------------------------------------------------------------


def python(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=IMPORTED_FROM,
        **options,
    )


def test_a_described_gpu_imports_nothing_heavy():
    script = (
        "import sys; from attnsel.cli import main; code = main(['explain', '--gpu', 'H100']);"
        "heavy = {'torch', 'triton', 'cudnn', 'numpy', 'rich.table', 'rich.progress'} & set(sys.modules);"
        "heavy |= {'attnsel.diagnose.logs.parsers'} & set(sys.modules);"
        "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    done = python("-c", script)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGPIPE there")
def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        f"'{sys.executable}' -m attnsel rules | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        cwd=IMPORTED_FROM,
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminal there")
def test_colours_only_on_a_terminal():
    import os
    import pty

    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(IMPORTED_FROM)
        os.environ.update(TERM="xterm", COLUMNS="80")
        os.environ.pop("NO_COLOR", None)
        os.execv(sys.executable, [sys.executable, "-m", "attnsel", "explain", "--gpu", "H100"])
    out = b""
    try:
        while part := os.read(fd, 65536):
            out += part
    except OSError:
        pass  # how Linux says that the other end is closed
    os.waitpid(pid, 0)
    assert "\x1b[32m✔".encode() in out
    assert b"\x1b[1mcudnn" in out
    assert "\x1b" not in select(AttentionParams(), Environment.describe("H100")).report()
