"""What is said to have run is what PyTorch's profiler saw; why it ran is read right, or not told."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

import attnsel  # noqa: E402
from attnsel.diagnose.watching import judge as judging  # noqa: E402
from attnsel.environment.versions import Version  # noqa: E402
from f_sdpa_calls import RandomCall, a_call  # noqa: E402
from tables import each  # noqa: E402

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
MATH = "aten::_scaled_dot_product_attention_math"
ZEROS = "aten::zeros"
KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION)
OTHERWISE = "ran otherwise than read"

pytestmark = pytest.mark.filterwarnings("ignore:.*")  # PyTorch tells why no kernel is left
WITHIN = pytest.mark.skipif(
    not (2, 13) <= Version.parse(torch.__version__) < (2, 14), reason="compared with torch 2.13"
)


class Drawn(NamedTuple):
    """A call, and what a program switches around it."""

    call: RandomCall
    around: list[Callable[[], Any]]

    def __call__(self) -> torch.Tensor:
        with ExitStack() as stack:
            for enter in self.around:
                stack.enter_context(enter())
            return self.call.run()


def calls(count: int, seed: int) -> list[Drawn]:
    """Calls that compute: those that raise are left out."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        call = a_call(draw, empty=True)
        if draw.random() < 0.1:
            call.options["dropout_p"] = 0.25
        around: list[Callable[[], Any]] = []
        if draw.random() < 0.15:
            around.append(partial(sdpa_kernel, draw.sample(KERNELS, draw.randint(1, 2))))
        if draw.random() < 0.1:
            around.append(draw.choice([torch.no_grad, torch.inference_mode]))
        if draw.random() < 0.1:
            around.append(partial(torch.autocast, "cpu", dtype=torch.bfloat16))
        try:
            Drawn(call, around)()
        except (RuntimeError, IndexError):
            continue
        found.append(Drawn(call, around))
    return found


def profiled(several: list[Drawn]) -> list[str]:
    """The operators that ran, as PyTorch's profiler has them: without any mode of attnsel's."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for number, call in enumerate(several):
            with record_function(f"call {number}"):
                call()
    found = [ZEROS] * len(several)
    number = -1
    for event in sorted(seen.events(), key=lambda event: event.time_range.start):
        if event.name.startswith("call "):
            number = int(event.name.removeprefix("call "))
        elif event.name in (FLASH, MATH):
            found[number] = event.name
    return found


def differences(count: int, seed: int) -> tuple[list[str], Counter[str]]:
    """What the report of a call says wrongly, and how many calls ran what."""
    found: list[str] = []
    ran: Counter[str] = Counter()
    several = calls(count, seed)
    for call, kernel in zip(several, profiled(several), strict=True):
        ran[kernel] += 1
        with attnsel.watch() as seen:
            call()
        (site,) = seen.watched().sites
        if site.forward != kernel:
            found.append(f"says {site.forward}, ran {kernel}: {call}")
        elif site.params is None:
            found.append(f"was not read, {site.unread}: {call}")
        elif kernel == MATH and not site.why and site.best not in ("", "sdpa.math"):
            found.append(f"gives no reason: {call}")
        elif any(OTHERWISE in note for note in site.notes):
            found.append(f"{site.notes}: {call}")
    return found, ran


@WITHIN
@pytest.mark.parametrize("count", [120, pytest.param(3000, marks=pytest.mark.slow)])
def test_what_ran_and_why_is_said_as_the_profiler_saw_it(count: int) -> None:
    found, ran = differences(count, seed=count)
    assert not found
    assert min(ran[FLASH], ran[MATH], ran[ZEROS]) >= 7


def one(*arguments: Any, **named: Any) -> Any:
    """The judged site of one call, and its report."""
    with attnsel.watch() as seen:
        F.scaled_dot_product_attention(*arguments, **named)
    (site,) = seen.watched().sites
    return site, " ".join(seen.report().split())


def qkv(*shape: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape) for _ in range(3))


def test_a_mask_of_numbers_is_read_at_any_rank_in_question_and_fix():
    for shape, read in {
        (8, 8): "11ss",
        (1, 8): "111s",
        (4, 8, 8): "1hss",
        (2, 1, 8, 8): "b1ss",
        (2, 4, 8, 8): "bhss",
        (2, 1, 1, 8): "b1ss",
    }.items():
        site, told = one(*qkv(2, 4, 8, 16), attn_mask=torch.zeros(shape))
        assert site.params.core_attention_bias_shape == read, shape
        assert site.params.tensors.mask.shape == shape
        assert f"attn_mask fp32{list(shape)}" in told
        # A rank of three is the one thing against flash on a CPU.
        assert (site.candidate == "sdpa.math") == (len(shape) == 3)
        assert ("attn_mask=mask[None]" in site.fix) == (len(shape) == 3)


def test_why_math_ran_and_the_fix_that_gives_flash():
    q, k, v = qkv(4, 8, 16)
    site, told = one(q, k, v)  # without a batch
    assert (site.candidate, site.best, site.params.num_heads) == ("sdpa.math", "sdpa.flash", 4)
    assert "given in 3 dimensions" in told
    assert site.why[0].startswith("SDPA017")
    assert "(*(x[None] for x in (q, k, v)))[0]" in site.fix
    assert one(*(x[None] for x in (q, k, v)))[0].candidate == "sdpa.flash"
    site, told = one(torch.randn(2, 8, 16, 16), *qkv(2, 1, 16, 16)[:2])  # a head that broadcasts
    assert (site.candidate, site.best) == ("sdpa.math", "sdpa.flash")
    assert "enable_gqa is not set" in site.why[0]
    assert "enable_gqa=True" in site.fix
    assert "enable_gqa=false" in told


def test_a_kernel_that_was_switched_off_at_the_call_is_the_reason_afterwards_too():
    q, k, v = qkv(1, 2, 8, 8)
    with attnsel.watch() as seen:
        for backends in ([SDPBackend.MATH], [*KERNELS]):
            with sdpa_kernel(backends):
                F.scaled_dot_product_attention(q, k, v)
    told = {site.candidate: site for site in seen.watched().sites}
    assert "enable_flash_sdp=false" in told["sdpa.math"].switches
    assert told["sdpa.math"].why == ("turned off",)
    assert told["sdpa.flash"].why == ()


def test_where_another_kernel_ran_than_is_read_that_is_said_and_no_reason(monkeypatch):
    """As where PyTorch's checks change: here the answer to the call is one to another."""
    asked = judging.dispatched_by

    def wrong(dispatcher: str, p: Any, env: Any, switches: Any = None) -> Any:
        return asked(dispatcher, p.replace(attention_dropout=0.5, is_training=True), env, switches)

    monkeypatch.setattr(judging, "dispatched_by", wrong)
    site, told = one(*qkv(1, 2, 8, 8))
    assert "ran otherwise than read: sdpa.flash ran, and attnsel reads sdpa.math" in told
    assert (site.why, site.fix) == ((), "")


