"""No argument is dropped: each is honoured, makes a candidate ineligible with a reason, or raises.

Every parameter of ``attention``, of ``DotProductAttention`` and every field of ``AttentionParams`` has an
entry below, so a new one fails here until it has one. An entry that has an effect on numbers is a pair of
calls: the definition says that they differ, and each candidate that runs on a CPU gives its numbers or lists
reasons. The others have a check of what they do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_calls import Problem, complaint, definition, make
from attnsel import (
    AttentionParams,
    DotProductAttention,
    Environment,
    InvalidInput,
    NoBackendError,
    Policy,
    Tensors,
    UnsupportedArgument,
    attention,
    debug,
    functional,
    override,
    select,
)
from attnsel.backends.registry import CANDIDATES
from attnsel.module import _NOT_YET
from attnsel.rules import REGISTRY
from attnsel.runtime import dispatch
from attnsel.runtime.bind import make_spec
from attnsel.runtime.call import config
from attnsel.selection.rule_index import ALL, fields_of
from tables import each

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

POST, PRE = (
    {"bias": (kind, "b h s_q s_kv", False, None), "scale": 0.3}
    for kind in ("post_scale_bias", "pre_scale_bias")
)
LENGTHS = {"b": 3, "mask": "padding", "lengths": "cu_seqlens", "lens_q": [9, 4, 0], "lens_kv": [9, 6, 3]}
PACKED = {**LENGTHS, "fmt": "thd"}
GAPS = {**PACKED, "gaps": [[1, 1, 1], [1, 1, 1]]}
WINDOW = {"window": (2, 1), "s_q": 5}
Case = dict[str, Any]
# Argument: without it, with it, and where the module takes it.
PAIRS: dict[str, tuple[Case, Case, str]] = {
    "q": ({}, {"times": (-1.5, 1.0)}, "forward"),
    "v": ({}, {"times": (1.0, -1.5)}, "forward"),
    "attn_mask_type": ({}, {"mask": "causal"}, "init forward"),
    "attention_mask": ({}, {"mask": "arbitrary", "arbitrary": "b h s_q s_kv"}, "forward"),
    "window_size": ({}, {"window": (2, 1)}, "init forward"),
    "bottom_right_diagonal": ({**WINDOW, "anchor": True}, {**WINDOW, "anchor": False}, "init forward"),
    "softmax_scale": ({}, {"scale": 0.9}, "init forward"),
    "softcap": ({}, {"softcap": 0.7}, "init"),
    "core_attention_bias_type": (POST, PRE, "forward"),
    "core_attention_bias": ({"scale": 0.3}, POST, "forward"),
    "alibi_slopes": ({"g": 4, "alibi": "computed"}, {"g": 4, "alibi": "h"}, "forward"),
    "softmax_type": ({}, {"softmax": "off-by-one"}, "init"),
    "softmax_offset": ({"softmax": "off-by-one"}, {"softmax": "learnable"}, "init"),
    "cu_seqlens_q": ({"b": 3}, LENGTHS, "forward"),
    "cu_seqlens_kv": ({"b": 3}, LENGTHS, "forward"),
    "cu_seqlens_q_padded": (PACKED, GAPS, "forward"),
    "cu_seqlens_kv_padded": (PACKED, GAPS, "forward"),
    "qkv_format": ({}, {"fmt": "sbhd"}, "init forward"),
}
NOT_PYTORCHS = {"softcap", "softmax_type", "softmax_offset"}  # its kernels have no argument for these


def case(changes: Case) -> Problem:
    return make({"g": 2, "s_q": 9, "s_kv": 9, "d": 8, "e": 8, "grads": "", **changes})


def put_to_attention(problem: Problem, backend: str) -> Tensor:
    out = attention(*problem.qkv(problem.leaves), **problem.arguments | {"backend": backend})
    assert isinstance(out, Tensor)
    return out


FIRST, SECOND = (
    inspect.signature(f).parameters for f in (DotProductAttention.__init__, DotProductAttention.forward)
)


def put_to_module(problem: Problem, where: str) -> Tensor:
    """As many of the arguments in the constructor, or in ``forward``, as it takes there. From there the way
    to the kernels is one for all of them: ``tiled`` takes every call."""
    given = {n: v for n, v in problem.arguments.items() if v is not None and n in {*FIRST, *SECOND}}
    sink = problem.leaves.get("softmax_offset")
    in_init = {n: v for n, v in given.items() if n in FIRST and (where == "init" or n not in SECOND)}
    rest = {n: v for n, v in given.items() if n not in in_init}
    size = problem.sizes
    # Where forward is to say it, the constructor says something else.
    in_init = {"qkv_format": "bshd" if problem.case["fmt"] != "bshd" else "sbhd", **in_init}
    core = DotProductAttention(
        size["h"], (size["d"], size["e"]), size["g"], **in_init, backend="tiled"
    ).eval()
    if sink is not None:
        assert core.softmax_offset is not None
        with torch.no_grad():
            core.softmax_offset.copy_(sink.reshape(1, -1, 1, 1))
    tensors = problem.qkv(problem.leaves)
    planned = core.explain(*tensors, **rest)  # takes what forward takes, and says what it will do
    out = core(*tensors, **rest)
    assert planned.backend == "tiled"
    assert core.last_selection.candidates == planned.candidates
    return out.detach().unflatten(-1, (size["h"], size["e"]))


@pytest.mark.parametrize("name", PAIRS)
def test_an_argument_is_honoured_or_it_is_said_why_not(name: str) -> None:
    without, given, where = PAIRS[name]
    problem, before = case(given), definition(case(without), torch.float64)["out"]
    wanted = definition(problem, torch.float64)["out"]
    assert wanted.shape != before.shape or not torch.allclose(wanted, before, atol=1e-3), "no effect at all"
    for backend in RUNNING:
        if name in NOT_PYTORCHS and backend.startswith("sdpa"):
            with pytest.raises(NoBackendError) as caught:
                put_to_attention(problem, backend)
            assert caught.value.selection[backend].reasons
            continue
        assert complaint(problem, {"out": put_to_attention(problem, backend)}) == "", backend
    for place in where.split():
        assert complaint(problem, {"out": put_to_module(problem, place)}) == "", place


def test_formats_are_those_that_there_are() -> None:
    for fmt, changes in (("bhsd", {}), ("thd", PACKED)):
        problem = case({**changes, "fmt": fmt})
        assert complaint(problem, {"out": put_to_attention(problem, "tiled")}) == ""
    q, k, v = tensors()
    with pytest.raises(InvalidInput, match="qkv_format"):
        attention(q, k, v, qkv_format="dhsb")


# ---- arguments that do something else ---------------------------------------------------------------


def tensors(s: int = 6, h: int = 2, d: int = 8, b: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, b, s, h, d, generator=gen).unbind(0)
    return q, k, v


def module(**arguments: Any) -> DotProductAttention:
    return DotProductAttention(
        **{"num_attention_heads": 2, "kv_channels": 8, "qkv_format": "bshd", **arguments}
    )


def selection_of(*given: Tensor, **arguments: Any) -> Any:
    """The choice for a call of ``attention``."""
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "attend_again", lambda *handed: seen.extend(handed))
        patch.setattr(functional, "attend_anew", lambda *handed: None)
        attention(*(given or tensors()), **arguments)
    return dispatch.explain(*seen)


def dropout_takes_place() -> None:
    """With the unit matrix for v the output is P: each entry is 0 or P / (1 - p), at about the rate p."""
    q, k, _ = tensors(b=4, s=16, d=16)
    v = torch.eye(16)[None, :, None].expand(4, 16, 2, 16).contiguous()
    whole = attention(q, k, v, backend="tiled")
    for backend in RUNNING:
        if backend == "sdpa.flash":
            with pytest.raises(NoBackendError, match="SDPA"):
                attention(q, k, v, attention_dropout=0.25, backend=backend)
            continue
        core = module(kv_channels=16, attn_mask_type="no_mask", attention_dropout=0.25, backend=backend)
        for out in (
            attention(q, k, v, attention_dropout=0.25, backend=backend),
            core(q, k, v).unflatten(-1, (2, 16)),
        ):
            dropped = out == 0.0
            assert 0.15 < dropped.float().mean() < 0.35
            torch.testing.assert_close(out, torch.where(dropped, 0.0, whole / 0.75))
        torch.testing.assert_close(core.eval()(q, k, v).unflatten(-1, (2, 16)), whole)
    with pytest.raises(InvalidInput, match="attention_dropout"):
        module(attention_dropout=1.0)


def longest_is_a_bound() -> None:
    """No effect on numbers; a bound that a sequence exceeds raises."""
    problem = case({**PACKED, "lens_kv": [9, 4, 0]})
    plain = put_to_attention(problem, "tiled")
    problem.plain |= {"max_seqlen_q": 11, "max_seqlen_kv": 10}
    torch.testing.assert_close(put_to_attention(problem, "tiled"), plain)
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        for wrong, words in ((8, "longer than 8"), (torch.tensor(9), name)):
            problem.plain |= {"max_seqlen_q": 11, "max_seqlen_kv": 10, name: wrong}
            for put in (
                lambda: put_to_attention(problem, "tiled"),
                lambda: put_to_module(problem, "forward"),
            ):
                with pytest.raises(InvalidInput, match=words):
                    put()


def results_are_given() -> None:
    problem = case({"max_logit": True, "lse": True})
    out, lse, most = attention(*problem.qkv(problem.leaves), **problem.arguments)
    assert complaint(problem, {"out": out, "lse": lse, "max_logit": most}) == ""
    core = module(attn_mask_type="no_mask", return_max_logit=True)
    assert complaint(problem, {"max_logit": core(*problem.qkv(problem.leaves))[1], "out": out}) == ""
    for backend in ("sdpa.flash", "sdpa.math"):
        assert selection_of(backend=backend, return_max_logit=True).backend is None
    assert selection_of(backend="sdpa.math", return_lse=True).backend is None


def training_and_determinism_are_asked_for() -> None:
    for name in ("is_training", "deterministic"):
        assert not getattr(selection_of().params, name)
        assert getattr(selection_of(**{name: True}).params, name)
    bias = torch.randn(1, 2, 6, 6, requires_grad=True)
    asks = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    refusing = {b for b in RUNNING if selection_of(is_training=True, backend=b, **asks).backend is None}
    assert refusing == {"sdpa.flash"}, "its backward has no gradient for a bias"
    assert make_spec(config(deterministic=True), AttentionParams(deterministic=True), True).deterministic
    reading = [r for r in REGISTRY.rules.values() if "deterministic" in fields_of(r) != ALL]
    assert {name for rule in reading for name in rule.candidates} >= {"sdpa.flash", "sdpa.cudnn", "cudnn"}
    assert module(deterministic=True).explain(*tensors()).params.deterministic


def a_backend_is_never_swapped() -> None:
    for backend in RUNNING:
        core = module(backend=backend)
        core(*tensors())
        assert core.last_selection.backend == selection_of(backend=backend).backend == backend
    for call in (lambda: attention(*tensors(), backend="fastest"), lambda: module(backend="fastest")):
        with pytest.raises(InvalidInput, match="backend"):
            call()


def adaptations_are_forbidden() -> None:
    mask = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    asks: dict[str, Any] = {"attn_mask_type": "arbitrary", "attention_mask": mask, "backend": "tiled"}
    free, bound = (selection_of(adapt=adapt, **asks) for adapt in ("auto", "never"))
    assert [a.name for a in free["tiled"].adaptations] == ["drop_mask"]
    assert bound["tiled"].adaptations == ()
    assert module(adapt="never").explain(*tensors()).policy.adapt == "never"
    with pytest.raises(InvalidInput, match="adapt"):
        attention(*tensors(), adapt="perhaps")


# ---- the constructor --------------------------------------------------------------------------------


def heads_are_promised() -> None:
    for arguments in (
        {"num_attention_heads": 4}, {"kv_channels": 16}, {"kv_channels": (8, 4)}, {"num_gqa_groups": 1},
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match="must have"):
            module(**arguments)(*tensors())
    q, k, v = tensors()
    assert module(num_gqa_groups=1)(q, k[:, :, :1], v[:, :, :1]).shape == (2, 6, 16)


def a_rank_holds_its_share() -> None:
    assert module(num_attention_heads=4, num_gqa_groups=2, tp_size=2).num_gqa_groups == 1
    module(num_attention_heads=4, tp_size=2)(*tensors())


class Tracker:
    forks = 0

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        self.forks += 1
        yield


def dropout_draws_inside_the_tracker() -> None:
    for parallel, forks in ((False, 1), (True, 0)):  # as in TransformerEngine
        tracker = Tracker()
        core = module(
            attention_dropout=0.5, get_rng_state_tracker=lambda t=tracker: t, sequence_parallel=parallel
        )
        core(*tensors())
        assert tracker.forks == forks
        core.eval()(*tensors())
        assert tracker.forks == forks, "without dropout nothing is drawn"


def groups_and_exchanges_are_checked() -> None:
    """With real groups: tests/attnsel/context_parallel."""
    for name in ("cp_group", "cp_global_ranks", "cp_stream"):
        with pytest.raises(InvalidInput, match=name):
            module(**{name: [0, 1]})
    for name in ("p2p", "all_gather", "a2a", "a2a+p2p"):
        assert module(cp_comm_type=name).cp_comm_type == name
    with pytest.raises(InvalidInput, match="cp_comm_type"):
        module(cp_comm_type="pigeon")


def labels_show(caplog: pytest.LogCaptureFixture) -> None:
    for arguments, label in (({"layer_number": 3}, "layer 3"), ({"name": "decoder.1"}, "decoder.1")):
        debug._announced.clear()
        with override(debug=1):
            module(**arguments, softcap=3.0)(*tensors())
        assert f"attnsel: {label}: " in caplog.text


def words_without_effect_are_checked_or_kept() -> None:
    """The docstring says so of both: lengths and masks say what TransformerEngine reads from them."""
    held = object()
    assert module(tp_group=held).tp_group is held
    torch.testing.assert_close(*(module(attention_type=kind)(*tensors()) for kind in ("self", "cross")))
    told = " ".join((DotProductAttention.__doc__ or "").split())
    assert "attention_type is held to its two values, and tp_group is kept" in told


# ---- forward ----------------------------------------------------------------------------------------


def a_checkpoint_runs_the_forward_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    attend = dispatch.attend
    monkeypatch.setattr("attnsel.module.attend", lambda *given: (runs.append(1), attend(*given))[1])
    for again in (False, True):
        runs.clear()
        q, k, v = tensors()
        module()(q.requires_grad_(), k, v, checkpoint_core_attention=again).sum().backward()
        assert len(runs) == 1 + again


CU, APART = (torch.tensor(n, dtype=torch.int32) for n in ([0, 4, 6], [0, 4, 8]))
PADDED = {"cu_seqlens_q": CU, "cu_seqlens_kv": CU}


def outputs_are_fully_written() -> None:
    """Rows of padding are what ``fast_zero_fill`` fills in TransformerEngine: zeros either way."""
    for flag in (True, False):
        out = module(attn_mask_type="padding")(*tensors(), **PADDED, fast_zero_fill=flag)
        assert not out[0, 4:].any()
        assert not out[1, 2:].any()


def gaps_are_as_they_are_said_to_be() -> None:
    q, k, v = (torch.randn(8, 2, 8) for _ in range(3))
    core = module(qkv_format="thd", attn_mask_type="padding")
    gaps = {**PADDED, "cu_seqlens_q_padded": APART, "cu_seqlens_kv_padded": APART}
    torch.testing.assert_close(core(q, k, v, **gaps, pad_between_seqs=True), core(q, k, v, **gaps))
    none = {**PADDED, "cu_seqlens_q_padded": CU, "cu_seqlens_kv_padded": CU, "pad_between_seqs": False}
    short = (q[:6], k[:6], v[:6])
    torch.testing.assert_close(core(*short, **none), core(*short, **PADDED))
    for call in (core, core.explain):
        with pytest.raises(InvalidInput, match="pad_between_seqs = True: needs"):
            call(q, k, v, **PADDED, pad_between_seqs=True)
        with pytest.raises(InvalidInput, match="pad_between_seqs = False: must be True"):
            call(q, k, v, **gaps, pad_between_seqs=False)
    assert core.explain(q, k, v, **gaps).params.pad_between_seqs
    assert not core.explain(*short, **none).params.pad_between_seqs


def what_forward_does_not_support_raises() -> None:
    for name, harmless in _NOT_YET.items():
        module()(*tensors(), **{name: harmless})
        with pytest.raises(UnsupportedArgument, match=name):
            module()(*tensors(), **{name: 7})
    for call in (module(), module().explain):
        with pytest.raises(TypeError, match="unexpected argument 'sofmax_scale'"):
            call(*tensors(), sofmax_scale=1.0)


ELSEWHERE = "tests/attnsel/runtime/test_paged.py, test_fused_qkv.py"
OTHERS: dict[str, Callable[..., None] | str] = {
    **dict.fromkeys(("return_lse", "return_max_logit"), results_are_given),
    "attention_dropout": dropout_takes_place,
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest_is_a_bound),
    **dict.fromkeys(("is_training", "deterministic"), training_and_determinism_are_asked_for),
    "backend": a_backend_is_never_swapped,
    "adapt": adaptations_are_forbidden,
    **dict.fromkeys(("num_attention_heads", "kv_channels", "num_gqa_groups"), heads_are_promised),
    "tp_size": a_rank_holds_its_share,
    **dict.fromkeys(("sequence_parallel", "get_rng_state_tracker"), dropout_draws_inside_the_tracker),
    **dict.fromkeys(
        ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"), groups_and_exchanges_are_checked
    ),
    **dict.fromkeys(("layer_number", "name"), labels_show),
    **dict.fromkeys(("tp_group", "attention_type"), words_without_effect_are_checked_or_kept),
    "checkpoint_core_attention": a_checkpoint_runs_the_forward_again,
    "fast_zero_fill": outputs_are_fully_written,
    "pad_between_seqs": gaps_are_as_they_are_said_to_be,
    "not_yet": what_forward_does_not_support_raises,
    **dict.fromkeys(("block_table", "qkv_layer", "kv_layer", "qkv_interleave_dim"), ELSEWHERE),
    "attn_mask": "tests/attnsel/runtime/test_mistakes.py",
}


def test_every_argument_is_covered() -> None:
    names = {"query_layer": "q", "value_layer": "v", "key_layer": "k"}
    every = {*inspect.signature(attention).parameters, *FIRST, *SECOND} - {"self", "unknown"}
    assert {names.get(name, name) for name in every} == {"k", *PAIRS, *OTHERS}
    for name in {*FIRST} & {*PAIRS}:
        assert "init" in PAIRS[name][2], name
    for name in {*SECOND} & {*PAIRS}:
        assert "forward" in PAIRS[name][2], name


@pytest.mark.parametrize("check", dict.fromkeys([c for c in OTHERS.values() if callable(c)]))
def test_what_an_argument_does_besides_numbers(
    check: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    check(*[request.getfixturevalue(name) for name in inspect.signature(check).parameters])


# ---- the fields of a question -----------------------------------------------------------------------


def of_pages() -> AttentionParams:
    pool, table = torch.randn(4, 4, 2, 8), torch.zeros(2, 2, dtype=torch.int32)
    lengths = torch.tensor([0, 6, 12], dtype=torch.int32)
    core = module(attn_mask_type="padding").eval()
    return core.explain(tensors()[0], pool, pool, cu_seqlens_kv=lengths, block_table=table).params


def of_a_call(problem: Problem) -> AttentionParams:
    return selection_of(*problem.qkv(problem.leaves), **problem.arguments).params


# Planned only: no public call asks it, and no candidate claims to run it.
PLANNED: dict[str, dict[str, Any]] = {
    "fp8": {"fp8": True, "fp8_meta": {"recipe": {"kind": "delayed", "fp8_dpa": True}}},
    "fp8_meta": {"fp8": True, "fp8_meta": {"recipe": {"kind": "mxfp8", "fp8_dpa": True}}},
}
# Asked with a group of processes: tests/attnsel/context_parallel.
TOGETHER = {"cp_size", "cp_comm_type"}
# A promise about how the call is made, for the rules alone: what it asks of a kernel is checked there.
HINTS = {"cuda_graph"}


def test_a_call_asks_what_its_arguments_say() -> None:
    # rank: of a question about F.sdpa; attnsel's own tensors have four dimensions
    specs = {"q", "k", "v", "mask", "mask_hides_nothing", "ragged", "lengths_apart", "rank"}
    assert set(Tensors.model_fields) == specs
    default, strided = AttentionParams(), {"layouts": ("every second element",) * 3}
    asked = [of_a_call(case({**given, "grads": "qkv"})) for _, given, _ in PAIRS.values()]
    learnt = {"bias": ("post_scale_bias", "1 h s_q s_kv", True, None)}
    flags = ({name: True} for name in ("lse", "max_logit", "deterministic"))
    asked += [of_a_call(case(more)) for more in (*flags, strided, learnt)]
    asked += [selection_of(attention_dropout=0.1, is_training=True).params, of_pages()]
    told = {
        name
        for name in AttentionParams.model_fields
        for p in asked
        if getattr(p, name) != getattr(default, name)
    }
    assert told == set(AttentionParams.model_fields) - {*PLANNED, *HINTS, *TOGETHER}
    read = set().union(*(some for rule in REGISTRY.rules.values() if (some := fields_of(rule)) != ALL))
    assert read >= HINTS | TOGETHER | set(PLANNED)


@each("name", RUNNING)
def test_what_is_only_planned_is_never_claimed_to_run(name: str) -> None:
    for fields in PLANNED.values():
        chosen = select(AttentionParams(**fields), Environment.detect("cpu"), policy=Policy(backend=name))
        assert chosen.backend is None
        assert chosen[name].reasons or chosen[name].plan_only
