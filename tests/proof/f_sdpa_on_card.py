"""Whether what attnsel says of plain PyTorch is what the card here does: its chooser asked, its kernels run.

python tests/proof/f_sdpa_on_card.py --count 2000 --seed 11 --seconds 60

Drawn questions (f_sdpa_answers.py) are put to the machine as it is. ``torch._fused_sdp_choice`` on tensors of
the card tells which kernel PyTorch chooses; the call itself, whether it raises. Prints each contradiction.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend

from attnsel import Environment
from attnsel.dispatchers import dispatched_by
from f_sdpa_answers import drawn, question, switches
from f_sdpa_chooser import RELEASES, Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "mem_efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.ERROR: "none",
}
NOTHING_LEFT = re.compile("No (available kernel|viable backend)|Invalid backend")
BYTES = 2 << 30  # of one tensor at most


def tensors(c: Case) -> tuple[dict[str, torch.Tensor | None], dict[str, object]]:
    """q, k, v and the mask as the question describes them, and F.sdpa's other arguments."""
    dtype = DTYPES[c.dtype]
    sizes = {"query": (c.h, c.s_q, c.d), "key": (c.groups, c.s_kv, c.d), "value": (c.groups, c.s_kv, c.e)}
    made: dict[str, torch.Tensor | None] = {}
    for name, (heads, length, width) in sizes.items():
        if name == "query" and (c.step != 1 or c.offset):
            row = heads * width * c.step
            flat = torch.randn(c.b * length * row + 16, device="cuda", dtype=dtype)
            one = flat[c.offset // dtype.itemsize :].as_strided(
                (c.b, heads, length, width), (length * row, width * c.step, row, c.step)
            )
        else:
            lead = {3: (c.b * heads,), 4: (c.b, heads), 5: (1, c.b, heads)}[c.rank]
            one = torch.randn(*lead, length, width, device="cuda", dtype=dtype)
        made[name] = one.requires_grad_(c.grad)
    made["attn_mask"] = None
    if c.mask is not None:
        shape, kind, grad = c.mask
        whole = torch.zeros(
            *shape[:-1], shape[-1] * c.mask_step, device="cuda", dtype=DTYPES.get(kind, dtype)
        )
        mask = whole[..., :: c.mask_step]
        made["attn_mask"] = (mask == 0) if kind == "bool" else mask.detach().requires_grad_(grad)
    return made, {"dropout_p": c.dropout, "is_causal": c.causal, "enable_gqa": c.gqa}


@contextmanager
def switched(c: Case) -> Iterator[None]:
    """The switches of the question, and afterwards those that were there."""
    cuda = torch.backends.cuda
    turn = {"flash": cuda.enable_flash_sdp, "mem_efficient": cuda.enable_mem_efficient_sdp}
    turn |= {"math": cuda.enable_math_sdp, "cudnn": cuda.enable_cudnn_sdp}
    torch.use_deterministic_algorithms(c.deterministic)
    for name in c.off:
        turn[name](False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        for enable in turn.values():
            enable(True)


def asked(c: Case, env: Environment) -> tuple[str, str, str]:
    """What attnsel says is chosen, what it says where that is taken and raises, and what PyTorch chose."""
    dispatch = dispatched_by("torch", question(c), env, switches(c))
    said, raises = "none", ""
    for offer in dispatch.offers:
        texts = [refusal.text for refusal in offer.refusals]
        if all(text.startswith(f"{offer.name} is taken") for text in texts):
            said, raises = offer.name, "; ".join(texts)
            break
    made, rest = tensors(c)
    with switched(c):
        try:
            chosen = torch._fused_sdp_choice(*made.values(), **rest)
        except RuntimeError as error:
            if NOTHING_LEFT.search(str(error)):
                return said, raises, "none"
            raise
    return said, raises, NAMES[SDPBackend(chosen)]


def runs(c: Case) -> str:
    """The error of the call itself; empty where there is none."""
    made, rest = tensors(c)
    with switched(c):
        try:
            out = torch.nn.functional.scaled_dot_product_attention(*made.values(), **rest)
            if c.grad:
                out.sum().backward()
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return ""


def ask(count: int, seed: int, first: int, until: float) -> int:
    """Asks from the ``first`` question on; the number of the next one where a fault ended CUDA's context, or
    else ``count``. Prints contradictions as they come, and what was counted at the end."""
    warnings.simplefilter("ignore")
    found = torch.__version__.split("+")[0]
    release = max(one for one in RELEASES if one <= tuple(map(int, found.split("."))))
    env = Environment.detect()
    pick = random.Random(f"{seed} {release}")
    counted = Counter[str]()
    for number in range(count):
        c = drawn(release, pick)._replace(env=(), impl="FA2")
        largest = max(c.b * c.h * c.s_q, c.b * c.groups * c.s_kv) * max(c.d, c.e) * c.step
        if number < first:
            continue
        if time.monotonic() > until or max(largest, c.b * c.h * c.s_q * c.s_kv) * 8 > BYTES:
            counted["left out: too large, or no time"] += 1
            continue
        said, raises, chosen = asked(c, env)
        counted[f"chosen: {chosen}"] += 1
        if said != chosen:
            print(f"says {said}, PyTorch chose {chosen}: {c}", flush=True)
            continue
        error = runs(c)
        counted["raised as foretold" if error and raises else "called"] += 1
        if bool(error) != (bool(raises) or chosen == "none"):
            print(f"{chosen}: says {raises or 'it runs'}, the call: {error or 'runs'}: {c}", flush=True)
        if error and not alive():
            print("after which nothing runs in this process", counted, flush=True)
            return number + 1
    print(counted, flush=True)
    return count


def alive() -> bool:
    """Whether CUDA still works here: after a fault in a kernel no call of the process does."""
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError:
        return False
    return True


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=2000)
    options.add_argument("--seed", type=int, default=11)
    options.add_argument("--seconds", type=float, default=60)
    given = options.parse_args()
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}", flush=True)
    until = time.monotonic() + given.seconds
    first, processes = 0, multiprocessing.get_context("spawn")
    while first < given.count and time.monotonic() < until:
        with ProcessPoolExecutor(1, mp_context=processes) as pool:
            first = pool.submit(ask, given.count, given.seed, first, until).result()
    return 0


if __name__ == "__main__":
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what deterministic matrix products ask for
    sys.exit(main())
