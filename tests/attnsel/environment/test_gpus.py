"""The catalogue of GPUs. How drivers, shops and clouds spell them, and what is none: answers.txt."""

from __future__ import annotations

from attnsel.cli.flags import FLAG_OF
from attnsel.environment.gpus import ARCHITECTURES, catalogue, familiar, look_up_gpu
from tables import each


@each("gpu", catalogue().values())
def test_every_card_is_found_by_its_own_name(gpu) -> None:
    joined = gpu.name.replace(" ", "")
    assert look_up_gpu(gpu.name) == look_up_gpu(joined) == look_up_gpu(f"NVIDIA {gpu.name}") == gpu
    assert gpu.arch in ARCHITECTURES


def test_the_familiar_cards_are_of_every_architecture_for_which_people_choose_a_card() -> None:
    assert ", ".join(gpu.name for gpu in familiar()) == (
        "V100, T4, A100, A10, RTX 3090, L4, L40S, RTX 4090, H100, H200, B200, B300, RTX 5090, GB10"
    )


def test_the_help_of_gpu_names_the_newest_of_them() -> None:
    """As a constant: that a command starts does not wait for the catalogue."""
    newest = ", ".join(gpu.name for gpu in familiar()[-6:])
    (about,) = FLAG_OF["gpu"].parameter.annotation.__metadata__
    assert about.help.startswith(f"{newest} and more")
