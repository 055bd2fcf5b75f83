"""What PyTorch's chooser takes on GPUs, by its second writing, as the record for test_torch_on_gpus.py.

python tests/proof/f_sdpa_answers.py          # compares what attnsel says with every edge in every release
python tests/proof/f_sdpa_answers.py --write  # the record: the newest release whole, of each older one a few
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def main() -> int:
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
