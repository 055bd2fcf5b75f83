"""Questions as they stand in an address of the playground, drawn at random: right ones and wrong ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from urllib.parse import parse_qsl, quote

from attnsel.backends.registry import CANDIDATES
from sitegen.playground import form, glue

WRONG = (
    "",
    "foo",
    "-3",
    "0",
    "1e9",
    "9" * 30,
    "<b>x</b>",
    "a&b=c",
    "Ünïcode ✔",
    "'; ls",
    "8k ",
    "none",
    "../..",
    "%00",
)
_NUMBERS = {
    "batch-size": (1, 2, 8, 64),
    "num-heads": (1, 8, 16, 32, 40, 128),
    "num-gqa-groups": (1, 2, 4, 8, 16),
    "max-seqlen-q": (1, 17, 128, 1000, "4k", 4096, "32k"),
    "max-seqlen-kv": (1, 128, 4096, "8k", "128k"),
    "head-dim-qk": (32, 40, 64, 96, 128, 192, 256, 576),
    "head-dim-v": (64, 128, 256, 512),
    "softcap": (0.0, 30, 50.0),
    "attention-dropout": (0.0, 0.1),
    "page-size": (16, 64, 256),
    "cp-size": (1, 2, 8),
    "tensor-rank": (3, 4),
    "gpus-per-node": (2, 8),
    "link-gbs": (50, 450),
    "network-gbs": (12.5, 50),
    "seqlen": (512, "2k", 8192),
    "sliding-window": (1, 128, 4096),
    "tp-size": (1, 2, 8),
    "image-size": (224, 896),
}
_TEXTS = {
    "head-dim": ("64", "128", "192,128", "576,512"),
    "qkv-layout": (
        "bshd",
        "sbhd",
        "thd",
        "bhsd",
        "bs3hd",
        "thd_t2hd",
        "sbhd_sb2hd",
        "paged_kv_bshd_bshd_bshd",
    ),
    "window-size": ("-1,-1", "128,0", "1024,1024", "64", "-1,0", "0,0"),
    "alibi-slopes-shape": ("16", "2,16", "8"),
    "mask-dtype": ("bool", "fp32", "bf16"),
    "python": ("3.10", "3.12", "3.14"),
    "transformer-engine": ("1.13", "2.4", "2.8", "2.18", "none"),
    "flash-attn-3": ("3.0.0", "none"),
    "missing": ("libnvrtc", "libcudnn", "libcudnn,libnvrtc"),
    "backend": tuple(CANDIDATES),
    "allow": ("cudnn,triton", "sdpa.flash", "flash_attn.2,tiled"),
    "deny": ("cudnn", "triton,tiled"),
    "allow-known-bugs": ("all", "BUG001"),
    "memory-limit": ("1GiB", "200MB", "1"),
    "stride": ("q=16384,2048,128,1", "k=0,0,128,1", "v=1,2"),
    "misaligned": ("q", "q,k,v", "q=4", "mask"),
    "switch": ("NVTE_FUSED_ATTN=0", "NVTE_FLASH_ATTN=0", "flash=0", "TORCH_CUDNN_SDPA_DEPRIORITIZED=1"),
    "rows": ("head_dim_qk=64,128,192", "max_seqlen_q=1k:4k:*2", "gpu=A100,H100", "dtype=bf16,fp32", "foo=1"),
    "cols": (
        "cudnn=8.9.7,9.5.0",
        "attn_mask_type=no_mask,causal",
        "window_size=128x0,-1x-1",
        "fp8_recipe=mxfp8",
    ),
}
_RARE = {
    "model",
    "tp-size",
    "image-size",
    "rows",
    "cols",
    "kernel",
    "backend",
    "allow",
    "stride",
    "misaligned",
    "as",
    "switch",
    "head-dim",
    "seqlen",
}
_RARE |= {
    "tensor-rank",
    "mask-dtype",
    "cp-size",
    "gpus-per-node",
    "link-gbs",
    "network-gbs",
    "missing",
    "platform",
}
_GPUS = (
    "H100",
    "A100",
    "B200",
    "RTX 4090",
    "RTX 5090",
    "T4",
    "L40S",
    "sm103",
    "sm75",
    "gfx942",
    "cpu",
    "mps",
    "xpu",
)


_GOES_WITH = {
    "core-attention-bias-requires-grad": "core-attention-bias-type=post_scale_bias training",
    "core-attention-bias-shape": "core-attention-bias-type=pre_scale_bias",
    "alibi-slopes-shape": "core-attention-bias-type=alibi",
    "pad-between-seqs": "qkv-layout=thd attn-mask-type=padding_causal",
    "page-size": "kv-cache=paged qkv-layout=paged_kv_bshd_bshd_bshd attn-mask-type=padding inference",
    "kv-cache": "inference",
    "gpus-per-node": "cp-size=8",
    "link-gbs": "cp-size=4",
    "network-gbs": "cp-size=16",
    "cp-comm-type": "cp-size=2",
    "switch": "as=te",
    "tp-size": "model=llama-3-8b",
    "image-size": "model=gemma-3-4b",
    "rows": "cols=cudnn=8.9.7,9.5.0",
    "cols": "rows=head_dim_qk=64,192",
    "kernel": "rows=head_dim_qk=64,192 cols=gpu=A100,H100",
}
"""What some fields need beside them: it is stated nearly always."""


def questions(seed: int) -> Iterator[str]:
    """Query strings without end."""
    draw = random.Random(seed)
    fields = {field.name: field for field in form.fields(glue().NOT_HERE)}
    while True:
        yield "&".join(f"{quote(name)}={quote(value)}" for name, value in _pairs(draw, fields))


def words(query: str) -> list[str]:
    """The command that asks the same."""
    pairs = parse_qsl(query, keep_blank_values=True)
    grid = {"rows", "cols", "kernel"} & {name for name, _ in pairs}
    return ["can-i-use" if grid else "explain", *(f"--{n}={v}" if v else f"--{n}" for n, v in pairs)]


def _pairs(draw: random.Random, fields: dict[str, form.Field]) -> list[tuple[str, str]]:
    gpus = fields["gpu"].suggestions
    pairs = [("gpu", draw.choice(_GPUS) if draw.random() < 0.6 else draw.choice(gpus))]
    common = [name for name in fields if name != "gpu" and name not in _RARE]
    names = draw.sample(common, draw.randint(0, 6))
    names += draw.sample(sorted(_RARE), draw.choice((0, 0, 0, 1, 2)))
    if draw.random() < 0.06:
        names += ["rows", "cols"]
    stated = {"gpu": pairs[0]}
    for name in names:
        field = fields[name]
        shown = draw.choice([n for n in (*field.names, field.negative) if n])
        stated[name] = (shown, "" if field.yes_or_no else _value(draw, field))
        if name in _GOES_WITH and draw.random() < 0.9:
            for text in _GOES_WITH[name].split():
                with_, _, value = text.partition("=")
                stated["training" if with_ == "inference" else with_] = (with_, value)
    pairs = list(stated.values())
    if draw.random() < 0.05:  # something that is wrong
        place = draw.randrange(len(pairs))
        pairs[place] = (pairs[place][0], draw.choice(WRONG))
    if draw.random() < 0.02:
        pairs.append((draw.choice(("foo", "head-dims", "causal", "gpu")), draw.choice(WRONG)))
    return pairs


def _value(draw: random.Random, field: form.Field) -> str:
    if field.name in _NUMBERS:
        return str(draw.choice(_NUMBERS[field.name]))
    if field.name in _TEXTS:
        return draw.choice(_TEXTS[field.name])
    choices = field.choices or field.suggestions[:25]
    return draw.choice((*choices, "none") if field.suggestions else choices)
