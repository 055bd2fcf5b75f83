"""Which kernel family is ahead of which, by the kind of call: the order by speed, with its published figures.

An architecture has an order of families; where sources contradict each other they stand together. A rule of
this file changes it for calls of a kind: a family ``leads`` others, or is ``last`` behind them. Its figures
are the measurements of such calls on its architectures (``attnsel.pages.figures``): none is listed here, and
a test finds those that say the opposite and that ``against`` does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from attnsel.environment import Environment
from attnsel.environment.versions import Versions, flash_attn_4
from attnsel.params import AttentionParams
from attnsel.rules.api import REGISTRY, Placing, gate_text, page_fields
from attnsel.rules.figures import Shape, few_queries

Families = tuple[tuple[str, ...], ...]
"""The fastest first; those that stand together are contested, and PREF013 says which of them goes first."""

BY_SPEED = "PREF005"
"""The preference that reads the order: where a rule of this file put one before another, that is named."""

_FLASH_FIRST: Families = (("flash",), ("cudnn",), ("flash3",), ("flash4",), ("efficient",))
_ADA: Families = (("cudnn", "flash"), ("flash3",), ("flash4",), ("efficient",))
_HOPPER: Families = (("flash3", "cudnn"), ("flash4",), ("flash",), ("efficient",))
_BLACKWELL: Families = (("cudnn", "flash4"), ("flash",), ("flash3",), ("efficient",))
_CONSUMER_BLACKWELL: Families = (("cudnn", "flash"), ("flash4",), ("flash3",), ("efficient",))
_CONSUMER_TRAINING: Families = (("flash", "cudnn"), ("flash4",), ("flash3",), ("efficient",))


def base(arch: int | None, training: bool) -> Families:
    """The order of an architecture, whatever is asked."""
    if arch is None or arch < 86 or arch in (87, 88):
        return _FLASH_FIRST
    if arch < 90:
        return _ADA
    if arch < 100:
        return _HOPPER
    if arch < 120:
        return _BLACKWELL
    return _CONSUMER_TRAINING if training else _CONSUMER_BLACKWELL


class Call(NamedTuple):
    """What the order may depend on: so little of a question that few are told apart."""

    training: bool
    deterministic: bool
    window: bool
    causal: bool
    head_dim: int  # the larger of the two
    few_queries: bool  # over many keys: see figures.few_queries
    short: bool  # no more queries than were ever measured as more than a few

    @classmethod
    def of(cls, p: AttentionParams) -> Call:
        head_dim = max(p.head_dim_qk, p.head_dim_v)
        return cls(p.is_training, p.deterministic, p.windowed, p.causal, head_dim, *lengths(p))

    @classmethod
    def measured(cls, shape: Shape) -> Call:
        """What was measured, as a call: of a head dimension that is not stated, the usual one."""
        head_dim = max(shape.head_dim_qk, shape.head_dim_v) or 128
        short = 0 < shape.seqlen_q <= _SHORT
        causal = shape.mask == "causal"
        return cls(
            shape.training,
            shape.deterministic,
            bool(shape.window),
            causal,
            head_dim,
            shape.few_queries,
            short,
        )


_SHORT = 512


def lengths(p: AttentionParams) -> tuple[bool, bool]:
    """``few_queries`` and ``short`` of a question: all that its lengths change about the order."""
    queries = p.max_seqlen_q
    return few_queries(queries, p.max_seqlen_kv), queries <= _SHORT


@dataclass(frozen=True, eq=False, kw_only=True)
class Lead(Placing):
    """``first`` goes before all of ``over``, and before what stands with them; with ``last`` that one goes
    behind all of ``over`` instead. ``against``: measurements that say the opposite, by more than noise."""

    first: str
    last: str
    over: tuple[str, ...]
    arch: frozenset[int]
    when: tuple[Versions, ...]
    against: tuple[str, ...]
    body: Callable[[Call], bool]

    def concerns(self, call: Call, arch: int | None) -> bool:
        return arch in self.arch and self.body(call)

    def open(self, env: Environment) -> bool:
        return all(getattr(env, gate.component) in gate for gate in self.when)


class Order:
    """The places of families for calls of a kind. One object for one order: it is compared as such."""

    __slots__ = ("_codes", "_places", "families")

    def __init__(self, families: Families, codes: dict[tuple[str, str], str]) -> None:
        self.families = families
        self._codes = codes
        self._places = {
            family: (place, among)
            for place, together in enumerate(families)
            for among, family in enumerate(together)
        }

    def place(self, family: str) -> tuple[int, int]:
        """A family's place, and the place among contested ones; behind all for one that is none."""
        return self._places.get(family, (len(self.families), 0))

    def code(self, above: str, below: str) -> str | None:
        """The rule of this file that put one family before another, if one did."""
        return self._codes.get((above, below))


