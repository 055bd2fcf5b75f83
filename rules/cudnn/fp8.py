"""FP8 attention in cuDNN, by recipe. Every rule looks at FP8 questions only.

A question is about FP8 when q, k and v are FP8 tensors, or when the call stands in FP8 autocast and the
recipe covers attention (``fp8_dpa``, or ``fp8_mha`` which includes it). A recipe that leaves attention alone
means FP16/BF16 attention, and the other files of this folder judge it.

Recipes are TransformerEngine's. Below cuDNN 9.8 its table comes first, and the frontend where the page says
so; from 9.8 on the library can be asked and is the judge (``fp8_since_9_8`` has what it alone says).
"""

from __future__ import annotations

from typing import Any

from attnsel.environment import Environment
from attnsel.environment.versions import Version, cudnn
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.cudnn.words import BLACKWELL, BLACKWELL_THOR, CONSUMER_BLACKWELL, HOPPER
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import NEWER, AtLeast, FreeText, OneOf


def recipe(kind: str, **fields: Any) -> dict[str, Any]:
    """The fields of a question whose attention runs under this recipe, for examples."""
    return {"fp8": True, "fp8_meta": {"recipe": {"kind": kind, "fp8_dpa": True, **fields}}}


DELAYED = recipe("delayed")
CURRENT = recipe("current")
MXFP8 = recipe("mxfp8")

CUDA = {"cuda"}
rule = rules_about("cudnn", fp8=True, device=CUDA)
asked = rules_about("cudnn", fp8=True, device=CUDA, evidence="library")


def kind_of(p: AttentionParams) -> str | None:
    return None if p.recipe is None else getattr(p.recipe, "kind", None)


def bottom_right(p: AttentionParams) -> bool:
    """The diagonal of a mask or window ends in the last corner."""
    return p.bottom_right or (p.windowed and p.window_size[1] >= 0 and p.bottom_right_diagonal is True)


# What is asked.


@rule("CUDNN301", fires_on={"dtype": "fp8_e4m3"}, passes={"dtype": "fp8_e4m3", **DELAYED})
def needs_recipe(p: AttentionParams, env: Environment) -> Violation | None:
    """FP8 tensors need a recipe that covers attention

    Why: the kernel scales q, k, v, the scores and the output; the recipe says how, and that decides which
    releases and GPUs can do it.
    Fix: fp8=True and fp8_meta={"recipe": {"kind": "delayed", "fp8_dpa": True}}; kinds: delayed, current,
    mxfp8.
    Source: cudnn-frontend v1.10.0, docs/operations/Attention.md (scale and descale tensors are inputs of
    sdpa_fp8); TransformerEngine d0067d0, utils.py lines 647 to 656.
    """
    if p.recipe is None:
        return Violation(
            "fp8_meta", None, FreeText("a recipe of kind delayed, current or mxfp8, with fp8_dpa")
        )
    if not p.recipe.attention_in_fp8:
        return Violation("fp8_meta", kind_of(p), FreeText("a recipe with fp8_dpa, since the tensors are FP8"))
    return None


@rule("CUDNN302", fires_on=recipe("block"), passes=DELAYED)
def no_block_scaling(p: AttentionParams, env: Environment) -> Violation | None:
    """Block scaling has no fused attention

    Why: cuDNN scales per tensor or, as MXFP8, per 32 elements; blocks of 128 it does not know.
    Fix: another kind of recipe for attention, or fp8_dpa off: the linear layers keep block scaling.
    Source: TransformerEngine d0067d0, utils.py lines 721 to 723.
    """
    if kind_of(p) != "block":
        return None
    return Violation("fp8_meta", "block", FreeText("kind delayed, current or mxfp8, or fp8_dpa off"))


@rule(
    "CUDNN303",
    when=cudnn("<9.8.0"),
    requires={"dtype": OneOf("fp8_e4m3")},
    unknown=True,
    fires_on={"dtype": "fp8_e5m2", **DELAYED},
    passes={"dtype": "fp8_e4m3", **DELAYED},
)
def tensors_in_e4m3(p: AttentionParams, env: Environment) -> bool:
    """Below cuDNN 9.8 q, k and v in E5M2 are documented and used by nobody

    Why: the frontend lists E4M3 and E5M2; TransformerEngine hands over E4M3 only and keeps E5M2 for
    gradients.
    Fix: E4M3, or cuDNN 9.8.0 or newer.
    Source: cudnn-frontend v1.10.0, docs/operations/Attention.md, "Tensors"; TransformerEngine d0067d0,
    utils.py line 628.
    """
    return p.dtype.startswith("fp8")


# Devices and versions.


