"""Which of several candidates goes first. The first preference in which two differ decides, and is named."""

from __future__ import annotations

from attnsel.backends.registry import CANDIDATES
from attnsel.policy import Policy
from attnsel.rules.api import REGISTRY, preference
from attnsel.rules.orders import BY_SPEED, LEADS, Order, ordered
from attnsel.verdicts.reasons import RankKey
from attnsel.verdicts.record import CandidateRecord


@preference("PREF001", short="after it in your order", evidence="policy")
def your_order(c: RankKey, arch: int | None, policy: Policy) -> int:
    """The order you gave comes before every other consideration.

    Why: ATTNSEL_BACKENDS=triton,sdpa.flash is a preference as well as a limit.
    Source: your policy.
    """
    return policy.allow.index(c.name) if c.name in policy.allow else 0


@preference("PREF016", short="slower when measured here", evidence="measured")
def measured_here(c: RankKey, arch: int | None, policy: Policy) -> int:
    """What was measured on this machine goes before what was published

    Why: the file of ATTNSEL_FIGURES, or of Policy(figures=…), holds times of this call or one near it: on
    this card or CPU model, in the same direction, with the same dtype, mask, window, determinism and head
    dimensions, lengths within a factor of 2 and sequences x heads of 4. The nearest shape decides, of equals
    the newest. Every kernel in it was compared with the reference first, so a last resort or one that nobody
    has proven may come first. What it does not hold stands behind what it does. A kernel that plans for each
    length counts as not measured where lengths grow: times are of a call whose plan was there.
    Fix: measure again after an upgrade (attnsel explain --measure), or take the file away.
    Source: your file, whose row the report names; attnsel/verdicts/measured.py.
    """
    ranking: tuple[str, ...] = () if c.order is None else c.order.measured
    planning = c.growing and CANDIDATES[c.name].plan_per_length
    return ranking.index(c.name) if c.name in ranking and not planning else len(ranking)


@preference("PREF002", short="right everywhere, slow", evidence="measured")
def last_resorts_last(c: RankKey, arch: int | None, policy: Policy) -> int:
    """Candidates that are right everywhere and slow on a GPU come last.

    Why: sdpa.math stores every score, tiled launches many small operations.
    Source: pytorch#181528 (7.5 ms against 23.1 ms for one ViT); attnsel benchmarks/budgets.py on CPUs.
    """
    return int(CANDIDATES[c.name].last_resort)


@preference("PREF003", short="nobody has checked it", evidence="policy")
def known_before_unknown(c: RankKey, arch: int | None, policy: Policy) -> int:
    """What is known to run comes before what nobody has checked.

    Why: an unknown may refuse when it runs; attnsel then goes on to the next.
    Source: attnsel's design: three verdicts, and unknown is one.
    """
    return int(c.verdict == "unknown")


@preference("PREF015", short="planned only", evidence="policy")
def run_before_planned(c: RankKey, arch: int | None, policy: Policy) -> int:
    """What attnsel runs comes before what it only plans

    Why: the answer for a machine that is described is the one that attnsel would give on it. Where all are
    planned, as in FP8, nothing changes; a last resort stays behind what is planned (PREF002).
    Source: attnsel's design: a candidate is eligible, and executable or not.
    """
    return int(c.planned)


@preference("PREF014", short="F.sdpa tries it later", evidence="source")
def order_of_f_sdpa(c: RankKey, arch: int | None, policy: Policy) -> int:
    """Below PyTorch 2.6 kernels stand in the order in which F.sdpa tries them

    Why: attnsel does not run there; the first kernel that F.sdpa can use is the one that runs. 2.5.0 put
    cuDNN first on Hopper, and 2.5.1 behind all others. What it is asked for (sdpa_kernel) comes before.
    Source: attnsel/selection/f_sdpa.py, "f_sdpa_order".
    """
    return c.f_sdpa


@preference("PREF004", short="not proven here", evidence="policy")
def proven_before_unproven(c: RankKey, arch: int | None, policy: Policy) -> int:
    """A kernel that no committed result shows here comes after all others

    Why: compiled and interpreted is not the same as run. One that was executed on a CPU is placed by PREF010.
    Source: benchmarks/results/gpu-tests-*.json and triton-executed.json in attnsel's repository.
    """
    return int(c.unproven and not c.executed)


