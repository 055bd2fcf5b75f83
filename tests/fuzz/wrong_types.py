"""Arguments of the wrong type, and values that no sane caller passes: all of them work or are named.

A case is a call and some of its arguments, written as Python expressions. What is accepted must also be of
its argument's kind: a flag that takes "no" for True is an argument that was read as another one. And a value
is judged alike whether or not one that equals it came before.
"""

from __future__ import annotations

import decimal
import enum
import fractions
import inspect
import pathlib
import textwrap
import warnings
from typing import Any

import numpy
import torch
from harness import Case, Target, Wrong
from hypothesis import strategies as st

import attnsel
from attnsel import flash_attn, settings
from attnsel.environment import COMPONENTS, Device
from attnsel.flash_attn import FlashAttentionError
from attnsel.params import Tensors, TensorSpec
from attnsel.params import options as recipes
from attnsel.runtime.dispatch import clear_cache


class Odd:
    """An object one of whose methods raises."""

    def __new__(cls, name: str) -> Any:
        def method(self: Any, *args: Any) -> Any:
            raise RuntimeError(f"{name} of an odd object")

        return object.__new__(type("Odd", (), {name: method}))


class Word(str, enum.Enum):
    CAUSAL = "causal"


class Two(enum.IntEnum):
    TWO = 2


NAMES: dict[str, Any] = {
    "Decimal": decimal.Decimal, "Device": Device, "Fraction": fractions.Fraction, "Odd": Odd,
    "Path": pathlib.Path, "TensorSpec": TensorSpec, "Tensors": Tensors, "Two": Two, "Word": Word,
    "attnsel": attnsel, "flash_attn": flash_attn, "np": numpy, "recipes": recipes, "torch": torch,
}  # fmt: skip

# ---- values ------------------------------------------------------------------------------------------


def listed(text: str) -> list[str]:
    """Expressions that stand between semicolons."""
    return [" ".join(part.split()) for part in text.split(";")]


_RAISING = ("repr", "str", "eq", "ne", "hash", "bool", "float", "int", "index", "len", "iter", "getattr",
            "lt")  # fmt: skip
VALUES: dict[str, list[str]] = {
    "none": ["None"],
    "flag": listed("True; False; np.bool_(True); 0; 1"),
    "int": listed("-1; 2; 3; 2**31; 2**63; 10**400; -10**400; np.int64(1); np.int32(2); Two.TWO"),
    "number": listed("""
        0.0; 0.5; 1.0; -0.5; 1e308; float('nan'); float('inf'); np.float32(0.5); np.float64(0.5);
        np.float16('nan'); Fraction(1, 3); Fraction(10**400); torch.tensor(0.5)
    """),
    "text": listed(r"""
        ''; 'x'; '1'; '0.5'; 'no'; 'causal'; 'bshd'; '\ud800\x1b[2J'; Word.CAUSAL; 'x' * 100000;
        np.str_('causal')
    """),
    "pair": listed("(1, 0); [2, 1]; (True, False); (np.int64(1), 0); (-1, -1); torch.tensor([1, 0])"),
    "tensor": listed("""
        torch.ones(1, 2, 2, 8); torch.ones(1, 2, 2, 8).half(); torch.ones(1, 2, 2, 8).double();
        torch.ones(1, 2, 2, 8).bfloat16().requires_grad_(); torch.ones(1, 2, 2, 8, dtype=torch.int64);
        torch.ones(1, 2, 2, 8, dtype=torch.complex64); torch.ones(1, 2, 2, 8, dtype=torch.bool);
        torch.ones(1, 2, 2, 8, device='meta'); torch.ones(1, 2, 2, 8).to_sparse(); torch.ones(0);
        torch.nested.nested_tensor([torch.ones(2, 2, 8)]); torch.ones(1, 2, 2, 8, 1); torch.ones(2, 2, 8);
        torch.ones(1, 0, 2, 8); torch.ones(0, 2, 2, 8); torch.ones(1, 2, 0, 8); torch.ones(1, 2, 2, 0);
        torch.tensor([0, 2], dtype=torch.int32); torch.tensor([0, 2]); torch.tensor([0.0, 2.0]);
        torch.tensor([2, 0], dtype=torch.int32); torch.tensor([0, 2**31 - 1], dtype=torch.int32);
        torch.tensor([[0, 2]], dtype=torch.int32); torch.tensor(1); torch.tensor(True); torch.tensor(2j);
        torch.zeros(2, 2, dtype=torch.bool); torch.ones(2); torch.tensor([[0]], dtype=torch.int32);
        torch.tensor([[-1]], dtype=torch.int32); torch.nn.Parameter(torch.ones(1, 2, 2, 8));
        torch.quantize_per_tensor(torch.ones(1, 2, 2, 8), 0.1, 0, torch.qint8)
    """),
    "object": [
        *listed("""
            b'causal'; 1j; Decimal('0.5'); []; (); [1]; (1, 2, 3); ('a', 'b'); [[1], [2]]; (None, None);
            (0.5, 1.5); (2.0, 0); (10**400, 0); (float('nan'), 0); {}; {'a': 1}; {1: 2}; {1, 2}; object();
            (i for i in (1, 0)); (lambda: 1); int; Ellipsis; NotImplemented; slice(1); torch.float16;
            torch.device('meta'); Path('x'); np.zeros(2); np.array(None); range(2); bytearray(2);
            memoryview(b'x'); Exception('x'); attnsel; recipes.DelayedScaling(); torch.Size([1, 2]);
            np.zeros((1, 2, 2, 8)); frozenset({'tiled'}); {'recipe': 'x'}; [[[]]]; (torch.ones(2), None);
            (Odd('__eq__'), 1); {'recipe': Odd('__eq__')}
        """),
        *(f"Odd('__{name}__')" for name in _RAISING),
    ],
}
EQUAL = {
    "True": "1", "False": "0", "1": "True", "1.0": "1", "0": "0.0", "np.bool_(True)": "True",
    "np.int64(1)": "1", "np.float32(0.5)": "0.5", "np.float64(0.5)": "0.5", "(True, False)": "(1, 0)",
    "(np.int64(1), 0)": "(1, 0)", "Two.TWO": "2", "Word.CAUSAL": "'causal'", "np.str_('causal')": "'causal'",
}  # fmt: skip
"""Values, and others that equal them and hash alike."""

