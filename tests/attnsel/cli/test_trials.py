"""Questions from public threads, as a user would type them, and what the thread found out.

Each row: the thread, the command, what is first, words that the answer must have, and must not have.
What is asked about in Python, or printed by ``attnsel doctor``, is tested beside its subject.
"""

from __future__ import annotations

import json
import shlex
from typing import NamedTuple

import pytest

from attnsel.cli import main


class Trial(NamedTuple):
    thread: str
    command: str
    first: str | None  # the candidate that runs; None: nothing does
    says: tuple[str, ...] = ()
    not_said: tuple[str, ...] = ()


MLA = "--head-dim 192,128"
THD = "--qkv-layout thd --attn-mask-type padding_causal"
TRIALS = [
    # ---- what was assumed
    Trial(
        "TransformerEngine#2354",
        f"--gpu H100 --cudnn 9.8.0 {THD} --batch 2 --heads 1 --seqlen 2208 {MLA}",
        "cudnn",
        ("refused with 1.24 to 1.28 (CUDNN230, CUDNN232): which do you have?",),
        ("To get cudnn",),
    ),
    Trial(
        "TransformerEngine#2354, with its TransformerEngine",
        f"--gpu H100 --cudnn 9.8.0 {THD} --batch 2 --heads 1 --seqlen 2208 {MLA} --transformer-engine 2.3",
        "cudnn",
        ("TransformerEngine 2.3.0 has cudnn-frontend 1.11.0 compiled in",),
    ),
    Trial(
        "TransformerEngine#1821",
        f"--gpu A100 --cudnn 9.8.0 {THD} {MLA}",
        "sdpa.varlen",
        ("CUDNN235", "On another GPU: cudnn"),
        ("CUDNN232",),
    ),
    Trial(
        "TransformerEngine#2186",
        f"--gpu H100 --cudnn 9.7.1 {THD} --heads 12 --cp-size 2",
        "sdpa.varlen",
        ("BUG011", "sdpa.varlen runs every step"),
    ),
    Trial(
        "TransformerEngine#2798",
        '--gpu "RTX 5090" --cudnn 9.18.1 --deterministic --transformer-engine 2.14',
        "cudnn",
        ("TE002",),
    ),
    Trial(
        "TransformerEngine#3333",
        f'--gpu "RTX 5090" --torch 2.11 --cudnn 9.25.0 {THD} --transformer-engine 2.17.0',
        "sdpa.varlen",
        ("TE003",),
    ),
    Trial(
        "TransformerEngine#1197",
        "--gpu H100 --torch 2.6 --window-size 1024 0 --transformer-engine 1.10",
        "sdpa.varlen",
        ("TE004",),
    ),
    # ---- cards and wheels
    Trial("pytorch#172352", "--gpu V100 --dtype fp16", "sdpa.efficient", (), ("CUDA 13",)),
    Trial(
        "pytorch#172352, with CUDA 13",
        "--gpu V100 --dtype fp16 --torch 2.14 --cuda 13.0",
        None,
        ("INSTALL008", "--index-url https://download.pytorch.org/whl/cu126"),
    ),
    Trial("a 5090 and torch 2.7", '--gpu "RTX 5090" --torch 2.7', "sdpa.flash", ("CUDA 12.8.0*",), ("!",)),
    Trial("torch 2.2.2's own companions", "--gpu A100 --torch 2.2.2", "sdpa.flash", ("CUDA 12.1.0*",)),
    # ---- ways out
    Trial(
        "TensorRT-LLM#17849",
        "--gpu H100 --cudnn 9.20.0 --fp8 --fp8-recipe current --inference --mask no_mask",
        None,
        ("FP8 recipe current → delayed", "fp8_dpa=False"),
        ("B200",),
    ),
    Trial(
        "recipes that fit together",
        f"--gpu B200 --cudnn 9.10.1 {MLA}",
        "sdpa.flash",
        ("pip install 'torch==2.11.0'", "torch 2.11.0 is the first whose wheels bring cuDNN 9.19.0"),
        ("nvidia-cudnn-cu12", "torch>="),
    ),
    Trial(
        "cosmos-framework#153",
        "--gpu B200 --torch 2.13 --fp8 --fp8-recipe mxfp8",
        None,
        (
            "pip install --no-deps 'nvidia-cudnn-cu13==9.21.0.82'",
            "torch 2.13.0 pins nvidia-cudnn-cu13==9.20.0.48",
        ),
    ),
    # ---- bugs that are steered around
    Trial(
        "pytorch#193893",
        "--gpu B200 --torch 2.11 --seqlen-q 1 --seqlen-kv 8k --kv-heads 4 --inference",
        "sdpa.efficient",
        ("repeats 4 kv heads to 8", "BUG005", "[pytorch#193893]", "BUG005 (avoided)", "sees 1 key of 8192"),
    ),
    Trial(
        "cudnn-frontend#160",
        "--gpu H100 --torch 2.14 --cudnn 9.15.0 --seqlen 4097",
        "cudnn",
        ("avoids BUG004", "[pytorch#169849]", "BUG004 (avoided)"),
    ),
    Trial(
        "pytorch#191937",
        "--gpu H100 --torch 2.13 --qkv-layout bhsd --batch 1 --heads 8 --head-dim 512 --inference"
        " --mask arbitrary --seqlen-q 2049 --seqlen-kv 2049 --stride k=1049088,0,512,1"
        " --stride v=1049088,0,512,1",
        "sdpa.efficient",
        ("BUG031",),
    ),
    Trial(
        "pytorch#121943",
        "--gpu A100 --torch 2.2 --mask arbitrary --seqlen 157 --qkv-layout bhsd",
        "sdpa.efficient",
        ("HINT008",),
    ),
    # ---- F.sdpa's own conditions
    Trial(
        "pytorch#137347",
        "--gpu H100 --torch 2.6 --qkv-layout bhsd --mask arbitrary --batch 2 --heads 32 --seqlen-q 157"
        " --seqlen-kv 6404",
        "sdpa.cudnn",
    ),
    Trial("pytorch#191612", "--gpu H100 --mask arbitrary --mask-dtype fp32", "sdpa.cudnn", ("SDPA206",)),
    Trial("pytorch#117354", "--gpu A100 --torch 2.6 --tensor-rank 3", "sdpa.varlen", ("SDPA017",)),
    Trial(
        "sam2#48, kohya#1884",
        '--gpu "RTX 4090" --platform windows --torch 2.4',
        "sdpa.efficient",
        ("SDPA811",),
    ),
    Trial(
        "pytorch#125070", '--gpu "RTX 3090" --platform windows --torch 2.3', "sdpa.efficient", ("SDPA811",)
    ),
    Trial(
        "diffusers#9704", '--gpu "RTX 4090" --torch 2.5.0 --missing libnvrtc', "sdpa.flash", ("INSTALL009",)
    ),
    Trial("ComfyUI#10090", '--gpu "RTX 4090" --torch 2.8 --missing libnvrtc', "sdpa.flash", ("INSTALL009",)),
    Trial("pytorch#176915", "--gpu H100 --torch 2.5 --cp-size 2 --cudnn 9.1.0", "sdpa.flash", ("HINT010",)),
    # ---- other makers
    Trial("pytorch#138864", "--gpu gfx942 --torch 2.5", "sdpa.flash", (), ("nobody has checked",)),
    Trial("TheRock#1908", "--gpu gfx1100 --torch 2.8 --dtype fp16", "sdpa.flash"),
    Trial("pytorch#149261", "--gpu mps --torch 2.6", "sdpa.math", (), ("nobody has checked",)),
    # ---- packages and suspicious questions
    Trial(
        "flash-attention#1638", "--gpu T4 --dtype fp16 --flash-attn 2.7.4", "sdpa.efficient", ("FLASH202",)
    ),
    Trial(
        "vllm#12656: FlashAttention 2 takes 72, its caller refused",
        "--gpu A100 --torch 2.8 --flash-attn 2.8.3 --head-dim 72 --inference --backend flash_attn.2",
        "flash_attn.2",
    ),
    Trial(
        "gpt-oss sinks (flash-attention PR 2336)",
        "--gpu H100 --heads 64 --kv-heads 8 --head-dim 64 --sliding-window 128 --softmax-type learnable",
        "cudnn",
    ),
    Trial(
        "--fp8 alone", "--gpu H100 --cudnn 9.20.0 --fp8", "cudnn", ("fp8 without a recipe", "--fp8-recipe")
    ),
    Trial("swapped h and s", "--gpu A100 --heads 4096 --seqlen 16", "sdpa.flash", ("HINT004",)),
]


@pytest.mark.parametrize("trial", TRIALS, ids=[trial.thread for trial in TRIALS])
def test_a_thread_gets_its_answer(trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", *shlex.split(trial.command)]
    code = main([*words, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["backend"] == trial.first
    assert code == (0 if trial.first else 3)
    assert main(words) == code
    said = " ".join(capsys.readouterr().out.split())
    for text in trial.says:
        assert text in said, said
    for text in trial.not_said:
        assert text not in said, said