@preference("PREF008", short="costly to adapt to", evidence="reported")
def costly_changes_last(c: RankKey, arch: int | None, policy: Policy) -> int:
    """A kernel that costs half as much work again to adapt to comes later

    Why: the fastest family is up to 1.7 times as fast as the next; copies and padding that add half of the
    attention's own work leave little of that, and take memory besides. Among last resorts PREF006 decides.
    Source: FlashAttention-3 paper, figures for H100 (see PREF005);
    attnsel/selection/adaptations.py, "overhead".
    """
    return int(c.overhead > _HALF and not CANDIDATES[c.name].last_resort)


_HALF = 8  # sixteenths


@preference("PREF010", short="executed on a CPU only", evidence="executed")
def proven_before_executed(c: RankKey, arch: int | None, policy: Policy) -> int:
    """A kernel executed on a CPU only comes after proven ones that fit as well

    Why: executing its PTX on a CPU shows that its numbers are right and its accesses in bounds. It shows
    neither its speed nor what ptxas makes of it, so what has run on a GPU goes first. A change that adds more
    than half of the attention's own work to every call (PREF008) outweighs that: on a T4, which has one fused
    kernel of PyTorch's, decoding with grouped heads would copy all keys and values for each token. The first
    call is compared with tiled all the same.
    Source: benchmarks/results/triton-executed.json in attnsel's repository.
    """
    return int(c.unproven)


@preference("PREF017", short="measured slower here", evidence="measured")
def slower_where_measured(c: RankKey, arch: int | None, policy: Policy) -> int:
    """On sm90 triton comes after PyTorch's kernels that fit as well

    Why: on an H200 it takes 1.09 to 1.45 times the time of sdpa.flash backward, 0.95 to 1.18 times forward
    with head dimension 64, and 0.79 to 0.90 times forward with 128, so that no training step gains; other
    types and widths were not timed. A change that adds more than half of the attention's own work to every
    call (PREF008) outweighs that.
    Source: benchmarks/results/kernel-speed-h200.json (bf16, d 64 and 128, 2k and 8k; triton 3.6, torch 2.11).
    """
    return int(arch in CANDIDATES[c.name].slower_on)


@preference("PREF011", short="a plan per length", evidence="reported")
def no_plan_per_length(c: RankKey, arch: int | None, policy: Policy) -> int:
    """Where lengths vary from call to call, a kernel that plans for each is later

    Why: a cache of n keys gets a plan of cuDNN's own at every n, and a plan takes longer than thousands of
    such calls: 55 to 70 ms, or a second where a kernel is new. Such a call has at most 16 queries and no
    gradient, and its keys are as many as the tensor has. With pages, or with lengths beside a cache of one
    size, one plan serves all of them. Prompts are planned for at their first eight lengths; from then on a
    new length goes to a kernel without a plan. Training is not concerned: its lengths come back each epoch.
    Source: flashinfer#5245 (55 to 70 ms per new shape); pytorch#155958 (TORCH_CUDNN_SDPA_AVOID_RECOMPILE);
    attnsel/backends/cudnn/run.py, where dense lengths are exact; attnsel/runtime/cache.py.
    """
    return int(c.growing and CANDIDATES[c.name].plan_per_length)


@preference("PREF012", short="copies what is padded", evidence="policy")
def lengths_before_copies(c: RankKey, arch: int | None, policy: Policy) -> int:
    """A kernel that takes lengths comes before one that needs padding copied

    Why: q, k and v are copied, and in training the copies of every layer are kept for its backward; a kernel
    without lengths then computes the padded rows as well, half of the work of a batch that is half padding
    being for nothing. Where a batch is nearly full the faster family may win: measure, and give your order.
    Among last resorts PREF006 decides.
    Source: attnsel/selection/adaptations.py, "zero_padding", "unpack" and "fold_mask", for
    what is copied.
    """
    return int(c.copies_padding and not CANDIDATES[c.name].last_resort)


def _place(record: CandidateRecord, c: RankKey, arch: int | None) -> tuple[int, int]:
    """Its family's place, and the place among contested ones; behind all for one that belongs to none."""
    order: Order = ordered(arch) if c.order is None else c.order
    return order.place(record.kernel_family)


def _standing(name: str) -> tuple[CandidateRecord, int]:
    """The candidate whose place it takes, and -1, 0 or 1: before it, its own, or behind it."""
    record = CANDIDATES[name]
    if record.beside is None:
        return record, 0
    other, beside = record.beside
    return CANDIDATES[other], beside


