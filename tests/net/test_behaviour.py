"""What attention gives is what the record says it gave (``behaviour.py``, README.md).

And the cache in front of it tells calls apart that differ in one respect.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import attnsel  # noqa: E402
import behaviour  # noqa: E402
from attnsel import DotProductAttention  # noqa: E402
from behaviour import DOORS, differing, digest, numbers, one_thread, read  # noqa: E402

PART = 250
COUNTS = {door: len(read(door).lines) for door in DOORS}
assert sum(COUNTS.values()) >= 3120, "cases are gone"
PARTS = [
    pytest.param(door, range(start, min(start + PART, count)), id=f"{door}-{start:04}")
    for door, count in COUNTS.items()
    for start in range(0, count, PART)
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


ADAPTATIONS = (
    *("drop_mask", "unpack", "zero_padding", "pad_head_dim_qk", "pad_head_dim_v", "contiguous", "fold_mask"),
    *("pack", "pad_sequence", "expand_gqa"),  # by candidates from elsewhere: nothing on a CPU needs them
)


def test_each_adaptation_is_in_the_record() -> None:
    ran = Counter(
        name for door in DOORS for line in read(door).lines for name in re.split("[, >+]+", line.ran)
    )
    assert {name: ran[name] for name in ADAPTATIONS if ran[name] < 20} == {}


# ---- each field that calls are remembered by --------------------------------------------------------

KERNELS = (
    *(SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    SDPBackend.CUDNN_ATTENTION,
)
Given = dict[str, Any]
"""What a call is given. ``module``: of its layer; ``attention``, ``f_sdpa``: through this function instead,
with these; ``inference``: in evaluation; ``within``: what is in force (``in_force``)."""


def cu(*ends: int) -> Any:
    return torch.tensor(ends, dtype=torch.int32)


def hidden(*shape: int) -> Any:
    return numbers("hidden", *shape) > 0.5


def dense(**more: Any) -> Given:
    return {name: numbers(name, 2, 4, 2, 8) for name in "qkv"} | more


def packed(**more: Any) -> Given:
    given = {name: numbers(name, 8, 2, 8) for name in "qkv"}
    given |= {"cu_seqlens_q": cu(0, 4, 8), "cu_seqlens_kv": cu(0, 4, 8)}
    return {"module": {"qkv_format": "thd", "attn_mask_type": "padding"}, **given, **more}


def one_cu() -> Given:
    given = packed()
    return given | {"cu_seqlens_kv": given["cu_seqlens_q"]}


def padded() -> Given:
    """With one tensor for both lengths."""
    one = cu(0, 3, 5)
    return dense(module={"attn_mask_type": "padding"}, cu_seqlens_q=one, cu_seqlens_kv=one)


def gapped() -> Given:
    starts = {f"cu_seqlens_{side}_padded": cu(0, 4, 8) for side in ("q", "kv")}
    return packed(**starts, cu_seqlens_q=cu(0, 2, 5))


def paged() -> Given:
    given = {"q": numbers("q", 2, 1, 2, 8), "k": numbers("k", 8, 2, 2, 8), "v": numbers("v", 8, 2, 2, 8)}
    given |= {"cu_seqlens_q": cu(0, 1, 2), "cu_seqlens_kv": cu(0, 4, 7), "inference": True}
    given |= {"block_table": torch.tensor([[1, 2, 0], [5, 4, 0]], dtype=torch.int32)}
    return {"module": {"attn_mask_type": "padding"}, **given}


def fake() -> Given:
    with FakeTensorMode():
        return {name: torch.empty(2, 4, 2, 8) for name in "qkv"}


CALLS: dict[str, Callable[[], Given]] = {
    "dense": dense,
    "by attention": lambda: dense(attention={}),
    "inference": lambda: dense(inference=True),
    "grads in inference": lambda: dense(inference=True, q=numbers("q", 2, 4, 2, 8).requires_grad_()),
    "by f_sdpa": lambda: dense(f_sdpa={}),
    "grouped": lambda: dense(
        f_sdpa={"enable_gqa": True}, **{n: numbers(n, 2, h, 4, 8) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    ),
    "causal by f_sdpa": lambda: dense(f_sdpa={"is_causal": True}),
    "no grad": lambda: dense(inference=True, within="no_grad"),
    "padded": padded,
    "wide v": lambda: dense(attention={}, v=numbers("v", 2, 4, 2, 16)),
    "window": lambda: dense(window_size=(1, 1)),
    "longer keys": lambda: dense(window_size=(1, 1), **{n: numbers(n, 2, 6, 2, 8) for n in "kv"}),
    "max_seqlen_q": lambda: dense(max_seqlen_q=1),
    "hides nothing": lambda: dense(
        attention_mask=torch.zeros(4, 4, dtype=torch.bool), module={"attn_mask_type": "arbitrary"}
    ),
    "masked": lambda: dense(attention_mask=hidden(4, 4), module={"attn_mask_type": "arbitrary"}),
    "biased": lambda: dense(
        core_attention_bias=numbers("bias", 1, 2, 4, 4), core_attention_bias_type="post_scale_bias"
    ),
    "sloped": lambda: dense(alibi_slopes=numbers("slopes", 2).abs(), core_attention_bias_type="alibi"),
    # Through attention: a module's offset is its own parameter.
    "learned": lambda: dense(softmax_offset=numbers("offset", 2), attention={"softmax_type": "learnable"}),
    "packed": packed,
    "longest": lambda: packed(max_seqlen_q=4, max_seqlen_kv=4),
    "gapped": gapped,
    "paged": paged,
}


def apart(t: Any) -> Any:
    """The same numbers with strides that nothing dense has."""
    return torch.stack([t, t], -1)[..., 0]


def shifted(t: Any) -> Any:
    """The same numbers one element behind an aligned address."""
    return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)


def on_meta(t: Any) -> Any:
    return t.to("meta")


def recorded(t: Any) -> Any:
    return t.clone().requires_grad_()


class Wrapped(torch.Tensor):  # type: ignore[name-defined,misc,unused-ignore]
    """A tensor of a type that is not PyTorch's."""


