"""Names of GPUs: as drivers, shops and clouds spell them, and those that no card has."""

from __future__ import annotations

import pytest

from attnsel import Environment, InvalidInput
from attnsel.environment.gpus import ARCHITECTURES, CATALOGUE, FAMILIAR, look_up_gpu
from attnsel.selection.unlock.proposals import nearest_gpus
from tables import each

# The driver's: torch.cuda.get_device_name(), nvidia-smi -L, and NVIDIA's names of virtual GPUs.
DRIVERS = """
Tesla V100S-PCIE-32GB -> V100S, sm70, 32
Tesla V100-FHHL-16GB -> V100 PCIe 16GB, sm70, 16
Quadro RTX 5000 with Max-Q Design -> Quadro RTX 5000, sm75, 16
NVIDIA GeForce GTX 1650 Ti -> GTX 1650 Ti Laptop, sm75, 4
NVIDIA GeForce RTX 2070 with Max-Q Design -> RTX 2070, sm75, 8
NVIDIA A100-SXM4-40GB -> A100 40GB, sm80, 40
NVIDIA A100-SXM-64GB -> A100 64GB, sm80, 64
NVIDIA A800 40GB Active -> A800 PCIe 40GB, sm80, 40
NVIDIA A100-PG509-200 -> A100 40GB, sm80, 40
NVIDIA GeForce MX570 A -> MX570 A, sm86, 2
NVIDIA GeForce RTX 3050 6GB Laptop GPU -> RTX 3050 Laptop 6GB, sm86, 6
Orin (nvgpu) -> Orin, sm87, -
NVIDIA RTX 5000 Ada Generation Laptop GPU -> RTX 5000 Ada Laptop, sm89, 16
NVIDIA H100 80GB HBM3 -> H100, sm90, 80
NVIDIA H20-3e -> H20 141GB, sm90, 141
NVIDIA GH200 480GB -> GH200, sm90, 96
NVIDIA GH200 144G HBM3e -> GH200 144GB, sm90, 144
NVIDIA GeForce RTX 5090 D v2 -> RTX 5090 D V2, sm120, 24
NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition -> RTX PRO 6000 Max-Q, sm120, 96
NVIDIA A100-SXM4-80GB MIG 3g.40gb -> A100 MIG 3g.40gb, sm80, 40
NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb -> A100 40GB MIG 3g.20gb, sm80, 20
NVIDIA H100 80GB HBM3 MIG 1g.10gb+me -> H100 MIG 1g.10gb, sm90, 10
GRID A100-10C -> A100 PCIe 40GB vGPU 10GB, sm80, 10
GRID A100-1-5C -> A100 PCIe 40GB vGPU 5GB, sm80, 5
GRID A100DX-80C -> A100 vGPU 80GB, sm80, 80
NVIDIA H100L-94C -> H100 NVL vGPU 94GB, sm90, 94
"""

# Shops, clouds, forums.
PEOPLE = """
H100 SXM5 -> H100, sm90, 80
H100 94GB -> H100 NVL, sm90, 94
DGX A100 -> A100, sm80, 80
a100 sxm 40 gb -> A100 40GB, sm80, 40
GB200 NVL72 -> GB200, sm100, 186
Grace Hopper -> GH200, sm90, 96
Jetson AGX Orin 32GB -> AGX Orin 32GB, sm87, 32
Jetson Orin Nano Super -> Orin Nano, sm87, 8
4090 mobile -> RTX 4090 Laptop, sm89, 16
4090D -> RTX 4090 D, sm89, 24
RTX 4070TiSuper -> RTX 4070 Ti SUPER, sm89, 16
rtx4060ti16gb -> RTX 4060 Ti 16GB, sm89, 16
A6000 -> RTX A6000, sm86, 48
RTX Ada 6000 -> RTX 6000 Ada, sm89, 48
RTX 6000 Ada Lovelace -> RTX 6000 Ada, sm89, 48
pro 6000 max-q -> RTX PRO 6000 Max-Q, sm120, 96
RTX 6000 Blackwell -> RTX PRO 6000, sm120, 96
sm_90a -> sm90, sm90, -
sm_101a -> sm110, sm110, -
8xH100 -> H100, sm90, 80
T4 x2 -> T4, sm75, 16
DRIVE Thor -> Thor, sm110, -
12.1 -> sm121, sm121, -
"""