def order_of(call: Call, env: Environment) -> Order:
    """The order for calls of a kind on a machine."""
    arch = env.arch
    leads = tuple([lead for lead in _LEADS if lead.concerns(call, arch) and lead.open(env)])
    return ordered(arch, call.training, leads)


@lru_cache(maxsize=256)
def ordered(arch: int | None, training: bool = False, leads: tuple[Lead, ...] = ()) -> Order:
    """An architecture's order, changed by some rules, the later ones on top."""
    groups = [list(together) for together in base(arch, training)]
    codes: dict[tuple[str, str], str] = {}
    for lead in leads:
        moved = lead.first or lead.last
        before = {family: place for place, group in enumerate(groups) for family in group}
        groups = [left for group in groups if (left := [family for family in group if family != moved])]
        among = [place for place, group in enumerate(groups) if not set(lead.over).isdisjoint(group)]
        place = min(among) if lead.first else max(among) + 1
        for other in (family for group in groups[place:] if lead.first for family in group):
            if other in lead.over or before[other] <= before[moved]:
                codes[moved, other] = lead.code
        for other in (family for group in groups[:place] if lead.last for family in group):
            if other in lead.over or before[other] >= before[moved]:
                codes[other, moved] = lead.code
        groups.insert(place, [moved])
    return Order(tuple(map(tuple, groups)), codes)


_LEADS: list[Lead] = []


def leads() -> tuple[Lead, ...]:
    """The rules of this file."""
    return tuple(_LEADS)


def lead(
    code: str,
    *,
    first: str = "",
    last: str = "",
    over: tuple[str, ...],
    arch: Iterable[int],
    short: str,
    when: tuple[Versions, ...] = (),
    against: tuple[str, ...] = (),
) -> Callable[[Callable[[Call], bool]], Callable[[Call], bool]]:
    """Register a change of the order for the calls of which the body returns True. ``short``: see Placing."""

    def register(body: Callable[[Call], bool]) -> Callable[[Call], bool]:
        archs = frozenset(arch)
        page = Lead(
            **page_fields(code, body, "reported"),
            first=first,
            last=last,
            over=over,
            arch=archs,
            when=when,
            short=short,
            against=against,
            body=body,
            when_text=gate_text(when, archs, ()),
        )
        REGISTRY.add(page)
        _LEADS.append(page)
        return body

    return register


_FA4 = (flash_attn_4(">=4.0.0b30"),)


@lead(
    "PREF030",
    first="flash4",
    over=("flash3", "cudnn"),
    arch={90},
    when=_FA4,
    short="behind FlashAttention 4 in forwards",
)
def forward_on_hopper(c: Call) -> bool:
    """FlashAttention 4 leads on Hopper in forwards without a window

    Why: with 4.0.0b30 and newer, against cuDNN 9.27 on an H200, cuDNN takes 1.01 to 1.18 times as long; under
    a causal mask of 2k it is 3 % ahead. FlashAttention 3 is about as fast as 4: of forwards alone nobody has
    published both, TabPFN's threads find 4 at or ahead of it everywhere, torchtitan's find them alike.
    With a window cuDNN stays first. Of 512 queries and fewer there is no figure, and FlashAttention 4 does
    not split keys there.
    Source: cudnn-frontend's benchmarks (1.31.0, September 2026); TabPFN#1235 and #1291; torchtitan#4413;
    flash-attention#2415.
    """
    return not (c.training or c.window or c.short) and c.head_dim <= 192


@lead(
    "PREF031",
    first="flash4",
    over=("flash3", "cudnn"),
    arch={90},
    when=_FA4,
    short="behind FlashAttention 4 in training",
)
def backward_on_hopper(c: Call) -> bool:
    """FlashAttention 4 leads on Hopper in training, but for wide causal heads

    Why: on an H200 cuDNN 9.27 takes 1.02 to 1.29 times as long backward with heads of 128, deterministic or
    not; 1.2 with windows and heads of 64; 1.5 to 1.6 with heads of 192 and 128 and no mask. With those heads
    and a causal mask cuDNN is ahead by up to 4 %, and deterministic by up to 14 %. Of heads of 64 without a
    window there is no figure. FlashAttention 3 and 4 take the same time forward and backward.
    Source: cudnn-frontend's benchmarks (1.31.0, September 2026); anemoi-core#959.
    """
    return c.training and not c.short and c.head_dim <= 192 and (c.head_dim <= 128 or not c.causal)


