"""Sentences of rules as Markdown: names of code as code, codes of rules and numbers of issues as links.

What it writes reads the same on GitHub and in Python-Markdown: a character with a meaning becomes an entity.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from attnsel.errors import printable
from attnsel.report.markdown import code

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

_TOKEN = re.compile(
    r"""
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
    """,
    re.VERBOSE,
)
_KNOWN_REPOSITORY = re.compile(rf"\b(?:{'|'.join(map(re.escape, REPOSITORIES))})\b")
_MARKUP = re.compile(r"[&<>*`\[\]|\\~^{}$]|(?<!\w)_|_(?!\w)|(?<=\w)@(?=\w)|^(?:\d+(?=[.)] )|[#+=-](?=\s))")


def _no_link(code: str) -> str:
    return ""


def prose(text: str, rule_at: Callable[[str], str] = _no_link) -> str:
    """``text`` as one line of Markdown. ``rule_at``: the address of a rule's page, or nothing."""
    text = printable(" ".join(text.split()))
    repository = ""
    done, end = [], 0
    for found in _TOKEN.finditer(text):
        between = text[end : found.start()]
        named = _KNOWN_REPOSITORY.findall(between)
        repository = REPOSITORIES[named[-1]] if named else repository
        done.append(plain(between))
        end = found.end()
        whole = found[0]
        if found["issue"]:
            name = found["repository"] or ""
            repository = (name if "/" in name else REPOSITORIES.get(name, "")) if name else repository
            address = f"https://github.com/{repository}/issues/{found['number']}" if repository else ""
            done.append(link(plain(whole), address))
        elif found["rule"]:
            done.append(link(whole, rule_at(whole)))
        elif found["url"]:
            done.append(link(plain(whole), whole))
        else:
            done.append(code(whole.strip("`")))
    done.append(plain(text[end:]))
    return "".join(done)


def plain(text: str) -> str:
    """``text`` as it stands: nothing in it is markup."""
    return _MARKUP.sub(lambda found: "".join(f"&#{ord(sign)};" for sign in found[0]), text)


def link(text: str, address: str) -> str:
    """``text``, already Markdown, as a link where there is an address."""
    return f"[{text}]({address})" if address else text


def words(items: list[str], last: str = "and") -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}" if items else ""


def sentence(text: str) -> str:
    """``text`` with a capital at its beginning, unless it begins with a name that is written small."""
    first = re.match(r"[a-z]+(?=[ ,;:])", text)
    if first is None or first[0] in _SMALL:
        return text
    return text[0].upper() + text[1:]


_SMALL = frozenset({"attnsel", "cudnn", "libcudnn", "libtorch", "pip", "tiled", "torch", "triton"})