def wrapped(t: Any) -> Any:
    return t.as_subclass(Wrapped)


def negated(t: Any) -> Any:
    """A view that is negated when it is read."""
    return torch._neg_view(t)


@contextmanager
def in_force(name: str) -> Iterator[None]:
    """``behaviour.context``, and what the program says of PyTorch's own kernels or is traced by."""
    flags = torch.backends.cuda
    ours: dict[str, Callable[[], Any]] = {
        "vmap": lambda: torch._functorch.vmap.vmap_increment_nesting(2, "error"),
        "jvp": torch.autograd.forward_ad.dual_level,
        "priority": lambda: sdpa_kernel([*reversed(KERNELS)], set_priority=True),
    }
    with ExitStack() as stack:
        if name.startswith("enable_"):
            stack.callback(getattr(flags, name), True)
            getattr(flags, name)(False)
        else:
            stack.enter_context(ours.get(name, lambda: behaviour.context(name))())
        yield


def of(call: str, tensor: str, **changes: Callable[[Any], Any]) -> dict[str, tuple[str, Given]]:
    """Rows about one tensor of a call."""
    return {f"{tensor}.{what}": (call, {tensor: change}) for what, change in changes.items()}


def shorter(t: Any) -> Any:
    """With the same strides: a slice."""
    return t[:, :3]


OF_QKV: dict[str, Callable[[Any], Any]] = {
    "stride": apart, "address": shifted, "dtype": torch.Tensor.half, "device": on_meta,
}  # fmt: skip

OF_F_SDPA: dict[str, Any] = {
    "attn_mask": torch.eye(2).bool(), "dropout_p": 0.5, "is_causal": True, "scale": 0.5,
}  # fmt: skip
AROUND_F_SDPA = (
    *(f"enable_{name}_sdp" for name in ("flash", "mem_efficient", "math", "cudnn")),
    *("vmap", "jvp", "priority", "autocast", "allow-tiled"),
)

