"""What attention gives is what the record says it gave (``behaviour.py``, README.md).

And the cache in front of it tells calls apart that differ in one respect.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import attnsel  # noqa: E402
import behaviour  # noqa: E402
from attnsel import DotProductAttention  # noqa: E402
from behaviour import DOORS, differing, digest, numbers, one_thread, read  # noqa: E402

PART = 250
PARTS = [
    pytest.param(door, range(start, min(start + PART, kind.count)), id=f"{door}-{start:04}")
    for door, kind in DOORS.items()
    for start in range(0, kind.count, PART)
]
SHOWN = 10

pytestmark = pytest.mark.usefixtures("no_switches_from_outside")


@pytest.mark.parametrize(("door", "part"), PARTS)
def test_what_attention_gives_is_what_was_recorded(door: str, part: range) -> None:
    how, told = differing(door, part)
    print(f"{door}: compared {how}")
    if how != "bit by bit":
        warnings.warn(f"{door}: another torch or processor than the record's, compared {how}", stacklevel=1)
    if told:
        more = f"\n... and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
        pytest.fail(
            f"{len(told)} of {len(part)} cases of {door} are not what was recorded (compared {how}):\n"
            + "\n".join(told[:SHOWN])
            + more
            + "\nIf that is meant: python tests/net/behaviour.py --accept",
            pytrace=False,
        )


@pytest.mark.parametrize("door", DOORS)
def test_each_case_has_its_line(door: str) -> None:
    assert len(read(door).lines) == DOORS[door].count


ADAPTATIONS = (
    *("drop_mask", "unpack", "zero_padding", "pad_head_dim_qk", "pad_head_dim_v", "contiguous", "fold_mask"),
    *("pack", "pad_sequence", "expand_gqa"),  # by candidates from elsewhere: nothing on a CPU needs them
)


@pytest.mark.parametrize("adaptation", ADAPTATIONS)
def test_each_adaptation_is_in_the_record(adaptation: str) -> None:
    names = [re.split(r", |>|\+", line.ran) for door in DOORS for line in read(door).lines]
    assert sum(adaptation in ran for ran in names) >= 20


# ---- each field that calls are remembered by --------------------------------------------------------

Given = dict[str, Any]


def tensor(name: str, *shape: int, dtype: Any = torch.float32, grad: bool = False, offset: int = 0) -> Any:
    """Dense, its first element ``offset`` elements behind an aligned address."""
    size = offset + int(torch.Size(shape).numel())
    return numbers(name, size, dtype=dtype)[offset:].view(shape).requires_grad_(grad)


def dense(**changes: Any) -> Callable[[], Given]:
    """A call of q, k and v; made anew each time."""

    def made() -> Given:
        given = {name: tensor(name, 2, 4, 2, 8) for name in "qkv"}
        return given | {n: value() if callable(value) else value for n, value in changes.items()}

    return made


def packed(**changes: Any) -> Callable[[], Given]:
    def made() -> Given:
        given: Given = {name: tensor(name, 8, 2, 8) for name in "qkv"}
        given |= {"cu_seqlens_q": cu(0, 4, 8), "cu_seqlens_kv": cu(0, 4, 8)}
        given |= {n: value() if callable(value) else value for n, value in changes.items()}
        return {"module": {"qkv_format": "thd", "attn_mask_type": "padding"}, **given}

    return made


def cu(*ends: int) -> Any:
    return torch.tensor(ends, dtype=torch.int32)


def one_cu(**changes: Any) -> Callable[[], Given]:
    def made() -> Given:
        given = packed(**changes)()
        given["cu_seqlens_kv"] = given["cu_seqlens_q"]
        return given

    return made


def masked(mask: Callable[[], Any], **changes: Any) -> Callable[[], Given]:
    return dense(attention_mask=mask, module={"attn_mask_type": "arbitrary"}, **changes)


def hidden(*shape: int) -> Any:
    return numbers("hidden", *shape) > 0.5


def biased(bias: Callable[[], Any], **changes: Any) -> Callable[[], Given]:
    return dense(**{"core_attention_bias": bias, "core_attention_bias_type": "post_scale_bias", **changes})


def learned(offset: Callable[[], Any], **changes: Any) -> Callable[[], Given]:
    """Through ``attention``: a module's offset is its own parameter."""
    return dense(softmax_offset=offset, attention={"softmax_type": "learnable"}, **changes)


def sloped(slopes: Callable[[], Any]) -> Callable[[], Given]:
    return dense(alibi_slopes=slopes, core_attention_bias_type="alibi")


