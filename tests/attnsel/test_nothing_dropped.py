"""No argument is dropped: each is honoured, makes a candidate ineligible with a reason, or raises.

Every parameter of ``attention``, of ``DotProductAttention`` and every field of ``AttentionParams`` has an
entry below, so a new one fails here until it has one. An entry that has an effect on numbers is a pair of
calls: the reference says that they differ, and each candidate that runs on a CPU gives what the reference
gives or lists its reasons. The others have a check of what they do.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnsel import (
    AttentionParams,
    DotProductAttention,
    Environment,
    InvalidInput,
    NoBackendError,
    Policy,
    attention,
    functional,
    select,
)
from attnsel.backends.registry import CANDIDATES
from attnsel.rules import REGISTRY
from attnsel.runtime.bind import make_spec
from attnsel.runtime.call import config
from attnsel.selection.rule_dependencies import ALL, fields_of
from call_cases import Call, Case, assert_close, mask_type

torch.set_num_threads(1)
RUNNING = ["sdpa.flash", "sdpa.math", "tiled", *(["triton"] if importlib.util.find_spec("triton") else [])]


def test_these_are_the_candidates_that_run_on_a_cpu() -> None:
    runs = {
        name
        for name in CANDIDATES
        if (s := select(AttentionParams(), Environment.detect("cpu"), policy=Policy(backend=name))).backend
        and s[name].executable
    }
    assert runs == set(RUNNING)


# ---- arguments that change numbers ------------------------------------------------------------------


def case(asks: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, **sizes: int) -> Case:
    small = {"h": 2, "g": 2, "s_q": 9, "s_kv": 9, "d": 8, "e": 8, **sizes}
    return Case("", asks or {}, tensors or {}, small, torch.float32)


CU = {"lengths": "cu_seqlens, cross"}
PLAIN = case()
PAIRS: dict[str, tuple[Case, Case]] = {
    # argument: without it, with it
    "attn_mask_type": (PLAIN, case(mask_type("causal"))),
    "attention_mask": (
        case(mask_type("no_mask")),
        case(mask_type("arbitrary"), {"attention_mask": "b h s_q s_kv"}),
    ),
    "window_size": (PLAIN, case({"window_size": (2, 1)})),
    "bottom_right_diagonal": (
        case({"window_size": (2, 1), "bottom_right_diagonal": True}, s_q=5),
        case({"window_size": (2, 1), "bottom_right_diagonal": False}, s_q=5),
    ),
    "softmax_scale": (PLAIN, case({"softmax_scale": 0.9})),
    "softcap": (PLAIN, case({"softcap": 0.7})),
    "core_attention_bias_type": (
        case({"softmax_scale": 0.3}, {"post_scale_bias": "1 h s_q s_kv"}),
        case({"softmax_scale": 0.3}, {"pre_scale_bias": "1 h s_q s_kv"}),
    ),
    "core_attention_bias": (PLAIN, case({}, {"post_scale_bias": "b 1 s_q s_kv"})),
    "alibi_slopes": (
        case({"core_attention_bias_type": "alibi"}, h=4, g=4),
        case({}, {"alibi_slopes": "h"}, h=4, g=4),
    ),
    "softmax_type": (PLAIN, case({"softmax_type": "off-by-one"})),
    "softmax_offset": (case({"softmax_type": "off-by-one"}), case({}, {"softmax_offset": "h"})),
    "cu_seqlens_q": (case(mask_type("no_mask"), b=3), case(mask_type("padding"), CU, b=3)),
    "cu_seqlens_kv": (case(mask_type("no_mask"), b=3), case(mask_type("padding"), CU, b=3)),
    "cu_seqlens_q_padded": (case(mask_type("padding"), CU), case(mask_type("padding"), {**CU, "gap": 1})),
    "cu_seqlens_kv_padded": (case(mask_type("padding"), CU), case(mask_type("padding"), {**CU, "gap": 1})),
}  # fmt: skip
_PACKED = {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"}


def put_to_attention(call: Call, backend: str) -> Tensor:
    out = attention(*call.qkv, **call.arguments, backend=backend)
    assert isinstance(out, Tensor)
    return out


def module_for(call: Call, backend: str, where: str) -> tuple[DotProductAttention, dict[str, Any]]:
    """A module with as many of the arguments in its constructor, or in ``forward``, as it takes there."""
    arguments = dict(call.arguments)
    sink = arguments.pop("softmax_offset", None)
    first, second = (
        inspect.signature(f).parameters for f in (DotProductAttention.__init__, DotProductAttention.forward)
    )
    in_init = {n: v for n, v in arguments.items() if n in first and (where == "init" or n not in second)}
    rest = {n: v for n, v in arguments.items() if n not in in_init}
    size = call.size
    in_init.setdefault("attn_mask_type", "no_mask")
    # Where forward is to say it, the constructor says something else.
    core = DotProductAttention(
        size["h"], (size["d"], size["e"]), size["g"], **{"qkv_format": "sbhd", **in_init}, backend=backend
    ).eval()
    if sink is not None:
        assert core.softmax_offset is not None
        with torch.no_grad():
            core.softmax_offset.copy_(sink.reshape(1, -1, 1, 1))
    return core, rest


def put_to_module(call: Call, backend: str, where: str) -> Tensor:
    core, rest = module_for(call, backend, where)
    planned = core.explain(*call.qkv, **rest)  # takes what forward takes, and says what it will do
    assert planned.backend in (backend, None)
    out = core(*call.qkv, **rest)
    assert core.last_selection.candidates == planned.candidates
    assert isinstance(out, Tensor)
    return out.unflatten(-1, (call.size["h"], call.size["e"]))


def honoured(name: str, backend: str, put: Callable[[Call, str], Tensor]) -> None:
    fmt = "thd" if name in _PACKED else "bshd"
    without, given = (Call(one, fmt) for one in PAIRS[name])
    if name in _PACKED:  # the same memory, read as if there were no gaps
        given.leaves["q"].data[: without.size["t_q"]] = without.leaves["q"].data
    wanted = given.expected()["out"]
    before = without.expected()["out"]
    assert wanted.shape != before.shape or not torch.allclose(wanted, before, atol=1e-3), "no effect at all"
    with torch.no_grad():
        if given.refused(backend):
            with pytest.raises(NoBackendError) as caught:
                put(given, backend)
            assert caught.value.selection[backend].reasons
            return
        assert_close({"out": put(given, backend)}, {"out": wanted}, torch.float32)


@pytest.mark.parametrize("name", PAIRS)
def test_attention_honours_its_argument_or_says_why_not(name: str) -> None:
    for backend in RUNNING:
        honoured(name, backend, put_to_attention)


INIT_NUMBERS = {"attn_mask_type", "window_size", "bottom_right_diagonal", "softmax_scale", "softmax_type",
                "softcap"}  # fmt: skip
FORWARD_NUMBERS = set(PAIRS) - {"softcap", "softmax_type", "softmax_offset"}


@pytest.mark.parametrize("name", sorted(INIT_NUMBERS))
def test_the_constructor_honours_its_argument(name: str) -> None:
    """Of the module the way to the kernels is one for all of them: ``tiled`` takes every call."""
    honoured(name, "tiled", lambda call, b: put_to_module(call, b, "init"))


@pytest.mark.parametrize("name", sorted(FORWARD_NUMBERS))
def test_forward_honours_its_argument(name: str) -> None:
    honoured(name, "tiled", lambda call, b: put_to_module(call, b, "forward"))


@pytest.mark.parametrize(("name", "backend"), [("q", "sdpa.flash"), ("k", "sdpa.math"), ("v", "tiled")])
def test_tensors_are_honoured(name: str, backend: str) -> None:
    call = Call(PLAIN, "bshd")
    before = put_to_attention(call, backend)
    call.leaves[name] = call.leaves[name].detach() * -1.5
    after = put_to_attention(call, backend)
    assert not torch.allclose(before, after)
    wanted = call_out(call)
    assert_close({"out": after.detach()}, {"out": wanted}, torch.float32)


def call_out(call: Call) -> Tensor:
    from attnsel.backends.contract import Inputs
    from reference import attention_reference

    doubles = {name: t.detach().double() for name, t in call.leaves.items()}
    out, _, _ = attention_reference(call.spec(), Inputs(**doubles))
    return call.to_caller(out)


@pytest.mark.parametrize(
    ("fmt", "backend"),
    [
        ("bshd", "tiled"),
        ("sbhd", "sdpa.flash"),
        ("bhsd", "sdpa.math"),
        ("thd", "tiled"),
        ("thd", "sdpa.flash"),
    ],
)
def test_a_format_is_honoured(fmt: str, backend: str) -> None:
    asks, tensors = (mask_type("padding_causal"), {"lengths": "cu_seqlens"}) if fmt == "thd" else ({}, {})
    call = Call(case(asks, tensors), fmt)
    wanted = call.expected()["out"]
    ways = [put_to_attention]
    if fmt != "bhsd":  # modules have TransformerEngine's three
        ways += [lambda c, b: put_to_module(c, b, "init"), lambda c, b: put_to_module(c, b, "forward")]
    for put in ways:
        if call.refused(backend):
            with pytest.raises(NoBackendError, match="SDPA007"):
                put(call, backend)
            continue
        assert_close({"out": put(call, backend).detach()}, {"out": wanted}, torch.float32)
    with pytest.raises(InvalidInput, match="qkv_format"):
        attention(*call.qkv, qkv_format="dhsb")


# ---- arguments that do something else ---------------------------------------------------------------


def small(**shape: int) -> tuple[Tensor, Tensor, Tensor]:
    size = {"b": 2, "s": 6, "h": 2, "d": 8, **shape}
    gen = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, size["b"], size["s"], size["h"], size["d"], generator=gen).unbind(0)
    return q, k, v


def refuses(backend: str, **arguments: Any) -> bool:
    """Whether this candidate gives reasons against these arguments, and no other answer."""
    selection = selection_of(backend, **arguments)
    if selection.backend is None:
        assert selection[backend].reasons
        with pytest.raises(NoBackendError):
            attention(*small(), backend=backend, **arguments)
    return selection.backend is None


def lse_is_given(backend: str) -> None:
    call = Call(case({"return_lse": True}), "bshd")
    if refuses(backend, return_lse=True):
        assert backend == "sdpa.math"
        return
    with torch.no_grad():
        out, lse = attention(*call.qkv, **call.arguments, backend=backend)
    wanted = call.expected()
    assert_close({"out": out, "lse": lse}, wanted, torch.float32)


def max_logit_is_given(backend: str) -> None:
    call = Call(case({"return_max_logit": True}), "bshd")
    if refuses(backend, return_max_logit=True):
        assert backend.startswith("sdpa.")
        return
    wanted = call.expected()
    with torch.no_grad():
        out, max_logit = attention(*call.qkv, **call.arguments, backend=backend)
        core = DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type="no_mask", return_max_logit=True)
        assert_close({"out": out, "max_logit": max_logit}, wanted, torch.float32)
        assert_close({"max_logit": core(*call.qkv)[1]}, wanted, torch.float32)


def dropout_takes_place(backend: str) -> None:
    """With the unit matrix for v the output is P: each entry is 0 or P / (1 - p), at about the rate p."""
    if refuses(backend, attention_dropout=0.25):
        assert backend == "sdpa.flash"
        return
    q, k, _ = small(b=4, s=16, d=16)
    v = torch.eye(16)[None, :, None].expand(4, 16, 2, 16).contiguous()
    whole = attention(q, k, v, backend="tiled")
    core = DotProductAttention(
        2, 16, qkv_format="bshd", attn_mask_type="no_mask", attention_dropout=0.25, backend=backend
    )
    core.backend = backend
    forced = DotProductAttention(
        2, 16, qkv_format="bshd", attn_mask_type="no_mask", attention_dropout=0.25, backend=backend
    )
    for out in (
        attention(q, k, v, attention_dropout=0.25, backend=backend),
        forced(q, k, v).unflatten(-1, (2, 16)),
    ):
        dropped = out == 0.0
        assert 0.15 < dropped.float().mean() < 0.35
        torch.testing.assert_close(out, torch.where(dropped, 0.0, whole / 0.75))
    torch.testing.assert_close(core.eval()(q, k, v).unflatten(-1, (2, 16)), whole)


def longest_is_a_bound(backend: str) -> None:
    """No effect on numbers; a bound that a sequence exceeds raises; known bounds decide on unpacking."""
    call = Call(case(mask_type("padding"), {"lengths": "cu_seqlens"}), "thd")
    if backend not in ("tiled", "triton"):
        return
    plain = put_to_attention(call, backend)
    call.arguments |= {"max_seqlen_q": 11, "max_seqlen_kv": 10}
    torch.testing.assert_close(put_to_attention(call, backend), plain)
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        with pytest.raises(InvalidInput, match="longer than 8"):
            attention(*call.qkv, **{**call.arguments, name: 8}, backend=backend)
        with pytest.raises(InvalidInput, match=name):
            attention(*call.qkv, **{**call.arguments, name: torch.tensor(9)}, backend=backend)
        core, rest = module_for(call, backend, "forward")
        with pytest.raises(InvalidInput, match="longer than 8"):
            core(*call.qkv, **{**rest, name: 8})


def selection_of(backend: str, **arguments: Any) -> Any:
    seen: list[Any] = []
    q, k, v = small()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "attend", lambda *given: seen.extend(given))
        attention(q, k, v, backend=backend, **arguments)
    from attnsel.runtime.dispatch import explain

    return explain(*seen)


def training_is_asked_for(backend: str) -> None:
    assert not selection_of(backend).params.is_training
    assert selection_of(backend, is_training=True).params.is_training
    bias = torch.randn(1, 2, 6, 6, requires_grad=True)
    asks = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    chosen = selection_of(backend, is_training=True, **asks)
    assert (chosen.backend is None) == (backend == "sdpa.flash"), "its backward has no gradient for a bias"


def determinism_is_asked_for(backend: str) -> None:
    assert not selection_of(backend).params.deterministic
    assert selection_of(backend, deterministic=True).params.deterministic
    static = config(deterministic=True)
    assert make_spec(static, AttentionParams(deterministic=True), True).deterministic
    reading = [r for r in REGISTRY.rules.values() if "deterministic" in fields_of(r) != ALL]
    assert {name for rule in reading for name in rule.candidates} >= {"sdpa.flash", "sdpa.cudnn", "cudnn"}
    core = DotProductAttention(2, 8, qkv_format="bshd", deterministic=True, backend=backend)
    assert core.explain(*small()).params.deterministic


def a_backend_is_never_swapped(backend: str) -> None:
    core = DotProductAttention(2, 8, qkv_format="bshd", backend=backend)
    core(*small())
    assert core.last_selection is not None
    assert core.last_selection.backend == backend
    with pytest.raises(InvalidInput, match="backend"):
        attention(*small(), backend="fastest")
    with pytest.raises(InvalidInput, match="backend"):
        DotProductAttention(2, 8, backend="fastest")


def adaptations_are_forbidden(backend: str) -> None:
    asks: dict[str, Any] = {
        "attn_mask_type": "arbitrary",
        "attention_mask": torch.zeros(1, 1, 6, 6, dtype=torch.bool),
    }
    free, bound = (selection_of(backend, adapt=adapt, **asks) for adapt in ("auto", "never"))
    assert [a.name for a in free[backend].adaptations] == ["drop_mask"]
    assert bound[backend].adaptations == ()
    core = DotProductAttention(2, 8, qkv_format="bshd", adapt="never", backend=backend)
    assert core.explain(*small()).policy.adapt == "never"
    with pytest.raises(InvalidInput, match="adapt"):
        attention(*small(), adapt="perhaps")


ATTENTION_OTHERS: dict[str, Callable[[str], None]] = {
    "return_lse": lse_is_given,
    "return_max_logit": max_logit_is_given,
    "attention_dropout": dropout_takes_place,
    "max_seqlen_q": longest_is_a_bound,
    "max_seqlen_kv": longest_is_a_bound,
    "is_training": training_is_asked_for,
    "deterministic": determinism_is_asked_for,
    "backend": a_backend_is_never_swapped,
    "adapt": adaptations_are_forbidden,
}


def test_every_argument_of_attention_is_covered() -> None:
    elsewhere = {"block_table"} | {
        "qkv_layer",
        "kv_layer",
        "qkv_interleave_dim",
    }  # runtime/test_paged, test_fused_qkv
    covered = {"q", "k", "v", "qkv_format", *PAIRS, *ATTENTION_OTHERS, *elsewhere}
    assert covered == set(inspect.signature(attention).parameters) - {"unknown"}


@pytest.mark.parametrize("check", dict.fromkeys(ATTENTION_OTHERS.values()))
def test_what_an_argument_does_besides_numbers(check: Callable[[str], None]) -> None:
    for backend in RUNNING:
        check(backend)