# By the field: a call, and in what another differs from it: values, or what a tensor becomes. Of the tensors
# beside q, k and v a shape, a dtype or a stride may be refused or make no difference to a kernel; what is
# asked then is another question still.
FIELDS: dict[str, tuple[str, Given | Callable[[], Given]]] = {
    **of("dense", "q", shape=shorter, **OF_QKV),
    **of("dense", "k", shape=shorter, **OF_QKV),
    **of("dense", "v", **OF_QKV),
    **of("wide v", "v", shape=lambda t: t[..., :12]),
    "k.shape and v.shape": ("dense", {"k": shorter, "v": shorter}),
    **{f"{name}.requires_grad": ("inference", {name: recorded}) for name in "qkv"},
    "type(q)": ("dense", fake),
    **{f"f_sdpa: type({name})": ("by f_sdpa", {name: wrapped}) for name in "qkv"},
    **{f"f_sdpa: {name}.is_neg": ("by f_sdpa", {name: negated}) for name in "qkv"},
    **{f"f_sdpa: {name}": ("by f_sdpa", {"f_sdpa": {name: value}}) for name, value in OF_F_SDPA.items()},
    **{f"f_sdpa: {name}": ("by f_sdpa", {"within": name}) for name in AROUND_F_SDPA},
    "f_sdpa: is_causal is a bool": ("causal by f_sdpa", {"f_sdpa": {"is_causal": 1}}),
    "f_sdpa: enable_gqa": ("grouped", {"f_sdpa": {}}),
    "settings": ("dense", {"within": "deny-flash"}),
    "grad mode": ("grads in inference", {"within": "no_grad"}),
    "deterministic algorithms": ("dense", {"within": "deterministic"}),
    "autocast": ("dense", {"within": "autocast"}),
    "inference mode": ("no grad", {"within": "inference"}),
    "a transform": ("dense", {"within": "vmap"}),
    "which of the others": (
        "biased",
        {"core_attention_bias": lambda _: None, "attention_mask": numbers("bias", 1, 2, 4, 4)},
    ),
    "cu_seqlens_kv or none": ("padded", {"cu_seqlens_kv": lambda _: None}),
    "extras or none": ("dense", CALLS["biased"]),
    "one cu_seqlens or two": ("packed", one_cu),
    "a mask that hides nothing": ("hides nothing", CALLS["masked"]),
    **of("masked", "attention_mask", shape=lambda _: hidden(2, 1, 4, 4), stride=apart, device=on_meta),
    **of("masked", "attention_mask", dtype=lambda t: t.to(torch.uint8)),
    **of("biased", "core_attention_bias", shape=lambda _: numbers("bias", 2, 1, 4, 4), stride=apart),
    **of("biased", "core_attention_bias", address=shifted, dtype=lambda t: t.double() / 3),
    **of("biased", "core_attention_bias", device=on_meta, requires_grad=recorded),
    **of("sloped", "alibi_slopes", shape=lambda _: numbers("slopes", 2, 2).abs(), dtype=torch.Tensor.double),
    **of("sloped", "alibi_slopes", device=on_meta, requires_grad=recorded),
    **of("learned", "softmax_offset", shape=lambda _: numbers("offset", 3), dtype=torch.Tensor.int),
    **of("learned", "softmax_offset", device=on_meta, requires_grad=recorded),
    **of("packed", "cu_seqlens_q", shape=lambda _: cu(0, 4, 4, 8), dtype=torch.Tensor.long),
    **of("packed", "cu_seqlens_kv", shape=lambda _: cu(0, 4, 4, 8), dtype=torch.Tensor.long, device=on_meta),
    "longest of cu_seqlens_q": ("packed", {"cu_seqlens_q": cu(0, 3, 8)}),
    "longest of cu_seqlens_kv": ("packed", {"cu_seqlens_kv": cu(0, 3, 8)}),
    "cu_seqlens_q_padded": ("gapped", {"cu_seqlens_q_padded": torch.Tensor.long}),
    "cu_seqlens_kv_padded": ("gapped", {"cu_seqlens_kv_padded": torch.Tensor.long}),
    "max_seqlen_q": ("longest", {"max_seqlen_q": 6}),
    "max_seqlen_kv": ("longest", {"max_seqlen_kv": 6}),
    "max_seqlen_q is an int": ("max_seqlen_q", {"max_seqlen_q": True}),
    **of("paged", "block_table", shape=lambda t: t[:, :2].contiguous(), dtype=torch.Tensor.long),
    "module.training": ("dense", {"inference": True}),
    "window_size": ("dense", {"window_size": (1, 0)}),
    "softmax_scale": ("dense", {"softmax_scale": 0.5}),
    "attn_mask_type": ("dense", {"attn_mask_type": "causal"}),
    "bottom_right_diagonal": ("longer keys", {"bottom_right_diagonal": False}),
    "softcap": ("dense", {"module": {"softcap": 2.0}}),
    "softmax_type": ("dense", {"module": {"softmax_type": "off-by-one"}}),
    "attention_dropout": ("dense", {"module": {"attention_dropout": 0.5}}),
    "deterministic": ("dense", {"module": {"deterministic": True}}),
    "return_max_logit": ("dense", {"module": {"return_max_logit": True}}),
    "backend": ("dense", {"module": {"backend": "tiled"}}),
    "adapt": ("window", {"module": {"adapt": "never"}}),
    "qkv_format": ("dense", {"qkv_format": "sbhd"}),
    "core_attention_bias_type": ("biased", {"core_attention_bias_type": "pre_scale_bias"}),
    "return_lse": ("by attention", {"attention": {"return_lse": True}}),
}

