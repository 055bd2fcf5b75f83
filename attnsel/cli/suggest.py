"""What was meant by a flag or a command that there is not: by its meaning first, then by its spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cyclopts import CycloptsError, RepeatArgumentError, UnknownOptionError

from attnsel.errors import short

if TYPE_CHECKING:
    from attnsel.cli.flags import Flag

# By what to say instead: how other libraries and tools name it, without dashes.
_MEANT: dict[str, str] = {
    "--num-heads": "nheads n-heads num-q-heads q-heads nhead num-query-heads attention-heads n-head",
    "--num-gqa-groups": "num-query-groups gqa-groups gqa enable-gqa n-kv-heads nheads-k nheads-kv kv-groups "
    "num-heads-kv num-heads-k num-kv-groups groups heads-kv heads-k mqa n-head-kv num-kv num-gqa",
    "--batch-size": "bs b batchsize bsz micro-batch-size mbs num-seqs",
    "--seqlen": "seq sequence-length seq-length max-seqlen max-seq-len max-seq-length ctx context "
    "context-length max-model-len length n-ctx s max-position-embeddings sequence",
    "--max-seqlen-q": "seq-len-q q-len query-length sq s-q q-length target-length max-seq-len-q q-seqlen",
    "--max-seqlen-kv": "seqlen-k seq-len-kv seq-len-k kv-len kv-length skv s-kv k-len key-length "
    "source-length max-seqlen-k max-seq-len-kv past-length kv-seqlen cache-len",
    "--head-dim": "headdim head-size d dim d-head kv-channels hidden-size-per-head qk-head-dim dim-head",
    "--head-dim-qk": "d-qk hdim-qk head-dim-q head-dim-k",
    "--head-dim-v": "v-head-dim d-v hdim-v headdim-v dv",
    "--causal": "is-causal autoregressive causal-mask use-causal-mask",
    "--attn-mask-type": "attn-mask attention-mask mask-type attn-mask-types padding padding-mask "
    "attention-mask-type",
    "--sliding-window": "swa window local local-window local-attention sliding-window-size attention-window",
    "--attention-dropout": "dropout-p attn-dropout p-dropout dropout-prob attention-probs-dropout-prob",
    "--dtype": "precision data-type torch-dtype bf16 fp16 half qkv-dtype element-type bfloat16 float16",
    "--qkv-layout": "qkv-format format input-layout memory-format tensor-layout varlen thd bshd sbhd bhsd",
    "--inference": "eval infer no-training forward-only fwd-only no-grad decode decoding prefill forward",
    "--training": "train backward bwd grad requires-grad",
    "--softmax-type": "sinks sink attention-sinks s-aux attention-sink softmax off-by-one",
    "--softcap": "logits-soft-cap soft-cap attn-logit-softcapping logit-softcap logit-cap softcapping",
    "--core-attention-bias-type": "bias attn-bias alibi bias-type attention-bias score-mod",
    "--kv-cache": "cache paged paged-kv kvcache kv-cache-type use-cache",
    "--page-size": "block-size page-block-size kv-block-size paged-block-size page",
    "--cp-size": "cp context-parallel context-parallel-size ring world-size cp-ranks",
    "--cp-comm-type": "cp-comm ulysses comm-type cp-type",
    "--cuda-graph": "graph cudagraph cuda-graphs enable-cuda-graph graphs",
    "--fp8-recipe": "recipe fp8-dpa fp8-mha fp8-meta mxfp8 scaling",
    "--return-lse": "lse softmax-lse return-softmax-lse need-weights return-attn-probs return-softmax",
    "--return-max-logit": "max-logit qk-clip muon-clip",
    "--gpu": "device arch compute-capability sm card gpu-name cc device-name gpu-type accelerator",
    "--cuda": "cuda-version cu cudatoolkit toolkit",
    "--cudnn": "cudnn-version nvidia-cudnn cudnn-backend",
    "--cudnn-frontend": "frontend cudnn-fe fe nvidia-cudnn-frontend",
    "--torch": "pytorch torch-version pytorch-version",
    "--triton": "triton-version",
    "--python": "python-version py",
    "--flash-attn": "flash-attention flash flash-attn-version fa2 fa flash-attn-2 flash-attention-2",
    "--flash-attn-3": "fa3 flash-attention-3",
    "--flash-attn-4": "fa4 flash-attention-4",
    "--platform": "os system windows linux",
    "--backend": "force impl kernel attn-implementation attn-impl attention-backend use-backend only",
    "--deny": "disable exclude without forbid",
    "--allow": "backends enable include",
    "--memory-limit": "memory max-memory mem workspace mem-limit",
    "--deterministic": "determinism reproducible",
    "--params": "config file call input question",
    "--env": "environment machine doctor",
    "--json": "as-json output-json format-json",
    "--markdown": "md issue github",
    "--short": "brief summary concise quiet compact tldr",
    "--ask-library": "ask library conformance check",
    "--sources": "source where verbose why",
}
_CHANGES_NOTHING = {
    "softmax-scale": "the scale of the scores decides nothing, so there is no flag for it",
    "scale": "the scale of the scores decides nothing, so there is no flag for it",
    "sm-scale": "the scale of the scores decides nothing, so there is no flag for it",
    "scaling-factor": "the scale of the scores decides nothing, so there is no flag for it",
    "model": "models are not known by name; say --heads, --kv-heads and --head-dim from its config.json",
    "hidden-size": "say --heads and --head-dim, whose product it is",
    "tp-size": "a rank of tensor parallelism runs heads / tp_size: say --heads and --kv-heads of one rank",
    "tensor-parallel-size": "say --heads and --kv-heads of one rank, each divided by it",
    "num-layers": "every layer is one such call, so there is no flag for it",
}
_COMMANDS_MEANT: dict[str, str] = {
    "explain": "ask plan select why-not what which choose select-backend choice query predict show run-plan",
    "rule": "why code page describe",
    "rules": "list ls codes all-rules constraints list-rules",
    "matrix": "grid table compare sweep support support-matrix",
    "doctor": "env environment info check diagnose collect-env versions version status",
    "prove": "bench benchmark test test-gpu selftest verify",
    "run": "exec launch python start",
    "conformance": "validate audit conform",
    "completion": "completions install-completion complete shell",
    "gpus": "gpu cards devices list-gpus catalogue",
}


def unknown_flag(error: UnknownOptionError, command: str, known: Iterable[str]) -> str:
    """One sentence about a flag that ``command`` does not have; ``known``: those that it has."""
    typed = error.token.keyword or error.token.value
    name = typed.split("=", 1)[0]
    said = f"there is no flag {short(name, str)}"
    bare = name.lstrip("-").replace("_", "-").casefold()
    if bare in _CHANGES_NOTHING and "--gpu" in known:
        return f"{said}: {_CHANGES_NOTHING[bare]}"
    meant = meant_flag(name, known)
    if meant is None:
        return f"{said}; attnsel {command} --help shows every flag"
    return f"{said}. Did you mean {meant}?"


def meant_flag(name: str, known: Iterable[str]) -> str | None:
    """The flag of ``known`` that means what ``name`` says, or else is spelt much like it."""
    names = list(known)
    no = name.startswith("--no-")
    bare = name.lstrip("-").replace("_", "-").casefold()
    positive = bare.removeprefix("no-") if no else bare
    for word in dict.fromkeys((bare, positive)):
        if f"--{word}" in names:
            return f"--{word}"
        for flag, others in _MEANT.items():
            negative = f"--no-{flag.removeprefix('--')}"
            if word in others.split() and flag in names:
                return negative if no and word == positive and negative in names else flag
    close = difflib.get_close_matches(f"--{bare}", names, n=1, cutoff=0.75)
    return close[0] if close else None


def unknown_command(typed: str, commands: Sequence[str]) -> str:
    """One sentence about a command that there is not."""
    if typed.startswith("-"):
        where = "write it behind, such as attnsel explain --gpu H100"
        return f"{short(typed, str)} comes before the command; {where}"
    word = typed.casefold().replace("_", "-")
    said = f'there is no command "{short(typed, str)}"'
    meant = next((name for name in commands if word in _COMMANDS_MEANT.get(name, "").split()), None)
    if meant is None:
        meant = next(iter(difflib.get_close_matches(word, commands, n=1, cutoff=0.6)), None)
    if meant is not None:
        return f'{said}. Did you mean "{meant}"?'
    return f"{said}; there are {', '.join(commands)}"


def repeated(error: RepeatArgumentError, words: Sequence[str], flags: Iterable[Flag]) -> str:
    """One sentence about a flag that was given twice, under one of its names or under two."""
    name = error.token.keyword or ""
    for flag in flags:
        names = [*flag.names, *([flag.negative] if flag.negative else [])]
        if name in names:
            used = [word.split("=", 1)[0] for word in words]
            other = next((used_name for used_name in used if used_name in names and used_name != name), None)
            if other is not None:
                return f"{other} and {name} are one flag; leave out one of them"
    return f"{short(name, str)} is given twice"


def known_flags(error: CycloptsError) -> list[str]:
    """Every name that the command of an error has a flag for."""
    arguments = getattr(error, "argument_collection", None) or ()
    return [name for argument in arguments for name in argument.names if name.startswith("--")]
