"""What the backends say of a call before a kernel runs: candidates, memory, strides, refusals, masks, rows,
as recorded answers to the questions in recorded/*.txt.

Accept what changed with ``pytest tests/backends/test_recorded.py --snapshot-update``.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_cases import int32
from attnsel import AttentionParams, Environment
from attnsel.backends import checks, rows
from attnsel.backends import rows as pages
from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.backends.cudnn.graph import layouts
from attnsel.backends.registry import BUILT_IN, CANDIDATES, OLDEST_TORCH
from attnsel.backends.rows import sequences_of
from attnsel.backends.sdpa import ops
from attnsel.backends.sdpa.guards import violations
from attnsel.backends.sdpa.plan import mask_itemsize, plan_mask
from attnsel.backends.sdpa.run import alike, readable
from attnsel.errors import UnsupportedArgument
from attnsel.params import TensorSpec
from attnsel.verdicts.record import CandidateRecord
from records import Record, literals, words_of

torch.set_num_threads(1)

FOLDER = Path(__file__).parent / "recorded"
_TENSOR = re.compile(
    r"(?P<shape>[\d,]+|scalar)(:(?P<dtype>\w+))?(/(?P<strides>[\d,]+))?(\+(?P<first>\d+))?(@(?P<device>\w+))?(?P<grad>!)?"
)
_RESULT = ("out", "lse", "dout", "dlse")


def tensor(text: str) -> Tensor:
    """``2,4,6,8:float16/strides+first@device!`` (``!``: requires a gradient), or a list of int32."""
    if text.startswith("["):
        return int32(ast.literal_eval(text))
    found = _TENSOR.fullmatch(text)
    assert found, text
    shape, strides = (
        [int(n) for n in (found[name] or "").split(",") if n.isdigit()] for name in ("shape", "strides")
    )
    dtype = getattr(torch, found["dtype"] or "float32")
    device = found["device"] or "cpu"
    if device == "sparse":
        return torch.zeros(shape, dtype=dtype).to_sparse()
    if strides:
        memory = torch.zeros(4096, dtype=dtype, device=device)
        made = memory.as_strided(shape, strides, int(found["first"] or 0))
    else:
        made = torch.zeros(shape, dtype=dtype, device=device)
    return made.requires_grad_() if found["grad"] else made


def call_of(given: dict[str, str], **base: Any) -> tuple[Spec, Inputs, dict[str, Tensor]]:
    """A call, q, k and v alike where they are not given. A tensor's name instead of one: it is the same."""
    tensors: dict[str, Any] = {}
    fields = {}
    for name, value in given.items():
        if name in Inputs._fields or name in _RESULT:
            known = int(value) if name.startswith("max_") else tensors.get(value)
            tensors[name] = tensor(value) if known is None else known
        else:
            fields[name] = value
    others = {name: tensors.pop(name) for name in _RESULT if name in tensors}
    q = tensors.setdefault("q", tensor("2,4,6,8:float16"))
    k = tensors.setdefault("k", q)
    tensors.setdefault("v", k)
    return Spec(**{**base, **literals(fields)}), Inputs(**tensors), others


def shown(value: Any) -> str:
    if isinstance(value, Tensor):
        if value.dim() <= 2 and value.numel() < 40 and value.dtype in (torch.int32, torch.bool):
            return f"{value.int().tolist()}".replace(", ", ",")
        return f"{list(value.shape)}{list(value.stride())}".replace(", ", ",")
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "(" + ", ".join(f"{name} {shown(one)}" for name, one in value._asdict().items()) + ")"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(shown, value)) + ")"
    if isinstance(value, (set, frozenset)):
        return shown(tuple(sorted(value)))
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value)


