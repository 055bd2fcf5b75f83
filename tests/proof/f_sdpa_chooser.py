"""PyTorch's choice between its CUDA kernels, written down a second time and apart from attnsel's rules.

Each condition stands with its line: in sdp_utils.cpp the line of its warning, as the machine code of the
wheel's libtorch_cuda.so holds it, for 2.4 the source's; in sdp_utils_cpp.h that of the function in the
header of the wheel. Where a library tells no line, the function's name. Releases: 2.2.2, 2.3.1, 2.4.0,
2.5.0, 2.5.1, 2.6.0, 2.7.1, 2.8.0, 2.9.1, 2.10.0, 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

Release = tuple[int, int, int]
RELEASES: tuple[Release, ...] = (
    *((2, 2, 2), (2, 3, 1), (2, 4, 0), (2, 5, 0), (2, 5, 1), (2, 6, 0), (2, 7, 1), (2, 8, 0), (2, 9, 1)),
    *((2, 10, 0), (2, 11, 0), (2, 12, 0), (2, 13, 0), (2, 14, 1), (2, 15, 0)),
)

# sdp_utils.cpp, line of the warning: flash's head_dim, mem-efficient's, flash's GPUs, mem-efficient's GPUs,
# wide heads with a gradient, is_causal, cuDNN's GPUs, determinism, head_dim's limit, its multiple.
C_LINES = {
    (2, 2, 2): (88, 136, 186, 205, 229, 250, 0, 0, 0, 0),
    (2, 3, 1): (94, 142, 203, 223, 253, 274, 355, 0, 0, 0),
    (2, 4, 0): (92, 142, 201, 232, 263, 284, 442, 0, 321, 321),
    (2, 5, 0): (118, 166, 240, 284, 315, 336, 493, 545, 386, 392),
    (2, 5, 1): (113, 161, 235, 279, 310, 331, 488, 540, 381, 387),
    (2, 6, 0): (120, 173, 238, 273, 304, 325, 488, 540, 375, 381),
    (2, 7, 1): (129, 182, 263, 308, 341, 362, 525, 590, 412, 418),
    (2, 8, 0): (129, 182, 263, 314, 348, 369, 538, 604, 425, 431),
    (2, 9, 1): (166, 219, 300, 351, 385, 406, 581, 647, 462, 468),
    (2, 10, 0): (177, 252, 339, 396, 430, 451, 632, 692, 507, 513),
    (2, 11, 0): (180, 255, 342, 402, 436, 457, 647, 718, 522, 528),
    (2, 12, 0): (180, 255, 342, 402, 436, 457, 659, 730, 534, 540),
    (2, 13, 0): (199, 285, 443, 503, 537, 558, 772, 843, 647, 653),
    (2, 14, 1): (213, 299, 457, 517, 551, 572, 863, 934, 672, 678),
    (2, 15, 0): (292, 388, 547, 607, 643, 666, 1006, 1077, 806, 813),
}
FLASH_HEAD, MEM_HEAD, FLASH_GPU, MEM_GPU, GRAD, CAUSAL, CUDNN_GPU, DETERMINISTIC, LIMIT, EIGHT = range(10)

# sdp_utils_cpp.h, line of the function: attn_mask at all, its shape, four dimensions, heads, lengths,
# strides, element type. 2.2.2 and 2.3.1: of the warning, where the library tells it.
H_LINES = {
    (2, 2, 2): (272, 0, 284, 0, 0, 0, 0),
    (2, 3, 1): (269, 0, 315, 0, 0, 462, 0),
    (2, 4, 0): (266, 276, 310, 344, 420, 436, 88),
    (2, 5, 0): (268, 278, 312, 386, 483, 499, 90),
    (2, 5, 1): (268, 278, 312, 386, 483, 499, 90),
    (2, 6, 0): (261, 271, 305, 379, 476, 492, 83),
    (2, 7, 1): (258, 268, 302, 376, 473, 489, 80),
    (2, 8, 0): (259, 269, 303, 378, 476, 492, 81),
    (2, 9, 1): (259, 269, 303, 378, 476, 492, 81),
    (2, 10, 0): (260, 270, 304, 379, 477, 493, 82),
    (2, 11, 0): (260, 270, 304, 379, 477, 493, 82),
    (2, 12, 0): (260, 270, 304, 379, 477, 493, 82),
    (2, 13, 0): (260, 270, 323, 398, 496, 512, 82),
    (2, 14, 1): (279, 289, 342, 420, 525, 541, 101),
    (2, 15, 0): (277, 287, 341, 429, 537, 555, 99),
}
MASK, MASK_SHAPE, RANK, HEADS, LENGTHS, STRIDES, DTYPE = range(7)
H_NAMES = (
    *("check_for_attn_mask", "check_attn_mask_shape", "check_tensor_shapes"),
    *("check_batch_size_and_num_heads_dense", "check_nonzero_sequence_lengths_dense"),
    *("check_last_dim_stride_equals_1_dense", "check_tensor_dtype"),
)
# cuDNN's single queries and keys.
ONE_KEY = {
    **{(2, 6, 0): 408, (2, 7, 1): 445, (2, 8, 0): 458, (2, 9, 1): 495, (2, 10, 0): 540},
    **{(2, 11, 0): 555, (2, 12, 0): 567, (2, 13, 0): 680, (2, 14, 1): 705},
    (2, 15, 0): 843,
}
ONE_QUERY = {
    **{(2, 6, 0): 408, (2, 7, 1): 445, (2, 8, 0): 458, (2, 9, 1): 501, (2, 10, 0): 546},
    **{(2, 11, 0): 561, (2, 12, 0): 573, (2, 13, 0): 686, (2, 14, 1): 711},
    (2, 15, 0): 849,
}
DROPOUT_VERSIONS = {
    **{(2, 9, 1): 674, (2, 10, 0): 719, (2, 11, 0): 745, (2, 12, 0): 757, (2, 13, 0): 870},
    **{(2, 14, 1): 985, (2, 15, 0): 1128},
}
SIXTEENTHS = {(2, 12, 0): 489, (2, 13, 0): 590, (2, 14, 1): 604, (2, 15, 0): 699}
GRID = {(2, 13, 0): 605, (2, 14, 1): 619, (2, 15, 0): 735}
OFFSET = {(2, 13, 0): 356, (2, 14, 1): 370, (2, 15, 0): 460}
DECODE = {(2, 14, 1): 648, (2, 15, 0): 780}
WIDE_BACKWARD = {(2, 14, 1): 772, (2, 15, 0): 915}
HALF_TILE = {(2, 15, 0): 770}
FLASH_GRID = {(2, 15, 0): 717}


class Case(NamedTuple):
    """One call on one GPU. ``cudnn``: as cudnnGetVersion() writes it; ``cuda``: the build's, as 128 for 12.8.
    ``impl``: what activate_flash_attention_impl put behind flash.
    ``mask``: shape, type and whether it requires a gradient; ``step``: the last stride of q; ``offset``:
    bytes that q begins after a boundary of 16; ``gqa``: enable_gqa."""

    arch: int = 90
    cudnn: int = 91002
    cuda: int = 128
    dtype: str = "bf16"
    b: int = 2
    h: int = 16
    groups: int = 16
    s_q: int = 512
    s_kv: int = 512
    d: int = 128
    e: int = 128
    mask: tuple[tuple[int, ...], str, bool] | None = None
    causal: bool = False
    dropout: float = 0.0
    grad: bool = False
    gqa: bool = True
    rank: int = 4
    deterministic: bool = False
    step: int = 1
    mask_step: int = 1
    offset: int = 0
    env: tuple[tuple[str, str], ...] = ()
    off: tuple[str, ...] = ()
    impl: str = "FA2"

    @property
    def major(self) -> int:
        return self.arch // 10

    @property
    def minor(self) -> int:
        return self.arch % 10


class Choice(NamedTuple):
    """What is taken, "" for nothing, and the first line against each kernel that is not."""

    taken: str
    against: dict[str, str]
    order: tuple[str, ...]


Checks = Iterator[tuple[str, bool]]


def choose(r: Release, c: Case) -> Choice:
    """select_sdp_backend."""
    against: dict[str, str] = {}
    kernels = order(r, c)
    for kernel in kernels:
        lines = [line for line, failed in CHECKS[kernel](r, c) if failed] if kernel in CHECKS else []
        if kernel in c.off:
            lines.insert(0, "turned off")
        if lines:
            against[kernel] = lines[0]
    taken = next((kernel for kernel in kernels if kernel not in against), "")
    return Choice(taken, against, kernels)


def order(r: Release, c: Case) -> tuple[str, ...]:
    """priority_order: 2.4.0, line 48; the others in the machine code of select_sdp_backend."""
    behind = ("flash", "mem_efficient", "math", "cudnn")
    ahead = ("cudnn", "flash", "mem_efficient", "math")
    said = dict(c.env)
    if r < (2, 3, 0):
        return behind[:3]
    if r < (2, 5, 0):
        return ahead
    if r == (2, 5, 0):
        return ahead if c.major > 8 else ("flash", "cudnn", "mem_efficient", "math")
    if r < (2, 9, 0):
        return behind
    if r < (2, 10, 0):  # CUDNN_VERSION >= 90900, of the build: install_cuda.sh at v2.9.0
        compiled = {126: 91002, 128: 90800, 129: 91002, 130: 91300}[c.cuda]
        prefers = compiled >= 90900 and c.major in (9, 10) and c.minor == 0
        return ahead if prefers and said.get("TORCH_CUDNN_SDPA_PREFERRED") != "0" else behind
    minors = range(10) if r >= (2, 13, 0) and c.cuda >= 130 else (0, 3)
    prefers = c.cudnn > 91500 and c.major in (9, 10) and c.minor in minors
    return ahead if prefers and said.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1" else behind


def _c(r: Release, place: int) -> str:
    return f"sdp_utils.cpp:{C_LINES[r][place]}"


def _h(r: Release, place: int) -> str:
    line = H_LINES[r][place]
    return f"sdp_utils_cpp.h:{line}" if line else H_NAMES[place]


def _last(r: Release) -> int:
    """The newest architecture in check_sm_version."""
    return 90 if r < (2, 7, 0) else 120 if r < (2, 8, 0) else 121


def _heads(r: Release, c: Case, supports_gqa: bool) -> bool:
    """check_batch_size_and_num_heads_dense."""
    if c.gqa and c.groups != c.h and supports_gqa and r >= (2, 5, 0):
        return bool(c.h % c.groups)
    if r >= (2, 14, 0) and supports_gqa and c.groups == 1:  # supports_mqa
        return False
    return c.groups != c.h


def _strides(c: Case, ignore_singleton: bool, mask: bool = True) -> bool:
    """check_last_dim_stride_equals_1_dense."""
    plain = c.step == 1 or (ignore_singleton and c.d == 1)
    return not plain or (mask and c.mask is not None and c.mask_step != 1)


def _wrong_rank(r: Release, c: Case) -> bool:
    """check_tensor_shapes; three dimensions become four in normalize_unbatched_input of 2.14."""
    return c.rank != 4 and not (r >= (2, 14, 0) and c.rank == 3)


def flash(r: Release, c: Case) -> Checks:
    yield _h(r, RANK), _wrong_rank(r, c)
    yield _h(r, MASK), c.mask is not None
    fa4 = c.impl == "FA4" and r >= (2, 15, 0)
    if fa4:  # check_fa4_constraints
        yield "sdp_utils.cpp:209", c.major not in (9, 10)
        yield "sdp_utils.cpp:215", c.dropout != 0
    yield _c(r, FLASH_HEAD), _not_fa4_s(c) if fa4 else c.d != c.e or c.d > 256
    yield _c(r, FLASH_GPU), not 80 <= c.arch <= _last(r)
    small = 86 <= c.arch <= 89 or (r >= (2, 7, 0) and 120 <= c.arch <= _last(r))
    narrow = c.d <= 192 or (r >= (2, 3, 0) and c.d > 224 and not c.dropout)
    yield _c(r, GRAD), c.grad and small and not narrow
    yield _c(r, CAUSAL), c.causal and c.s_q != c.s_kv
    yield _h(r, DTYPE), c.dtype not in (("bf16", "fp16") if c.major >= 8 else ("fp16",))
    yield _h(r, HEADS), _heads(r, c, supports_gqa=True)
    if r in FLASH_GRID:
        yield f"sdp_utils.cpp:{FLASH_GRID[r]}", c.b > 65535 or c.h > 65535
    yield _h(r, LENGTHS), 0 in (c.s_q, c.s_kv)
    yield _h(r, STRIDES), _strides(c, ignore_singleton=r >= (2, 3, 0))


def _not_fa4_s(c: Case) -> bool:
    """Head dimensions that check_head_dim_size_flash of 2.15 refuses where FA4 is behind flash."""
    if not (c.d > 0 and c.e > 0):
        return True
    if c.major == 9:
        return c.d > 256 or c.e > 256
    return c.major != 10 or (max(c.d, c.e) > 128 and (c.d, c.e) not in ((192, 128), (256, 256)))


def efficient(r: Release, c: Case) -> Checks:
    half = c.dtype in ("bf16", "fp16")
    yield _c(r, MEM_GPU), not 50 <= c.arch <= _last(r)
    yield _h(r, RANK), _wrong_rank(r, c)
    # minimum_gemm_alignment, 2.4.0, line 66
    tensor_cores = c.major >= 8 or (c.major == 7 and half)
    whole = max(4 if c.major >= 8 else 1, 128 // (16 if half else 32) if tensor_cores else 1)
    yield _c(r, MEM_HEAD), bool(c.d % whole or c.e % whole)
    if r in OFFSET:
        size = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[c.dtype]
        yield f"sdp_utils.cpp:{OFFSET[r]}", c.major >= 8 and c.offset % (whole * size) != 0
    yield _h(r, LENGTHS), 0 in (c.s_q, c.s_kv)
    yield _h(r, STRIDES), _strides(c, ignore_singleton=False)
    yield _h(r, HEADS), _heads(r, c, supports_gqa=r >= (2, 14, 0))
    yield _h(r, DTYPE), c.dtype not in (("fp16", "fp32", "bf16") if c.major >= 8 else ("fp16", "fp32"))


def cudnn(r: Release, c: Case) -> Checks:
    if r < (2, 5, 0):
        enabled = dict(c.env).get("TORCH_CUDNN_SDPA_ENABLED") == "1"
        yield f"sdp_utils.cpp:{409 if r < (2, 4, 0) else 496}", not enabled
        yield _c(r, CUDNN_GPU), not 80 <= c.arch <= 90
        if r >= (2, 4, 0):
            yield _c(r, EIGHT), bool(c.d % 8) or c.d > 256
            yield "sdp_utils.cpp:520", c.grad
            yield "sdp_utils.cpp:479", c.dtype not in ("bf16", "fp16")
        return
    if r in DROPOUT_VERSIONS:
        yield f"sdp_utils.cpp:{DROPOUT_VERSIONS[r]}", c.dropout > 0 and 91100 < c.cudnn < 91400
    yield _h(r, RANK), _wrong_rank(r, c)
    yield _c(r, DETERMINISTIC), c.deterministic
    yield _h(r, DTYPE), c.dtype not in (("bf16", "fp16") if c.major >= 8 else ("fp16",))
    yield _h(r, MASK_SHAPE), c.mask is not None and not _mask_fits(c)
    yield _c(r, CUDNN_GPU), not 80 <= c.arch <= _last(r)
    if r in SIXTEENTHS:
        yield f"sdp_utils.cpp:{SIXTEENTHS[r]}", c.dropout * 16 != int(c.dropout * 16)
    yield _h(r, LENGTHS), 0 in (c.s_q, c.s_kv)
    if not (2, 7, 0) <= r < (2, 8, 0):
        yield _h(r, STRIDES), _strides(c, ignore_singleton=True)
    if r >= (2, 8, 0):
        yield _h(r, HEADS), _heads(r, c, supports_gqa=True)
    if r in GRID:
        yield f"sdp_utils.cpp:{GRID[r]}", c.b > 65535 or c.h > 65535
    if r in HALF_TILE:  # of query alone, under no_grad too
        tile = c.arch == 90 and not c.causal and c.grad and c.s_kv % 128 == 64
        yield f"sdp_utils.cpp:{HALF_TILE[r]}", tile and c.cudnn < 92600
    if r in DECODE:
        wrong = 91900 <= c.cudnn <= 92500 and not 92401 <= c.cudnn <= 92499
        yield f"sdp_utils.cpp:{DECODE[r]}", c.s_q == 1 and wrong and c.major in (10, 11)
    limit = _limit(r, c)
    yield _c(r, LIMIT), c.d > limit or c.e > limit
    yield _c(r, EIGHT), bool(c.d % 8 or c.e % 8)
    if r in ONE_KEY:
        yield f"sdp_utils.cpp:{ONE_KEY[r]}", c.s_kv == 1
        yield f"sdp_utils.cpp:{ONE_QUERY[r]}", c.s_q == 1 and (r < (2, 9, 0) or c.dropout > 0)
    if r in WIDE_BACKWARD and _limit(r, c._replace(d=256)) == 256:
        pairs = ((192, 128), (256, 256))
        wide = max(c.d, c.e) > 128 and (c.d, c.e) not in pairs
        yield f"sdp_utils.cpp:{WIDE_BACKWARD[r]}", c.grad and wide


def _mask_fits(c: Case) -> bool:
    """check_attn_mask_shape."""
    assert c.mask is not None
    shape, _, grad = c.mask
    whole = (c.b, c.h, c.s_q, c.s_kv)
    if grad or len(shape) not in (2, 4):
        return False
    return all(n in (1, m) for n, m in zip(shape, whole[4 - len(shape) :], strict=True))


def _limit(r: Release, c: Case) -> int:
    """head_dim_limit in check_cudnn_tensor_shapes."""
    hopper, server = c.arch == 90, c.arch == 90 or c.major == 10
    deepseek = c.d == 192 and c.e == 128
    if r < (2, 8, 0):
        return 128
    if r < (2, 9, 0):
        return 256 if hopper and c.cudnn > 90500 else 128
    if r < (2, 11, 0):
        return 256 if hopper and c.cudnn > 90999 else 128
    if r < (2, 14, 0):
        wide = 256 if hopper and c.cudnn > 90999 else 128
        return 192 if c.major == 10 and c.cudnn > 91099 and deepseek else wide
    if server and c.cudnn > 92200 and not (c.arch == 107 and c.cudnn <= 92500):
        return 256
    return 192 if server and c.cudnn > 91099 and deepseek else 128


CHECKS = {"flash": flash, "mem_efficient": efficient, "cudnn": cudnn}