# ---- calls -------------------------------------------------------------------------------------------

_TABLE = "torch.tensor([[0]], dtype=torch.int32)"
_QKV = dict.fromkeys(("q", "k", "v"), "torch.ones(1, 2, 2, 8)")
_HALF = dict.fromkeys(("q", "k", "v"), "torch.ones(1, 2, 2, 8).half()")
_PACKED = dict.fromkeys(("q", "k", "v"), "torch.ones(2, 2, 8)")
_CU = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), "torch.tensor([0, 2], dtype=torch.int32)")
_MODULE = "attnsel.DotProductAttention(2, 8, qkv_format='bshd', attn_mask_type='no_mask'"
_LAYERS = {f"{name}_layer": "torch.ones(1, 2, 2, 8)" for name in ("query", "key", "value")}
_FLASH_CU = {"cu_seqlens_q": _CU["cu_seqlens_q"], "cu_seqlens_k": _CU["cu_seqlens_q"]}
_FLASH_LENGTHS = {**_FLASH_CU, "max_seqlen_q": "2", "max_seqlen_k": "2"}
_HALF_PACKED = dict.fromkeys(("q", "k", "v"), "torch.ones(2, 2, 8).half()")
_PAGES = dict.fromkeys(("k", "v"), "torch.ones(1, 256, 2, 8).half()")