NEAREST = {
    "H150": "did you mean H200 or H100?",
    "RTX 9090": "did you mean RTX 5090 or RTX 5080?",
    "RTX 4060 SUPER": "did you mean RTX 4070 SUPER",
    "RTX 3090 Laptop": "did you mean RTX 3080 Laptop",
    "RTX 6000": "one of Quadro RTX 6000, RTX A6000, RTX 6000 Ada or RTX PRO 6000",
    "A100 48GB": "there is A100 (80 GB), A100 40GB (40 GB)",
    "NVIDIA H20 NVL16": "there is H20 (96 GB) or H20 141GB (141 GB)",
    "RTX 4090 MIG 1g.5gb": "RTX 4090 has no MIG 1g.5gb",
    "nonsense": "attnsel gpus lists all",
    "sm95": "sm90",
    "H100" * 30: "no name is longer than 100 characters",
}

OLDER = (
    "Tesla P100-SXM2-16GB", "K80", "GTX 1080 Ti", "GeForce GTX 980", "1060", "TITAN Xp", "Quadro P6000",
    "MX150", "Jetson TX2", "Jetson Nano", "sm61", "6.0",
)  # fmt: skip

OTHERS = {
    "MI300X": "gfx942",
    "RX 7900 XTX": "rocm",
    "M3 Max": "mps",
    "Arc A770": "xpu",
    "TPU v5e": "not a GPU",
    "Rubin": "10.7",
    "sm107": "10.7",
    "Rubin CPX": "not known",
    "sm88": "lists no GPU",
}


def refused(name: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        Environment.describe(name)
    assert caught.value.field == "gpu"
    return caught.value.allowed


@each("line", [*DRIVERS.strip().splitlines(), *PEOPLE.strip().splitlines()])
def test_a_spelling_finds_its_card(line: str) -> None:
    spelling, _, card = line.partition(" -> ")
    found = look_up_gpu(spelling)
    memory = "-" if found.memory_gib is None else found.memory_gib
    assert f"{found.name}, sm{found.arch}, {memory}" == card


@each("name", NEAREST)
def test_a_card_that_does_not_exist_is_refused_with_what_is_near(name: str) -> None:
    said = refused(name)
    assert said.startswith("unknown GPU")
    assert NEAREST[name] in said


@each("name", OLDER)
def test_what_came_before_volta_is_told_so(name: str) -> None:
    assert refused(name) == "older than Volta (sm70), the oldest architecture that attnsel plans for"


@each("name", OTHERS)
def test_other_makers_and_what_is_not_known_yet_get_one_line(name: str) -> None:
    said = refused(name)
    assert OTHERS[name] in said
    assert "unknown" not in said
    if "ask for gfx" in said:
        assert Environment.describe(OTHERS[name]).device.type == "rocm"


@each("gpu", CATALOGUE.values())
def test_every_card_is_found_by_its_own_name(gpu) -> None:
    joined = gpu.name.replace(" ", "")
    assert look_up_gpu(gpu.name) == look_up_gpu(joined) == look_up_gpu(f"NVIDIA {gpu.name}") == gpu
    assert gpu.arch in ARCHITECTURES
    assert gpu.kind in ("data center", "workstation", "GeForce", "Jetson", "mining")


def test_the_familiar_cards_keep_their_figures() -> None:
    assert {gpu.name: gpu[1:4] for gpu in FAMILIAR} == {
        "V100": (70, 32, 80), "T4": (75, 16, 40), "A100": (80, 80, 108), "A10": (86, 24, 72),
        "RTX 3090": (86, 24, 82), "L4": (89, 24, 58), "L40S": (89, 48, 142), "RTX 4090": (89, 24, 128),
        "H100": (90, 80, 132), "H200": (90, 141, 132), "B200": (100, 180, 148), "B300": (103, 288, 148),
        "RTX 5090": (120, 32, 170), "GB10": (121, 128, 48),
    }  # fmt: skip


def test_a_card_nobody_knows_is_never_proposed() -> None:
    for gpu in ("GTX 1630", "T1000 8GB", "RTX PRO 6000 Server", "AGX Orin 32GB", "A100 64GB"):
        assert set(nearest_gpus(Environment.describe(gpu))) <= set(FAMILIAR)


def test_a_part_of_a_card_has_its_own_memory_and_no_more_sms_than_it_has() -> None:
    device = Environment.describe("NVIDIA A100-SXM4-40GB MIG 2g.10gb").device
    assert (device.memory, device.sm_count, device.arch) == (10 << 30, 28, 80)
    assert Environment.describe("NVIDIA H100 80GB HBM3 MIG 2g.20gb").device.sm_count is None  # not a multiple
    assert Environment.describe("GRID T4-8Q").device.sm_count == 40  # in turns with others


def test_a_driver_that_does_not_say_which_board_leaves_its_figures_open() -> None:
    device = Environment.describe("Orin (nvgpu)").device
    assert (device.arch, device.memory, device.sm_count) == (87, None, None)
    assert device.shared_memory == ARCHITECTURES[87].shared_memory
