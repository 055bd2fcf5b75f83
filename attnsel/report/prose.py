"""Our own sentences taken apart: names of code, codes of rules, addresses, numbers of issues."""

from __future__ import annotations

import re
from functools import cache

from attnsel.report.document import Code, Inline, Link, Ref

REPOSITORIES = {
    "ComfyUI": "Comfy-Org/ComfyUI",
    "TransformerEngine": "NVIDIA/TransformerEngine",
    "cudnn-frontend": "NVIDIA/cudnn-frontend",
    "flash-attention": "Dao-AILab/flash-attention",
    "flashinfer": "flashinfer-ai/flashinfer",
    "pytorch": "pytorch/pytorch",
    "sam2": "facebookresearch/sam2",
    "sd-scripts": "kohya-ss/sd-scripts",
    "sglang": "sgl-project/sglang",
    "torch-xpu-ops": "intel/torch-xpu-ops",
    "transformers": "huggingface/transformers",
    "triton": "triton-lang/triton",
    "trl": "huggingface/trl",
    "unsloth": "unslothai/unsloth",
}
"""Where the issues of a repository are that a source names by its last name alone."""

_TOKEN = r"""
      (?P<quoted>``?[^`\n]+``?)
    | (?P<url>https?://[^\s,;)"]+)
    | (?P<pip>\bpip\ install(?:\ -\S+)*\ (?:'[^']+'|[\w.-]*\w))
    | (?P<issue>(?P<repository>(?:[A-Za-z][\w.-]*/)?[A-Za-z][\w.-]*)?(?P<pr>(?:\bPR\ )?\#)(?P<number>\d+)\b)
    | (?P<rule>\b[A-Z]+\d{3}\b)
    | (?P<flag>(?<![\w-])--[a-z][\w-]*)
    | (?P<name>
          (?<![\w.])(?:[\w.-]+/)*(?:\w+\.)*\w*[A-Za-z0-9]_[\w.]*\w(?:\(\))?(?:=\w+)?   # head_dim_qk, a/b_c.py
        | (?<![\w./])(?:sdpa|flash_attn)\.\w+
        | (?<![\w./])F\.sdpa\b
        | (?<![\w./])(?:[\w-]+/)+[\w-]+\.\w+ | (?<![\w./])[\w-]+\.(?:py|h|cpp|cu|so|toml|md)\b
      )
"""


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Compiled when a sentence is first taken apart."""
    known = re.compile(rf"\b(?:{'|'.join(map(re.escape, REPOSITORIES))})\b")
    return re.compile(_TOKEN, re.VERBOSE), known


def spans(text: str) -> tuple[Inline, ...]:
    """A text in parts. An issue without a repository is of the one that was named last."""
    text = " ".join(text.split())
    token, known = _patterns()
    repository, end = "", 0
    parts: list[Inline] = []
    for found in token.finditer(text):
        between, whole = text[end : found.start()], found[0]
        end = found.end()
        parts.append(between)
        named = known.findall(between)
        repository = REPOSITORIES[named[-1]] if named else repository
        if found["issue"]:
            name = found["repository"] or ""
            repository = (name if "/" in name else REPOSITORIES.get(name, "")) if name else repository
            address = f"https://github.com/{repository}/issues/{found['number']}" if repository else ""
            parts.append(Link(whole, address))
        elif found["rule"]:
            parts.append(Ref(whole))
        else:
            parts.append(Link(whole, whole) if found["url"] else Code(whole.strip("`")))
    return (*parts, text[end:])