@asked("CUDNN304", requires={"arch": AtLeast(90)}, fires_on={"gpu": "L4", **DELAYED}, device=None)
def fp8_needs_hopper(p: AttentionParams, env: Environment) -> None:
    """FP8 attention needs Hopper (sm90) or newer

    Fix: attention in bf16 (fp8_dpa off); Ada multiplies in FP8 but has no such attention.
    Source: cudnn-frontend v1.3.0 to 1.32 ("only supported on Hopper architecture and newer");
    TransformerEngine v2.18, fused_attn.cpp, FP8 branch.
    """


@rule(
    "CUDNN305",
    arch=HOPPER,
    requires={"cudnn": AtLeast(Version(9, 1))},
    fires_on={"cudnn": "9.0.0", **DELAYED},
)
def fp8_from_9_1(p: AttentionParams, env: Environment) -> None:
    """FP8 attention needs cuDNN 9.1.0

    Fix: cuDNN 9.7.0 or newer has most of it.
    Source: cudnn-frontend v1.3.0 to 1.32 ("only supported starting cudnn 9.1.0"). TransformerEngine v2.3
    still lists packed sequences of at most 512 tokens from 8.9.0; v2.18 does not.
    """


@rule(
    "CUDNN306",
    when=cudnn(">=9.1.0,<9.2.1"),
    arch=HOPPER,
    requires={"cudnn": NEWER},
    unknown=True,
    fires_on=DELAYED,
)
def fp8_before_9_2_1(p: AttentionParams, env: Environment) -> None:
    """From 9.1.0 to 9.2.0 the frontend takes FP8, TransformerEngine does not

    Fix: cuDNN 9.2.1 or newer.
    Source: cudnn-frontend v1.3.0 (9.1.0); TransformerEngine v2.18, fused_attn.cpp, FP8 branch (9.2.1).
    """


@rule(
    "CUDNN307",
    arch=range(100, 130),
    requires={"cudnn": AtLeast(Version(9, 7))},
    fires_on={"cudnn": "9.6.0", **DELAYED},
)
def fp8_blackwell_from_9_7(p: AttentionParams, env: Environment) -> None:
    """On Blackwell FP8 attention needs cuDNN 9.7.0

    Fix: cuDNN 9.7.0 or newer for inference, 9.19.0 for training (CUDNN309).
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch (the 9.2.1 row excludes sm100).
    """


@rule("CUDNN308", when=cudnn("==9.10.0"), requires={"cudnn": NEWER}, fires_on=DELAYED)
def fp8_bug_9_10_0(p: AttentionParams, env: Environment) -> None:
    """cuDNN 9.10.0 has known bugs in FP8 attention

    Fix: cuDNN 9.10.2 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp ("9.10.0: known bugs with SDPA FP8"); cudnn-frontend 1.23
    and 1.32.
    """


@asked(
    "CUDNN309",
    when=cudnn(">=9.7.0,<9.19.0"),
    arch=BLACKWELL,
    requires={"is_training": OneOf(False)},
    fires_on=DELAYED,
    passes={**DELAYED, "is_training": False},
)
def fp8_training_blackwell(p: AttentionParams, env: Environment) -> None:
    """On Blackwell FP8 training needs cuDNN 9.19.0

    Why: the frontend sends every FP8 backward there through the deterministic kernels, which came with 9.19.
    Fix: cuDNN 9.19.0 or newer.
    Source: cudnn-frontend 1.23, sdpa_fp8_bwd.h (auto-routing). TransformerEngine's table says 9.7, true for
    frontends of that time.
    """


@asked(
    "CUDNN310",
    when=cudnn(">=9.7.0"),
    arch=CONSUMER_BLACKWELL,
    requires={"is_training": OneOf(False)},
    fires_on=DELAYED,
    passes={**DELAYED, "is_training": False},
)
def fp8_training_consumer(p: AttentionParams, env: Environment) -> None:
    """On consumer Blackwell (sm120) there is no FP8 backward

    Fix: train in bf16.
    Source: libcudnn, asked. TransformerEngine d0067d0, utils.py lines 725 to 737, takes no FP8 attention
    there at all.
    """


@asked(
    "CUDNN311",
    when=cudnn(">=9.7.0,<9.18.1"),
    arch=CONSUMER_BLACKWELL,
    requires={"cudnn": NEWER},
    fires_on={**DELAYED, "is_training": False},
)
def fp8_inference_consumer(p: AttentionParams, env: Environment) -> None:
    """On consumer Blackwell (sm120) FP8 inference needs cuDNN 9.18.1

    Fix: cuDNN 9.18.1 or newer.
    Source: libcudnn, asked. TransformerEngine d0067d0, utils.py line 725, refuses sm120 at every version; the
    library is followed.
    """


