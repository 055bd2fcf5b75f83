"""Which findings are one call: what is counted, joined, ended and left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from attnsel.diagnose.logs.answer import Stated, rebuild
from attnsel.diagnose.logs.calls import SEEN, Calls, Gathered, LoggedCall, gather
from attnsel.diagnose.logs.message import Finding, Kind, Variant
from attnsel.diagnose.logs.reader import Entry
from tables import cells_of, each, rows_of

KINDS = dict(zip("?-+!~@", get_args(Kind), strict=False))  # question, refusal, chosen, error, note, frame


def gathered(*told: Sequence[Any], **facts: Any) -> Gathered:
    """Findings at lines: a mark for the kind, a letter for the text, the library behind it where it is not x;
    "=" and a candidate; in a stream."""
    calls = Calls()
    for line, said, *stream in told:
        what, _, candidate = said.partition("=")
        finding = Finding(what[2:] or "x", KINDS[what[0]], what[1], candidates=tuple(candidate.split()))
        calls.add(Entry(int(line), "".join(stream), ""), [finding._replace(**facts.get(what[1], {}))])
    return calls.gathered()


def seen(found: Gathered) -> list[str]:
    return [
        " ".join(["".join(f.text for f in call.findings), f"{call.times} {list(call.lines)}", *call.ranks])
        for call in found.calls
    ]


@each("told, calls", cells_of(__file__, "calls.txt"))
def test_what_is_one_call(told: str, calls: str) -> None:
    assert "; ".join(seen(gathered(*map(str.split, told.split("; "))))) == calls


def test_a_refusal_without_kernels_is_about_those_before_it() -> None:
    (call,) = gathered((1, "-a=k j"), (2, "-b"), (3, "-c=i"), (4, "-d"), (5, "!e")).calls
    assert [f.candidates for f in call.findings] == [("k", "j"), ("k", "j"), ("i",), ("i",), ()]
    assert (call.refused, call.chosen, call.outcome) == (("k", "j", "i"), (), call.findings[-1])


def test_what_has_many_causes_counts_near_a_frame_alone() -> None:
    for distance, calls in ((1, 1), (149, 1), (150, 0), (151, 0)):
        found = gathered((7, "@b"), (7 + distance, "!b=k"), b={"near": 150})
        assert len(found.calls) == calls, distance
    for frame in ((7, "@b", "r0"), (7, "@by")):  # of another stream, of another library
        assert not gathered(frame, (8, "!b=k"), b={"near": 150}).calls


def test_facts_tell_calls_apart_and_the_last_said_wins() -> None:
    calls = Calls()
    for n, facts in enumerate(({"head_dim_qk": 64}, {"head_dim_qk": 72}, {"head_dim_qk": 64})):
        calls.add(Entry(n + 1, "", ""), [Finding("x", "error", "a", params=facts, candidates=("k",))])
    assert [(call.times, call.params) for call in calls.gathered().calls] == [
        (2, {"head_dim_qk": 64}),
        (1, {"head_dim_qk": 72}),
    ]
    one = Finding(
        "x", "refusal", "a", {"dtype": "fp16"}, {"torch": "2.5"}, {"cudnn": "9.12.0", "dtype": "fp32"}
    )
    two = Finding("x", "error", "b", {"dtype": "bf16"}, {"gpu": "A100"}, {"cudnn": "9.7.0", "torch": "2.4"})
    for findings in ((one, two), (two, one)):
        call = LoggedCall(findings, 1, ())
        assert call.supposed == {"cudnn": "9.7.0"}
        assert call.params == {"dtype": findings[1].params["dtype"]}
        assert call.environment == {"torch": "2.5", "gpu": "A100"}


def test_a_call_and_a_machine_hold_sixty_messages() -> None:
    calls = Calls()
    calls.add(Entry(1, "", ""), [Finding("x", "refusal", f"{n}") for n in range(70)])
    calls.add(Entry(2, "", ""), [Finding("m", "machine", f"{n % 65}") for n in range(90)])
    calls.add(Entry(3, "", ""), [Finding("x", "error", "e", candidates=("k",))])
    found = calls.gathered()
    assert [f.text for f in found.calls[0].findings] == [*map(str, range(60)), "e"]
    assert [f.text for f in found.machine] == [*map(str, range(60))]


OLD = Variant("old", "buy", ("A1",), archs=(0, 75), unnamed=True)
NEW = Variant("new", "build", ("A2",), archs=(100, 129), unnamed=True)
NAMED = Variant("named", "f", ("A3",), seen=("lib", "other"))
ELSE = Variant("else", "g", ("A4", "A1"), unseen=("lib",))
TORCH = Variant("torch", "t", at=("torch>=2.5,<2.5.1",))


@each(
    ("variants", "machine", "seen_names", "meant"),
    [
        ((OLD, NEW), {}, (), ("old; or new", "buy; or build", ("A1", "A2"))),
        ((OLD, NEW), {"gpu": "sm75"}, (), ("old", "buy", ("A1",))),
        ((OLD, NEW), {"gpu": "sm80"}, (), None),
        ((OLD, NEW), {"gpu": "sm100"}, (), ("new", "build", ("A2",))),
        ((OLD, NEW), {"gpu": "no such card"}, (), ("old; or new", "buy; or build", ("A1", "A2"))),
        ((ELSE, NAMED), {}, ("lib",), ("named", "f", ("A3",))),
        ((ELSE, NAMED), {}, ("other",), ("named", "f", ("A3",))),
        ((ELSE, NAMED), {"missing": "lib"}, (), ("named", "f", ("A3",))),
        ((OLD, ELSE), {}, (), ("old; or else", "buy; or g", ("A1", "A4"))),
        ((OLD, ELSE), {"gpu": "T4"}, (), ("old", "buy", ("A1",))),
        ((ELSE, TORCH), {"torch": "2.5.0"}, (), ("torch", "t", ())),
        ((ELSE, TORCH), {"torch": "2.5.1"}, (), ("else", "g", ("A4", "A1"))),
    ],
)
def test_the_rest_of_a_log_decides_what_is_meant(
    variants: tuple[Variant, ...], machine: dict[str, Any], seen_names: tuple[str, ...], meant: Any
) -> None:
    calls = Calls()
    calls.add(Entry(1, "", ""), [Finding("x", "error", "boom", variants=variants)])
    calls.add(Entry(2, "", ""), [Finding("m", "machine", "m", environment=machine)])
    calls.add(Entry(3, "", ""), [Finding(SEEN, "machine", name) for name in seen_names])
    found = calls.gathered()
    findings = [f for call in found.calls for f in call.findings]
    assert [(f.known, f.fix, f.codes) for f in findings] == ([] if meant is None else [meant])
    assert [f.text for f in found.machine] == ["m"], "what was seen is nothing of the machine"


def test_of_errors_that_are_nobodys_the_last_that_holds_is_told() -> None:
    found = gathered((1, "!aattention"), (2, "!battention"), b={"variants": (NAMED,)})
    assert [call.findings[-1].text for call in found.calls] == ["a"]


def test_a_question_is_rebuilt_from_what_is_said_and_supposed() -> None:
    machine = [
        Finding("m", "machine", "1", environment={"torch": "2.6.0", "gpu": "A100"}),
        Finding("m", "machine", "2", environment={"torch": "2.5.1"}),
    ]
    given, supposed = {"head_dim_qk": 72, "num_heads": -3}, {"cudnn": "9.7.0", "deterministic": True}
    said = Finding("PyTorch", "error", "b", given, {}, supposed)
    call = LoggedCall((said._replace(unread=("z = 1", "z = 1")),), 1, ())
    made = rebuild(call, machine, Stated({"max_seqlen_q": 77}, {"cudnn": "9.9.0"}))
    assert (made.params.head_dim_qk, made.params.max_seqlen_q, made.params.deterministic) == (72, 77, True)
    assert (str(made.environment.torch), str(made.environment.cudnn)) == ("2.6.0", "9.9.0")
    assert (made.environment.device.arch, made.described) == (80, True)
    assert made.stated == ("cudnn", "gpu", "head_dim_qk", "max_seqlen_q", "torch")
    assert made.unread[:2] == ("z = 1", "torch = 2.5.1: the log says 2.6.0 before")
    assert [one.split(":")[0] for one in made.unread[2:]] == ["num_heads = -3"]
    assert "deterministic True, as its message needs" in made.assumed
    assert {one.split()[0] for one in made.assumed} == {
        *("deterministic", "dtype", "qkv_layout", "batch_size", "num_heads", "attn_mask_type", "is_training")
    }
    bare = rebuild(call._replace(findings=(said._replace(params={}),)), (), Stated())
    assert (bare.described, bare.assumed[0].split()[0], bare.environment.device.arch) == (False, "GPU", 90)
    assert "cudnn 9.7.0, as its message needs" in bare.assumed


@each("row", rows_of(__file__, "facts.csv"))
def test_what_a_line_states_of_the_machine(row: dict[str, str]) -> None:
    """Cards and releases in prose, and the same words where they are nobody's; lines stand between arrows."""
    machine = gather(row["text"].split(" ⏎ ")).machine
    told = {name: value for one in reversed(machine) for name, value in one.environment.items()}
    assert "; ".join(f"{name}={value}" for name, value in sorted(told.items())) == row["states"]
