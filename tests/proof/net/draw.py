"""Draws the questions of the record: every rule from both sides, every pair of values of two fields.

    python tests/proof/net/draw.py          # draws them anew from the rules as they are
    python tests/proof/net/draw.py --add    # after a new rule: asks about the codes that none reaches

Of each rule: its two examples; its bounds, with the values next to them on both sides, whether they stand
in ``requires`` or in the body; the releases at and just below each edge of its interval; an architecture on
each side of its gate. The rest are random calls that hold a pair of values which none before them does.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from attnsel import AttentionParams, Environment, InvalidInput
from attnsel.environment import COMPONENTS
from attnsel.environment.gpus import ARCHITECTURES
from attnsel.environment.versions import Version
from attnsel.rules import REGISTRY, Rule, load_all
from attnsel.rules.api import every_hint
from attnsel.rules.codes import question

sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("net", "support")]

from questions import random_question  # noqa: E402
from verdicts import (  # noqa: E402
    FOLDER,
    WAYS_OUT,
    Question,
    Record,
    answer,
    codes_of,
    environment_of,
    files,
    fires,
    reach,
    read,
    read_fields,
    ways_out,
    write,
    write_fields,
)

SEED = 20261124
# ---- questions of rules ------------------------------------------------------------------------------


def written(p: AttentionParams, env: Environment, **more: Any) -> Question:
    """The question in words. Raises ValueError where they would not say the same."""
    fields = p.model_dump(mode="json", exclude_unset=True)
    stated = {
        name: str(getattr(env, name)) for name in COMPONENTS if name not in env.assumed and getattr(env, name)
    }
    device = env.device
    machine: dict[str, Any] = {"gpu": device.name if device.type == "cuda" else device.type, **stated}
    plain = environment_of(write_fields(machine))
    machine |= {
        name: None for name in COMPONENTS if getattr(env, name) is None and getattr(plain, name) is not None
    }
    if device != plain.device:
        machine["device"] = device.model_dump(mode="json", exclude_defaults=True)
    for name in ("platform", "torch_flash", "missing", "detected"):
        if getattr(env, name) != getattr(plain, name):
            machine[name] = getattr(env, name)
    made = Question(write_fields(machine), write_fields({**fields, **more}))
    if made.parts[0] != p:
        raise ValueError(f"{made} is another call than {p}")
    return made


def around(p: AttentionParams, field: str, value: int) -> Iterator[AttentionParams]:
    for near in (value - 1, value, value + 1):
        yield from replaced(p, field, near)


def replaced(p: AttentionParams, field: str, value: Any) -> Iterator[AttentionParams]:
    try:
        yield p.replace(**{field: value})
    except (InvalidInput, TypeError):
        return  # another field contradicts it


def below(version: Version) -> Version:
    """The last release before one, and whatever may be called so."""
    major, minor, patch, _ = version
    if patch:
        return Version(major, minor, patch - 1)
    return Version(major, minor - 1, 99) if minor else Version(major - 1, 99)


def of_rule(rule: Rule) -> Iterator[Question]:
    """The questions on both sides of what it bounds; without adaptations where these would hide it."""
    for q in _of_rule(rule):
        yield from shown(rule, q)


def shown(rule: Rule, q: Question) -> Iterator[Question]:
    """The question, and without adaptations where these hide what the rule says."""
    yield q
    p, env, *_ = q.parts
    if fires(rule, p, env) and rule.code not in codes_of(answer(q)):
        yield Question(q.machine, f'{q.call} policy.adapt="never"'.strip())


def _of_rule(rule: Rule) -> Iterator[Question]:
    preview = {"policy.preview": True} if rule.status == "preview" else {}
    for example in (rule.fires_on, rule.passes):
        yield written(*question(rule, example), **preview)
    p, env = question(rule, rule.fires_on)
    sides = [q for q in beside_bounds(rule, p, env) if rule.concerns(q)]
    said = [rule.find(q, env) is not None for q in sides]
    for (one, refused), (other, too) in pairwise(zip(sides, said, strict=True)):
        if refused != too:
            yield written(one, env, **preview)
            yield written(other, env, **preview)
    for component in COMPONENTS:
        for edge in rule.edges(component):
            for version in (edge, below(edge)):
                yield from elsewhere(rule, {component: str(version)}, preview)


def of_architectures(record: Iterable[Question]) -> Iterator[Question]:
    """For each rule with a gate on it, and each architecture: a call that the rule is about, unless there is
    one."""
    by_arch: dict[int, list[tuple[AttentionParams, Environment]]] = {}
    for q in record:
        p, env, *_ = q.parts
        if env.arch is not None:
            by_arch.setdefault(env.arch, []).append((p, env))
    for rule in sorted(REGISTRY.rules.values(), key=lambda rule: rule.code):
        if rule.arch is None:
            continue
        anywhere = replace(rule, arch=None)
        for arch in ARCHITECTURES:
            if not any(fires(anywhere, p, env) for p, env in by_arch.get(arch, ())):
                for q in elsewhere(rule, {"gpu": f"sm{arch}"}, {}):
                    yield from shown(rule, q)


def elsewhere(rule: Rule, machine: dict[str, Any], more: dict[str, Any]) -> Iterator[Question]:
    try:
        yield written(*question(rule, {**rule.fires_on, **machine}), **more)
    except (InvalidInput, ValueError):
        return  # gates that exclude each other


def beside_bounds(rule: Rule, p: AttentionParams, env: Environment) -> Iterator[AttentionParams]:
    """Calls in an order in which neighbours differ in a little."""
    for limit in rule.limits:
        if limit.of_environment:
            continue
        for field in limit.fields:
            observed = getattr(p, field)
            yield p
            bound = getattr(limit.requirement.resolved(p), "limit", None)
            if type(bound) is int:
                yield from around(p, field, bound)
            for repaired in limit.requirement.resolved(p).repairs(observed):
                if isinstance(repaired, int) and not isinstance(repaired, bool):
                    step = getattr(limit.requirement, "of", 2)
                    yield from around(p, field, repaired)
                    if isinstance(step, int):
                        yield from replaced(p, field, repaired + step // 2)
                        yield from replaced(p, field, repaired + step)
                else:
                    yield from replaced(p, field, repaired)
    code = rule.body.__code__
    numbers = sorted({n for n in code.co_consts if type(n) is int and 0 <= n < 1 << 31})
    for field in code.co_names:
        if type(getattr(p, field, None)) is int and field in AttentionParams.model_fields:
            for number in numbers:
                yield p
                yield from around(p, field, number)


def of_knowledge(codes: Container[str] | None = None) -> Iterator[Question]:
    """The questions about these rules and hints, or about all."""
    load_all()
    for rule in sorted(REGISTRY.rules.values(), key=lambda rule: rule.code):
        if codes is None or rule.code in codes:
            yield from of_rule(rule)
    for hint in every_hint():
        if not hint.of_tensors and (codes is None or hint.code in codes):
            for example in (hint.fires_on, hint.passes):
                yield written(*question(hint, example))
    for rule in REGISTRY.policy_rules.values():
        if codes is not None and rule.code not in codes:
            continue
        fields = {f"policy.{name}": value for name, value in rule.fires_on[1].items()}
        yield Question(write_fields({"gpu": "H100"}), write_fields({"max_seqlen_q": 65536, **fields}))


# ---- the choice --------------------------------------------------------------------------------------


def pairs_of(q: Question) -> set[tuple[str, str]]:
    """Pairs of stated values, the machine among them."""
    stated = {**read_fields(q.machine), **read_fields(q.call)}
    stated["tensors"] = list(stated.get("tensors", ()))  # which of them, not how they lie
    return set(combinations(sorted(f"{name}={value}" for name, value in stated.items()), 2))


def draw() -> Record:
    record: Record = {}
    pairs: set[tuple[str, str]] = set()
    for q in of_knowledge():
        if q not in record:
            record[q] = answer(q)
            pairs |= pairs_of(q)
    print(f"{len(record)} questions of rules and hints")
    source = random.Random(SEED)
    pool = [q for q in (random_question(source) for _ in range(60_000)) if q is not None]
    for least in (24, 12, 6, 3, 1):  # greedily, the richest first
        for q in pool:
            new = pairs_of(q) - pairs
            if len(new) >= least and q not in record:
                record[q] = answer(q)
                pairs |= new
    print(f"{len(record)} questions, in which is every pair of values that {len(pool)} random calls hold")
    record.update((q, answer(q)) for q in list(of_architectures(record)))
    print(f"{len(record)} questions, with each rule on both sides of its architectures")
    return record


def group_of(q: Question) -> str:
    """The file a question stands in: by architecture, or by the kind of device."""
    env = environment_of(q.machine)
    return env.target if env.device.type == "cuda" else env.device.type


def choose_ways(record: Record, count: int, chosen: Record) -> Record:
    """Of ``count`` questions all ways out, those of ``chosen`` first, so that each kind of change is
    there."""
    kinds: dict[str, int] = {}
    for lines in chosen.values():
        for kind in kinds_of(lines):
            kinds[kind] = kinds.get(kind, 0) + 1
    source = random.Random(SEED)
    known = set(chosen)
    refused = sorted(
        q for q, lines in record.items() if q not in known and any(line.startswith("  x") for line in lines)
    )
    source.shuffle(refused)
    rest = []
    for q in refused[: 6 * (count - len(chosen))]:
        lines = ways_out(q)
        new = {kind for kind in kinds_of(lines) if kinds.get(kind, 0) < 2}
        if new and len(chosen) < count:
            chosen[q] = lines
            for kind in kinds_of(lines):
                kinds[kind] = kinds.get(kind, 0) + 1
        else:
            rest.append((q, lines))
    for q, lines in rest[: count - len(chosen)]:
        chosen[q] = lines
    print(f"ways out of {len(chosen)} questions, {len(kinds)} kinds of change")
    return chosen


def kinds_of(lines: list[str]) -> set[str]:
    """The effect and the fields of each way out."""
    found = set()
    for line in lines:
        head, _, rest = line.partition(": ")
        fields = ",".join(part.partition("=")[0] for part in rest.partition(" | ")[0].split() if "=" in part)
        found.add(f"{head.split()[-1]} {fields}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", type=int, default=300, help="questions whose ways out stand in full")
    parser.add_argument("--add", action="store_true", help="keep what is recorded; add what is missing")
    chosen = parser.parse_args()
    if chosen.add:
        record = read(files())
        codes = {line.partition(":")[0] for line in reach(record)}
        new = {q: answer(q) for q in of_knowledge(codes) if q not in record}
        print(f"{len(new)} questions about {', '.join(sorted(codes)) or 'nothing new'}")
        save({**record, **new})
        write(WAYS_OUT, choose_ways({**record, **new}, chosen.ways, read([WAYS_OUT])))
    else:
        record = draw()
        save(record)
        write(WAYS_OUT, choose_ways(record, chosen.ways, {}))
    missing = reach(read(files()))
    print("\n".join(missing) or "every code is reached from both sides")
    return 1 if missing else 0


def save(record: Record) -> None:
    """In a file for each architecture."""
    FOLDER.mkdir(exist_ok=True)
    for path in files():
        path.unlink()
    groups: dict[str, Record] = {}
    for q, lines in record.items():
        groups.setdefault(group_of(q), {})[q] = lines
    for name, part in groups.items():
        write(FOLDER / f"{name}.txt", part)


if __name__ == "__main__":
    sys.exit(main())
