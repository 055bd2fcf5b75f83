"""The flags themselves: each changes an answer, each has one meaning under every name, numbers as people
type them, and what is said of one that there is not."""

from __future__ import annotations

import json

import pytest

from attnsel import AttentionParams, Environment, Policy
from attnsel.cli.flags import ALIASES, FLAG_OF, FLAGS, SHORTHANDS
from attnsel.cli.numbers import read_count, read_window
from attnsel.cli.suggest import meant_flag
from attnsel.environment import COMPONENTS
from attnsel.errors import InvalidInput
from attnsel.pages.commands import DESCRIBED_AFTERWARDS
from tables import each

pytestmark = pytest.mark.usefixtures("no_switches_from_outside")


def test_every_field_of_a_call_a_machine_and_a_policy_has_a_flag_or_a_reason_not_to():
    flags = {
        part: {flag.field for flag in FLAGS if flag.part == part} for part in ("params", "machine", "policy")
    }
    assert set(AttentionParams.model_fields) - flags["params"] == {"tensors", "fp8_meta"}
    assert flags["params"] - set(AttentionParams.model_fields) == {"fp8_recipe", "mask_dtype", "tensor_rank"}
    assert flags["machine"] == {"gpu", *COMPONENTS, *DESCRIBED_AFTERWARDS}
    assert set(Policy.model_fields) - flags["policy"] == {"deterministic"}, "a field of the call"


# ---- no flag that changes nothing ---------------------------------------------------------------------

BIAS = "--core-attention-bias-type post_scale_bias"
GRAD = "--core-attention-bias-requires-grad"
WINDOW = "--attn-mask-type no_mask --max-seqlen-q 128 --max-seqlen-kv 4096 --window-size 16 0"
PAGED = "--inference --qkv-layout paged_kv_bshd_bshd_bshd --kv-cache paged"
THD = "--qkv-layout thd --attn-mask-type padding_causal"
# By field: a question, and what is added to it. The question is of an H100 where it names no GPU.
CHANGES: dict[str, tuple[str, str]] = {
    "dtype": ("", "--dtype fp32"),
    "qkv_layout": ("--attn-mask-type padding_causal", "--qkv-layout thd"),
    "batch_size": ("", "--batch-size 64"),
    "num_heads": ("", "--num-heads 64"),
    "num_gqa_groups": ("", "--num-gqa-groups 4"),
    "max_seqlen_q": ("--max-seqlen-kv 4096", "--max-seqlen-q 128"),
    "max_seqlen_kv": ("", "--max-seqlen-kv 8192"),
    "head_dim_qk": ("", "--head-dim-qk 512"),
    "head_dim_v": ("", "--head-dim-v 64"),
    "attn_mask_type": ("", "--attn-mask-type arbitrary"),
    "window_size": ("", "--window-size 128"),
    "bottom_right_diagonal": (f"--gpu A100 {WINDOW}", "--no-bottom-right-diagonal"),
    "core_attention_bias_type": ("", BIAS),
    "core_attention_bias_shape": (f"{BIAS} {GRAD}", "--core-attention-bias-shape bhss"),
    "core_attention_bias_requires_grad": (BIAS, GRAD),
    "alibi_slopes_shape": ("--core-attention-bias-type alibi", "--alibi-slopes-shape 2 16"),
    "softmax_type": ("", "--softmax-type learnable"),
    "softcap": ("", "--softcap 30"),
    "attention_dropout": ("", "--attention-dropout 0.1"),
    "is_training": ("--cudnn 9.1.0 --head-dim 192,128", "--inference"),
    "deterministic": ("", "--deterministic"),
    "return_lse": ("", "--return-lse"),
    "return_max_logit": ("", "--return-max-logit"),
    "kv_cache": ("--inference", "--kv-cache contiguous"),
    "page_size": (f"{PAGED} --page-size 64", "--page-size 256"),
    "pad_between_seqs": (f"--cudnn 9.7.1 {THD}", "--pad-between-seqs"),
    "cp_size": ("", "--cp-size 2"),
    "cp_comm_type": ("--cp-size 2", "--cp-comm-type all_gather"),
    "cuda_graph": ("--cudnn 9.1.0 --max-seqlen-q 1000", "--cuda-graph"),
    "fp8": ("--params {recipe}", "--fp8"),
    "fp8_recipe": ("", "--fp8-recipe delayed"),
    "gpu": ("--gpu H100", "--gpu A100"),
    "torch": ("", "--torch 2.7"),
    "triton": ("", "--triton none"),
    "cudnn": ("--head-dim-qk 192", "--cudnn 9.1.0"),
    "cudnn_frontend": ("", "--cudnn-frontend none"),
    "cuda": ("--torch 2.8", "--cuda 11.8"),
    "python": ("--torch 2.8 --cuda 12.8", "--python 3.13"),
    "flash_attn": ("", "--flash-attn 2.8.3"),
    "flash_attn_3": ("", "--flash-attn-3 3.0.0"),
    "flash_attn_4": ("", "--flash-attn-4 4.0.0b36"),
    "platform": ("", "--platform windows"),
    "torch_flash": ("--gpu A100", "--torch-flash FA3"),
    "missing": ("", "--missing libnvrtc"),
    "transformer_engine": (f"--cudnn 9.8.0 --head-dim 192,128 {THD}", "--transformer-engine 2.3"),
    "mask_dtype": ("--gpu A100 --attn-mask-type arbitrary", "--mask-dtype fp32"),
    "tensor_rank": ("--gpu A100", "--tensor-rank 3"),
    "backend": ("", "--backend triton"),
    "allow": ("", "--allow triton,tiled"),
    "deny": ("", "--deny cudnn"),
    "adapt": ("--head-dim-qk 100", "--adapt never"),
    "allow_known_bugs": ("--cudnn 9.15.0 --max-seqlen-q 4097", "--allow-known-bugs all"),
    "memory_limit": ("--attn-mask-type arbitrary", "--memory-limit 1MiB"),
}
NOTHING_YET = {"preview": "a rule of this release that is tried out"}