CALLS: dict[str, list[dict[str, str]]] = {
    "attnsel.attention": [
        _QKV,
        {**_QKV, "attn_mask_type": "'padding'", **_CU},
        {**_PACKED, "qkv_format": "'thd'", "attn_mask_type": "'padding_causal'", **_CU},
        {**_QKV, "attn_mask_type": "'arbitrary'", "attention_mask": "torch.zeros(2, 2, dtype=torch.bool)"},
        {**_QKV, "core_attention_bias_type": "'post_scale_bias'", "core_attention_bias": "torch.ones(2, 2)"},
        {**_QKV, "core_attention_bias_type": "'alibi'", "alibi_slopes": "torch.ones(2)"},
        {**_QKV, "softmax_type": "'learnable'", "softmax_offset": "torch.ones(2)"},
        {"qkv_layer": "torch.ones(1, 2, 3, 2, 8)"},
        {"q": _QKV["q"], "kv_layer": "torch.ones(1, 2, 2, 2, 8)"},
        {**_QKV, "attn_mask_type": "'padding'", "cu_seqlens_kv": _CU["cu_seqlens_kv"], "block_table": _TABLE},
    ],
    "attnsel.DotProductAttention": [{"num_attention_heads": "2", "kv_channels": "8"}],
    f"{_MODULE})": [_LAYERS, {**_LAYERS, "attn_mask_type": "'padding'", **_CU}],
    f"{_MODULE}).explain": [_LAYERS],
    f"{_MODULE}).set_context_parallel_group": [{"cp_group": "None"}],
    "attnsel.AttentionParams": [{}, {"kv_cache": "'paged'", "is_training": "False"}],
    "TensorSpec": [{"shape": "(1, 2, 2, 8)", "stride": "(32, 16, 8, 1)"}],
    "Tensors": [{}],
    "attnsel.Environment": [{"device": "Device()"}],
    "Device": [{}],
    "attnsel.Environment.describe": [{}],
    "attnsel.Environment.detect": [{}],
    "attnsel.Policy": [{}],
    "attnsel.configure": [{}],
    "attnsel.override": [{}],
    "recipes.DelayedScaling": [{}],
    "recipes.MXFP8BlockScaling": [{}],
    "attnsel.select": [{"params": "attnsel.AttentionParams()", "environment": "None"}],
    "flash_attn.flash_attn_func": [_HALF],
    "flash_attn.flash_attn_qkvpacked_func": [{"qkv": "torch.ones(1, 2, 3, 2, 8).half()"}],
    "flash_attn.flash_attn_varlen_func": [
        {**_HALF_PACKED, **_FLASH_LENGTHS},
        {**_HALF_PACKED, **_PAGES, **_FLASH_LENGTHS, "block_table": _TABLE},
    ],
    "flash_attn.flash_attn_with_kvcache": [
        {"q": _HALF["q"], **dict.fromkeys(("k_cache", "v_cache"), "torch.ones(1, 4, 2, 8).half()")},
        {
            **_HALF,
            **dict.fromkeys(("k_cache", "v_cache"), "torch.ones(1, 16, 2, 8).half()"),
            "cache_seqlens": "torch.tensor([1], dtype=torch.int32)",
        },
    ],
}
_HIDDEN = {  # arguments that no signature lists
    "attnsel.Environment.describe": ["gpu", *COMPONENTS],
    "attnsel.AttentionParams": ["context_parallel", *attnsel.AttentionParams.model_fields],
    "attnsel.configure": [*attnsel.Policy.model_fields, *settings.Settings.model_fields],
    "attnsel.override": [*attnsel.Policy.model_fields, *settings.Settings.model_fields],
    f"{_MODULE})": ["inference_params", "fp8_output", "num_splits", "score_mod"],
}
_MODELS = ("attnsel.AttentionParams", "TensorSpec", "Tensors", "attnsel.Environment", "Device",
           "attnsel.Policy")  # fmt: skip
_MODELS += ("attnsel.configure", "attnsel.override", "recipes.DelayedScaling", "recipes.MXFP8BlockScaling")

# What of the values above an argument may take; pydantic's models read texts ("128") by its rules.
_FLAGS = """bottom_right_diagonal is_training deterministic return_lse return_max_logit causal
    sequence_parallel return_attn_probs rotary_interleaved return_softmax_lse checkpoint_core_attention
    fast_zero_fill pad_between_seqs"""
_TEXTS = """qkv_format attn_mask_type core_attention_bias_type softmax_type backend adapt cp_comm_type
    attention_type"""
_NUMBERS = "softmax_scale softcap attention_dropout dropout_p"
_INTS = """max_seqlen_q max_seqlen_kv max_seqlen_k max_seqlen qkv_interleave_dim num_attention_heads
    num_gqa_groups tp_size num_splits"""
KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_FLAGS.split(), ("flag",)),
    **dict.fromkeys(_TEXTS.split(), ("text",)),
    **dict.fromkeys(_NUMBERS.split(), ("number", "int", "flag")),
    **dict.fromkeys(_INTS.split(), ("int", "flag")),
}
KIND_OF = {value: kind for kind, values in VALUES.items() for value in values}


