"""The catalogue of GPUs. How drivers, shops and clouds spell them, and what is none: answers.txt."""

from __future__ import annotations

from attnsel import Environment
from attnsel.environment.gpus import ARCHITECTURES, catalogue, familiar, look_up_gpu
from attnsel.selection.unlock.proposals import nearest_gpus
from tables import each


@each("gpu", catalogue().values())
def test_every_card_is_found_by_its_own_name(gpu) -> None:
    joined = gpu.name.replace(" ", "")
    assert look_up_gpu(gpu.name) == look_up_gpu(joined) == look_up_gpu(f"NVIDIA {gpu.name}") == gpu
    assert gpu.arch in ARCHITECTURES
    assert gpu.kind in ("data center", "workstation", "GeForce", "Jetson", "mining")


def test_the_familiar_cards_keep_their_figures() -> None:
    assert {gpu.name: gpu[1:4] for gpu in familiar()} == {
        "V100": (70, 32, 80), "T4": (75, 16, 40), "A100": (80, 80, 108), "A10": (86, 24, 72),
        "RTX 3090": (86, 24, 82), "L4": (89, 24, 58), "L40S": (89, 48, 142), "RTX 4090": (89, 24, 128),
        "H100": (90, 80, 132), "H200": (90, 141, 132), "B200": (100, 180, 148), "B300": (103, 288, 148),
        "RTX 5090": (120, 32, 170), "GB10": (121, 128, 48),
    }  # fmt: skip


def test_a_card_nobody_knows_is_never_proposed() -> None:
    for gpu in ("GTX 1630", "T1000 8GB", "RTX PRO 6000 Server", "AGX Orin 32GB", "A100 64GB"):
        assert set(nearest_gpus(Environment.describe(gpu))) <= set(familiar())
