"""What the engine answers, as text: one block for each question, so that a diff of it can be read.

    @ gpu="H100" cudnn="9.1.0"                                  the machine; other versions are assumed
    ? head_dim_qk=192 head_dim_v=128 policy.adapt="never"       what is stated of the call, and the policy
      > *sdpa.flash +pad_head_dim_v(head_dim_v=192), tiled PREF006
      x cudnn CUDNN204; flash_attn.2 flash_attn.3 INSTALL005
      ! HINT003; cudnn_frontend=1.23.0; cudnn rests on cudnn_frontend

``>``: what may run, best first, each with its adaptations, unknown reasons and the preference that put it
there; ``*`` is the choice, ``~`` unproven, ``e`` executed off-GPU, ``p`` planned only. ``x``: what is
refused, with its codes. ``!``: hints, versions that were taken for assumed ones, and verdicts that rest on
what was assumed.

    python tests/net/verdicts.py                            # what is answered otherwise now
    python tests/net/verdicts.py --accept                   # writes it down; says how many answers changed
    python tests/net/verdicts.py --accept --every-way-out   # the digests of all ways out too; some minutes

The questions are drawn by tests/proof/net/draw.py. Nothing here judges whether an answer is right.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

from attnsel import AttentionParams, Candidate, Device, Environment, Evidence, Policy, Selection, select
from attnsel.rules import REGISTRY, Rule, load_all

FOLDER = Path(__file__).parent / "verdicts"
WAYS_OUT = FOLDER / "ways_out.txt"
DIGESTS = FOLDER / "ways_out_digests.txt"
MOST_SHOWN = 12

_JSON = json.JSONDecoder()
_OF_CANDIDATES = ("  >", "  x")
_OF_DEVICE = ("device", "platform", "torch_flash", "missing", "detected")
"""Fields of a machine that ``Environment.describe`` does not take."""


class Question(NamedTuple):
    """A call, on a machine, under a policy: as they are written in the record."""

    machine: str
    call: str

    def asked(self) -> Selection:
        p, env, policy, evidence = self.parts
        return select(p, env, policy=policy, evidence=evidence)

    @property
    def parts(self) -> tuple[AttentionParams, Environment, Policy, Evidence]:
        of: dict[str, dict[str, Any]] = {"": {}, "policy": {}, "evidence": {}}
        for name, value in read_fields(self.call).items():
            part, _, field = name.rpartition(".")
            of[part][field] = value
        env = environment_of(self.machine)
        return AttentionParams(**of[""]), env, Policy(**of["policy"]), Evidence(**of["evidence"])


# ---- questions as text -------------------------------------------------------------------------------


def write_fields(fields: dict[str, Any]) -> str:
    """``a=1 b="x"``: the values are compact JSON."""
    return " ".join(f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in fields.items())


def read_fields(text: str) -> dict[str, Any]:
    fields, at = {}, 0
    while at < len(text):
        name, _, _ = text[at:].partition("=")
        fields[name], at = _JSON.raw_decode(text, at + len(name) + 1)
        at += 1  # the space between two
    return fields


_environments: dict[str, Environment] = {}


def environment_of(machine: str) -> Environment:
    if machine not in _environments:
        fields = read_fields(machine)
        more = {name: fields.pop(name) for name in _OF_DEVICE if name in fields}
        if "device" in more:
            more["device"] = Device(**more["device"])
        made = Environment.describe(**fields)
        _environments[machine] = made.replace(**more) if more else made
    return _environments[machine]


# ---- answers as text ---------------------------------------------------------------------------------


def answer(question: Question) -> list[str]:
    """The lines of the record below a question."""
    selection = question.asked()
    standing = [c for c in selection.candidates if c.verdict != "refused"]
    chosen = selection.backend
    lines = [f"  > {', '.join(_standing(c, c.name == chosen) for c in standing) or 'nothing'}"]
    refused = [c for c in selection.candidates if c.verdict == "refused"]
    groups = groupby(refused, key=lambda c: " ".join(reason.code for reason in c.reasons))
    if refused:
        lines.append(
            "  x " + "; ".join(f"{' '.join(c.name for c in group)} {codes}" for codes, group in groups)
        )
    said = "; ".join(_remarks(selection, environment_of(question.machine)))
    return [*lines, f"  ! {said}"] if said else lines


def _standing(c: Candidate, chosen: bool) -> str:
    marks = "~" * c.unproven + "e" * c.executed_off_gpu + "p" * (c.plan_only is not None)
    words = ["*" * chosen + c.name, marks, *(_adaptation(a.name, a.changes) for a in c.adaptations)]
    words += [f"?{reason.code}" for reason in c.reasons]
    return " ".join(filter(None, [*words, c.placed_by]))


def _adaptation(name: str, changes: Iterable[tuple[str, Any]]) -> str:
    made = ",".join(f"{field}={value}" for field, value in changes)
    return f"+{name}({made})" if made else f"+{name}"


def _remarks(selection: Selection, asked: Environment) -> Iterator[str]:
    if selection.hints:
        yield " ".join(hint.code for hint in selection.hints)
    taken = [name for name in asked.assumed if getattr(asked, name) != getattr(selection.environment, name)]
    if taken:
        yield " ".join(f"{name}={getattr(selection.environment, name)}" for name in taken)
    for one in selection.assumptions:
        yield f"{one.candidate} rests on {one.component}"


def ways_out(question: Question) -> list[str]:
    """A line for each way out, with what it changes, what it costs and what is pasted."""
    found = []
    for unlock in question.asked().unlocks:
        changes = " ".join(f"{field}={value}" for field, value in unlock.changes)
        commands = [] if unlock.install is None else list(unlock.install.commands)
        found.append(
            " | ".join([f"  {unlock.candidate} {unlock.rank} {unlock.effect}: {changes}", *commands])
        )
    return found or ["  none"]


def digest(lines: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=4).hexdigest()


# ---- the record --------------------------------------------------------------------------------------

Record = dict[Question, list[str]]


def files() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*.txt") if path not in (WAYS_OUT, DIGESTS))


def read(paths: Iterable[Path]) -> Record:
    record: Record = {}
    machine, lines = "", []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("@ "):
                machine = line[2:]
            elif line.startswith("?"):
                lines = record.setdefault(Question(machine, line[2:]), [])
            elif line:
                lines.append(line)
    return record


def write(path: Path, record: Record) -> None:
    parts = []
    for machine, questions in groupby(sorted(record), key=lambda question: question.machine):
        blocks = ("\n".join([f"? {question.call}".rstrip(), *record[question]]) for question in questions)
        parts.append("\n".join([f"@ {machine}", *blocks]))
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def read_digests() -> dict[str, str]:
    """Of the ways out of each question, by the digest of the question."""
    return dict(line.split() for line in DIGESTS.read_text(encoding="utf-8").splitlines())


def changes(record: Record, ask: Callable[[Question], list[str]]) -> dict[Question, list[str]]:
    """The questions that are answered otherwise now, with the answer."""
    found = {}
    for question, before in record.items():
        try:
            after = ask(question)
        except Exception as error:  # an answer too, and a changed one
            after = [f"  raises {type(error).__name__}: {error}"]
        if after != before:
            found[question] = after
    return found


def told(record: Record, changed: Record) -> str:
    """What changed, in words: question, before → after."""
    blocks = [f"{len(changed)} of {len(record)} answers changed"]
    for question, after in list(changed.items())[:MOST_SHOWN]:
        lines = [f"  {line}" for line in differences(record[question], after)]
        call = question.call or "the default call"
        blocks.append("\n".join([f"on {question.machine}", f"  ? {call}", *lines]))
    if len(changed) > MOST_SHOWN:
        blocks.append(f"... and {len(changed) - MOST_SHOWN} more")
    blocks.append("if that is meant: python tests/net/verdicts.py --accept, and look at the diff")
    return "\n\n".join(blocks)


def differences(before: list[str], after: list[str]) -> Iterator[str]:
    """Of an answer what each changed candidate was and is, the order, and what else is said; of other lines
    those that went and came."""
    was, now = _by_candidate(before), _by_candidate(after)
    for name in dict.fromkeys([*was, *now]):
        if was.get(name) != now.get(name):
            yield f"{name}: {was.get(name, 'in no line')} → {now.get(name, 'in no line')}"
    stay = [[name for name in one if _runs(was, name) and _runs(now, name)] for one in (was, now)]
    if stay[0] != stay[1]:
        yield f"order: {' '.join(stay[0])} → {' '.join(stay[1])}"
    rest = [[line.strip() for line in lines if line[:3] not in _OF_CANDIDATES] for lines in (before, after)]
    yield from (f"- {line}" for line in rest[0] if line not in rest[1])
    yield from (f"+ {line}" for line in rest[1] if line not in rest[0])


def _runs(said: dict[str, str], name: str) -> bool:
    return not said.get(name, "refused").startswith("refused")


def _by_candidate(lines: list[str]) -> dict[str, str]:
    """What the answer says of each, in their order."""
    found = {}
    for line in lines:
        if line.startswith("  > "):
            for part in line[4:].split(", "):
                name, _, said = part.partition(" ")
                found[name.lstrip("*")] = f"{'chosen' if name[0] == '*' else 'runs'} {said}".strip()
        elif line.startswith("  x "):
            for group in line[4:].split("; "):
                names = [word for word in group.split() if not word[-3:].isdigit()]
                codes = " ".join(word for word in group.split() if word[-3:].isdigit())
                found |= dict.fromkeys(names, f"refused {codes}")
    return found


def accept() -> int:
    """Answers everything again and writes what changed. Returns how many answers did."""
    changed = 0
    for path in files():
        record = read([path])
        found = changes(record, answer)
        if found:
            write(path, record | found)
            print(f"{path.name}: {len(found)} of {len(record)} answers changed")
            changed += len(found)
    record = read([WAYS_OUT])
    found = changes(record, ways_out)
    if found:
        write(WAYS_OUT, record | found)
        print(f"{WAYS_OUT.name}: {len(found)} of {len(record)} changed")
    return changed + len(found)


def other_ways_out(accept: bool = False) -> dict[Question, list[str]]:
    """The questions of the whole record with other ways out than their digest says; some minutes."""
    before, after = read_digests() if DIGESTS.exists() else {}, {}
    found = {}
    for question in track(list(read(files())), "ways out", disable=not sys.stderr.isatty()):
        lines = ways_out(question)
        name = digest(question)
        after[name] = digest(lines)
        if before.get(name) != after[name]:
            found[question] = lines
    if accept:
        DIGESTS.write_text("".join(f"{name} {after[name]}\n" for name in sorted(after)), encoding="utf-8")
    return found


def before_digests(changed: Iterable[Question]) -> Record:
    """What stands for the ways out that are recorded as digests alone."""
    return {question: ["  other ways out than these:"] for question in changed}


# ---- reach -------------------------------------------------------------------------------------------

NOT_REACHED = {
    "RUNTIME001": "speaks of what a kernel said when it ran",
    "RUNTIME002": "speaks of the numbers that a kernel gave",
    "PREF016": "follows a file of measurements",
    "HINT009": "is seen in the values of a mask",
    "HINT012": "is seen in the values of slopes",
}
"""Codes that no question reaches, and why."""


def codes_of(lines: Iterable[str]) -> set[str]:
    words = " ".join(lines).replace(";", " ").replace(",", " ").split()
    return {word.lstrip("?") for word in words if word.lstrip("?").isalnum() and word[-3:].isdigit()}


def fires(rule: Rule, p: AttentionParams, env: Environment) -> bool:
    """Whether it says anything, though an adaptation may answer it."""
    return rule.concerns(p) and rule.applies(env) and rule.find(p, env) is not None


def reach(record: Record) -> list[str]:
    """A line for each code that is in no answer, or that nothing passes which differs from a question that it
    refuses in the machine alone, or in the call alone."""
    load_all()
    said: dict[str, list[Question]] = {}
    for q, lines in record.items():
        for code in codes_of(lines):
            said.setdefault(code, []).append(q)
    missing = []
    for code in sorted(REGISTRY.pages):
        if code in NOT_REACHED:
            continue
        if code not in said:
            missing.append(f"{code}: in no answer")
        elif code in REGISTRY.rules and not any(
            _passes(REGISTRY.rules[code], q) for q in beside(said[code], record)
        ):
            missing.append(f"{code}: no question beside those that it refuses passes it")
    return missing


def beside(refused: list[Question], record: Iterable[Question]) -> Iterator[Question]:
    """Questions that share the call or the machine with one of these."""
    machines, calls = {q.machine for q in refused}, {q.call for q in refused}
    return (q for q in record if q not in refused and (q.machine in machines or q.call in calls))


def _passes(rule: Rule, q: Question) -> bool:
    p, env, *_ = q.parts
    return rule.concerns(p) and not fires(rule, p, env)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accept", action="store_true", help="write what is answered now")
    parser.add_argument(
        "--every-way-out", action="store_true", help="all of them, against digests; some minutes"
    )
    chosen = parser.parse_args()
    if chosen.accept:
        count = accept()
        if chosen.every_way_out:
            count += len(other_ways_out(accept=True))
        print(f"{count} answers changed")
        return 0
    record = read(files())
    found = changes(record, answer)
    if chosen.every_way_out:
        others = other_ways_out()
        record |= before_digests(others)
        found |= others
    print(told(record, found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