def paged(**changes: Any) -> Callable[[], Given]:
    def made() -> Given:
        given: Given = {
            "q": tensor("q", 2, 1, 2, 8),
            "k": tensor("k", 8, 2, 2, 8),
            "v": tensor("v", 8, 2, 2, 8),
        }
        given |= {"cu_seqlens_q": cu(0, 1, 2), "cu_seqlens_kv": cu(0, 4, 7), "inference": True}
        given |= {"block_table": torch.tensor([[1, 2, 0], [5, 4, 0]], dtype=torch.int32)}
        given |= {n: value() if callable(value) else value for n, value in changes.items()}
        return {"module": {"attn_mask_type": "padding"}, **given}

    return made


def swapped(name: str, *shape: int) -> Any:
    """The same numbers as the dense one, with another order of strides."""
    return tensor(name, *shape).transpose(0, 1).contiguous().transpose(0, 1)


def apart(t: Any) -> Any:
    """The same numbers with strides that nothing dense has."""
    return torch.stack([t, t], -1)[..., 0]


def shifted(t: Any) -> Any:
    """The same numbers one element behind an aligned address."""
    moved = torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
    return moved.copy_(t)


def gapped(**changes: Any) -> Callable[[], Given]:
    starts = {name: partial(cu, 0, 4, 8) for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")}
    return packed(**{**starts, "cu_seqlens_q": partial(cu, 0, 2, 5), **changes})


def longer_keys(**changes: Any) -> Callable[[], Given]:
    keys = {name: partial(tensor, name, 2, 6, 2, 8) for name in "kv"}
    return dense(window_size=(1, 1), **keys, **changes)


def fake() -> Given:
    with FakeTensorMode():
        return {name: torch.empty(2, 4, 2, 8) for name in "qkv"}


def each_of_qkv() -> dict[str, tuple[Callable[[], Given], Callable[[], Given]]]:
    found = {}
    for name in "qkv":
        plain = dense()
        found |= {
            f"{name}.stride": (plain, dense(**{name: lambda n=name: apart(tensor(n, 2, 4, 2, 8))})),
            f"{name}.address": (plain, dense(**{name: lambda n=name: tensor(n, 2, 4, 2, 8, offset=1)})),
            f"{name}.dtype": (
                plain,
                dense(**{name: lambda n=name: tensor(n, 2, 4, 2, 8, dtype=torch.float16)}),
            ),
            f"{name}.device": (plain, dense(**{name: lambda n=name: tensor(n, 2, 4, 2, 8).to("meta")})),
            f"{name}.requires_grad": (
                dense(inference=True),
                dense(inference=True, **{name: lambda n=name: tensor(n, 2, 4, 2, 8, grad=True)}),
            ),
        }
    return found


def bias(*shape: int, **of: Any) -> Callable[[], Any]:
    return lambda: tensor("bias", *shape, **of)


def slopes() -> Any:
    return tensor("slopes", 2).abs()


def offset() -> Any:
    return tensor("offset", 2)


# By the field: two calls that differ in nothing else. Of the tensors beside q, k and v a shape, a dtype or a
# stride may be refused or make no difference to a kernel; what is asked then is another question still.
FIELDS: dict[str, tuple[Callable[[], Given], Callable[[], Given]]] = {
    # With the same strides: a slice.
    "q.shape": (dense(), dense(q=lambda: tensor("q", 2, 4, 2, 8)[:, :3])),
    "k.shape": (dense(), dense(k=lambda: tensor("k", 2, 4, 2, 8)[:, :3])),
    "v.shape": (
        dense(attention={}, v=lambda: tensor("v", 2, 4, 2, 16)),
        dense(attention={}, v=lambda: tensor("v", 2, 4, 2, 16)[..., :12]),
    ),
    "k.shape and v.shape": (dense(), dense(**{n: lambda n=n: tensor(n, 2, 4, 2, 8)[:, :3] for n in "kv"})),
    **each_of_qkv(),
    "type(q)": (dense(), fake),
    "settings": (dense(), dense(override={"deny": ("sdpa.flash",)})),
    "grad mode": (
        dense(inference=True, q=lambda: tensor("q", 2, 4, 2, 8, grad=True)),
        dense(inference=True, q=lambda: tensor("q", 2, 4, 2, 8, grad=True), no_grad=True),
    ),
    "deterministic algorithms": (dense(), dense(deterministic_algorithms=True)),
    "autocast": (dense(), dense(autocast=True)),
    "extras or none": (dense(), biased(bias(1, 1, 4, 4))),
    "one cu_seqlens or two": (one_cu(), packed()),
    "a mask that hides nothing": (
        masked(lambda: torch.zeros(4, 4, dtype=torch.bool)),
        masked(lambda: hidden(4, 4)),
    ),
    "attention_mask.shape": (masked(lambda: hidden(4, 4)), masked(lambda: hidden(2, 1, 4, 4))),
    "attention_mask.stride": (masked(lambda: hidden(4, 4)), masked(lambda: apart(hidden(4, 4)))),
    "attention_mask.dtype": (masked(lambda: hidden(4, 4)), masked(lambda: hidden(4, 4).to(torch.uint8))),
    "attention_mask.device": (masked(lambda: hidden(4, 4)), masked(lambda: hidden(4, 4).to("meta"))),
    "core_attention_bias.shape": (biased(bias(1, 1, 4, 4)), biased(bias(2, 1, 4, 4))),
    "core_attention_bias.stride": (biased(bias(1, 2, 4, 4)), biased(lambda: apart(bias(1, 2, 4, 4)()))),
    "core_attention_bias.address": (biased(bias(1, 2, 4, 4)), biased(lambda: shifted(bias(1, 2, 4, 4)()))),
    "core_attention_bias.dtype": (
        biased(bias(1, 1, 4, 4)),
        biased(lambda: bias(1, 1, 4, 4, dtype=torch.float64)() / 3),
    ),
    "core_attention_bias.device": (biased(bias(1, 1, 4, 4)), biased(lambda: bias(1, 1, 4, 4)().to("meta"))),
    "core_attention_bias.requires_grad": (biased(bias(1, 1, 4, 4)), biased(bias(1, 1, 4, 4, grad=True))),
    "alibi_slopes.shape": (sloped(slopes), sloped(lambda: tensor("slopes", 2, 2).abs())),
    "alibi_slopes.dtype": (sloped(slopes), sloped(lambda: slopes().double())),
    "alibi_slopes.device": (sloped(slopes), sloped(lambda: tensor("slopes", 2).to("meta"))),
    "alibi_slopes.requires_grad": (sloped(slopes), sloped(lambda: tensor("slopes", 2, grad=True))),
    "softmax_offset.shape": (learned(offset), learned(lambda: tensor("offset", 3))),
    "softmax_offset.dtype": (learned(offset), learned(lambda: torch.ones(2, dtype=torch.int32))),
    "softmax_offset.device": (learned(offset), learned(lambda: tensor("offset", 2).to("meta"))),
    "softmax_offset.requires_grad": (learned(offset), learned(lambda: tensor("offset", 2, grad=True))),
    "cu_seqlens_q.shape": (packed(), packed(cu_seqlens_q=lambda: cu(0, 4, 4, 8))),
    "cu_seqlens_kv.shape": (packed(), packed(cu_seqlens_kv=lambda: cu(0, 4, 4, 8))),
    "cu_seqlens_q.dtype": (packed(), packed(cu_seqlens_q=lambda: cu(0, 4, 8).long())),
    "cu_seqlens_kv.dtype": (packed(), packed(cu_seqlens_kv=lambda: cu(0, 4, 8).long())),
    "cu_seqlens_kv.device": (packed(), packed(cu_seqlens_kv=lambda: cu(0, 4, 8).to("meta"))),
    "longest of cu_seqlens_q": (packed(), packed(cu_seqlens_q=lambda: cu(0, 3, 8))),
    "longest of cu_seqlens_kv": (packed(), packed(cu_seqlens_kv=lambda: cu(0, 3, 8))),
    "cu_seqlens_q_padded": (gapped(), gapped(cu_seqlens_q_padded=lambda: cu(0, 4, 8).long())),
    "cu_seqlens_kv_padded": (gapped(), gapped(cu_seqlens_kv_padded=lambda: cu(0, 4, 8).long())),
    "max_seqlen_q": (packed(max_seqlen_q=4, max_seqlen_kv=4), packed(max_seqlen_q=6, max_seqlen_kv=4)),
    "max_seqlen_kv": (packed(max_seqlen_q=4, max_seqlen_kv=4), packed(max_seqlen_q=4, max_seqlen_kv=6)),
    "max_seqlen_q is an int": (dense(max_seqlen_q=1), dense(max_seqlen_q=True)),
    "block_table.shape": (
        paged(),
        paged(block_table=lambda: torch.tensor([[1, 2], [5, 4]], dtype=torch.int32)),
    ),
    "block_table.dtype": (paged(), paged(block_table=lambda: torch.tensor([[1, 2, 0], [5, 4, 0]]))),
    "module.training": (dense(), dense(inference=True)),
    "window_size": (dense(), dense(window_size=(1, 0))),
    "softmax_scale": (dense(), dense(softmax_scale=0.5)),
    "attn_mask_type": (dense(), dense(attn_mask_type="causal")),
    "bottom_right_diagonal": (longer_keys(), longer_keys(bottom_right_diagonal=False)),
    "softcap": (dense(), dense(module={"softcap": 2.0})),
    "softmax_type": (dense(), dense(module={"softmax_type": "off-by-one"})),
    "attention_dropout": (dense(), dense(module={"attention_dropout": 0.5})),
    "deterministic": (dense(), dense(module={"deterministic": True})),
    "return_max_logit": (dense(), dense(module={"return_max_logit": True})),
    "backend": (dense(), dense(module={"backend": "tiled"})),
    "adapt": (dense(window_size=(1, 1)), dense(window_size=(1, 1), module={"adapt": "never"})),
    "qkv_format": (dense(), dense(qkv_format="sbhd")),
    "core_attention_bias_type": (
        biased(bias(1, 1, 4, 4)),
        biased(bias(1, 1, 4, 4), core_attention_bias_type="pre_scale_bias"),
    ),
    "return_lse": (dense(attention={}), dense(attention={"return_lse": True})),
}


NO_MATTER_HERE = {
    # Kernels on GPUs copy a bias that lies so; those on a CPU read any strides from any address.
    "core_attention_bias.stride",
    "core_attention_bias.address",
}


def asked(given: Given) -> dict[str, str]:
    """Run it: what was chosen, for which question, and what came out; or what was raised."""
    given = dict(given)
    built = {"qkv_format": "bshd", "attn_mask_type": "no_mask", **given.pop("module", {})}
    through_attention, inference = given.pop("attention", None), given.pop("inference", False)
    switches = {
        n: given.pop(n, None) for n in ("override", "no_grad", "deterministic_algorithms", "autocast")
    }
    q, k, v = (given.pop(name) for name in "qkv")
    name = {"no_grad": "no_grad", "deterministic_algorithms": "deterministic", "autocast": "autocast"}
    around = next((name[n] for n, on in switches.items() if on and n in name), "")
    torch.manual_seed(0)
    layer = DotProductAttention(2, (8, v.shape[-1]), **built).train(not inference)
    # Without a change there is no override: its settings would be another object, looked up the slow way.
    settings = attnsel.override(**switches["override"]) if switches["override"] else nullcontext()
    with behaviour.context(around), settings:
        try:
            if through_attention is None:
                result = layer(q, k, v, **given)
            else:
                result = attnsel.attention(q, k, v, **through_attention, **given)
        except Exception as error:
            return {"raised": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    results = result if isinstance(result, tuple) else (result,)
    told = {"kinds": str([(type(t).__name__, t.requires_grad, t.dtype, t.shape) for t in results])}
    chosen = layer.last_selection
    if chosen is not None:
        told |= {"ran": f"{chosen.backend} {[a.name for a in chosen.chosen.adaptations]}"}
        told |= {"question": repr(chosen.params), "policy": repr(chosen.policy)}
    if all(type(t) is torch.Tensor and t.device.type == "cpu" for t in results):
        found = {str(n): t for n, t in enumerate(results)}
        leaves = {
            n: t for n, t in {**given, "q": q, "k": k, "v": v}.items() if getattr(t, "requires_grad", False)
        }
        told |= {
            "results": digest(found | behaviour.gradients(results[0], leaves, torch.ones_like(results[0])))
        }
    return told


def differences(alone: dict[str, str], behind: dict[str, str]) -> list[str]:
    """By itself and behind another call; of a question its fields that differ."""
    found = []
    for name in dict.fromkeys((*alone, *behind)):
        sides = [told.get(name, "nothing").split(", ") for told in (alone, behind)]
        if sides[0] != sides[1]:
            mine, other = (", ".join(x for x in a if x not in b) for a, b in (sides, sides[::-1]))
            found.append(f"{name}: {mine}  ->  {other}")
    return found


@pytest.mark.parametrize("order", ["then the other", "then the one"])
@pytest.mark.parametrize("field", FIELDS)
def test_calls_that_differ_in_one_field_are_told_apart(field: str, order: str) -> None:
    """The second call, behind the first one, is what it is by itself."""
    first, second = FIELDS[field] if order == "then the other" else FIELDS[field][::-1]
    with warnings.catch_warnings(), one_thread():
        warnings.simplefilter("ignore")
        attnsel.clear_cache()
        alone = asked(second())
        attnsel.clear_cache()
        before = asked(first())
        behind = asked(second())
        attnsel.clear_cache()
    if behind != alone:
        said = "\n".join(f"    {part}" for part in differences(alone, behind))
        pytest.fail(
            f"two calls that differ in {field}: behind the first the second is not answered as alone\n{said}",
            pytrace=False,
        )
    if field not in NO_MATTER_HERE:
        assert before != behind, f"these two calls do not differ in {field} for anybody"