@lead(
    "PREF032",
    first="flash4",
    over=("cudnn",),
    arch={100, 103},
    when=_FA4,
    short="behind FlashAttention 4, deterministic",
)
def deterministic_on_blackwell(c: Call) -> bool:
    """FlashAttention 4 leads on B200, B300 in deterministic training at d128

    Why: on a GB200 cuDNN 9.27 takes 1.07 to 1.20 times as long backward from 8k on, and as long as
    FlashAttention 4 where nothing is asked of determinism. With a window it is the other way round: there
    FlashAttention 4 goes over every key (HINT012).
    Source: cudnn-frontend's benchmarks (1.31.0, September 2026).
    """
    return c.training and c.deterministic and not c.window and 64 < c.head_dim <= 128


@lead(
    "PREF033",
    first="cudnn",
    over=("flash",),
    arch={80},
    short="behind cuDNN, deterministic",
)
def deterministic_on_a100(c: Call) -> bool:
    """cuDNN leads on an A100 in deterministic training with heads of 128

    Why: FlashAttention 2 takes 1.34 to 1.40 times as long backward at 2k to 8k, causal or not. Beyond, cuDNN
    holds a tensor of all scores, which is refused where it does not fit; otherwise FlashAttention 2 is ahead
    by 1.2. With a window cuDNN goes over every key (PREF034).
    Source: cudnn-frontend's benchmarks (1.31.0, cuDNN 9.27, September 2026).
    """
    return c.training and c.deterministic and not c.window and 64 < c.head_dim <= 128


@lead(
    "PREF034",
    last="cudnn",
    over=("flash3", "flash4", "flash"),
    arch={*range(80, 91), 120, 121},
    short="goes over every key here",
)
def deterministic_window(c: Call) -> bool:
    """cuDNN is last in deterministic training with a window, but on B200

    Why: its time grows with the square of the length, whatever the window: on an H200 3.3 times that of
    FlashAttention 4 at 2k and 10.7 at 8k, on an A100 3.5 and 12.5 times that of FlashAttention 2. On an RTX
    PRO 6000 it takes 9 times as long as without determinism, and no other kernel was measured. On a GB200
    the time is the window's.
    Source: cudnn-frontend's benchmarks (1.31.0, cuDNN 9.27, September 2026).
    """
    return c.training and c.deterministic and c.window


@lead(
    "PREF035",
    first="flash",
    over=("cudnn",),
    arch={*range(80, 90), 120, 121},
    short="does not split the keys",
)
def few_queries_over_many_keys(c: Call) -> bool:
    """A kernel that splits keys goes before cuDNN for few queries over many keys

    Why: where queries fill a fraction of the GPU, the kernel that spreads the keys over the rest is ahead:
    on an A100 cuDNN takes 1.5 times as long as FlashAttention 2 with 1k queries over 62k keys, and 1.1 with
    4k. On cards of other architectures there is no figure; the kernels are the same.
    Source: cudnn-frontend's benchmarks (1.31.0, September 2026).
    """
    return not c.training and c.few_queries


@lead(
    "PREF036",
    first="flash4",
    over=("cudnn",),
    arch={120, 121},
    when=_FA4,
    short="behind FlashAttention 4 under a causal mask",
)
def causal_training_on_consumer_blackwell(c: Call) -> bool:
    """FlashAttention 4 goes before cuDNN on RTX 50 and RTX PRO in causal training

    Why: on an RTX PRO 6000 cuDNN 9.27 takes 1.12 to 1.14 times as long backward, and FlashAttention 4 1.16
    to 1.21 times as long in the forward, which is a quarter of the work. Without a mask they are alike.
    FlashAttention 2 stays first: backward on an RTX 5070 Ti 4 takes 1.26 times as long.
    Source: cudnn-frontend's benchmarks (1.31.0, September 2026); flash-attention#1981.
    """
    return c.training and c.causal and not c.window and not c.deterministic