@rule(
    "CUDNN312",
    when=cudnn(">=9.7.0"),
    arch=range(110, 120),
    requires={"arch": OneOf(90, 100, 103)},
    unknown=True,
    fires_on=DELAYED,
)
def fp8_sm110(p: AttentionParams, env: Environment) -> None:
    """Nobody has seen FP8 attention on sm110

    Fix: try it there, or attention in bf16.
    Source: TransformerEngine and cudnn-frontend treat it as "10 or newer" without naming it.
    """


# Recipes.


@asked(
    "CUDNN313",
    arch=(*HOPPER, *CONSUMER_BLACKWELL),
    fires_on=CURRENT,
    passes={**DELAYED, "is_training": False},
)
def current_scaling_needs_blackwell(p: AttentionParams, env: Environment) -> Violation | None:
    """Current scaling needs datacentre Blackwell (sm100, sm103)

    Why: the scale of the output is known only after it is computed, so the kernel must write half precision
    (inferred), which only the FP8 kernels of datacentre Blackwell do.
    Fix: delayed scaling, or fp8_dpa off.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("HALF/BFLOAT16 output is only supported on
    Blackwell"); TransformerEngine d0067d0, utils.py lines 686 to 702.
    """
    if kind_of(p) != "current":
        return None
    return Violation("fp8_meta", "current", FreeText("kind delayed"))


@asked(
    "CUDNN314",
    when=cudnn(">=9.7.0,<9.13.0"),
    arch=BLACKWELL_THOR,
    fires_on=CURRENT,
    passes={**DELAYED, "is_training": False},
)
def current_scaling_from_9_13(p: AttentionParams, env: Environment) -> Violation | None:
    """Current scaling needs cuDNN 9.13.0

    Why: its output is in half precision.
    Fix: cuDNN 9.13.0 or newer, or delayed scaling.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h. TransformerEngine d0067d0, utils.py lines 686 to 702,
    waits for 9.14 and gives no reason; the library is followed.
    """
    if kind_of(p) != "current":
        return None
    return Violation("fp8_meta", "current", FreeText("kind delayed"))


@asked("CUDNN315", arch=(*HOPPER, *range(110, 130)), fires_on=MXFP8, passes=DELAYED)
def mxfp8_needs_blackwell(p: AttentionParams, env: Environment) -> Violation | None:
    """MXFP8 attention needs datacenter Blackwell (sm100, sm103)

    Fix: delayed scaling where it is supported, or fp8_dpa off.
    Source: cudnn-frontend 1.32, scaled_dot_product_flash_attention.h lines 344 to 444 (major 10 only);
    TransformerEngine d0067d0, utils.py lines 703 to 737.
    """
    if kind_of(p) != "mxfp8":
        return None
    return Violation("fp8_meta", "mxfp8", FreeText("kind delayed or current"))


@rule(
    "CUDNN316",
    when=cudnn(">=9.7.0,<9.21.0", "==9.23.0", "==9.23.1"),
    arch=BLACKWELL,
    fires_on=MXFP8,
    passes={**DELAYED, "is_training": False},
)
def mxfp8_versions(p: AttentionParams, env: Environment) -> Violation | None:
    """MXFP8 attention needs cuDNN 9.21.0 or newer, but not 9.23.0 and 9.23.1

    Fix: cuDNN 9.21, 9.22, or 9.23.2 and newer.
    Source: TransformerEngine d0067d0, utils.py lines 703 to 720; TransformerEngine#3173 (bad at 9.23.0 and
    9.23.1); cudnn-frontend 1.23 ("MXFP8 SDPA requires cuDNN 9.21.0 or later").
    """
    if kind_of(p) != "mxfp8":
        return None
    return Violation("cudnn", env.cudnn, FreeText("9.21.0, 9.22 or 9.23.2 and newer"))


@rule("CUDNN317", arch=BLACKWELL, fires_on=recipe("mxfp8", fp8_mha=True), passes=MXFP8)
def mxfp8_inside_only(p: AttentionParams, env: Environment) -> Violation | None:
    """MXFP8 attention cannot pass FP8 on to the next layer (fp8_mha)

    Why: the kernel writes half precision; there is no input for the block scales of an output.
    Fix: fp8_dpa without fp8_mha.
    Source: cudnn-frontend 1.20 to 1.28, sdpa_mxfp8 (no scales of o); TransformerEngine d0067d0, utils.py
    lines 703 to 720.
    """
    if kind_of(p) == "mxfp8" and p.recipe is not None and p.recipe.fp8_mha:
        return Violation("fp8_meta", "mxfp8 with fp8_mha", FreeText("mxfp8 with fp8_dpa alone"))
    return None
