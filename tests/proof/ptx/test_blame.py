"""A miscompiled kernel is blamed on the line of ours that its first wrong instruction was made from."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton import run
from attnsel.backends.triton.launch import Launch, make_call
from paths import ROOT
from ptx_interpreter import cases
from ptx_interpreter.blame import Blamed, blame
from ptx_interpreter.run import execute

Change = Callable[[str], str]


@pytest.fixture(scope="module")
def launch() -> Launch:
    """Decode with its keys in three parts, on sm80: asynchronous copies, products, shuffles."""
    case = next(case for case in cases.CASES if case.name == "decode, three parts")
    call = make_call(*cases.make(case, torch.bfloat16))
    launches = run._forward_launches(call, 80, 0, run._results(call), splits=3)
    assert [each.name for each in launches] == ["decode", "merge"]
    return launches[0]


def nth(number: int, pattern: str, replacement: str) -> Change:
    """The place of that number, from 0 or from the end, is rewritten."""

    def change(text: str) -> str:
        found = list(re.finditer(pattern, text, re.MULTILINE))[number]
        return text[: found.start()] + found.expand(replacement) + text[found.end() :]

    return change


def line_of_ours(blamed: Blamed) -> str:
    """What stands at the first place of ours; before it there may be Triton's library."""
    for place in blamed.source.split(" in "):
        name, number = place.split(":")
        path = ROOT / "backends/triton" / name
        if path.exists():
            return path.read_text(encoding="utf-8").splitlines()[int(number) - 1]
    raise AssertionError(blamed.source)


MISCOMPILED = [
    ("registers of a product swapped",
     nth(-1, r"(mma\.sync\S+\s+\{[^}]*\}, \{ ?)(%r\d+), (%r\d+)", r"\1\3, \2"), "tl.dot(", "instead of"),
    ("a shuffle at another distance",
     nth(0, r"(shfl\.sync\.bfly\S+\s+%r\d+, %r\d+), 2,", r"\1, 1,"), "tl.max(", "instead of"),
    ("a store elsewhere", nth(-1, r"(st\.global.*\[ %rd\d+) \+ 0", r"\1 + 32"), "tl.store(", "instead of"),
    ("keys from elsewhere",
     nth(-1, r"(cp\.async\.cg\S+ \[ %r\d+ \+ 0 \], \[ %rd\d+) \+ 0", r"\1 + 16"), "tl.load(", "instead of"),
    ("a wait deleted",
     nth(0, r"cp\.async\.wait_group[^;]*;", ""), "tl.load(", "is not executed there, but line "),
    ("a loop left at once", nth(0, r"@(%p\d+ bra)", r"@!\1"), "for ", "instead of"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text", "detail"), [m[1:] for m in MISCOMPILED], ids=[m[0] for m in MISCOMPILED]
)
def test_the_first_wrong_instruction_is_blamed_on_our_line(
    change: Change, text: str, detail: str, launch: Launch
) -> None:
    found: list[tuple[str, str]] = []

    def noted(ptx: str) -> str:
        found.append((ptx, change(ptx)))
        return found[-1][1]

    blamed = blame(launch, 80, noted)
    assert blamed is not None
    before, after = (text.split("\n") for text in found[0])
    assert [k for k, (one, other) in enumerate(zip(before, after, strict=True), 1) if one != other] == [
        blamed.line
    ]
    assert blamed.kernel == "decode_kernel"
    assert blamed.threads >= 1
    assert text in line_of_ours(blamed)
    assert detail in blamed.detail
    assert str(blamed).startswith(f"decode_kernel at {blamed.source}, block ")


def test_an_edit_that_changes_nothing_is_blamed_on_nothing(launch: Launch) -> None:
    swapped = nth(0, r"add\.s32(\s+)(%r\d+), (%r\d+), (%r\d+);", r"add.s32\1\2, \4, \3;")
    assert blame(launch, 80, lambda text: text) is None
    assert blame(launch, 80, swapped) is None


def test_lines_are_kept(launch: Launch) -> None:
    with pytest.raises(ValueError, match="another number of lines"):
        blame(launch, 80, lambda text: text + "\n")


def test_the_tensors_of_the_launch_stay_as_they_are(launch: Launch) -> None:
    tensors = [t for t in launch.args.values() if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in tensors]
    blame(launch, 80, lambda text: text)
    assert all(torch.equal(t, was) or t.isnan().any() for t, was in zip(tensors, before, strict=True))


def test_a_cause_is_blamed_and_not_where_it_faults(launch: Launch) -> None:
    """An address is wrong where it is made, and out of bounds where it is used."""

    def wrong(text: str) -> str:
        found = re.search(r"cp\.async\.cg\S+ \[ %r\d+ \+ 0 \], \[ (%rd\d+) \+ 0", text)
        assert found is not None
        made = rf"(add\.s64\s+{found[1]}, %rd\d+), %rd\d+;"
        return nth(0, made, r"\1, 1073741824;")(text)

    blamed = blame(launch, 80, wrong)
    assert blamed is not None
    assert blamed.instruction.startswith("add.s64")
    assert blamed.edited.endswith(", 1073741824;")
    (fault, *_) = execute(launch, 80, wrong).faults
    assert fault.kind == "out of bounds"
    assert fault.instruction.startswith("cp.async.cg")
    assert fault.line > blamed.line