@each(("shape", "mask"), [((1, 2, 8, 8), (3, 2, 8, 8)), ((8, 8), (1, 8, 8)), ((2, 8, 8), (4, 1, 8, 8))])
def test_a_mask_that_plain_torch_raises_for_is_raised_for_under_a_watch(shape, mask):
    """Under a dispatch mode, math adds a mask in another way, which would take it."""
    q, k, v = torch.zeros(3, *shape)
    with pytest.raises(RuntimeError) as plain:
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(mask))
    with attnsel.watch() as seen:
        torch.ones(2).sum()  # from here on operators are read
        with pytest.raises(RuntimeError) as watched:
            F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(mask))
    assert str(watched.value) == str(plain.value)
    assert seen.sites == ()


def test_a_tensor_subclass_can_be_made_while_operators_are_read():
    class Marked(torch.Tensor):
        pass

    with attnsel.watch() as seen:
        torch.ones(2).sum()
        assert seen.recorder.state["by_hand"].mode is not None
        assert type(Marked([1.0, 2.0])) is Marked
        assert type(causal_lower_right(4, 8)).__name__ == "CausalBias"
        assert type(torch.Tensor([1.0])) is torch.Tensor
    with torch.inference_mode(), attnsel.watch():
        torch.ones(2, 2).sum()
        torch.nn.functional.linear(
            torch.ones(1, 2, 2), torch.ones(2, 2)
        )  # composite: the mode is entered again
        assert type(causal_lower_right(4, 8)).__name__ == "CausalBias"
    assert "__new__" not in vars(torch.Tensor)
    assert type(Marked(2, 3)) is Marked


def test_an_operator_called_by_its_name_was_no_choice():
    q, k, v = qkv(1, 2, 8, 8)
    with attnsel.watch() as seen:
        torch.ops.aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, True)
    (site,) = seen.watched().sites
    assert (site.api, site.forward, site.params.attn_mask_type) == ("aten", MATH, "causal")
    assert site.why == (f"{MATH} is called by name",)
