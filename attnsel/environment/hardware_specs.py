"""What GPUs deliver on paper: arithmetic, memory, and the links between them. For estimates only.

Peak rates are dense, for 16-bit inputs with float32 accumulation. Bandwidths are per GPU and per direction:
data sheets add both directions up. Sources, all NVIDIA's: data sheets of V100, T4, A100, A30, A10, A40, L4,
L40, L40S, H100, H100 NVL, H200 and H200 NVL, HGX B200 and B300; white papers "Ampere GA102", "Ada" and "RTX
Blackwell" for the RTX cards (rates with FP32 accumulation). Data sheets that give a rate with sparsity: half
of it. Networks: DGX-1 (4 × EDR 100 Gb/s for 8 GPUs), DGX A100 (8 × HDR 200 Gb/s), DGX H100, H200 and B200 (8
× NDR 400 Gb/s), DGX B300 (8 × 800 Gb/s). Where no such system exists the network is None: it has to be
stated. The figures of A30, A40, L40, H100 PCIe, H100 NVL and H200 NVL were not read again. Bridges join two
PCIe cards at most, so the link of these is PCIe. Other cards have no estimate: the data sheets of GB10,
laptops and many more have no 16-bit rate, or nobody read them for it.
"""

from __future__ import annotations

from typing import NamedTuple

from attnsel.environment.gpus import look_up_gpu


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
    "V100 16GB": Figures(125, 900, 150, "NVLink 2", 6.25, bf16=False),
    "V100 PCIe": Figures(112, 900, 16, "PCIe 3.0 x16", bf16=False),
    "V100 PCIe 16GB": Figures(112, 900, 16, "PCIe 3.0 x16", bf16=False),
    "T4": Figures(65, 320, 16, "PCIe 3.0 x16", bf16=False),
    "A100": Figures(312, 2039, 300, "NVLink 3", 25),
    "A100 40GB": Figures(312, 1555, 300, "NVLink 3", 25),
    "A100 PCIe": Figures(312, 1935, 32, "PCIe 4.0 x16"),
    "A100 PCIe 40GB": Figures(312, 1555, 32, "PCIe 4.0 x16"),
    "A30": Figures(165, 933, 32, "PCIe 4.0 x16"),
    "A10": Figures(125, 600, 32, "PCIe 4.0 x16"),
    "RTX 3090": Figures(71, 936, 32, "PCIe 4.0 x16"),
    "A40": Figures(149.7, 696, 32, "PCIe 4.0 x16"),
    "L4": Figures(121, 300, 32, "PCIe 4.0 x16"),
    "L40": Figures(181.05, 864, 32, "PCIe 4.0 x16"),
    "L40S": Figures(362, 864, 32, "PCIe 4.0 x16"),
    "RTX 4090": Figures(165.2, 1008, 32, "PCIe 4.0 x16"),
    "H100": Figures(989.4, 3350, 450, "NVLink 4", 50),
    "H100 PCIe": Figures(756, 2000, 64, "PCIe 5.0 x16"),
    "H100 NVL": Figures(835.5, 3900, 64, "PCIe 5.0 x16"),
    "H200": Figures(989.4, 4800, 450, "NVLink 4", 50),
    "H200 NVL": Figures(835.5, 4800, 64, "PCIe 5.0 x16"),
    "B200": Figures(2250, 8000, 900, "NVLink 5", 50),
    "B300": Figures(2250, 8000, 900, "NVLink 5", 100),
    "RTX 5090": Figures(209.5, 1792, 64, "PCIe 5.0 x16"),
}


def figures_of(name: str | None) -> Figures | None:
    """By any name of a GPU, the catalogue's or the driver's ("NVIDIA A100-SXM4-80GB"); None if unknown."""
    try:
        return FIGURES.get(look_up_gpu(name).name) if name else None
    except ValueError:
        return None
