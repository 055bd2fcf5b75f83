"""The flags themselves: each changes an answer, each has one meaning under every name, numbers as people
type them, and what is said of one that there is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.cli.flags import ALIASES, FLAG_OF, FLAGS, SHORTHANDS
from attnsel.cli.numbers import read_count, read_window
from attnsel.cli.suggest import meant_flag
from attnsel.errors import InvalidInput
from tables import each

pytestmark = pytest.mark.usefixtures("no_switches_from_outside")


@pytest.fixture
def asked(monkeypatch, run):
    """What reaches the engine: ``params, environment, policy``."""

    def ask(line: str) -> tuple[AttentionParams, Environment, Policy]:
        got = []
        monkeypatch.setattr(
            "attnsel.cli.as_dispatcher.select",
            lambda p, e, policy: got.append((p, e, policy)) or select(p, e),
        )
        code, _, err = run(line)
        assert code in (0, 3), err
        return got[0]

    return ask


# ---- no flag that changes nothing ---------------------------------------------------------------------

PAGED = "--inference --qkv-layout paged_kv_bshd_bshd_bshd --kv-cache paged"
THD = "--qkv-layout thd --attn-mask-type padding_causal"
# By field: a question, what stood there before if anything did, and what is added.
CHANGES: dict[str, tuple[str, ...]] = {
    "dtype": ("--gpu H100", "--dtype fp32"),
    "qkv_layout": ("--gpu H100 --attn-mask-type padding_causal", "--qkv-layout thd"),
    "batch_size": ("--gpu H100", "--batch-size 64"),
    "num_heads": ("--gpu H100", "--num-heads 64"),
    "num_gqa_groups": ("--gpu H100", "--num-gqa-groups 4"),
    "max_seqlen_q": ("--gpu H100 --max-seqlen-kv 4096", "--max-seqlen-q 128"),
    "max_seqlen_kv": ("--gpu H100", "--max-seqlen-kv 8192"),
    "head_dim_qk": ("--gpu H100", "--head-dim-qk 512"),
    "head_dim_v": ("--gpu H100", "--head-dim-v 64"),
    "attn_mask_type": ("--gpu H100", "--attn-mask-type arbitrary"),
    "window_size": ("--gpu H100", "--window-size 128"),
    "bottom_right_diagonal": (
        "--gpu A100 --attn-mask-type no_mask --max-seqlen-q 128 --max-seqlen-kv 4096 --window-size 16 0",
        "--no-bottom-right-diagonal",
    ),
    "core_attention_bias_type": ("--gpu H100", "--core-attention-bias-type post_scale_bias"),
    "core_attention_bias_shape": (
        "--gpu H100 --core-attention-bias-type post_scale_bias --core-attention-bias-requires-grad",
        "--core-attention-bias-shape bhss",
    ),
    "core_attention_bias_requires_grad": (
        "--gpu H100 --core-attention-bias-type post_scale_bias",
        "--core-attention-bias-requires-grad",
    ),
    "alibi_slopes_shape": ("--gpu H100 --core-attention-bias-type alibi", "--alibi-slopes-shape 2 16"),
    "softmax_type": ("--gpu H100", "--softmax-type learnable"),
    "softcap": ("--gpu H100", "--softcap 30"),
    "attention_dropout": ("--gpu H100", "--attention-dropout 0.1"),
    "is_training": ("--gpu H100 --cudnn 9.1.0 --head-dim 192,128", "--inference"),
    "deterministic": ("--gpu H100", "--deterministic"),
    "return_lse": ("--gpu H100", "--return-lse"),
    "return_max_logit": ("--gpu H100", "--return-max-logit"),
    "kv_cache": ("--gpu H100 --inference", "--kv-cache contiguous"),
    "page_size": (f"--gpu H100 {PAGED}", "--page-size 64", "--page-size 256"),
    "pad_between_seqs": (f"--gpu H100 --cudnn 9.7.1 {THD}", "--pad-between-seqs"),
    "cp_size": ("--gpu H100", "--cp-size 2"),
    "cp_comm_type": ("--gpu H100 --cp-size 2", "--cp-comm-type all_gather"),
    "cuda_graph": ("--gpu H100 --cudnn 9.1.0 --max-seqlen-q 1000", "--cuda-graph"),
    "fp8": ("--gpu H100 --params {recipe}", "--fp8"),
    "fp8_recipe": ("--gpu H100", "--fp8-recipe delayed"),
    "gpu": ("", "--gpu H100", "--gpu A100"),
    "torch": ("--gpu H100", "--torch 2.7"),
    "triton": ("--gpu H100", "--triton none"),
    "cudnn": ("--gpu H100 --head-dim-qk 192", "--cudnn 9.1.0"),
    "cudnn_frontend": ("--gpu H100", "--cudnn-frontend none"),
    "cuda": ("--gpu H100 --torch 2.8", "--cuda 11.8"),
    "python": ("--gpu H100 --torch 2.8 --cuda 12.8", "--python 3.13"),
    "flash_attn": ("--gpu H100", "--flash-attn 2.8.3"),
    "flash_attn_3": ("--gpu H100", "--flash-attn-3 3.0.0"),
    "flash_attn_4": ("--gpu H100", "--flash-attn-4 4.0.0b36"),
    "platform": ("--gpu H100", "--platform windows"),
    "torch_flash": ("--gpu A100", "--torch-flash FA3"),
    "missing": ("--gpu H100", "--missing libnvrtc"),
    "transformer_engine": (
        "--gpu H100 --cudnn 9.8.0 --head-dim 192,128 --layout thd --causal",
        "--transformer-engine 2.3",
    ),
    "mask_dtype": ("--gpu A100 --attn-mask-type arbitrary", "--mask-dtype fp32"),
    "tensor_rank": ("--gpu A100", "--tensor-rank 3"),
    "backend": ("--gpu H100", "--backend triton"),
    "allow": ("--gpu H100", "--allow triton,tiled"),
    "deny": ("--gpu H100", "--deny cudnn"),
    "adapt": ("--gpu H100 --head-dim-qk 100", "--adapt never"),
    "allow_known_bugs": ("--gpu H100 --cudnn 9.15.0 --max-seqlen-q 4097", "--allow-known-bugs all"),
    "memory_limit": ("--gpu H100 --attn-mask-type arbitrary", "--memory-limit 1MiB"),
}
NOTHING_YET = {"preview": "a rule of this release that is tried out"}


@pytest.fixture
def answer(run, tmp_path):
    """The answer without the question in it."""

    def ask(line: str) -> dict[str, Any]:
        recipe = tmp_path / "recipe.json"
        recipe.write_text('{"fp8_meta": {"recipe": {"kind": "delayed", "fp8_dpa": true}}}')
        code, out, err = run(f"explain --json {line.replace('{recipe}', str(recipe))}")
        assert code in (0, 3), err
        told = json.loads(out)
        return {name: told[name] for name in told if name not in ("params", "environment", "policy")}

    return ask


def test_every_flag_is_looked_at():
    assert set(CHANGES) | set(NOTHING_YET) >= set(FLAG_OF)


@each("field", [field for field in FLAG_OF if field in CHANGES])
def test_a_flag_changes_an_answer(answer, field):
    base, *instead, flag = CHANGES[field]
    assert flag.split()[0] in (FLAG_OF[field].name, FLAG_OF[field].negative)
    assert answer(" ".join([base, *instead])) != answer(f"{base} {flag}")


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


# ---- other names --------------------------------------------------------------------------------------

VALUES = {"qkv_layout": "sbhd", "attn_mask_type": "no_mask", "attention_dropout": "0.1"}


@each("field, alias", [(f, name) for f, names in ALIASES.items() for name in names])
def test_another_name_says_the_same(asked, field, alias):
    value = VALUES.get(field, "4")
    assert asked(f"explain --gpu H100 {alias} {value}") == asked(
        f"explain --gpu H100 {FLAG_OF[field].name} {value}"
    )


@each("field", ALIASES)
def test_two_names_at_once_are_one_clear_mistake(run, field):
    first, second = FLAG_OF[field].name, ALIASES[field][0]
    for words in ((first, second), (second, first)):
        value = VALUES.get(field, "4")
        code, out, err = run(["explain", "--gpu", "H100", *(w for name in words for w in (name, value))])
        assert (code, out) == (2, "")
        assert err == f"attnsel: {words[0]} and {words[1]} are one flag; leave out one of them\n"


@each(
    "words, expected",
    [
        ("--head-dim 64", {"head_dim_qk": 64}),
        ("--head-dim 192,128", {"head_dim_qk": 192, "head_dim_v": 128}),
        ("--head-dim 192 --head-dim-v 128", {"head_dim_qk": 192, "head_dim_v": 128}),
        ("--seqlen 8k", {"max_seqlen_q": 8192}),
        ("--seq-len 128_000", {"max_seqlen_q": 128_000}),
        ("--seqlen 8k --seqlen-kv 16Ki", {"max_seqlen_q": 8192, "max_seqlen_kv": 16384}),
        ("--causal", {}),
        ("--no-causal", {"attn_mask_type": "no_mask"}),
        ("--causal --layout thd", {"attn_mask_type": "padding_causal", "qkv_layout": "thd"}),
        ("--no-causal --layout t3hd", {"attn_mask_type": "padding", "qkv_layout": "t3hd"}),
        ("--window-size 1024", {"window_size": (1024, 1024)}),
        ("--window-size 1k,0", {"window_size": (1024, 0)}),
        ("--mask no_mask --window-size 64", {"attn_mask_type": "no_mask", "window_size": (64, 64)}),
        # transformers' meaning: the query's own key counts
        ("--sliding-window 1k", {"window_size": (1023, 0)}),
        ("--no-causal --sliding-window 64", {"attn_mask_type": "no_mask", "window_size": (64, 64)}),
        (
            "--heads 32 --kv-heads 8 --head-dim 128 --seqlen 8k --batch 1 --causal --dropout 0.1",
            {
                "num_heads": 32,
                "num_gqa_groups": 8,
                "max_seqlen_q": 8192,
                "batch_size": 1,
                "attention_dropout": 0.1,
            },
        ),
    ],
)
def test_short_ways_to_say_several_fields(asked, words, expected):
    assert asked(f"explain --gpu H100 {words}")[0] == AttentionParams(**expected)


@each("causal", [True, False])
def test_a_sliding_window_is_that_of_transformers(asked, causal):
    torch = pytest.importorskip("torch")
    masks = pytest.importorskip("transformers.masking_utils")
    name = "sliding_window_causal_mask_function" if causal else "sliding_window_bidirectional_mask_function"
    mask = getattr(masks, name, None)
    if mask is None:
        pytest.skip(f"this transformers has no {name}")
    (query,), keys = torch.tensor([100]), torch.arange(200)
    seen = [int(k) for k in keys if mask(8)(0, 0, query, k)]
    p, _, _ = asked(f"explain --gpu H100 {'--causal' if causal else '--no-causal'} --sliding-window 8")
    left, right = p.window_size
    assert seen == list(range(100 - left, 100 + right + 1))


def test_a_shorthand_wins_over_a_file_in_all_that_it_states(asked, tmp_path):
    file = tmp_path / "call.json"
    file.write_text('{"head_dim_qk": 192, "head_dim_v": 128, "attn_mask_type": "padding"}')
    p, _, _ = asked(f"explain --gpu H100 --params {file} --head-dim 64 --causal")
    assert (p.head_dim_qk, p.head_dim_v, p.attn_mask_type) == (64, 64, "padding_causal")


@each(
    "words, told",
    [
        ("--head-dim 64 --head-dim-qk 128", "--head-dim 64: --head-dim-qk 128 states head_dim_qk too"),
        ("--head-dim 64,64 --head-dim-v 128", "--head-dim 64,64: --head-dim-v 128 states head_dim_v too"),
        ("--seqlen 4 --max-seqlen-q 8", "--seqlen 4: --max-seqlen-q 8 states max_seqlen_q too"),
        ("--causal --mask padding", "--causal: --attn-mask-type padding states attn_mask_type too"),
        ("--sliding-window 4 --window-size 3 0", "--sliding-window 4: --window-size 3 0 states window_size"),
        ("--causal --no-causal", "--causal and --no-causal are one flag"),
        ("--head-dim 1,2,3", "--head-dim 1,2,3: must be one number, or two"),
        ("--head-dim -5", "--head-dim -5: head_dim_qk must be greater than 0"),
        ("--seqlen 8,192", "--seqlen 8,192: must be a whole number without commas: 8192"),
        ("--seqlen 4096.", "--seqlen 4096.: must be a whole number: 4096"),
        ("--sliding-window 0", "--sliding-window 0: must be at least 1"),
        ("--window-size 1 2 3", "must be LEFT RIGHT, or one number for both sides"),
        ("--window-size 1 --window-size 2", "--window-size 1 2: is given twice"),
        ("--window-size", "--window-size: needs a number behind it"),
        ("--heads 2 --heads 2", "--heads is given twice"),
        ("--heads", "--heads needs a value behind it"),
    ],
)
def test_a_contradiction_is_one_line(run, words, told):
    code, out, err = run(f"explain --gpu H100 {words}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


# ---- numbers ------------------------------------------------------------------------------------------


@each(
    "text, number",
    {"8k": 8192, "8K": 8192, "8Ki": 8192, "1M": 1 << 20, "2Mi": 2 << 20, "128_000": 128_000}.items(),
)
def test_numbers_as_people_type_them(text, number):
    assert read_count("--x", text) == number


@each(
    "text",
    [
        "",
        "8,192",
        "8.5k",
        "4096.",
        "1e3",
        "0x10",
        "٣",
        "²",
        "+8",
        "8 k",
        "8kk",
        "8G",
        "_8",
        "1__0",
        "9" * 5000,
    ],
)
def test_what_is_no_number_is_said_to_be_none(text):
    with pytest.raises(InvalidInput, match=r"--x = .*(must be a whole number|far too large)"):
        read_count("--x", text)


def test_a_window_of_one_number_is_both_sides():
    assert read_window("--x", ["5"]) == (5, 5)
    assert read_window("--x", ["-1", "0"]) == read_window("--x", ["-1,0"]) == (-1, 0)


# ---- what was meant -----------------------------------------------------------------------------------

EVERY = [name for flag in (*FLAGS, *SHORTHANDS) for name in (*flag.names, flag.negative) if name]
EVERY += ["--seq-len", "--json", "--params", "--env", "--short"]


@each(
    "typed, meant",
    [
        ("--num-query-groups", "--num-gqa-groups"),
        ("--n-kv-heads", "--num-gqa-groups"),
        ("--num_kv_heads", "--num-kv-heads"),
        ("--is-causal", "--causal"),
        ("--no-is-causal", "--no-causal"),
        ("--causl", "--causal"),
        ("--nheads", "--num-heads"),
        ("--headdim", "--head-dim"),
        ("--context-length", "--seqlen"),
        ("--dropout-p", "--attention-dropout"),
        ("--arch", "--gpu"),
        ("--cudnn-version", "--cudnn"),
        ("--flash-attn2", "--flash-attn"),
        ("--frobnicate", None),
    ],
)
def test_a_flag_is_suggested_by_meaning_first(typed, meant):
    assert meant_flag(typed, EVERY) == meant
