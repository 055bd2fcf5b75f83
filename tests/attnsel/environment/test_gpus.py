"""The catalogue of GPUs. How drivers, shops and clouds spell them, and what is none: answers.txt."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from attnsel import Environment, InvalidInput
from attnsel.cli.flags import FLAG_OF
from attnsel.environment.gpus import architecture_of, catalogue, familiar, look_up_gpu
from tables import each

HERE = Path(__file__).parent


def _lines(name: str) -> list[str]:
    return [line for line in (HERE / name).read_text().splitlines() if not line.startswith("#")]


NAMES = list(csv.DictReader(_lines("card_names.csv")))
TOO_OLD = ("21", "30", "35", "37", "53", "62")


@each("row", [row for row in NAMES if row["arch"] not in TOO_OLD])
def test_names_that_people_type_are_answered(row) -> None:
    device = Environment.describe(row["name"]).device
    assert row["arch"] in (device.name if row["arch"].startswith("gfx") else f"{device.arch or device.type}")
    assert device.name.partition(" (gfx")[0] == row["means"]
    assert not row["memory_gb"] or device.memory == int(row["memory_gb"]) << 30


@each("name", [row["name"] for row in NAMES if row["arch"] in TOO_OLD])
def test_a_card_without_a_pytorch_is_known_all_the_same(name) -> None:
    with pytest.raises(InvalidInput, match="older than"):
        Environment.describe(name)


@each("line", _lines("no_cards.txt"))
def test_a_name_that_is_no_card_is_a_line_with_the_nearest(line) -> None:
    name, meant = line.split(": ")
    with pytest.raises(InvalidInput, match=r"unknown GPU|not a GPU") as caught:
        Environment.describe(name)
    said = str(caught.value)
    assert "\n" not in said
    assert meant == "-" or re.search(rf"\(did you mean (?:.* or )?{meant}(?: or .*)?\?\)", said)


@each("gpu", catalogue().values())
def test_every_card_is_found_by_its_own_name(gpu) -> None:
    maker = {"cuda": "NVIDIA", "rocm": "AMD", "xpu": "Intel", "mps": "Apple"}[gpu.device]
    joined = gpu.name.replace(" ", "")
    assert look_up_gpu(gpu.name) == look_up_gpu(joined) == look_up_gpu(f"{maker} {gpu.name}") == gpu
    assert (gpu.device == "cuda") == bool(architecture_of(gpu.arch))


def test_the_familiar_cards_are_of_every_architecture_for_which_people_choose_a_card() -> None:
    assert ", ".join(gpu.name for gpu in familiar()) == (
        "V100, T4, A100, A10, RTX 3090, L4, L40S, RTX 4090, H100, H200, B200, B300, RTX 5090, GB10"
    )


def test_the_help_of_gpu_names_the_newest_of_them() -> None:
    """As a constant: that a command starts does not wait for the catalogue."""
    newest = ", ".join(gpu.name for gpu in familiar()[-6:])
    (about,) = FLAG_OF["gpu"].parameter.annotation.__metadata__
    assert about.help.startswith(f"{newest} and more")