def test_every_flag_changes_an_answer(run, written):
    recipe = written('{"fp8_meta": {"recipe": {"kind": "delayed", "fp8_dpa": true}}}')

    def answer(*words: str) -> dict[str, object]:
        """Without the question in it."""
        line = " ".join(words).replace("{recipe}", str(recipe))
        code, out, err = run(f"explain --json {line} {'' if '--gpu' in line else '--gpu H100'}")
        assert code in (0, 3), err
        told = json.loads(out)
        return {name: told[name] for name in told if name not in ("params", "environment", "policy")}

    assert set(CHANGES) | set(NOTHING_YET) >= set(FLAG_OF)
    for field, (question, flag) in CHANGES.items():
        name, value = flag.split()[0], f"{flag} ".partition(" ")[2].strip()
        assert name in (FLAG_OF[field].name, FLAG_OF[field].negative)
        more = flag if name not in question else ""
        changed = f"{question} {more}" if more else question.rpartition(name)[0] + f"{name} {value}"
        assert answer(question) != answer(changed), field


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


@each("field, alias", [(field, name) for field, names in ALIASES.items() for name in names])
def test_another_name_says_the_same(asked, field, alias):
    value = VALUES.get(field, "4")
    line = f"explain --gpu H100 {FLAG_OF[field].name} {value}"
    assert asked(f"explain --gpu H100 {alias} {value}") == asked(line)
    assert asked(line).params != AttentionParams()


THD_CAUSAL = {"qkv_layout": "thd", "attn_mask_type": "padding_causal"}
PAGED_CALL = {
    "qkv_layout": "paged_kv_bshd_bshd_bshd",
    "kv_cache": "paged",
    "page_size": 16,
    "is_training": False,
}
MXFP8 = {"fp8": True, "fp8_meta": {"recipe": {"kind": "mxfp8", "fp8_dpa": True}}}