def parameters_of(call: str) -> dict[str, inspect.Parameter]:
    function = eval(call, NAMES)
    if isinstance(function, torch.nn.Module):
        function = function.forward
    return dict(inspect.signature(function).parameters)


def arguments(call: str) -> list[str]:
    """The names of a call's arguments."""
    fields = getattr(eval(call, NAMES), "model_fields", None)
    if fields is not None:
        return list(_HIDDEN.get(call, fields))
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [name for name, parameter in parameters_of(call).items() if parameter.kind in by_name]
    return list(dict.fromkeys([*named, *_HIDDEN.get(call, [])]))


ARGUMENTS = {call: arguments(call) for call in CALLS}


def may_be_none(call: str, name: str) -> bool:
    """Whether None says nothing."""
    parameters = parameters_of(call)
    return name not in parameters or parameters[name].default is None


@st.composite
def call(draw: Any) -> Case:
    name = draw(st.sampled_from(list(CALLS)))
    given = dict(draw(st.sampled_from(CALLS[name])))
    odd = {}
    for argument in draw(st.lists(st.sampled_from(ARGUMENTS[name]), min_size=1, max_size=2, unique=True)):
        kind = draw(st.sampled_from(list(VALUES)))  # so that the kinds with few values come as often
        odd[argument] = draw(st.sampled_from(VALUES[kind]))
    return {"call": name, "given": given, "odd": odd}


def _run(case: Case, odd: dict[str, str]) -> str:
    """How the call with these arguments ended; Wrong where it ended in no documented way."""
    values = {name: eval(text, NAMES) for name, text in {**case["given"], **odd}.items()}
    function = eval(case["call"], NAMES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = function(**values)
            if hasattr(made, "__enter__") and case["call"] == "attnsel.override":
                with made:
                    pass
        except FlashAttentionError as error:
            return _named(error, case, "flash_attn" in case["call"])
        except attnsel.InvalidInput as error:
            return _named(error, case, "flash_attn" not in case["call"])
        except attnsel.UnsupportedArgument:
            return "UnsupportedArgument"
        except attnsel.NoBackendError:
            return "NoBackendError"
        except Exception as error:
            raise Wrong(f"{type(error).__name__} came out: {str(error)[:300]}") from error
        finally:
            settings.configure()
    return "accepted"


def _named(error: attnsel.InvalidInput, case: Case, expected: bool) -> str:
    if not expected:
        raise Wrong(f"{type(error).__name__} is not what {case['call']} raises: {error}")
    if not str(error).isprintable() or len(str(error)) > 1500:
        raise Wrong(f"a message of {len(str(error))} characters, or not printable: {str(error)[:300]!r}")
    return "InvalidInput"


def attempt(case: Case) -> str:
    clear_cache()
    first = _run(case, case["odd"])
    if first == "accepted" and case["call"] not in _MODELS:
        for name, text in case["odd"].items():
            kinds = KINDS.get(name)
            default = text == "None" and may_be_none(case["call"], name)
            if kinds is not None and KIND_OF[text] not in kinds and not default:
                raise Wrong(f"{name} = {text} was accepted")
    twin = {name: EQUAL.get(text, text) for name, text in case["odd"].items()}
    if twin != case["odd"]:
        clear_cache()
        try:
            _run(case, twin)
        except Wrong:
            return first  # a case of its own
        again = _run(case, case["odd"])
        if again != first:
            raise Wrong(f"{first} by itself, {again} after {twin}")
    return first


def script(case: Case) -> str:
    lines = ["import enum, pathlib", "from decimal import Decimal", "from fractions import Fraction"]
    lines += ["from pathlib import Path", "from typing import Any", "import numpy as np, torch"]
    lines += ["import attnsel", "from attnsel import flash_attn, recipes"]
    lines += ["from attnsel.environment import Device", "from attnsel.params import Tensors, TensorSpec"]
    text = str({**case["given"], **case["odd"]})
    lines += [textwrap.dedent(inspect.getsource(made)) for made in (Odd, Word, Two) if made.__name__ in text]
    given = ", ".join(f"{name}={value}" for name, value in {**case["given"], **case["odd"]}.items())
    return "\n".join([*lines, f"{case['call']}({given})"])


TARGET = Target("wrong_types", call(), attempt, script, gate=500)
