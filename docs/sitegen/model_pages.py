"""Three models as pages, made by the command that anybody would type: ``attnsel explain --model --html``."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from html import escape

from attnsel import cli
from sitegen.model import File

FOLDER = "model-pages"
SHOWN = {
    "llama-3-8b-t4": ("Llama 3 8B on a T4, which has no bf16 and no flash kernel", "llama-3-8b", "T4"),
    "gemma-3-4b-rtx-4090": ("Gemma 3 4B on an RTX 4090: windows in most layers", "gemma-3-4b", "RTX 4090"),
    "deepseek-v3-h100": ("DeepSeek-V3 on an H100: heads of 192 and 128", "deepseek-v3", "H100"),
}  # fmt: skip
"""By the name of a page: what it shows, the preset, the GPU."""


def files() -> Iterator[File]:
    """The pages, and one that leads to them."""
    items = []
    for name, (about, model, gpu) in SHOWN.items():
        words = ["explain", "--model", model, "--gpu", gpu, "--html", "-"]
        printed = io.StringIO()
        with redirect_stdout(printed):
            code = cli.main(words)
        if code != cli.FOUND:
            raise ValueError(f"attnsel {' '.join(words)} ended with {code}")
        yield File(f"{FOLDER}/{name}.html", printed.getvalue())
        shell = " ".join(f'"{word}"' if " " in word else word for word in words[:-1])
        items += [
            f'- <a href="{name}.html">{escape(about)}</a>',
            "",
            f"    `attnsel {shell} {name}.html`",
            "",
        ]
    yield File(f"{FOLDER}/index.md", "\n".join([*_INTRODUCTION, *items]), "Three models")


_INTRODUCTION = (
    "# Three models, as pages",
    "",
    "What `--html` writes: a file that needs no network, with every layer and phase, every kernel and why it "
    "runs or cannot, the ways to a faster one, and memory over length. The commands below made these pages; "
    "any other model, GPU or release is asked the same way.",
    "",
)