@preference(BY_SPEED, short="a slower kernel family", evidence="reported")
def faster_family_first(c: RankKey, arch: int | None, policy: Policy) -> int:
    """FlashAttention 3 and cuDNN lead on Hopper, cuDNN and 4 on B200, 2 on A100

    Why: on an H100, causal, 8k: FlashAttention 3 648 TFLOP/s forward, cuDNN 566, FlashAttention 2 358. On a
    GB200 cuDNN 9.27 and FlashAttention 4 are alike, and FlashAttention 2 runs there on instructions of
    Ampere, at a third of their speed. On an A100 cuDNN takes 1.1 to 1.3 times as long as FlashAttention 2,
    and neither FlashAttention 3 nor 4 was written for it. PREF030 and its neighbours change the order for
    calls of a kind; where sources contradict each other PREF013 says so. Calls that nobody has measured take
    the order of their architecture, and their report says that there is no figure.
    Source: FlashAttention-3 paper; cudnn-frontend's benchmarks (9.22 and 9.27; A100, H200, GB200);
    pytorch#126122; transformers PR #48163; TransformerEngine v2.18, utils.py, lines 588-596 and 1647-1660.
    A plug-in stands where its maker says, or behind these.
    """
    record, beside = _standing(c.name)
    return 3 * _place(record, c, arch)[0] + beside


@preference("PREF006", short="the slower last resort", evidence="measured")
def leaner_last_resort(c: RankKey, arch: int | None, policy: Policy) -> int:
    """Of the last resorts sdpa.math goes first while its scores are small

    Why: sdpa.math is a handful of large operations and holds all scores at once; tiled holds a block.
    One GiB is where a score tensor stops being a detail on the smallest card of the catalogue (16 GiB).
    Source: attnsel's choice; the size is printed in the report.
    """
    first = "tiled" if c.large_scores else "sdpa.math"
    return int(CANDIDATES[c.name].last_resort and c.name != first)


@preference("PREF007", short="more to adapt", evidence="policy")
def lighter_changes_first(c: RankKey, arch: int | None, policy: Policy) -> int:
    """Of two that are as fast, the one that adapts with less work goes first

    Why: a copy costs memory and time on every call: none is made for a kernel that is no better.
    Source: attnsel/selection/adaptations.py, "overhead": bytes moved and operations added, against the
    attention's own.
    """
    return c.overhead


@preference("PREF013", short="contested: measuring decides", evidence="reported")
def contested_order(c: RankKey, arch: int | None, policy: Policy) -> int:
    """Where sources contradict each other, one goes first until it is measured

    Why: on Hopper FlashAttention 3 is ahead of cuDNN in its maker's figures and behind it in tritonbench's,
    newer cuDNN reaches 673 and 579 TFLOP/s on an H200, and TransformerEngine takes cuDNN before any
    FlashAttention. On B200 and B300 FlashAttention 4 and cuDNN are within 3 % of each other, SGLang went from
    the one to the other after measuring, and TransformerEngine takes cuDNN. On sm86 and sm89 PyTorch's sweep
    finds cuDNN 1.04 to 1.23 times as fast as FlashAttention 2, transformers' 0.93 (A10G) and 1.00 (L40S). On
    sm120 cuDNN is ahead by 1.07 forward on an RTX 5090, and at 0.88 in transformers' training shapes on an
    RTX PRO 6000. Of two that are contested, the one with less to adapt goes first (PREF007).
    Fix: measure your shapes (attnsel explain --measure), and let ATTNSEL_FIGURES name the file.
    Source: FlashAttention-3 paper; flash-attention#1893 and #1310; tritonbench#141; cudnn-frontend's
    benchmarks (9.19.1 on an H200, 9.22 and 9.27 on a GB200); FlashAttention-4 paper; sglang#33655;
    pytorch#192799; transformers PR #48163; learn-cuda, 07_attention; TransformerEngine v2.18, utils.py, lines
    1647-1660.
    """
    return _place(_standing(c.name)[0], c, arch)[1]


@preference("PREF009", short="same family as one above", evidence="policy")
def order_within_a_family(c: RankKey, arch: int | None, policy: Policy) -> int:
    """Within a family, the kernel with fewer layers above it goes first

    Why: cudnn asks the library itself, with every feature it has; sdpa.cudnn sees what PyTorch passes on.
    One that was written for the architecture goes before one that was not: sdpa.flash (FlashAttention-2) for
    sm8x and sm12x, triton for sm90 to sm119.
    Source: attnsel's choice.
    """
    record = CANDIDATES[c.name]
    if not record.kernel_family:
        return 2 * len(CANDIDATES)
    position = list(CANDIDATES).index(c.name)
    return position + (0 if arch in record.written_for else len(CANDIDATES))


for _row in LEADS:
    REGISTRY.add(_row)
