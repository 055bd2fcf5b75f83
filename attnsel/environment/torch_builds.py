"""What each CUDA wheel of PyTorch for Linux x86-64 brings: a line per release and CUDA version.

A line: torch, CUDA ("*" is PyPI's own wheel), cuDNN, NCCL, Triton, and which of ``ARCHS`` it has code for.
The first release is the oldest that a described machine may have. Read 2026-11-23:

- PyPI's own wheels: versions from their Requires-Dist, CUDA from their torch/version.py, code from the list
  in their libtorch_python.so, which ``torch.cuda.get_arch_list()`` returns. Since 2.14 Triton is "~=".
- PyTorch's index up to 2.5: manywheel/build_cuda.sh and common/install_cuda.sh of pytorch/builder at
  release/2.2 to release/2.5. cu118 of 2.2 and 2.3: package lists of users.
- Since 2.6: pytorch's .github/scripts/generate_binary_build_matrix.py, RELEASE.md ("Release Compatibility
  Matrix", "PyTorch CUDA Support Matrix": pytorch#164471, #175253, #182849, #194367), build_cuda.sh at 2.8.
- 2.11: RELEASE.md has cuDNN 9.17.1.4 and the wheels 9.19.0.56; only cu129 requires 9.17.1.4.
- Code of cu128 of 2.7 and 2.10, and of cu126 and cu128 of 2.11: get_arch_list() as users report it
  (pytorch#182250); of 2.13: torch/cuda/__init__.py, PYTORCH_RELEASES_CODE_CC.
- Inferred: NCCL of cu128 of 2.7; cuDNN and NCCL of cu129 of 2.9 and 2.10, as cu128 of the same release; code
  of cu129 of 2.9, 2.10 and 2.11, as before and after; cuDNN and NCCL of cu130 of 2.15, as its cu132. A cu129
  of 2.12 was built, and no published one was found.

Not here: wheels for Windows, and those for aarch64. CUDA wheels for aarch64 lie on PyPI since 2.11, with code
for 80, 90, 100, 110 and 120, and in the index since 2.5; they require the same versions.
"""

from __future__ import annotations

# First to last minor release of Python 3 with a wheel on PyPI.
PYTHONS = {
    "2.2": "8-12", "2.3": "8-12", "2.4": "8-12", "2.5": "9-13", "2.6": "9-13",
    "2.7": "9-13", "2.8": "9-13", "2.9": "10-14", "2.10": "10-14", "2.11": "10-14", "2.12": "10-14",
    "2.13": "10-14", "2.14": "10-14", "2.15": "11-15",
}  # fmt: skip

# Compute capabilities with machine code; "+" is behind the one whose PTX is there too.
ARCHS = {
    "kepler-hopper": "37 50 60 70 75 80 86 90",
    "maxwell-hopper": "50 60 70 75 80 86 90",
    "volta": "70 75 80 86 90 100 120",
    "volta+": "70 75 80 86 90 100 120+",
    "turing": "75 80 86 90 100 120",
    "turing+": "75 80 86 90 100 120+",
}