NO_MATTER_HERE = {
    # Kernels on GPUs copy a bias that lies so; those on a CPU read any strides from any address.
    "core_attention_bias.stride",
    "core_attention_bias.address",
    # Guards made outside hold for no call inside; what a transform refuses says nothing of plain calls.
    "inference mode",
    "a transform",
}


def other(field: str) -> Given:
    """The call that differs in this field."""
    call, change = FIELDS[field]
    if callable(change):
        return change()
    given = CALLS[call]()
    return given | {n: value(given[n]) if callable(value) else value for n, value in change.items()}


def asked(given: Given) -> dict[str, str]:
    """Run it: what was chosen, for which question, and what came out; or what was raised."""
    built = {"qkv_format": "bshd", "attn_mask_type": "no_mask", **given.pop("module", {})}
    through_attention, inference = given.pop("attention", None), given.pop("inference", False)
    through_f_sdpa = given.pop("f_sdpa", None)
    within = given.pop("within", "")
    tensors = [given.pop(name) for name in "qkv"]
    torch.manual_seed(0)
    layer = DotProductAttention(2, (8, tensors[2].shape[-1]), **built).train(not inference)
    before = attnsel.cache_info()
    with in_force(within):
        try:
            if through_f_sdpa is not None:
                result = attnsel.scaled_dot_product_attention(*tensors, **through_f_sdpa)
            elif through_attention is None:
                result = layer(*tensors, **given)
            else:
                result = attnsel.attention(*tensors, **through_attention, **given)
        except Exception as error:
            return {"raised": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    results = result if isinstance(result, tuple) else (result,)
    told = {"kinds": str([(type(t).__name__, t.requires_grad, t.dtype, t.shape) for t in results])}
    after = attnsel.cache_info()
    told["known, new"] = str((after.hits > before.hits, after.misses > before.misses))
    chosen = layer.last_selection
    if chosen is not None:
        told |= {"ran": f"{chosen.backend} {[a.name for a in chosen.chosen.adaptations]}"}
        told |= {"question": repr(chosen.params), "policy": repr(chosen.policy)}
    if all(type(t) is torch.Tensor and t.device.type == "cpu" for t in results):
        given |= dict(zip("qkv", tensors, strict=True))
        leaves = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
        grads = behaviour.gradients(results[0], leaves, torch.ones_like(results[0]))
        told |= {"results": digest({str(n): t for n, t in enumerate(results)} | grads)}
    return told


def differences(alone: dict[str, str], behind: dict[str, str]) -> list[str]:
    """By itself and behind another call; of a question its fields that differ."""
    found = []
    for name in dict.fromkeys((*alone, *behind)):
        sides = [told.get(name, "nothing").split(", ") for told in (alone, behind)]
        if sides[0] != sides[1]:
            mine, theirs = (", ".join(x for x in a if x not in b) for a, b in (sides, sides[::-1]))
            found.append(f"{name}: {mine}  ->  {theirs}")
    return found


@pytest.mark.parametrize("field", FIELDS)
def test_calls_that_differ_in_one_field_are_told_apart(field: str) -> None:
    """Whichever is second, behind the other one it is what it is by itself."""
    pair = [CALLS[FIELDS[field][0]], partial(other, field)]
    for first, second in (pair, pair[::-1]):
        with warnings.catch_warnings(), one_thread():
            warnings.simplefilter("ignore")
            attnsel.clear_cache()
            alone = asked(second())
            attnsel.clear_cache()
            before = [asked(first()), asked(first())][0]  # behind the second its way is the shortest
            behind = asked(second())
            attnsel.clear_cache()
        if behind != alone:
            said = "\n".join(f"    {part}" for part in differences(alone, behind))
            head = f"two calls that differ in {field}: behind the first the second is not answered as alone"
            pytest.fail(f"{head}\n{said}", pytrace=False)
        if field not in NO_MATTER_HERE:
            assert before != behind, f"these two calls do not differ in {field} for anybody"
