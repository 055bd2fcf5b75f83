"""The catalogue of GPUs. How drivers, shops and clouds spell them, and what is none: answers.txt."""

from __future__ import annotations

from attnsel import Environment
from attnsel.cli.flags import FLAG_OF
from attnsel.environment.gpus import architecture_of, catalogue, familiar, look_up_gpu
from tables import each, rows_of


@each("row", rows_of(__file__, "card_names.csv"))
def test_names_that_people_type_are_answered(row) -> None:
    device = Environment.describe(row["name"]).device
    assert row["arch"] in (device.name if row["arch"].startswith("gfx") else f"{device.arch or device.type}")
    assert device.name.partition(" (gfx")[0] == row["means"]
    assert not row["memory_gb"] or device.memory == int(row["memory_gb"]) << 30


@each("gpu", catalogue().values())
def test_every_card_is_found_by_its_own_name(gpu) -> None:
    maker = {"cuda": "NVIDIA", "rocm": "AMD", "xpu": "Intel", "mps": "Apple"}[gpu.device]
    joined = gpu.name.replace(" ", "")
    assert look_up_gpu(gpu.name) == look_up_gpu(joined) == look_up_gpu(f"{maker} {gpu.name}") == gpu
    assert (gpu.device == "cuda") == bool(architecture_of(gpu.arch))


def test_the_familiar_cards_are_of_every_architecture_for_which_people_choose_a_card() -> None:
    """The help of --gpu names the newest, as a constant: no command waits for the cards to start."""
    assert ", ".join(gpu.name for gpu in familiar()) == (
        "V100, T4, A100, A10, RTX 3090, L4, L40S, RTX 4090, H100, H200, B200, B300, RTX 5090, GB10"
    )
    (about,) = FLAG_OF["gpu"].parameter.annotation.__metadata__
    assert about.help.startswith(f"{', '.join(gpu.name for gpu in familiar()[-6:])} and more")
