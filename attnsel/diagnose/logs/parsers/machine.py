"""What messages about the machine need beside their rows: names of cards, versions as packages have them."""

from __future__ import annotations

import re
from contextlib import suppress

from attnsel.diagnose.logs.message import Facts
from attnsel.environment import describe_device
from attnsel.environment.gpus import look_up_gpu
from attnsel.errors import InvalidInput


def package(match: re.Match[str]) -> Facts:
    """A package's release, without what its build adds; torch's says CUDA's too (+cu130)."""
    name = re.sub(r"^nvidia-|-cu\d\d$", "", match["package"]).replace("-", "_")
    cuda = match["torch_cu"] if name == "torch" else None
    built = {"cuda": f"{cuda[:2]}.{cuda[2:]}"} if cuda else {}
    return {"environment": {**built, name: match["version"]}}


def gpu(match: re.Match[str]) -> Facts | None:
    """A card as a program prints its name, if there is one of it."""
    with suppress(ValueError):
        look_up_gpu(match["name"].strip())
        return {"environment": {"gpu": match["name"].strip()}}
    return None


def card(match: re.Match[str]) -> Facts | None:
    """The card that the most of the words name, if there is one."""
    words = match["card"].split()
    for end in range(len(words), 0, -1):
        name = " ".join(words[:end]).strip(" :,.;")
        with suppress(InvalidInput):
            device = describe_device(name)
            if device.name != f"sm{device.arch}":
                return {"environment": {"gpu": name}}
    return None
