"""What CUDA and PyTorch say where a library holds no machine code for the GPU.

Read: the CUDA runtime's cudaErrorNoKernelImageForDevice; torch/cuda/__init__.py, 2.0 to 2.13:
_check_capability.
"""

from __future__ import annotations

from attnsel.diagnose.logs.message import FirstOf, Variant, text
from attnsel.diagnose.logs.parsers.flash_attn import BLACKWELL_BUILD, OTHER_KERNEL

_MESSAGES = (
    *text(
        ("no kernel image is available for execution on the device", "cudaErrorNoKernelImageForDevice"),
        variants=(
            Variant(
                "FlashAttention 3 (hopper) is compiled for sm80 to sm90a: it has no code for the GPU",
                "do without FlashAttention 3: in xformers a build that has FlashAttention 2 for the card, "
                "or F.sdpa",
                ("FLASH302",),
                seen=("flash_attn_3",),
            ),
            Variant(
                "this build of FlashAttention holds no machine code for the GPU",
                f"{BLACKWELL_BUILD}; or {OTHER_KERNEL}",
                ("FLASH203", "FLASH204", "FLASH202"),
                seen=("flash_attn",),
            ),
            Variant(
                "the library that was called holds no machine code for the GPU",
                "a wheel of torch with code for the GPU (PyTorch's index, another CUDA); `attnsel doctor` "
                "tells",
                ("INSTALL008",),
            ),
        ),
        source="CUDA's cudaErrorNoKernelImageForDevice; flash-attention 2.8.4, setup.py:74; "
        "Dao-AILab/flash-attention#1638, #2168",
    ),
    *text(
        " is not compatible with the current PyTorch installation",
        r"with CUDA capability sm_(?P<sm>\d{2,3}) is not compatible with the current PyTorch installation",
        read=lambda match: {"environment": {"gpu": f"sm{match['sm']}"}},
        cause="this wheel of PyTorch has no machine code for the GPU",
        codes=("INSTALL008",),
        fix=(
            "torch 2.7 or newer with CUDA 12.8 (--index-url .../whl/cu128) for Blackwell; CUDA 12.6 for V100",
        ),
        source="torch/cuda/__init__.py, _check_capability (2.0 to 2.13); xorbitsai/inference#3603",
    ),
)

LIBRARY = FirstOf("CUDA", "'no kernel image', 'sm_120 is not compatible'", _MESSAGES)
