"""TRITON0xx: where attnsel's own Triton kernels compile, fit and make sense.

The tables behind these rules come from compiling flash kernels ahead of time for every architecture with
the Triton wheels of PyPI: registers and spills by cuobjdump, shared memory by the compiler's metadata.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import Version, triton
from attnsel.params import AttentionParams
from attnsel.rules.api import INTERPRETED, rules_about
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import AtLeast, AtMost, FreeText, OneOf

rule = rules_about("triton", evidence="compiler")

CUDA = {"cuda"}
TURING = frozenset({75})
ROWS_APART = AtMost((1 << 24) - 1)  # elements; backends/triton/launch.py refuses more as well
LATENT = (576, 512)  # head dimensions of latent attention in its absorbed form: forward only


@rule("TRITON001", requires={"device": OneOf("cuda")}, fires_on={"device": "rocm"})
def needs_an_nvidia_gpu(p: AttentionParams, env: Environment) -> bool:
    """The Triton kernels run on NVIDIA GPUs

    Why: for AMD the kernels compile, but nothing of attnsel's has run there.
    Fix: tiled and sdpa.* run on other devices.
    Source: ahead-of-time compilation with Triton 3.7.1; attnsel's launch code sets CUDA devices only.
    """
    return env.device.type != "cpu"  # TRITON007


@rule(INTERPRETED, device={"cpu"}, evidence="measured", fires_on={"gpu": "cpu"}, passes={"gpu": "H100"})
def interpreted_only_when_asked(p: AttentionParams, env: Environment) -> Violation | None:
    """On CPU tensors the Triton kernels are interpreted, and only when asked for

    Why: an interpreted kernel takes a second for what a GPU does in a microsecond; it is for tests and for
    curiosity.
    Fix: backend="triton" runs it all the same.
    Source: interpreter timings with Triton 3.7.1, 0.1 to 0.8 s for s = 128 to 1024.
    """
    return Violation("device", "cpu", FreeText("cuda, or backend='triton' to interpret it"))


@rule("TRITON008", fires_on={"tensors": {"q": {"shape": (2, 8, 16, 128), "stride": (32768, 4096, 256, 2)}}})
def innermost_stride(p: AttentionParams, env: Environment) -> Violation | None:
    """The Triton kernels read head dimensions that lie side by side

    Why: a tile's row is loaded as one run of memory; every other stride is taken as it is.
    Fix: x.contiguous(), or adapt="auto", which copies.
    Source: attnsel's kernels, backends/triton/tile.py.
    """
    for name, spec in (("q", p.tensors.q), ("k", p.tensors.k), ("v", p.tensors.v)):
        if spec is not None and spec.last_stride != 1:
            return Violation(
                f"tensors.{name}", f"innermost stride {spec.last_stride}", FreeText("1: a dense copy")
            )
    return None


@rule(
    "TRITON009",
    evidence="measured",
    fires_on={"tensors": {"k": {"shape": (1, 8, 1, 128), "stride": (1 << 27, 1 << 24, 128, 1)}}},
    passes={"tensors": {"k": {"shape": (1, 8, 1, 128), "stride": (1 << 26, 1 << 23, 128, 1)}}},
)
def rows_far_apart(p: AttentionParams, env: Environment) -> Violation | None:
    """The Triton kernels address the rows of a tile with 32 bits

    Why: rows 2^24 elements apart or more put the last row of a tile of 128 beyond 2^31.
    Fix: x.contiguous().
    Source: attnsel's kernels, backends/triton/tile.py; the interpreter read other memory.
    """
    row = {"bshd": 1, "sbhd": 0, "thd": 0, "bhsd": 2}
    for name, spec, fmt in (
        ("q", p.tensors.q, p.layout.q_format),
        ("k", p.tensors.k, p.layout.kv_format),
        ("v", p.tensors.v, p.layout.kv_format),
    ):
        if spec is None or spec.shape[row[fmt]] <= 1:
            continue
        stride = spec.stride[row[fmt]]
        if not ROWS_APART.holds(stride, p):
            return Violation(f"tensors.{name}", f"row stride {stride}", ROWS_APART)
    return None


@rule(
    "TRITON002",
    requires={"arch": AtLeast(75)},
    fires_on={"gpu": "V100"},
    passes={"gpu": "T4", "dtype": "fp16"},
)
def needs_turing(p: AttentionParams, env: Environment) -> None:
    """The Triton kernels need Turing or newer (sm75)

    Why: Triton gave up Volta's tensor cores; what it compiles for sm70 multiplies element by element.
    Fix: sdpa.efficient uses Volta's tensor cores.
    Source: kernels compiled for sm70 with Triton 3.0 to 3.9: no HMMA instruction; triton#5066.
    """


@rule(
    "TRITON003",
    arch=TURING,
    requires={"dtype": OneOf("fp16")},
    fires_on={"dtype": "bf16"},
    passes={"dtype": "fp16"},
)
def turing_has_no_bf16(p: AttentionParams, env: Environment) -> bool:
    """On Turing the Triton kernels compute in fp16

    Why: Turing's tensor cores know fp16 only; bf16 and fp32 would run on plain multiply-adds.
    Fix: cast to fp16 (mind its range of ±65504).
    Source: kernels compiled for sm75: HMMA.1688 for fp16 only.
    """
    return p.dtype in ("bf16", "fp32")


@rule("TRITON004", requires={"dtype": OneOf("fp32", "bf16", "fp16")}, fires_on={"dtype": "fp64"})
def dtypes(p: AttentionParams, env: Environment) -> bool:
    """The Triton kernels take fp16, bf16 and fp32

    Fix: tiled and sdpa.math compute in fp64.
    Source: attnsel's kernel table was compiled for these three.
    """
    return not p.dtype.startswith("fp8")  # TRITON005


@rule("TRITON005", fires_on={"dtype": "fp8_e4m3"})
def no_fp8(p: AttentionParams, env: Environment) -> Violation | None:
    """The Triton kernels do not run attention in FP8

    Fix: cast q, k, v to bf16, or use a recipe without fp8_dpa; cudnn plans FP8 attention.
    Source: attnsel's kernels take no scales.
    """
    if p.dtype.startswith("fp8"):
        return Violation("dtype", p.dtype, OneOf("bf16", "fp16"))
    return Violation("fp8", True, FreeText("a recipe with fp8_dpa=False")) if p.fp8_attention else None


@rule(
    "TRITON006",
    requires={"platform": OneOf("linux")},
    evidence="documented",
    fires_on={"platform": "windows"},
)
def linux_only(p: AttentionParams, env: Environment) -> None:
    """The Triton kernels need Linux

    Why: PyPI has Triton wheels for Linux only.
    Fix: use Linux or WSL; sdpa.* and tiled run elsewhere.
    Source: the file list of the triton releases 3.0 to 3.9 on PyPI.
    """


# Which Triton.


@rule(
    "TRITON010",
    requires={"triton": AtLeast(Version(3, 2))},
    evidence="policy",
    fires_on={"triton": "3.1.0"},
    passes={"triton": "3.2.0"},
)
def oldest_triton(p: AttentionParams, env: Environment) -> None:
    """The Triton kernels are built for Triton 3.2 and newer

    Why: 3.2 comes with PyTorch 2.6, the oldest that attnsel runs on.
    Fix: upgrade PyTorch, which brings its Triton along.
    Source: attnsel's pyproject.toml.
    """


@rule(
    "TRITON011",
    when=triton(">=3.3.0,<3.4.0"),
    arch=TURING,
    fires_on={"dtype": "fp16"},
    passes={"triton": "3.4.0", "dtype": "fp16"},
)
def turing_lost(p: AttentionParams, env: Environment) -> Violation:
    """Triton 3.3 does not compile the kernels for Turing

    Why: its pass manager fails on them, with and without attnsel's hook. Triton 3.2 still compiles for
    Turing's tensor cores; from 3.4 on it falls back to plain multiply-adds, and attnsel's hook into the
    compiler's stages brings the tensor cores back.
    Fix: Triton 3.2, or 3.4 and newer.
    Source: kernels compiled for sm75 with Triton 3.0.0 to 3.9.0.
    """
    return Violation("triton", env.triton, FreeText("3.2, or 3.4 and newer"))


@rule(
    "TRITON012",
    arch=range(100, 130),
    requires={"triton": AtLeast(Version(3, 3))},
    fires_on={"triton": "3.2.0"},
    passes={"triton": "3.3.1"},
)
def blackwell_unknown_to_triton(p: AttentionParams, env: Environment) -> None:
    """Triton before 3.3 knows no Blackwell

    Why: on the first dot for sm100 or sm120 its compiler stops at an assertion, "computeCapability not
    supported", and takes the process with it.
    Fix: PyTorch 2.7 and newer bring Triton 3.3 and newer.
    Source: kernels compiled for sm100 and sm120 with Triton 3.2.0: AccelerateMatmul.cpp:36 aborts.
    """


@rule(
    "TRITON013",
    arch={103, 121},
    requires={"triton": AtLeast(Version(3, 6))},
    fires_on={"triton": "3.5.1"},
    passes={"triton": "3.6.0"},
)
def newer_blackwell(p: AttentionParams, env: Environment) -> None:
    """sm103 and sm121 need Triton 3.6

    Why: the assembler that older releases carry, ptxas 12.8, does not know these architectures.
    Fix: Triton 3.6, which comes with PyTorch 2.10, or newer.
    Source: kernels compiled with Triton 3.5.1 ("Value 'sm_103a' is not defined") and 3.6.0.
    """


@rule(
    "TRITON014",
    arch={110},
    requires={"triton": AtLeast(Version(3, 7))},
    fires_on={"gpu": "sm110", "triton": "3.6.0"},
    passes={"gpu": "sm110", "triton": "3.7.1"},
)
def thor(p: AttentionParams, env: Environment) -> None:
    """sm110 needs Triton 3.7

    Why: the assembler that older releases carry does not know this architecture.
    Fix: Triton 3.7, which comes with PyTorch 2.13, or newer.
    Source: kernels compiled with Triton 3.6.0 ("sm_110a is not defined") and 3.7.1.
    """


@rule(
    "TRITON015",
    training=True,
    when=triton(">=3.4.0,<3.5.0"),
    arch={100},
    fires_on={"is_training": True},
    passes={"is_training": False},
)
def backward_lost_on_sm100(p: AttentionParams, env: Environment) -> Violation | None:
    """Triton 3.4 does not compile the backward for sm100

    Why: a pass of its compiler fails on the dK/dV kernel in every tile that uses tcgen05; smaller ones pass.
    Fix: Triton 3.3, or 3.5 and newer.
    Source: dK/dV compiled for sm100 at head_dim 64 and 128 with Triton 3.3.1 to 3.9.0.
    """
    return Violation("triton", env.triton, FreeText("3.3, or 3.5 and newer"))


# What fits.


@rule(
    "TRITON020",
    device=CUDA,
    requires={("head_dim_qk", "head_dim_v"): AtMost(256)},
    fires_on={"head_dim_qk": 320},
    passes={"head_dim_qk": 576, "head_dim_v": 512, "is_training": False},
)
def head_dim_limit(p: AttentionParams, env: Environment) -> bool:
    """Triton kernels stop at head_dim 256, but for 16-bit 576/512 inference

    Why: wider tiles leave no configuration that fits shared memory and does not spill.
    Fix: sdpa.efficient and tiled have no limit.
    Source: table of forward, dK/dV and dQ kernels compiled for sm75 to sm121 with Triton 3.7.1: head
    dimensions 40 to 256 in 16 bits, to 256 in float32.
    """
    latent = (p.head_dim_qk, p.head_dim_v) == LATENT and p.dtype in ("fp16", "bf16")
    return p.is_training or not latent


@rule(
    "TRITON021",
    training=True,
    arch=TURING,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"dtype": "fp16", "head_dim_qk": 256},
    passes={"dtype": "fp16", "head_dim_qk": 256, "is_training": False},
)
def turing_wide_backward(p: AttentionParams, env: Environment) -> None:
    """On Turing the Triton backward stops at head_dim 128

    Why: no dK/dV tile for 256 fits Turing's 64 KiB without spilling registers; head dimensions between are
    padded to 256.
    Fix: sdpa.efficient trains with wider heads on Turing.
    Source: table of kernels compiled for sm75 with Triton 3.7.1 (least spill 16x32, 4 warps, stack 32).
    """
