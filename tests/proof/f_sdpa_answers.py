"""What PyTorch's chooser takes on GPUs, by its second writing, as the record for test_torch_on_gpus.py.

python tests/proof/f_sdpa_answers.py          # compares what attnsel says with every edge in every release
python tests/proof/f_sdpa_answers.py --write  # the record: the newest release whole, of each older one a few
python tests/proof/f_sdpa_answers.py --random 1000 --seed 7  # so many drawn questions a release, from 2.6 on
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from attnsel import AttentionParams, Environment
from attnsel.dispatchers import dispatched_by
from attnsel.environment.versions import Version
from attnsel.params import Tensors, TensorSpec
from f_sdpa_chooser import CHECKS, RELEASES, Case, Release, choose
from f_sdpa_rows import ROWS, cases

RECORD = Path(__file__).parents[1] / "attnsel/dispatchers/torch_answers.json"
NEWEST = RELEASES[-1]


def question(c: Case) -> AttentionParams:
    q = mask = None
    if c.step != 1 or c.offset:
        row = c.h * c.d * c.step
        stride = (c.s_q * row, row, c.d * c.step, c.step)
        q = TensorSpec(shape=(c.b, c.s_q, c.h, c.d), stride=stride, alignment=c.offset or 16)
    if c.mask is not None:
        sizes, dtype, grad = c.mask
        stride = (*(1,) * (len(sizes) - 1), c.mask_step)
        mask = TensorSpec(shape=sizes, stride=stride, dtype=dtype, requires_grad=grad)
    return AttentionParams(
        dtype=c.dtype,
        batch_size=c.b,
        num_heads=c.h,
        num_gqa_groups=c.groups,
        max_seqlen_q=c.s_q,
        max_seqlen_kv=c.s_kv,
        head_dim_qk=c.d,
        head_dim_v=c.e,
        attn_mask_type="arbitrary" if mask is not None else "causal" if c.causal else "no_mask",
        attention_dropout=c.dropout,
        is_training=c.grad,
        deterministic=c.deterministic,
        tensors=Tensors(q=q, mask=mask, rank=c.rank),
    )


def machine(c: Case) -> dict[str, str]:
    return {
        "gpu": f"sm{c.arch}",
        "cudnn": str(Version.parse(c.cudnn)),
        "cuda": f"{c.cuda // 10}.{c.cuda % 10}",
    }


def switches(c: Case) -> dict[str, str]:
    turned = dict(c.env) | {f"enable_{kernel}_sdp": "false" for kernel in c.off}
    turned |= {"activate_flash_attention_impl": c.impl} if c.impl != "FA2" else {}
    return turned if c.gqa else {**turned, "enable_gqa": "false"}


def expected(release: Release, c: Case) -> str:
    """The kernels in the order in which they are tried; ``!``: passed over."""
    choice = choose(release, c)
    names = [name + "!" * (name in choice.against) for name in choice.order]
    if release >= (2, 12, 0) and 0 in (c.s_q, c.s_kv):
        names.insert(0, "zeros")  # before anything is chosen
    return " ".join(names)


def said(release: Release, c: Case) -> str:
    """What attnsel says, in the same words; a kernel that is taken and raises is not passed over."""
    env = Environment.describe(**machine(c), torch=name_of(release))
    offers = dispatched_by("torch", question(c), env, switches(c)).offers
    return " ".join(
        offer.name + "!" * any(not r.text.startswith(f"{offer.name} is taken") for r in offer.refusals)
        for offer in offers
    )


def name_of(release: Release) -> str:
    return ".".join(map(str, release))


# ---- the record --------------------------------------------------------------------------------------


def chosen_cases() -> dict[Case, list[Release]]:
    """Cases and the releases that they are recorded for."""
    chosen: dict[Case, list[Release]] = {}
    for row in ROWS:
        for release in row.releases():
            chosen.setdefault(row.case, []).append(release)
    for case in _edges_of_newest():
        chosen.setdefault(case, []).append(NEWEST)
    for release in RELEASES[:-1]:
        for case in _one_for_each_check(release):
            chosen.setdefault(case, []).append(release)
    return {case: sorted(set(releases)) for case, releases in chosen.items()}


def _edges_of_newest() -> Iterator[Case]:
    """Every edge on every GPU; of the cuDNN releases those at which the answer changes."""
    before: dict[Case, tuple[Case, str]] = {}
    for case in cases():
        plain = case._replace(cudnn=0, cuda=0)
        answer = expected(NEWEST, case)
        if plain not in before:
            yield case
        elif before[plain][1] != answer:
            yield before[plain][0]
            yield case
        before[plain] = case, answer


def _one_for_each_check(release: Release) -> Iterator[Case]:
    """Cases in which each check of each kernel fails alone, few of them."""
    alone: dict[Case, set[tuple[str, str]]] = {}
    for case in cases():
        for kernel, check in CHECKS.items():
            failed = [line for line, fails in check(release, case) if fails]
            if len(failed) == 1 and kernel in choose(release, case).order:
                alone.setdefault(case, set()).add((kernel, failed[0]))
    left = set().union(*alone.values())
    while left:
        case = max(alone, key=lambda case: len(alone[case] & left))
        left -= alone[case]
        yield case


def rows() -> Iterator[dict[str, Any]]:
    for case, releases in chosen_cases().items():
        params = question(case).model_dump(mode="json", exclude_defaults=True)
        answers = {name_of(release): expected(release, case) for release in releases}
        row = {"params": params, "machine": machine(case), "switches": switches(case), "answers": answers}
        yield {name: value for name, value in row.items() if value}


# ---- drawn questions ---------------------------------------------------------------------------------

_LENGTHS = (0, 1, 1, 2, 8, 16, 63, 64, 127, 128, 192, 320, 448, 512, 576, 1000, 4096)
_WIDTHS = (1, 4, 8, 12, 60, 62, 64, 72, 96, 100, 128, 136, 160, 192, 200, 224, 225, 256, 257, 264, 512)
_CUDNN = (
    8907,
    90100,
    90500,
    90501,
    90600,
    90999,
    91000,
    91002,
    91099,
    91100,
    91101,
    91201,
    91399,
    91400,
    91500,
)
_CUDNN += (91501, 91701, 91900, 92000, 92200, 92201, 92400, 92401, 92500, 92501, 92599, 92600, 92800)
_CUDA = {(2, 6): (124, 126), (2, 7): (126, 128), (2, 8): (126, 128, 129), (2, 9): (126, 128, 129, 130)}
_CUDA |= {(2, minor): (126, 130) for minor in range(10, 16)} | {(2, 10): (126, 128, 130), (2, 12): (130, 132)}
_ALL = ("flash", "mem_efficient", "math", "cudnn")
_VARIABLES = ("TORCH_CUDNN_SDPA_PREFERRED", "TORCH_CUDNN_SDPA_DEPRIORITIZED")


def drawn(release: Release, pick: random.Random) -> Case:
    """A question that release could be asked; each field is plain more often than not, so that checks are met
    alone."""

    def seldom(plain: Any, *others: Any, odds: float = 0.25) -> Any:
        return pick.choice(others) if pick.random() < odds else plain

    h = seldom(16, 1, 3, 32, 65536, odds=0.15)
    groups = h if h == 65536 or pick.random() < 0.7 else pick.choice([n for n in (1, 2, 4, h) if h % n == 0])
    b = seldom(2, 1, 7, 65535, 65536, odds=0.15)
    tiny = b * h > 10_000
    s_q = pick.choice((1, 16)) if tiny else seldom(512, *_LENGTHS, odds=0.5)
    s_kv = s_q if tiny or pick.random() < 0.6 else pick.choice(_LENGTHS)
    d = seldom(128, *_WIDTHS, odds=0.5)
    e = d if pick.random() < 0.75 else pick.choice((64, 128, 192, 256, d))
    if pick.random() < 0.08:
        d, e = 192, 128
    case = Case(
        arch=pick.choice((70, 75, 80, 86, 89, 90, 90, 90, 100, 100, 103, 110, 120, 121)),
        cudnn=pick.choice(_CUDNN[1:]),
        cuda=pick.choice(_CUDA[release[:2]]),
        dtype=seldom("bf16", "fp16", "fp16", "fp32", "fp64"),
        b=b, h=h, groups=groups, s_q=s_q, s_kv=s_kv, d=d, e=e,
        causal=pick.random() < 0.3,
        dropout=seldom(0.0, 0.1, 0.125, 0.3125),
        grad=pick.random() < 0.5,
        gqa=pick.random() < 0.85,
        rank=4 if h == 65536 or pick.random() < 0.9 else pick.choice((3, 5)),
        deterministic=pick.random() < 0.1,
        off=() if pick.random() < 0.7 else tuple(name for name in _ALL if pick.random() < 0.4),
        env=() if pick.random() < 0.8 else tuple((name, pick.choice("01")) for name in _VARIABLES),
        impl=seldom("FA2", "FA4", odds=0.1) if release >= (2, 10, 0) else "FA2",
    )  # fmt: skip
    if case.dropout and not case.grad:  # F.sdpa is told the dropout; without a gradient attnsel drops it
        case = case._replace(dropout=0.0)
    if pick.random() < 0.1 and case.rank == 4 and not tiny and 0 not in (s_q, s_kv):
        case = case._replace(step=2) if pick.random() < 0.5 else case._replace(offset=pick.choice((2, 4, 8)))
    if pick.random() < 0.3 and not case.causal and not tiny and 0 not in (s_q, s_kv) and case.rank == 4:
        whole = tuple(n if pick.random() < 0.7 else 1 for n in (b, h, s_q, s_kv))
        shape = whole[4 - pick.choice((2, 3, 4, 4)) :]
        mask = (shape, pick.choice(("bool", case.dtype)), pick.random() < 0.1 and case.grad)
        case = case._replace(mask=mask, mask_step=seldom(1, 512, odds=0.1))
    return case


class Drawn(NamedTuple):
    """What asking showed: contradictions, and of each release's clauses those that some question met alone or
    with others, and those that none did."""

    differences: list[str]
    met: dict[Release, set[str]]
    unmet: dict[Release, set[str]]


def ask_drawn(count: int, seed: int, releases: tuple[Release, ...]) -> Drawn:
    differences: list[str] = []
    met: dict[Release, set[str]] = {}
    unmet: dict[Release, set[str]] = {}
    for release in releases:
        pick = random.Random(f"{seed} {release}")
        every: set[str] = set()
        met[release] = set()
        for _ in range(count):
            case = drawn(release, pick)
            wanted, found = expected(release, case), said(release, case)
            if wanted != found:
                differences.append(f"{name_of(release)} {case}: says {found}, not {wanted}")
            for kernel, check in CHECKS.items():
                for line, fails in check(release, case):
                    every.add(f"{kernel} {line}")
                    if fails:
                        met[release].add(f"{kernel} {line}")
        unmet[release] = every - met[release]
    return Drawn(differences, met, unmet)


def main() -> int:
    if sys.argv[1:2] == ["--random"]:
        given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
        recent = tuple(release for release in RELEASES if release >= (2, 6, 0))
        answer = ask_drawn(int(given["--random"]), int(given.get("--seed", 0)), recent)
        for release in recent:
            met, unmet = answer.met[release], answer.unmet[release]
            rest = ", ".join(sorted(unmet)) or "none"
            print(f"{name_of(release)}: {len(met)} of {len(met | unmet)} clauses met; not met: {rest}")
        print("\n".join(answer.differences) or "no difference")
        return 1 if answer.differences else 0
    if sys.argv[1:] == ["--write"]:
        text = ",\n".join(json.dumps(row) for row in rows())
        RECORD.write_text(f"[\n{text}\n]\n", encoding="utf-8")
        return 0
    differences = [
        f"{name_of(release)} {case}: says {said(release, case)}, its source {expected(release, case)}"
        for release in RELEASES
        for case in cases()
        if said(release, case) != expected(release, case)
    ]
    print("\n".join(differences) or "no difference")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
