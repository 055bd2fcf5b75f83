"""What --params and --env read beside attnsel's own JSON."""

from __future__ import annotations

import json
import os
import subprocess
import threading

import pytest

from attnsel import AttentionParams, Environment, select
from attnsel.cli import files, main
from tables import each

pytestmark = pytest.mark.usefixtures("no_switches_from_outside")

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


@pytest.fixture
def asked(monkeypatch):
    def ask(words: list[str]) -> tuple[AttentionParams, Environment]:
        got = []
        monkeypatch.setattr(
            "attnsel.cli.as_dispatcher.select", lambda p, e, policy: got.append((p, e)) or select(p, e)
        )
        assert main(["explain", *words]) in (0, 3)
        return got[0]

    return ask


# ---- what TransformerEngine prints --------------------------------------------------------------------

CALL = AttentionParams(
    qkv_layout="thd_thd_thd",
    batch_size=1,
    num_heads=64,
    max_seqlen_q=8192,
    head_dim_qk=192,
    head_dim_v=128,
    attn_mask_type="padding_causal",
)


@each("text", [TE, f"a log\n{TE}more of it\n", TE[TE.index("{") :]])
def test_a_configuration_of_transformer_engine_is_the_call_and_the_machine(asked, tmp_path, capsys, text):
    file = tmp_path / "te.log"
    file.write_text(text)
    p, env = asked(["--params", str(file)])
    assert p == CALL
    there = (env.arch, str(env.cudnn), str(env.flash_attn), env.flash_attn_3)
    assert there == (100, "9.10.1", "2.7.3", None)
    assert "cudnn" not in env.assumed
    assert capsys.readouterr().err == ""


def test_what_is_not_read_of_a_configuration_is_named_in_one_line(asked, tmp_path, capsys):
    file = tmp_path / "te.log"
    file.write_text(TE.replace("'fp8': False", "'fp8': False, 'num_splits': 3, 'zz\x1b': '[red]x[/red]'"))
    assert asked(["--params", str(file)])[0] == CALL
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err[:-1].isprintable()
    assert err.endswith(
        "not read of TransformerEngine's configuration: num_splits = 3, zz\\x1b = '[red]x[/red]'\n"
    )


def test_of_several_configurations_the_first_is_read(asked, tmp_path, capsys):
    file = tmp_path / "te.log"
    file.write_text(TE + TE + TE.replace("'num_heads': 64", "'num_heads': 128"))
    assert asked(["--params", str(file)])[0] == CALL
    assert (
        "holds 2 different configurations of TransformerEngine; the first is read" in capsys.readouterr().err
    )


# ---- doctor's -----------------------------------------------------------------------------------------


def test_the_answer_of_doctor_is_a_machine(asked, tmp_path, capsys):
    there = Environment.describe("H200", cudnn="9.5.0")
    file = tmp_path / "doctor.json"
    file.write_text(
        json.dumps({"schema": "attnsel.doctor/3", "devices": [there.model_dump(mode="json")], "findings": []})
    )
    assert asked(["--env", str(file)])[1] == there
    assert asked(["--env", str(file), "--cudnn", "9.6.0"])[1] == there.replace(
        cudnn="9.6.0", assumed=there.assumed
    )
    assert capsys.readouterr().err == ""


def test_of_several_devices_the_first_is_asked_about(asked, tmp_path, capsys):
    devices = [Environment.describe(gpu).model_dump(mode="json") for gpu in ("H100", "A100")]
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps({"devices": devices}))
    assert asked(["--env", str(file)])[1].arch == 90
    assert capsys.readouterr().err == f"attnsel: {file}: holds 2 devices; the first is asked about\n"


@each("devices", [[], [3], ["x"], [None]])
def test_a_doctor_that_saw_no_device_is_named(run, tmp_path, devices):
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps({"devices": devices}))
    code, _, err = run(["explain", "--env", str(file)])
    assert code == 2
    assert f"{file}: devices = " in err


def test_this_machines_own_doctor_can_be_asked_about(run, asked, tmp_path):
    out = run("doctor --json")[1]
    file = tmp_path / "doctor.json"
    file.write_text(out)
    assert asked(["--env", str(file)])[1] == Environment(**json.loads(out)["devices"][0])


# ---- pipes and marks ----------------------------------------------------------------------------------

pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")


@pipes
def test_a_pipe_that_nobody_writes_into_is_no_wait_without_end(run, tmp_path, monkeypatch):
    monkeypatch.setattr("attnsel.cli.files._PATIENCE", 0.1)
    os.mkfifo(tmp_path / "pipe")
    code, out, err = run(["explain", "--params", str(tmp_path / "pipe")])
    assert (code, out) == (2, "")
    assert err == f"attnsel: --params {tmp_path / 'pipe'}: nobody writes into this pipe\n"


@pipes
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
    assert asked(["--gpu", "H100", "--params", str(pipe)])[0].num_heads == 4
    writer.join()


@pipes
def test_a_shell_may_substitute_a_command(asked, tmp_path):
    with subprocess.Popen(
        ["sh", "-c", 'sleep 0.3; echo "{\\"num_heads\\": 4}"'], stdout=subprocess.PIPE
    ) as writer:
        path = f"/dev/fd/{writer.stdout.fileno()}"
        if not os.path.exists(path):
            pytest.skip("no /dev/fd here")
        assert asked(["--gpu", "H100", "--params", path])[0].num_heads == 4


def test_a_byte_order_mark_is_no_mistake(asked, tmp_path):
    file = tmp_path / "call.json"
    file.write_bytes(b'\xef\xbb\xbf{"num_heads": 4}')
    assert asked(["--gpu", "H100", "--params", str(file)])[0].num_heads == 4


def test_on_windows_a_pipe_is_read_as_it_was_opened(monkeypatch):
    """There the system has no os.set_blocking, and a read waits."""
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.delattr(os, "set_blocking")
    monkeypatch.delattr(os, "get_blocking")
    theirs, ours = os.pipe()
    os.write(ours, b"{}")
    os.close(ours)
    try:
        assert files._from_pipe(theirs) == b"{}"
    finally:
        os.close(theirs)
