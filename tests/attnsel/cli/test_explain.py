"""What is asked about: this machine or another, files, variables, what TransformerEngine and doctor print."""

from __future__ import annotations

import io
import json
import os
import threading

import pytest

from attnsel import AttentionParams, Environment, Policy, settings
from attnsel.cli import question
from tables import each

pytestmark = pytest.mark.usefixtures("no_switches_from_outside")


def test_this_machine_is_the_default_and_with_another_version_it_is_another(asked, monkeypatch):
    here = Environment.describe("H200").replace(detected=True)
    monkeypatch.setattr(question.Environment, "detect", lambda: here)
    assert asked("explain").env is here
    env = asked("explain --cudnn 9.5.0").env
    assert (str(env.cudnn), env.detected, env.device) == ("9.5.0", False, here.device)
    assert "cudnn" not in env.assumed


def test_variables_of_a_policy_hold_and_flags_win(asked, monkeypatch):
    monkeypatch.setenv("ATTNSEL_DISABLE", "cudnn")
    monkeypatch.setenv("ATTNSEL_ADAPT", "never")
    settings.configure()
    assert asked("explain --gpu H100 --adapt auto").policy == Policy(deny=("cudnn",))


# ---- files --------------------------------------------------------------------------------------------


def test_a_file_is_the_base_and_flags_win_in_all_that_they_state(asked, written):
    file = written(
        '{"head_dim_qk": 192, "head_dim_v": 128, "attn_mask_type": "padding", "is_training": false}'
    )
    p = asked(f"explain --gpu H100 --params {file} --num-heads 4 --head-dim 64 --causal").params
    assert p == AttentionParams(
        head_dim_qk=64, num_heads=4, attn_mask_type="padding_causal", is_training=False
    )


def test_an_answer_can_be_asked_again(run, asked, written):
    first = run("explain --gpu A100 --cudnn 9.5.0 --head-dim-qk 96 --fp8-recipe delayed --json")[1]
    file = written(first)
    again = asked(f"explain --params {file} --env {file}")
    assert again.params.model_dump(mode="json") == json.loads(first)["params"]
    assert again.env == Environment.describe("A100", cudnn="9.5.0")
    env = asked(f"explain --params {file} --env {file} --gpu H100 --cudnn 9.6.0").env
    assert (env.arch, str(env.cudnn)) == (90, "9.6.0")


def test_a_dash_reads_standard_input_and_a_byte_order_mark_is_no_mistake(asked, written, monkeypatch):
    text = '{"tensors": {"q": {"shape": [2, 8, 1, 64], "stride": [512, 64, 64, 1]}}}'
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert asked("explain --gpu H100 --params -").params.tensors.q.shape == (2, 8, 1, 64)
    file = written(b'\xef\xbb\xbf{"num_heads": 4}')
    assert asked(f"explain --gpu H100 --params {file}").params.num_heads == 4


# ---- what TransformerEngine prints --------------------------------------------------------------------

TE = (
    "[DEBUG    | DotProductAttention]: Running with config={'transformer_engine_version': '2.8.0', "
    "'compute_capability': 'sm100', 'flash_attn_version': '2.7.3', 'flash_attn_3_version': 'not installed', "
    "'cudnn_version': '9.10.1', 'qkv_type': <class 'torch.Tensor'>, 'qkv_dtype': torch.bfloat16, "
    "'qkv_layout': 'thd_thd_thd', 'batch_size': 1, 'num_heads': 64, 'num_gqa_groups': 64, "
    "'max_seqlen_q': 8192, 'max_seqlen_kv': 8192, 'head_dim_qk': 192, 'head_dim_v': 128, "
    "'attn_mask_type': 'padding_causal', 'window_size': (-1, 0), 'fp8': False, "
    "'fp8_meta': {'fp8_checkpoint': False, 'fp8_group': None}, 'inference_params': None, "
    "'softmax_type': 'vanilla', 'is_training': True}\n"
)
CALL = AttentionParams(
    qkv_layout="thd_thd_thd",
    batch_size=1,
    num_heads=64,
    max_seqlen_q=8192,
    head_dim_qk=192,
    head_dim_v=128,
    attn_mask_type="padding_causal",
)
UNREAD = TE.replace("'fp8': False", "'fp8': False, 'num_splits': 3, 'zz\x1b': '[red]x[/red]'")


@each(
    "text, told",
    [
        (f"a log\n{TE}more of it\n", ""),
        (TE[TE.index("{") :], ""),
        (
            UNREAD,
            "not read of TransformerEngine's configuration: num_splits = 3, zz\\x1b = '[red]x[/red]'\n",
        ),
        (
            TE + TE + TE.replace("'num_heads': 64", "'num_heads': 128"),
            "holds 2 different configurations of TransformerEngine; the first is read\n",
        ),
    ],
)
def test_a_configuration_of_transformer_engine_is_the_call_and_the_machine(asked, written, text, told):
    found = asked(f"explain --params {written(text)}")
    assert found.params == CALL
    env = found.env
    assert (env.arch, str(env.cudnn), str(env.flash_attn), env.flash_attn_3) == (100, "9.10.1", "2.7.3", None)
    assert "cudnn" not in env.assumed
    assert found.err.endswith(told)
    assert found.err.count("\n") == bool(told)


# ---- doctor's -----------------------------------------------------------------------------------------


def test_the_answer_of_doctor_is_a_machine(asked, written):
    devices = [Environment.describe(gpu, cudnn="9.5.0").model_dump(mode="json") for gpu in ("H200", "A100")]
    file = written(json.dumps({"schema": "attnsel.doctor/3", "devices": devices[:1], "findings": []}))
    there = Environment.describe("H200", cudnn="9.5.0")
    assert asked(f"explain --env {file}")[1::2] == (there, "")
    changed = there.replace(cudnn="9.6.0", assumed=there.assumed)
    assert asked(f"explain --env {file} --cudnn 9.6.0").env == changed
    file = written(json.dumps({"devices": devices}))
    found = asked(f"explain --env {file}")
    assert found.env == there
    assert found.err == f"attnsel: {file}: holds 2 devices; the first is asked about\n"


# ---- pipes --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_read_to_its_end(asked, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        with pipe.open("w") as file:
            file.write('{"num_heads":')
            file.flush()
            threading.Event().wait(0.2)
            file.write(" 4" + " " * 200_000 + "}")

    writer = threading.Thread(target=write)
    writer.start()
    assert asked(f"explain --gpu H100 --params {pipe}").params.num_heads == 4
    writer.join()