def test_candidates(record: Record) -> None:
    lines = [f"in this order: {', '.join(BUILT_IN)}; torch from {OLDEST_TORCH}"]
    for name in CANDIDATES:
        made = CANDIDATES[name]
        if not made.kernel.startswith("attnsel."):
            continue
        for field in dataclasses.fields(CandidateRecord):
            value = getattr(made, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                lines.append(f"{name} | {field.name} | {shown(value)}")
    record.holds(FOLDER / "candidates.txt", lines)


def test_memory(record: Record) -> None:
    def answer(question: str) -> Iterator[str]:
        names, given = words_of(question)
        env = Environment.describe(given.pop("gpu"))
        p = AttentionParams(**literals(given))
        for name, made in CANDIDATES.items():
            if made.memory and made.kernel.startswith("attnsel.") and name in (names or [name]):
                yield f"{name}: {' '.join(map(str, made.memory(p, env)))}"

    record.answers(FOLDER / "memory.txt", answer)


SIZES: dict[str, Any] = {
    **{"batch_size": 3, "num_heads": 4, "num_gqa_groups": 2, "max_seqlen_q": 5, "max_seqlen_kv": 7},
    **{"head_dim_qk": 8, "head_dim_v": 16, "attn_mask_type": "padding", "is_training": False},
}


def test_strides(record: Record) -> None:
    def answer(question: str) -> Iterator[str]:
        (layout,), given = words_of(question)
        specs = {name: given.pop(name) for name in "qkv" if name in given}
        p = AttentionParams(qkv_layout=layout, **{**SIZES, **literals(given)})
        for name, text in specs.items():
            strides = tuple(map(int, text.split(",")))
            spec = TensorSpec(shape=(2,) * len(strides), stride=strides)
            p = p.replace(tensors=p.tensors.model_copy(update={name: spec}))
        try:
            for name, t in zip("qkv", layouts(p), strict=True):
                yield f"{name} {list(t.dims)} {list(t.strides)}"
        except UnsupportedArgument as error:
            yield f"no: {error}"

    record.answers(FOLDER / "strides.txt", answer)


def test_refusals_of_tensors(record: Record) -> None:
    def answer(question: str) -> Iterator[str]:
        _, given = words_of(question)
        spec, inputs, more = call_of(given)
        try:
            if inputs.block_table is not None:
                pages.check_pages(spec, inputs)
                yield f"{pages.longest_paged(inputs)} rows at most, pages of {pages.page_size(inputs)}"
            checks.check_tensors(spec, inputs)
            if more:
                result = Result(more["out"], more.get("lse"))
                checks.check_gradients(spec, inputs, result, more["dout"], more.get("dlse"))
            yield "taken"
        except ValueError as error:
            yield f"no: {error}"

    record.answers(FOLDER / "tensors.txt", answer)


def test_guards_and_masks_of_sdpa(record: Record) -> None:
    def answer(question: str) -> Iterator[str]:
        (what,), given = words_of(question)
        spec, inputs, _ = call_of(given)
        said: dict[str, list[str]] = {}
        every = ops.TRAITS if what == "plan" else (*ops.TRAITS, ops.VARLEN)
        for traits in every:
            if what == "readable":
                same = readable(traits, inputs.q) is inputs.q
                lines = [f"{'as it is' if same else 'a copy'}; beside k {shown(alike(traits, *inputs[:2]))}"]
            elif what == "guards":
                lines = list(violations(traits, spec, inputs)) or ["taken"]
            else:
                try:
                    plan = dataclasses.asdict(plan_mask(traits, spec, inputs))
                    flags = [name for name, value in plan.items() if value is True]
                    bounds = ", ".join(f"{name} {plan[name]}" for name in ("shape", "lo", "hi", "diagonal"))
                    size = mask_itemsize(traits, inputs)
                    lines = [" ".join([bounds, f"({size} bytes)" if plan["shape"] else "", *flags])]
                except ValueError as error:
                    lines = [f"no: {str(error).partition(' takes ')[2]}"]
            for line in lines:
                said.setdefault(line, []).append(f"{traits.kernel.removeprefix('sdpa.')}-{traits.device}")
        for line, names in said.items():
            yield f"{line} | {'all' if len(names) == len(every) else ' '.join(names)}"

    record.answers(FOLDER / "sdpa.txt", answer)


def test_rows_of_flash_attention(record: Record) -> None:
    def answer(question: str) -> Iterator[str]:
        (what, *numbers), given = words_of(question)
        spec, inputs, more = call_of(given)
        try:
            if what == "open_right":
                rows.check_open_right("A", *map(int, numbers))
                yield "taken"
            elif what == "window":
                yield shown(rows.bottom_right_window("A", spec, inputs))
            elif what == "lse":
                yield shown(rows.lse_of_forward(spec, Result(inputs.q, more.get("lse"))))
            else:
                rows.check_rows_given(spec, inputs)
                rows.check_rows("A", spec, inputs)
                longest, same = rows.longest_rows(spec, inputs), rows.same_lengths(spec, inputs)
                yield f"longest {longest}{', the same' if same else ''}"
                found = sequences_of(spec, inputs)
                if found is not None:
                    yield from (
                        f"{name} {shown(one)}" for name, one in found._asdict().items() if one is not None
                    )
                    yield f"one for both: {found.q is found.kv}"
                form = rows.Form(spec, inputs)
                yield f"given {shown(form.qkv())} lengths {shown(form.lengths())}"
                out = form.rows(inputs.q)
                h, t = out.shape[-2], out.shape[0]
                lse = torch.zeros(h, t) if found else torch.zeros(*out.shape[:2], h).transpose(1, 2)
                back = form.lse(lse)
                yield f"out {shown(out)} back {shown(form.out(out.contiguous()))} lse {shown(back)}"
                yield f"lse again {shown(form.lse_rows(back))} {shown(form.lse_of_op(back))}"
        except ValueError as error:
            yield f"no: {error}"

    record.answers(FOLDER / "rows.txt", answer)