ROWS = (
    "2.2.0,1,2  11.8 8.7.0.84  2.19.3 2.2.0 kepler-hopper",
    "2.2.0,1,2 *12.1 8.9.2.26  2.19.3 2.2.0 maxwell-hopper",
    "2.3.0      11.8 8.7.0.84  2.20.5 2.3.0 kepler-hopper",
    "2.3.0     *12.1 8.9.2.26  2.20.5 2.3.0 maxwell-hopper",
    "2.3.1      11.8 8.7.0.84  2.20.5 2.3.1 kepler-hopper",
    "2.3.1     *12.1 8.9.2.26  2.20.5 2.3.1 maxwell-hopper",
    "2.4.0,1    11.8 9.1.0.70  2.20.5 3.0.0 kepler-hopper",
    "2.4.0,1   *12.1 9.1.0.70  2.20.5 3.0.0 maxwell-hopper",
    "2.4.0,1    12.4 9.1.0.70  2.20.5 3.0.0 maxwell-hopper",
    "2.5.0,1    11.8 9.1.0.70  2.21.5 3.1.0 kepler-hopper",
    "2.5.0,1    12.1 9.1.0.70  2.21.5 3.1.0 maxwell-hopper",
    "2.5.0,1   *12.4 9.1.0.70  2.21.5 3.1.0 maxwell-hopper",
    "2.6.0      11.8 9.1.0.70  2.21.5 3.2.0 kepler-hopper",
    "2.6.0     *12.4 9.1.0.70  2.21.5 3.2.0 maxwell-hopper",
    "2.6.0      12.6 9.5.1.17  2.21.5 3.2.0 maxwell-hopper",
    "2.7.0      11.8 9.1.0.70  2.21.5 3.3.0 kepler-hopper",
    "2.7.0     *12.6 9.5.1.17  2.26.2 3.3.0 maxwell-hopper",
    "2.7.0      12.8 9.7.1.26  2.26.2 3.3.0 turing+",
    "2.7.1      11.8 9.1.0.70  2.21.5 3.3.1 kepler-hopper",
    "2.7.1     *12.6 9.5.1.17  2.26.2 3.3.1 maxwell-hopper",
    "2.7.1      12.8 9.7.1.26  2.26.2 3.3.1 turing+",
    "2.8.0      12.6 9.10.2.21 2.27.3 3.4.0 maxwell-hopper",
    "2.8.0     *12.8 9.10.2.21 2.27.3 3.4.0 volta",
    "2.8.0      12.9 9.10.2.21 2.27.3 3.4.0 volta+",
    "2.9.0      12.6 9.10.2.21 2.27.5 3.5.0 maxwell-hopper",
    "2.9.0     *12.8 9.10.2.21 2.27.5 3.5.0 volta",
    "2.9.0      12.9 9.10.2.21 2.27.5 3.5.0 volta+",
    "2.9.0      13.0 9.13.0.50 2.27.7 3.5.0 turing+",
    "2.9.1      12.6 9.10.2.21 2.27.5 3.5.1 maxwell-hopper",
    "2.9.1     *12.8 9.10.2.21 2.27.5 3.5.1 volta",
    "2.9.1      12.9 9.10.2.21 2.27.5 3.5.1 volta+",
    "2.9.1      13.0 9.13.0.50 2.27.7 3.5.1 turing+",
    "2.10.0     12.6 9.10.2.21 2.27.5 3.6.0 maxwell-hopper",
    "2.10.0    *12.8 9.10.2.21 2.27.5 3.6.0 volta",
    "2.10.0     12.9 9.10.2.21 2.27.5 3.6.0 volta+",
    "2.10.0     13.0 9.15.1.9  2.28.9 3.6.0 turing+",
    "2.11.0     12.6 9.10.2.21 2.28.9 3.6.0 maxwell-hopper",
    "2.11.0     12.8 9.19.0.56 2.28.9 3.6.0 turing",
    "2.11.0     12.9 9.17.1.4  2.28.9 3.6.0 turing",
    "2.11.0    *13.0 9.19.0.56 2.28.9 3.6.0 turing",
    "2.12.0     12.6 9.10.2.21 2.29.3 3.7.0 maxwell-hopper",
    "2.12.0    *13.0 9.20.0.48 2.29.7 3.7.0 turing",
    "2.12.0     13.2 9.20.0.48 2.29.7 3.7.0 turing",
    "2.12.1     12.6 9.10.2.21 2.29.3 3.7.1 maxwell-hopper",
    "2.12.1    *13.0 9.20.0.48 2.29.7 3.7.1 turing",
    "2.12.1     13.2 9.20.0.48 2.29.7 3.7.1 turing",
    "2.13.0     12.6 9.10.2.21 2.29.3 3.7.1 maxwell-hopper",
    "2.13.0     12.9 9.20.0.48 2.29.7 3.7.1 turing",
    "2.13.0    *13.0 9.20.0.48 2.29.7 3.7.1 turing",
    "2.13.0     13.2 9.20.0.48 2.29.7 3.7.1 turing",
    "2.14.0,1   12.6 9.10.2.21 2.29.3 3.8.0 maxwell-hopper",
    "2.14.0,1  *13.0 9.24.0.43 2.30.7 3.8.0 turing",
    "2.14.0,1   13.2 9.24.0.43 2.30.7 3.8.0 turing",
    "2.15.0     13.0 9.26.0.51 2.30.7 3.9.0 turing",
    "2.15.0    *13.2 9.26.0.51 2.30.7 3.9.0 turing",
)
