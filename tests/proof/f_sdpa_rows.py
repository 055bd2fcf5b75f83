"""Calls at the edges of what PyTorch's chooser looks at, and what it takes for some of them, by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

from f_sdpa_chooser import RELEASES, Case, Release

FULL = ((2, 16, 512, 512), "bool", False)

EDGES: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "s_q": 128},
    {"causal": True, "s_kv": 128},
    {"grad": True},
    {"dtype": "fp16"},
    {"dtype": "fp32"},
    {"dtype": "fp64"},
    {"dtype": "fp32", "d": 60, "e": 60},
    {"dtype": "fp32", "d": 62, "e": 62},
    {"dtype": "fp16", "d": 60, "e": 60},
    *({"d": width, "e": width} for width in (64, 100, 129, 136, 192, 193, 200, 224, 225, 256, 257, 264)),
    *({"d": width, "e": width, "grad": True} for width in (136, 192, 200, 224, 232, 256)),
    {"d": 200, "e": 200, "grad": True, "dropout": 0.125},
    {"d": 256, "e": 256, "grad": True, "dropout": 0.125},
    {"d": 192, "e": 128},
    {"d": 192, "e": 128, "grad": True},
    {"d": 128, "e": 64},
    {"d": 256, "e": 128},
    {"d": 256, "e": 192, "grad": True},
    {"d": 1, "e": 1},
    {"d": 1, "e": 1, "step": 2},
    {"d": 1, "e": 1, "step": 2, "dtype": "fp32"},
    {"mask": FULL},
    {"mask": ((512, 512), "bool", False)},
    {"mask": ((1, 512), "bool", False)},
    {"mask": ((1, 1, 512, 512), "bf16", False)},
    {"mask": ((2, 1, 1, 512), "bool", False)},
    {"mask": ((16, 512, 512), "bool", False)},
    {"mask": ((2, 16, 512, 512), "bf16", True), "grad": True},
    {"mask": FULL, "mask_step": 512},
    {"mask": FULL, "grad": True},
    {"mask": FULL, "groups": 4},
    {"mask": FULL, "d": 256, "e": 256},
    {"mask": FULL, "dtype": "fp16"},
    {"dropout": 0.1, "grad": True},
    {"dropout": 0.125, "grad": True},
    {"groups": 4},
    {"groups": 1},
    {"groups": 4, "gqa": False},
    {"groups": 1, "gqa": False},
    {"groups": 4, "dtype": "fp32"},
    {"groups": 4, "causal": True, "s_q": 64},
    {"s_q": 1},
    {"s_kv": 1},
    {"s_q": 1, "s_kv": 1},
    {"s_q": 1, "dropout": 0.125, "grad": True},
    {"s_q": 1, "groups": 4},
    {"s_q": 1, "s_kv": 4096, "mask": ((2, 1, 1, 4096), "bool", False)},
    *({"s_kv": length, "grad": True} for length in (448, 576)),
    {"s_kv": 448, "s_q": 448, "grad": True, "causal": True},
    {"s_kv": 448},
    {"s_q": 0},
    {"s_kv": 0},
    {"rank": 3},
    {"rank": 3, "dtype": "fp32"},
    {"deterministic": True},
    {"deterministic": True, "grad": True},
    {"step": 2},
    {"step": 2, "mask": FULL},
    {"offset": 2},
    {"offset": 8, "mask": FULL},
    {"b": 65536, "s_q": 16, "s_kv": 16},
    {"b": 65535, "s_q": 16, "s_kv": 16},
    {"h": 65536, "groups": 65536, "s_q": 16, "s_kv": 16},
    {"off": ("flash",)},
    {"off": ("flash", "mem_efficient")},
    {"off": ("flash", "mem_efficient", "math")},
    {"off": ("flash", "mem_efficient", "math"), "mask": ((16, 512, 512), "bool", False)},
    {"off": ("math",), "dtype": "fp64"},
    {"env": (("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1"),)},
    {"env": (("TORCH_CUDNN_SDPA_PREFERRED", "0"),)},
    {"env": (("TORCH_CUDNN_SDPA_ENABLED", "1"),)},
    {"env": (("TORCH_CUDNN_SDPA_ENABLED", "1"),), "grad": True},
    {"env": (("TORCH_CUDNN_SDPA_ENABLED", "1"),), "d": 100, "e": 100},
)

GPUS = (70, 75, 80, 86, 89, 90, 100, 103, 110, 120, 121)
LIBRARIES = (90100, 90501, 90700, 91002, 91100, 91101, 91400, 91500, 91501, 91900, 92000, 92300, 92401, 92501)


def cases() -> list[Case]:
    """Every edge on every GPU, and with every cuDNN that some check names where cuDNN could be taken."""
    shapes = [edge for edge in EDGES if not edge or edge.keys() & {"d", "dropout", "s_q", "s_kv", "mask"}]
    made = [Case(arch=arch, **edge) for arch in GPUS for edge in EDGES]
    for arch in (80, 90, 100, 103, 110):
        for cudnn in LIBRARIES:
            cuda = 128 if cudnn < 91500 else 130
            made += [Case(arch=arch, cudnn=cudnn, cuda=cuda, **edge) for edge in shapes]
        made += [Case(arch=arch, cuda=cuda) for cuda in (126, 129, 130)]
    made += [
        Case(arch=arch, impl="FA4", **edge) for arch in (80, 90, 100, 120) for edge in EDGES if _wide(edge)
    ]
    return made


def _wide(edge: dict[str, Any]) -> bool:
    """Where what stands behind the flash kernel counts: head dimensions, dropout."""
    return not edge or bool(edge.keys() & {"d", "dropout"} and edge.keys() <= {"d", "e", "dropout", "grad"})


class Row(NamedTuple):
    """From one release on, up to another, this is taken, and the line says so. 2.5.0 apart, if ``late``: it
    tries cuDNN early everywhere."""

    since: Release
    before: Release
    case: Case
    taken: str
    line: str
    late: bool = False

    def releases(self) -> list[Release]:
        return [
            release
            for release in RELEASES
            if self.since <= release < self.before and not (self.late and release == (2, 5, 0))
        ]


_ALL = (2, 2, 0)
_END = (99, 0, 0)
_OWN = {"cudnn": 92000, "cuda": 130}  # what the wheels of 2.12 and 2.13 bring

ROWS = (
    Row(_ALL, (2, 5, 0), Case(), "flash", "2.4.0 sdp_utils.cpp:48, 488: cuDNN is first and not opted in"),
    Row((2, 5, 0), (2, 5, 1), Case(), "cudnn", "2.5.0 select_sdp_backend: first on sm90"),
    Row((2, 5, 0), (2, 5, 1), Case(arch=80), "flash", "2.5.0 select_sdp_backend: second elsewhere"),
    Row((2, 5, 1), (2, 9, 0), Case(), "flash", "2.5.1 select_sdp_backend: behind math"),
    Row((2, 9, 0), (2, 10, 0), Case(), "flash", "2.9.1 can_use_cudnn_attention: compiled with 90800"),
    Row((2, 9, 0), (2, 10, 0), Case(cuda=126), "cudnn", "2.9.0 install_cuda.sh, install_126: 9.10.2.21"),
    Row((2, 9, 0), (2, 10, 0), Case(cuda=129), "cudnn", "2.9.0 install_cuda.sh, install_129: 9.10.2.21"),
    Row((2, 9, 0), (2, 10, 0), Case(arch=103, cuda=129), "flash", "2.9.1 select_sdp_backend: minor 0"),
    Row((2, 15, 0), _END, Case(s_kv=448, grad=True, **_OWN), "flash", "2.15.0 sdp_utils.cpp:770"),
    Row((2, 10, 0), (2, 15, 0), Case(s_kv=448, grad=True, **_OWN), "cudnn", "2.15.0 sdp_utils.cpp:770"),
    Row((2, 15, 0), _END, Case(s_kv=448, **_OWN), "cudnn", "2.15.0 sdp_utils.cpp:770: a gradient"),
    Row(
        (2, 15, 0), _END, Case(arch=80, b=65536, s_q=16, s_kv=16), "mem_efficient", "2.15.0 sdp_utils.cpp:717"
    ),
    Row((2, 15, 0), _END, Case(arch=80, impl="FA4"), "mem_efficient", "2.15.0 sdp_utils.cpp:209"),
    Row((2, 15, 0), _END, Case(d=192, e=128, impl="FA4"), "flash", "2.15.0 sdp_utils.cpp:234"),
    Row((2, 15, 0), _END, Case(arch=100, d=256, e=256, impl="FA4"), "flash", "2.15.0 sdp_utils.cpp:249"),
    Row((2, 15, 0), _END, Case(arch=100, d=192, e=192, impl="FA4"), "mem_efficient", "2.15.0 …:241"),
    Row((2, 10, 0), _END, Case(cudnn=91500), "flash", "2.10.0 select_sdp_backend: 91500 is not above 91500"),
    Row((2, 10, 0), _END, Case(cudnn=91501), "cudnn", "2.10.0 select_sdp_backend: sm90, 91501"),
    Row((2, 10, 0), _END, Case(arch=100, cudnn=91501), "cudnn", "2.10.0 select_sdp_backend: sm100"),
    Row((2, 10, 0), _END, Case(arch=103, cudnn=91501), "cudnn", "2.10.0 select_sdp_backend: minor 3"),
    Row((2, 10, 0), _END, Case(arch=120, **_OWN), "flash", "2.10.0 select_sdp_backend: major 9 or 10"),
    Row((2, 10, 0), _END, Case(arch=80, **_OWN), "flash", "2.10.0 select_sdp_backend: major 9 or 10"),
    Row(_ALL, _END, Case(arch=80, mask=FULL), "mem_efficient", "2.4.0 sdp_utils_cpp.h:266", late=True),
    Row((2, 10, 0), _END, Case(mask=FULL, **_OWN), "cudnn", "2.10.0 sdp_utils_cpp.h:270: four dimensions"),
    Row(
        (2, 10, 0),
        _END,
        Case(mask=((16, 512, 512), "bool", False), **_OWN),
        "mem_efficient",
        "2.10.0 sdp_utils_cpp.h:270: three dimensions",
    ),
    Row(_ALL, _END, Case(arch=80, dtype="fp32"), "mem_efficient", "2.4.0 sdp_utils.cpp:476"),
    Row(_ALL, _END, Case(arch=80, dtype="fp64"), "math", "2.4.0 sdp_utils.cpp:608"),
    Row(_ALL, _END, Case(arch=75), "math", "2.4.0 sdp_utils.cpp:610: bf16 from sm80 on"),
    Row(_ALL, _END, Case(arch=75, dtype="fp16"), "mem_efficient", "2.4.0 sdp_utils.cpp:201"),
    Row(_ALL, (2, 7, 0), Case(arch=120), "math", "2.6.0 sdp_utils.cpp:238, 273: up to sm90"),
    Row((2, 7, 0), _END, Case(arch=120), "flash", "2.7.1 sdp_utils.cpp:263: up to sm120"),
    Row((2, 7, 0), (2, 8, 0), Case(arch=121), "math", "2.7.1 sdp_utils.cpp:263, 308: up to sm120"),
    Row((2, 8, 0), _END, Case(arch=121), "flash", "2.8.0 sdp_utils.cpp:263: up to sm121"),
    Row(_ALL, _END, Case(arch=80, d=256, e=256), "flash", "2.4.0 sdp_utils.cpp:92"),
    Row(_ALL, _END, Case(arch=80, d=257, e=257), "math", "2.4.0 sdp_utils.cpp:92, 142"),
    Row(_ALL, _END, Case(arch=80, d=264, e=264), "mem_efficient", "2.4.0 sdp_utils.cpp:92"),
    Row(_ALL, _END, Case(arch=80, d=100, e=100), "flash", "2.4.0 attention.cpp:675: padded"),
    Row(_ALL, _END, Case(arch=80, d=192, e=128), "mem_efficient", "2.4.0 sdp_utils.cpp:92"),
    Row(_ALL, _END, Case(arch=89, d=200, e=200, grad=True), "mem_efficient", "2.4.0 sdp_utils.cpp:263"),
    Row(_ALL, (2, 3, 0), Case(arch=89, d=256, e=256, grad=True), "mem_efficient", "2.2.2 sdp_utils.cpp:229"),
    Row((2, 3, 0), _END, Case(arch=89, d=256, e=256, grad=True), "flash", "2.3.1 sdp_utils.cpp:253"),
    Row(
        (2, 3, 0),
        _END,
        Case(arch=89, d=256, e=256, grad=True, dropout=0.125),
        "mem_efficient",
        "2.3.1 sdp_utils.cpp:253: dropout",
    ),
    Row((2, 7, 0), _END, Case(arch=120, d=224, e=224, grad=True), "mem_efficient", "2.7.1 sdp_utils.cpp:341"),
    Row(
        _ALL, _END, Case(arch=80, causal=True, s_q=128), "mem_efficient", "2.4.0 sdp_utils.cpp:284", late=True
    ),
    Row(
        _ALL, (2, 5, 0), Case(arch=80, groups=4), "math", "2.4.0 sdp_utils_cpp.h:361: there is no enable_gqa"
    ),
    Row((2, 5, 0), _END, Case(arch=80, groups=4), "flash", "2.5.1 sdp_utils_cpp.h:412"),
    Row(
        (2, 5, 0),
        (2, 14, 0),
        Case(arch=80, groups=4, mask=FULL),
        "math",
        "2.5.1 sdp_utils_cpp.h:416",
        late=True,
    ),
    Row((2, 14, 0), _END, Case(arch=80, groups=4, mask=FULL), "mem_efficient", "2.14.1 sdp_utils_cpp.h:420"),
    Row((2, 14, 0), _END, Case(arch=80, groups=1, gqa=False), "flash", "2.14.1 sdp_utils_cpp.h:459"),
    Row(
        _ALL, (2, 14, 0), Case(arch=80, groups=1, gqa=False), "math", "2.13.0 sdp_utils_cpp.h:436", late=True
    ),
    Row(_ALL, (2, 14, 0), Case(arch=80, rank=3), "math", "2.13.0 sdp_utils_cpp.h:323"),
    Row((2, 14, 0), _END, Case(arch=80, rank=3), "flash", "2.14.1 sdp_utils_cpp.h:50"),
    Row((2, 12, 0), _END, Case(dropout=0.1, grad=True, **_OWN), "flash", "2.12.0 sdp_utils.cpp:489"),
    Row((2, 12, 0), _END, Case(dropout=0.125, grad=True, **_OWN), "cudnn", "2.12.0 sdp_utils.cpp:489"),
    Row(
        (2, 10, 0),
        (2, 12, 0),
        Case(dropout=0.1, grad=True, **_OWN),
        "cudnn",
        "2.12.0 has check_cudnn_dropout",
    ),
    Row((2, 10, 0), _END, Case(deterministic=True, **_OWN), "flash", "2.10.0 sdp_utils.cpp:692"),
    Row((2, 10, 0), _END, Case(s_kv=1, **_OWN), "flash", "2.10.0 sdp_utils.cpp:540"),
    Row((2, 10, 0), _END, Case(s_q=1, **_OWN), "cudnn", "2.10.0 sdp_utils.cpp:546: without dropout"),
    Row((2, 10, 0), (2, 14, 0), Case(arch=100, s_q=1, **_OWN), "cudnn", "2.13.0 sdp_utils.cpp:680"),
    Row((2, 14, 0), _END, Case(arch=100, s_q=1, **_OWN), "flash", "2.14.1 sdp_utils.cpp:648"),
    Row((2, 14, 0), _END, Case(arch=100, s_q=1, cudnn=92401, cuda=130), "cudnn", "2.14.1: 92401 to 92499"),
    Row(
        (2, 10, 0), (2, 14, 0), Case(d=256, e=256, **_OWN), "cudnn", "2.10.0 sdp_utils.cpp:507: sm90, > 90999"
    ),
    Row((2, 14, 0), _END, Case(d=256, e=256, **_OWN), "flash", "2.14.1 sdp_utils.cpp:672: > 92200"),
    Row((2, 14, 0), _END, Case(d=256, e=256, cudnn=92300, cuda=130), "cudnn", "2.14.1 sdp_utils.cpp:672"),
    Row((2, 10, 0), (2, 11, 0), Case(arch=100, d=192, e=128, **_OWN), "mem_efficient", "2.10.0 …:507"),
    Row((2, 11, 0), _END, Case(arch=100, d=192, e=128, **_OWN), "cudnn", "2.11.0 sdp_utils.cpp:522"),
    Row(
        (2, 14, 0),
        _END,
        Case(d=256, e=192, grad=True, cudnn=92300, cuda=130),
        "mem_efficient",
        "2.14.1 sdp_utils.cpp:772",
    ),
    Row((2, 13, 0), (2, 15, 0), Case(b=65536, s_q=16, s_kv=16, **_OWN), "flash", "2.13.0 …:605"),
    Row((2, 13, 0), _END, Case(arch=80, offset=2, mask=FULL), "math", "2.13.0 sdp_utils.cpp:356"),
    Row(
        _ALL,
        (2, 13, 0),
        Case(arch=80, offset=2, mask=FULL),
        "mem_efficient",
        "2.13.0 has the offset's check",
        late=True,
    ),
    Row(_ALL, _END, Case(arch=80, step=2), "math", "2.4.0 sdp_utils_cpp.h:436"),
    Row(_ALL, (2, 3, 0), Case(arch=80, d=1, e=1, step=2), "math", "2.2.2 …_dense has no ignore_singleton"),
    Row((2, 3, 0), _END, Case(arch=80, d=1, e=1, step=2), "flash", "2.4.0 sdp_utils_cpp.h:448"),
    Row(_ALL, _END, Case(arch=80, off=("flash", "mem_efficient", "math", "cudnn")), "", "2.4.0 …:674"),
    Row(
        (2, 6, 0),
        (2, 9, 0),
        Case(s_q=1, off=("flash", "mem_efficient", "math")),
        "",
        "2.6.0 sdp_utils.cpp:408",
    ),
    Row(
        (2, 3, 0),
        (2, 5, 0),
        Case(env=(("TORCH_CUDNN_SDPA_ENABLED", "1"),)),
        "cudnn",
        "2.4.0 sdp_utils.cpp:50, 492",
    ),
    Row(
        (2, 10, 0),
        _END,
        Case(env=(("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1"),), **_OWN),
        "flash",
        "2.10.0 check_prefer_cudnn_attention",
    ),
)
