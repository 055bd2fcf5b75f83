"""No argument is dropped, continued: the module's own arguments, and the fields of a question.

See ``test_nothing_dropped``: what changes numbers is held against the reference there. A new parameter of
``DotProductAttention`` or a new field of ``AttentionParams`` fails here until it has an entry.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attnsel import (
    AttentionParams,
    DotProductAttention,
    Environment,
    InvalidInput,
    Policy,
    Tensors,
    UnsupportedArgument,
    debug,
    override,
    select,
)
from attnsel.backends.registry import CANDIDATES
from attnsel.module import _NOT_YET
from attnsel.rules import REGISTRY
from attnsel.runtime import dispatch as run
from attnsel.selection.rule_dependencies import ALL, fields_of

torch.set_num_threads(1)

NUMBERS = "held against the reference in test_nothing_dropped"
CPU = ("sdpa.flash", "sdpa.math", "tiled", "triton")


def tensors(**shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = {"s": 6, "h": 2, "d": 8, **shape}
    q, k, v = torch.randn(3, 2, size["s"], size["h"], size["d"]).unbind(0)
    return q, k, v


def module(**arguments: Any) -> DotProductAttention:
    given = {"num_attention_heads": 2, "kv_channels": 8, "qkv_format": "bshd", **arguments}
    return DotProductAttention(**given)


# ---- the constructor --------------------------------------------------------------------------------


def heads_are_promised() -> None:
    for arguments in (
        {"num_attention_heads": 4},
        {"kv_channels": 16},
        {"kv_channels": (8, 4)},
        {"num_gqa_groups": 1},
    ):
        with pytest.raises(InvalidInput, match="must have"):
            module(**arguments)(*tensors())
    q, k, v = tensors()
    assert module(num_gqa_groups=1)(q, k[:, :, :1], v[:, :, :1]).shape == (2, 6, 16)


def a_rank_holds_its_share() -> None:
    assert module(num_attention_heads=4, num_gqa_groups=2, tp_size=2).num_gqa_groups == 1
    with pytest.raises(InvalidInput, match="tp_size"):
        module(tp_size=3)
    q, k, v = tensors()
    module(num_attention_heads=4, tp_size=2)(q, k, v)


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


def only_groups_are_groups() -> None:
    """Real ones: tests/attnsel/context_parallel."""
    for name in ("cp_group", "cp_global_ranks", "cp_stream"):
        with pytest.raises(InvalidInput, match=name):
            module(**{name: [0, 1]})


def an_exchange_is_named_for_when_there_is_a_group() -> None:
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
    torch.manual_seed(0)
    q, k, v = tensors()
    same = [module(attention_type=kind)(q, k, v) for kind in ("self", "cross")]
    torch.testing.assert_close(*same)
    with pytest.raises(InvalidInput, match="attention_type"):
        module(attention_type="sideways")
    told = " ".join((DotProductAttention.__doc__ or "").split())
    assert "attention_type is held to its two values, and tp_group is kept" in told


def dropout_is_for_training() -> None:
    core = module(attention_dropout=0.5)
    assert core.explain(*tensors()).params.attention_dropout == 0.5
    assert core.eval().explain(*tensors()).params.attention_dropout == 0.0
    with pytest.raises(InvalidInput, match="attention_dropout"):
        module(attention_dropout=1.0)


INIT: dict[str, Callable[..., None] | str] = {
    "num_attention_heads": heads_are_promised,
    "kv_channels": heads_are_promised,
    "num_gqa_groups": heads_are_promised,
    "attention_dropout": dropout_is_for_training,
    "sequence_parallel": dropout_draws_inside_the_tracker,
    "tp_size": a_rank_holds_its_share,
    "get_rng_state_tracker": dropout_draws_inside_the_tracker,
    "tp_group": words_without_effect_are_checked_or_kept,
    "layer_number": labels_show,
    "attention_type": words_without_effect_are_checked_or_kept,
    "cp_group": only_groups_are_groups,
    "cp_global_ranks": only_groups_are_groups,
    "cp_stream": only_groups_are_groups,
    "cp_comm_type": an_exchange_is_named_for_when_there_is_a_group,
    "name": labels_show,
    **dict.fromkeys(
        ("qkv_format", "attn_mask_type", "window_size", "bottom_right_diagonal", "softmax_scale",
         "softmax_type", "return_max_logit", "softcap", "deterministic", "backend", "adapt"),
        NUMBERS,
    ),
}  # fmt: skip


def test_every_argument_of_the_constructor_is_covered() -> None:
    assert set(INIT) == set(inspect.signature(DotProductAttention.__init__).parameters) - {"self", "unknown"}


# ---- forward ----------------------------------------------------------------------------------------


def a_checkpoint_runs_the_forward_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    attend = run.attend
    monkeypatch.setattr("attnsel.module.attend", lambda *given: (runs.append(1), attend(*given))[1])
    for again, expected in ((False, 1), (True, 2)):
        runs.clear()
        q, k, v = tensors()
        out = module()(q.requires_grad_(), k, v, checkpoint_core_attention=again)
        out.sum().backward()
        assert len(runs) == expected


def outputs_are_fully_written() -> None:
    """Rows of padding are what ``fast_zero_fill`` fills in TransformerEngine: zeros either way."""
    cu = torch.tensor([0, 4, 6], dtype=torch.int32)
    core = module(attn_mask_type="padding")
    for flag in (True, False):
        out = core(*tensors(), cu_seqlens_q=cu, cu_seqlens_kv=cu, fast_zero_fill=flag)
        assert not out[0, 4:].any()
        assert not out[1, 2:].any()


def gaps_are_as_they_are_said_to_be() -> None:
    q, k, v = (torch.randn(8, 2, 8) for _ in range(3))
    cu, apart = (torch.tensor(n, dtype=torch.int32) for n in ([0, 3, 6], [0, 4, 8]))
    core = module(qkv_format="thd", attn_mask_type="padding")
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    padded = {"cu_seqlens_q_padded": apart, "cu_seqlens_kv_padded": apart}
    gaps = core(q, k, v, **lengths, **padded)
    torch.testing.assert_close(core(q, k, v, **lengths, **padded, pad_between_seqs=True), gaps)
    dense = core(q[:6], k[:6], v[:6], **lengths)
    none = {"cu_seqlens_q_padded": cu, "cu_seqlens_kv_padded": cu}
    torch.testing.assert_close(core(q[:6], k[:6], v[:6], **lengths, **none, pad_between_seqs=False), dense)
    for call in (core, core.explain):
        with pytest.raises(InvalidInput, match="pad_between_seqs = True: needs"):
            call(q, k, v, **lengths, pad_between_seqs=True)
        with pytest.raises(InvalidInput, match="pad_between_seqs = False: must be True"):
            call(q, k, v, **lengths, **padded, pad_between_seqs=False)
    assert core.explain(q, k, v, **lengths, **padded).params.pad_between_seqs
    assert not core.explain(
        q[:6], k[:6], v[:6], **lengths, **none, pad_between_seqs=False
    ).params.pad_between_seqs


def what_forward_does_not_support_raises() -> None:
    for name, harmless in _NOT_YET.items():
        module()(*tensors(), **{name: harmless})
        with pytest.raises(UnsupportedArgument, match=name):
            module()(*tensors(), **{name: 7})
    with pytest.raises(TypeError, match="unexpected argument 'sofmax_scale'"):
        module()(*tensors(), sofmax_scale=1.0)
    with pytest.raises(TypeError, match="unexpected argument 'sofmax_scale'"):
        module().explain(*tensors(), sofmax_scale=1.0)


def packed_buffers_are_their_parts() -> None:
    """query, key and value cut out of one buffer, wherever it interleaves them, or of a buffer of two."""
    q, k, v = tensors()
    wanted = module()(q, k, v)
    for dim in (-3, -2):
        packed = {"qkv_layer": torch.stack((q, k, v), dim), "qkv_interleave_dim": dim}
        pair = {"kv_layer": torch.stack((k, v), dim), "qkv_interleave_dim": dim}
        torch.testing.assert_close(module()(**packed), wanted)
        torch.testing.assert_close(module()(q, **pair), wanted)
    for wrong in ({"qkv_layer": torch.stack((q, k, v), -3)}, {"qkv_interleave_dim": -2}):
        with pytest.raises(InvalidInput):
            module()(q, k, v, **wrong)


FORWARD: dict[str, Callable[..., None] | str] = {
    **dict.fromkeys(
        ("query_layer", "key_layer", "value_layer", "attention_mask", "qkv_format", "cu_seqlens_q",
         "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv",
         "attn_mask_type", "window_size", "bottom_right_diagonal", "core_attention_bias_type",
         "core_attention_bias", "alibi_slopes", "softmax_scale", "block_table"),
        NUMBERS,
    ),
    "checkpoint_core_attention": a_checkpoint_runs_the_forward_again,
    "fast_zero_fill": outputs_are_fully_written,
    "pad_between_seqs": gaps_are_as_they_are_said_to_be,
    **dict.fromkeys(("qkv_layer", "kv_layer", "qkv_interleave_dim"), packed_buffers_are_their_parts),
    "not_yet": what_forward_does_not_support_raises,
}  # fmt: skip


def test_every_argument_of_forward_is_covered() -> None:
    assert set(FORWARD) == set(inspect.signature(DotProductAttention.forward).parameters) - {"self"}


@pytest.mark.parametrize("check", dict.fromkeys([c for c in (INIT | FORWARD).values() if callable(c)]))
def test_what_an_argument_of_the_module_does(
    check: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    needs = inspect.signature(check).parameters
    check(*[request.getfixturevalue(name) for name in needs])


# ---- the fields of a question -----------------------------------------------------------------------


def asked(**arguments: Any) -> AttentionParams:
    forward = {n: arguments.pop(n) for n in list(arguments) if n in FORWARD and n not in INIT}
    core = module(**arguments)
    return core.explain(*forward.pop("qkv", tensors()), **forward).params


def padded_lengths() -> dict[str, Any]:
    cu = torch.tensor([0, 4, 6], dtype=torch.int32)
    return {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}


def _packed() -> AttentionParams:
    q, k, v = (torch.randn(8, 2, 8) for _ in range(3))
    apart = torch.tensor([0, 4, 8], dtype=torch.int32)
    core = module(qkv_format="thd", attn_mask_type="padding")
    return core.explain(
        q, k, v, **padded_lengths(), cu_seqlens_q_padded=apart, cu_seqlens_kv_padded=apart
    ).params


def _paged() -> AttentionParams:
    q, _, _ = tensors()
    pool, table = torch.randn(4, 4, 2, 8), torch.zeros(2, 2, dtype=torch.int32)
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    core = module(attn_mask_type="padding").eval()
    return core.explain(q, pool, pool, cu_seqlens_kv=cu, block_table=table).params


def _lse() -> AttentionParams:
    from attnsel.runtime.call import config

    return run.explain(config(return_lse=True), *tensors()).params


def _strided() -> AttentionParams:
    return module(kv_channels=4).explain(*(t[..., ::2] for t in tensors())).params


def _bias() -> AttentionParams:
    bias = torch.randn(2, 1, 6, 6, requires_grad=True)
    given = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    return module().explain(*tensors(), **given).params


def _alibi() -> AttentionParams:
    given = {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(2)}
    return module().explain(*tensors(), **given).params


# From a call of the public functions, a value that is not the field's default.
REACHED: dict[str, Callable[[], AttentionParams]] = {
    "dtype": lambda: asked(),
    "qkv_layout": _packed,
    "batch_size": lambda: module().explain(*(t[:1] for t in tensors())).params,
    **dict.fromkeys(("num_heads", "num_gqa_groups", "max_seqlen_q", "max_seqlen_kv"), asked),
    **dict.fromkeys(("head_dim_qk", "head_dim_v"), asked),
    "attn_mask_type": lambda: asked(attn_mask_type="no_mask"),
    "window_size": lambda: asked(window_size=(2, 0)),
    "bottom_right_diagonal": lambda: asked(attn_mask_type="causal_bottom_right"),
    "core_attention_bias_type": _bias,
    "core_attention_bias_shape": _bias,
    "core_attention_bias_requires_grad": _bias,
    "alibi_slopes_shape": _alibi,
    "softmax_type": lambda: asked(softmax_type="learnable"),
    "softcap": lambda: asked(softcap=2.0),
    "attention_dropout": lambda: asked(attention_dropout=0.1),
    "is_training": lambda: module().eval().explain(*tensors()).params,
    "deterministic": lambda: asked(deterministic=True),
    "return_lse": _lse,
    "return_max_logit": lambda: asked(return_max_logit=True),
    "kv_cache": _paged,
    "page_size": _paged,
    "pad_between_seqs": _packed,
    "tensors": _strided,
}
# Planned only: no public call asks it, and no candidate claims to run it.
PLANNED: dict[str, dict[str, Any]] = {
    "fp8": {"fp8": True, "fp8_meta": {"recipe": {"kind": "delayed", "fp8_dpa": True}}},
    "fp8_meta": {"fp8": True, "fp8_meta": {"recipe": {"kind": "mxfp8", "fp8_dpa": True}}},
}
# Asked with a group of processes: tests/attnsel/context_parallel.
TOGETHER = {"cp_size", "cp_comm_type"}
# A promise about how the call is made, for the rules alone: what it asks of a kernel is checked there.
HINTS = {"cuda_graph"}


def test_every_field_of_a_question_is_covered() -> None:
    assert {*REACHED, *PLANNED, *HINTS, *TOGETHER} == set(AttentionParams.model_fields)
    assert not set(REACHED) & set(PLANNED)


def test_a_call_asks_what_its_arguments_say() -> None:
    default = AttentionParams()
    same = [field for field, ask in REACHED.items() if getattr(ask(), field) == getattr(default, field)]
    assert same == []


@pytest.mark.parametrize("name", CPU)
def test_what_is_only_planned_is_never_claimed_to_run(name: str) -> None:
    for fields in PLANNED.values():
        p = AttentionParams(**fields)
        chosen = select(p, Environment.detect("cpu"), policy=Policy(backend=name))
        assert chosen.backend is None
        assert chosen[name].reasons or chosen[name].plan_only


def test_what_no_call_asks_is_read_by_a_rule() -> None:
    read = set().union(*(some for rule in REGISTRY.rules.values() if (some := fields_of(rule)) != ALL))
    assert read >= HINTS | TOGETHER | set(PLANNED)


def test_specs_of_tensors_are_all_read() -> None:
    # rank: of a question about F.sdpa; attnsel's own tensors have four dimensions
    names = {"q", "k", "v", "mask", "mask_hides_nothing", "ragged", "lengths_apart", "rank"}
    assert set(Tensors.model_fields) == names
    assert all(name in CANDIDATES for name in CPU)
