"""Which of several candidates goes first. The first preference in which two differ decides, and is named."""

from __future__ import annotations

from attnsel.candidates import CANDIDATES
from attnsel.policy import Policy
from attnsel.rules.api import preference
from attnsel.verdict import Standing

# (candidate, architecture) pairs that a benchmarks/results/gpu-tests-*.json shows running: a whole run of
# tests/gpu that passed. benchmarks/gpu.py makes the file and says what it proves, and
# tests/benchmarks/test_proven.py holds the two together. PyTorch's own kernels are tested by PyTorch on each
# architecture that their rules admit; ours are not until we do.
PROVEN: frozenset[tuple[str, int]] = frozenset()


@preference("PREF001", evidence="policy")
def your_order(c: Standing, arch: int | None, policy: Policy) -> int:
    """The order you gave comes before every other consideration.

    Why: ATTNSEL_BACKENDS=triton,sdpa.flash is a preference as well as a limit.
    Source: your policy.
    """
    return policy.allow.index(c.name) if c.name in policy.allow else 0


@preference("PREF002", evidence="measured")
def last_resorts_last(c: Standing, arch: int | None, policy: Policy) -> int:
    """Candidates that are right everywhere and slow on a GPU come last.

    Why: sdpa.math stores every score, tiled launches many small operations.
    Source: pytorch#181528 (7.5 ms against 23.1 ms for one ViT); attnsel benchmarks/overhead.py on CPUs.
    """
    return int(CANDIDATES[c.name].last_resort)


@preference("PREF003", evidence="policy")
def known_before_unknown(c: Standing, arch: int | None, policy: Policy) -> int:
    """What is known to run comes before what nobody has checked.

    Why: an unknown may refuse when it runs; attnsel then goes on to the next.
    Source: attnsel's design: three verdicts, and unknown is one.
    """
    return int(c.verdict == "unknown")


@preference("PREF004", evidence="policy")
def proven_before_unproven(c: Standing, arch: int | None, policy: Policy) -> int:
    """A kernel of ours that no committed result shows here comes after proven ones.

    Why: compiled and interpreted is not the same as run.
    Source: benchmarks/results/gpu-tests-*.json in attnsel's repository.
    """
    return int(c.unproven)


@preference("PREF008", evidence="reported")
def costly_changes_last(c: Standing, arch: int | None, policy: Policy) -> int:
    """A kernel that takes half as much work again to adapt to comes after those that fit better.

    Why: the fastest family is up to 1.7 times as fast as the next; copies and padding that add half of the
    attention's own work leave little of that, and take memory besides. Among last resorts PREF006 decides.
    Source: FlashAttention-3 paper, figures for H100 (see PREF005); attnsel/adapt.py, "overhead".
    """
    return int(c.overhead > _HALF and not CANDIDATES[c.name].last_resort)


_HALF = 8  # sixteenths

# Families of like speed, the fastest first.
_FLASH_FIRST = (("sdpa.flash", "triton"), ("cudnn", "sdpa.cudnn"), ("sdpa.efficient",))
_CUDNN_FIRST = (("cudnn", "sdpa.cudnn"), ("triton", "sdpa.flash"), ("sdpa.efficient",))


def _families(arch: int | None) -> tuple[tuple[str, ...], ...]:
    return _CUDNN_FIRST if arch is not None and 90 <= arch < 120 else _FLASH_FIRST


@preference("PREF005", evidence="reported")
def faster_family_first(c: Standing, arch: int | None, policy: Policy) -> int:
    """cuDNN leads on Hopper and datacentre Blackwell, flash-type kernels lead elsewhere.

    Why: cuDNN's Hopper kernels reach about 1.6x FlashAttention-2 at head_dim 128 forward; on Ampere it
    was measured 12 to 18 % slower than flash.
    Source: FlashAttention-3 paper, figures for H100 (cuDNN 617 against 362 TFLOP/s, head_dim 128, 2k);
    transformers PR #48163; TransformerEngine prefers fused attention from sm90 on (utils.py 1647-1660).
    A plug-in stands where its maker says, or behind these.
    """
    families = _families(arch)
    place = CANDIDATES[c.name].place
    name, beside = (c.name, 0) if place is None else place
    family = next((i for i, names in enumerate(families) if name in names), len(families))
    return 3 * family + beside  # beside is -1, 0 or 1


@preference("PREF006", evidence="measured")
def leaner_last_resort(c: Standing, arch: int | None, policy: Policy) -> int:
    """Among last resorts, sdpa.math goes first while its scores are small, tiled otherwise.

    Why: sdpa.math is a handful of large operations and holds all scores at once; tiled holds a block.
    One GiB is where a score tensor stops being a detail on the smallest card of the catalogue (16 GiB).
    Source: attnsel's choice; the size is printed in the report.
    """
    first = "tiled" if c.large_scores else "sdpa.math"
    return int(CANDIDATES[c.name].last_resort and c.name != first)


@preference("PREF007", evidence="policy")
def lighter_changes_first(c: Standing, arch: int | None, policy: Policy) -> int:
    """Of two that are as fast, the one that adapts the call with less work goes first.

    Why: a copy costs memory and time on every call: none is made for a kernel that is no better.
    Source: attnsel/adapt.py, "overhead": bytes moved and operations added, against the attention's own.
    """
    return c.overhead


@preference("PREF009", evidence="policy")
def order_within_a_family(c: Standing, arch: int | None, policy: Policy) -> int:
    """Within a family, the kernel with fewer layers between it and the call goes first.

    Why: cudnn asks the library itself, with every feature it has; sdpa.cudnn sees what PyTorch passes on.
    Between sdpa.flash and triton: the one written for the architecture goes first.
    Source: attnsel's choice.
    """
    order = [name for names in _families(arch) for name in names]
    return order.index(c.name) if c.name in order else len(order)
