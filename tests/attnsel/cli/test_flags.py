"""The flags themselves: what each says reaches the question, each has one meaning under every name, numbers
as people type them."""

from __future__ import annotations

import ast
import inspect

import pytest

from attnsel import AttentionParams, Environment, Policy
from attnsel.cli import COMMANDS, _with_flags_of
from attnsel.cli.flags import ALIASES, FLAG_OF, FLAGS, SHORTHANDS
from attnsel.environment import COMPONENTS
from attnsel.pages.commands import DESCRIBED_AFTERWARDS
from tables import cells_of, each

pytestmark = pytest.mark.usefixtures("no_switches_from_outside")


def test_every_field_of_a_call_a_machine_and_a_policy_has_a_flag_or_a_reason_not_to():
    flags = {
        part: {flag.field for flag in FLAGS if flag.part == part} for part in ("params", "machine", "policy")
    }
    assert set(AttentionParams.model_fields) - flags["params"] == {"tensors", "fp8_meta"}
    assert flags["params"] - set(AttentionParams.model_fields) == {"fp8_recipe", "mask_dtype", "tensor_rank"}
    assert flags["machine"] == {"gpu", *COMPONENTS, *DESCRIBED_AFTERWARDS}
    assert set(Policy.model_fields) - flags["policy"] == {"deterministic"}, "a field of the call"


@each("command", ["explain", "can-i-use"])
def test_a_command_that_reads_some_words_has_every_flag_they_name(command):
    def flags_for(*words: str) -> set[str]:
        return set(inspect.signature(_with_flags_of(COMMANDS[command][0], words)).parameters)

    every, none = {flag.parameter.name for flag in (*SHORTHANDS, *FLAGS)}, flags_for(command)
    assert not every & none
    for flag in (*SHORTHANDS, *FLAGS):
        for name in filter(None, (*flag.names, flag.negative)):
            assert flags_for(command, name, "1") - none == {flag.parameter.name}, name
            assert flags_for(command, "--json", f"{name}=1") - none == {flag.parameter.name}, name


# ---- what they say ------------------------------------------------------------------------------------


def test_a_flag_that_says_nothing_of_the_call_is_told(run):
    for words, told in (
        ("--cp-comm-type a2a", "--cp-comm-type changes nothing without a --cp-size above 1"),
        ("--bottom-right-diagonal --mask no_mask", "changes nothing without a window or ALiBi"),
        ("--no-bottom-right-diagonal", "beside --attn-mask-type causal, which decides it"),
        ("--dropout 0.1 --inference", "--attention-dropout changes nothing with --inference"),
        ("--preview", "--preview changes nothing in this release: none of its rules is tried out"),
    ):
        code, out, err = run(f"explain --gpu H100 {words}")
        assert (code, err.count("\n")) == (0, 1), err
        assert told in err
        assert out


# ---- other names, and short ways to say several fields ------------------------------------------------

VALUES = {"qkv_layout": "sbhd", "attn_mask_type": "no_mask", "attention_dropout": "0.1"}


CALL = {  # a value of its own for each field that the rows below leave alone; with no value: yes
    "dtype": "fp32", "batch_size": 3, "num_heads": 12, "num_gqa_groups": 4, "max_seqlen_q": 128,
    "max_seqlen_kv": 4096, "head_dim_v": 96, "core_attention_bias_type": "post_scale_bias",
    "core_attention_bias_shape": "bhss", "core_attention_bias_requires_grad": "", "softmax_type": "learnable",
    "softcap": 30.0, "attention_dropout": 0.1, "return_lse": "", "return_max_logit": "", "cp_size": 2,
    "cp_comm_type": "all_gather", "cuda_graph": "", "bottom_right_diagonal": "",
    "attn_mask_type": "arbitrary",
}  # fmt: skip
MACHINE = {
    "torch": "2.8.0", "triton": "3.2.0", "cudnn": "9.1.0", "cudnn_frontend": "1.9.0", "cuda": "12.8.0",
    "python": "3.11.0", "flash_attn": "2.8.3", "flash_attn_3": "3.0.0", "flash_attn_4": "4.0.0b36",
    "transformer_engine": "2.3.0", "platform": "windows", "torch_flash": "FA3",
}  # fmt: skip


def test_what_flags_say_reaches_the_question(asked):
    call, machine = (
        " ".join(f"{FLAG_OF[field].name} {value}" for field, value in said.items())
        for said in (CALL, MACHINE)
    )
    switches = (
        "--allow tiled,sdpa.math --deny cudnn --adapt never --allow-known-bugs bug001 --memory-limit 1MiB"
    )
    found = asked(f"explain --gpu A100 --missing libnvrtc {call} {machine} {switches}")
    said = {field: True if value == "" else value for field, value in CALL.items()}
    assert found.params == AttentionParams(**said)
    assert {field: str(getattr(found.env, field)) for field in MACHINE} == MACHINE
    assert (found.env.arch, found.env.missing) == (80, ("libnvrtc",))
    assert found.policy == Policy(
        allow=("tiled", "sdpa.math"), deny=("cudnn",), adapt="never", allow_known_bugs=("BUG001",),
        memory_limit=1 << 20,
    )  # fmt: skip
    assert asked("explain --gpu H100 --backend triton --triton none")[1:3] == (
        Environment.describe("H100", triton=None),
        Policy(backend="triton"),
    )


@each("field, alias", [(field, name) for field, names in ALIASES.items() for name in names])
def test_another_name_says_the_same(asked, field, alias):
    value = VALUES.get(field, "4")
    line = f"explain --gpu H100 {FLAG_OF[field].name} {value}"
    assert asked(f"explain --gpu H100 {alias} {value}") == asked(line)
    assert asked(line).params != AttentionParams()


@each("words, expected", cells_of(__file__, "flags.txt"))
def test_flags_say_what_the_model_says(asked, words, expected):
    fields = ast.literal_eval(expected)
    assert asked(f"explain --gpu H100 {words}").params == AttentionParams(**fields)
