"""What GPUs deliver on paper: arithmetic, memory, and the links between them. For estimates only.

Peak rates are dense, for 16-bit inputs with float32 accumulation. Bandwidths are per GPU and per direction:
data sheets add both directions up. Sources, all NVIDIA's: data sheets of V100 (SXM2), T4, A100 (80 GB SXM),
A10, L4, L40S, H100 and H200 (SXM), HGX B200 and B300; white papers "Ampere GA102", "Ada" and "RTX Blackwell"
for the RTX cards (rates with FP32 accumulation). Data sheets that give a rate with sparsity: half of it.
Networks: DGX-1 (4 × EDR 100 Gb/s for 8 GPUs), DGX A100 (8 × HDR 200 Gb/s), DGX H100, H200 and B200
(8 × NDR 400 Gb/s), DGX B300 (8 × 800 Gb/s). Where no such system exists the network is None: it has to be
stated. GB10 is left out: its data sheet has no 16-bit rate.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Figures(NamedTuple):
    """bf16_tflops: 1e12 operations per second. Bandwidths in GB/s, 1e9 bytes."""

    tflops: float
    memory: float
    link: float
    link_name: str
    network: float | None = None
    per_node: int = 8
    bf16: bool = True  # tensor cores take bf16, not fp16 alone


FIGURES: dict[str, Figures] = {
    "V100": Figures(125, 900, 150, "NVLink 2", 6.25, bf16=False),
    "T4": Figures(65, 320, 16, "PCIe 3.0 x16", bf16=False),
    "A100": Figures(312, 2039, 300, "NVLink 3", 25),
    "A10": Figures(125, 600, 32, "PCIe 4.0 x16"),
    "RTX 3090": Figures(71, 936, 32, "PCIe 4.0 x16"),
    "L4": Figures(121, 300, 32, "PCIe 4.0 x16"),
    "L40S": Figures(362, 864, 32, "PCIe 4.0 x16"),
    "RTX 4090": Figures(165.2, 1008, 32, "PCIe 4.0 x16"),
    "H100": Figures(989.4, 3350, 450, "NVLink 4", 50),
    "H200": Figures(989.4, 4800, 450, "NVLink 4", 50),
    "B200": Figures(2250, 8000, 900, "NVLink 5", 50),
    "B300": Figures(2250, 8000, 900, "NVLink 5", 100),
    "RTX 5090": Figures(209.5, 1792, 64, "PCIe 5.0 x16"),
}
_PCIE = {"A100": 32.0, "H100": 64.0, "V100": 16.0}  # their PCIe cards: a bridge joins two at most


def figures_of(name: str | None) -> Figures | None:
    """By the catalogue's name of a GPU or the driver's ("NVIDIA A100-SXM4-80GB"); None if unknown."""
    if not name:
        return None
    words = re.split(r"[\s_-]+", name)
    for gpu, figures in FIGURES.items():
        if set(gpu.split()) <= set(words):
            pcie = _PCIE.get(gpu) if "PCIe" in words or "PCIE" in words else None
            return figures if pcie is None else figures._replace(link=pcie, link_name="PCIe x16")
    return None