@each(
    "words, expected",
    [
        ("", {}),
        ("--inference", {"is_training": False}),
        ("--training", {"is_training": True}),
        ("--deterministic --no-cuda-graph", {"deterministic": True}),
        ("--max-seqlen-kv -1", {}),
        ("--dtype float16", {"dtype": "fp16"}),
        ("--softcap 30.5", {"softcap": 30.5}),
        (
            "--core-attention-bias-type alibi --alibi-slopes-shape 2 16",
            {"core_attention_bias_type": "alibi", "alibi_slopes_shape": (2, 16)},
        ),
        ("--fp8-recipe mxfp8", MXFP8),
        (f"{PAGED} --page-size 16", PAGED_CALL),
        ("--head-dim 64", {"head_dim_qk": 64}),
        ("--head-dim 192,128", {"head_dim_qk": 192, "head_dim_v": 128}),
        ("--head-dim 192 --head-dim-v 128", {"head_dim_qk": 192, "head_dim_v": 128}),
        ("--seq-len 128_000", {"max_seqlen_q": 128_000}),
        ("--seqlen 8k --seqlen-kv 16Ki", {"max_seqlen_q": 8192, "max_seqlen_kv": 16384}),
        ("--causal", {}),
        ("--no-causal", {"attn_mask_type": "no_mask"}),
        ("--causal --layout thd", THD_CAUSAL),
        ("--no-causal --layout t3hd", {"attn_mask_type": "padding", "qkv_layout": "t3hd"}),
        ("--window-size 1024", {"window_size": (1024, 1024)}),
        ("--window-size 1k,0", {"window_size": (1024, 0)}),
        ("--window-size -1 -1 --mask no_mask", {"attn_mask_type": "no_mask"}),
        # as transformers.masking_utils (5.23): the query's own key counts; both sides without a mask
        ("--sliding-window 1k", {"window_size": (1023, 0)}),
        ("--no-causal --sliding-window 64", {"attn_mask_type": "no_mask", "window_size": (64, 64)}),
    ],
)
def test_flags_say_what_the_model_says(asked, words, expected):
    assert asked(f"explain --gpu H100 {words}").params == AttentionParams(**expected)


@each(
    "words, expected",
    [
        ("--gpu H100 --cudnn 9.1.0", Environment.describe("H100", cudnn="9.1.0")),
        ("--gpu sm80 --triton none", Environment.describe("sm80", triton=None)),
        ("--gpu A100 --cudnn-frontend 1.9", Environment.describe("A100", cudnn_frontend="1.9")),
        ("--gpu A100 --platform windows", Environment.describe("A100").replace(platform="windows")),
    ],
)
def test_a_machine_that_is_elsewhere(asked, words, expected):
    assert asked(f"explain {words}").env == expected


@each(
    "words, expected",
    [
        ("", Policy()),
        ("--backend triton", Policy(backend="triton")),
        ("--allow tiled,sdpa.math", Policy(allow=("tiled", "sdpa.math"))),
        ("--deny cudnn --adapt never", Policy(deny=("cudnn",), adapt="never")),
        ("--allow-known-bugs bug001,BUG002", Policy(allow_known_bugs=("BUG001", "BUG002"))),
    ],
)
def test_switches(asked, words, expected):
    assert asked(f"explain --gpu H100 {words}").policy == expected


# ---- numbers ------------------------------------------------------------------------------------------


def test_numbers_as_people_type_them():
    for text, number in {
        "8k": 8192, "8K": 8192, "8Ki": 8192, "1M": 1 << 20, "2Mi": 2 << 20, "128_000": 128_000
    }.items():  # fmt: skip
        assert read_count("--x", text) == number
    for text in ("", "8.5k", "1e3", "0x10", "٣", "²", "+8", "8 k", "8kk", "8G", "_8", "1__0", "9" * 5000):
        with pytest.raises(InvalidInput, match=r"--x = .*(must be a whole number|far too large)"):
            read_count("--x", text)
    assert read_window("--x", ["5"]) == (5, 5)
    assert read_window("--x", ["-1", "0"]) == read_window("--x", ["-1,0"]) == (-1, 0)


# ---- what was meant -----------------------------------------------------------------------------------


def test_a_flag_is_suggested_by_meaning_first():
    every = [name for flag in (*FLAGS, *SHORTHANDS) for name in (*flag.names, flag.negative) if name]
    for typed, meant in {
        "--num-query-groups": "--num-gqa-groups",
        "--num_kv_heads": "--num-kv-heads",
        "--no-is-causal": "--no-causal",
        "--causl": "--causal",
        "--context-length": "--seqlen",
        "--arch": "--gpu",
        "--flash-attn2": "--flash-attn",
        "--frobnicate": None,
    }.items():
        assert meant_flag(typed, every) == meant, typed
