"""What the commands share that compare rules with the real thing: which GPUs, the bound, and every
disagreement by what it has in common with others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agreement import RuleMismatch, Tally, upper_bound
from attnsel.cli.output import print_text
from attnsel.environment import describe_device
from attnsel.errors import InvalidInput
from attnsel.report.words import params_words
from attnsel.rules import REGISTRY
from printed import wrap

Row = tuple[str, int]
SHOWN = 3  # disagreements written out per group; --json holds all of them


def gpus_of(arch: str) -> tuple[str, ...]:
    """Cards or architectures, by commas; "90" is sm90; none for "". Raises InvalidInput."""
    if not arch:
        return ()
    names = []
    for word in filter(None, (part.strip() for part in arch.split(","))):
        name = f"sm{word}" if word.isdecimal() else word
        if describe_device(name).arch is None:
            raise InvalidInput("--arch", word, "must be GPUs or architectures, e.g. H100 or 90")
        names.append(name)
    if not names:
        raise InvalidInput("--arch", arch, "must be GPUs or architectures, e.g. H100 or 90")
    return tuple(names)


def tell_outcomes(
    judge: str,
    about: Mapping[str, Any],
    tally: Tally,
    notes: Iterable[str],
    words: Mapping[str, str],
    *more: Row,
) -> None:
    """Who judged, of how many questions, and how often both agree.

    ``words``: for "known bug", "no answer" and "crashes", where there are some. ``more``: rows beside these.
    """
    count, asked = tally.outcomes, tally.asked
    for note in notes:
        print_text("\n".join(wrap(note, "! ")))
    print_text(judge)
    print_text(
        f"{about['samples']} questions (seed {about['seed']}) on {', '.join(about['gpus'])}: {asked} asked"
    )
    rows = (
        ("both agree", count["agree"], ""),
        ("false accepts", count["false accept"], _bound(count["false accept"], asked)),
        ("false rejects", count["false reject"], _bound(count["false reject"], asked)),
        (words["known bug"], count["known bug"], ""),
        ("unknown to the rules", count["unknown"], ""),
        (words["no answer"], count["no answer"], ""),
        (words["crashes"], tally.crashes, ""),
        *((name, number, "") for name, number in more),
    )
    for name, number, rate in rows:
        if number or rate or name == "both agree":
            print_text(f"  {number:>7}  {name}{rate}")


def _bound(seen: int, asked: int) -> str:
    return f" (at 95 %: at most {100 * upper_bound(seen, asked):.2g} % of all questions)"


def tell_disagreements(found: Sequence[RuleMismatch]) -> None:
    """Those with the same cause together, the most frequent first."""
    groups: dict[tuple[str, str], list[RuleMismatch]] = defaultdict(list)
    for one in found:
        why = ", ".join(one.codes) if one.outcome == "false reject" else one.library
        groups[one.outcome, why].append(one)
    sizes = Counter({key: len(group) for key, group in groups.items()})
    for (kind, why), number in sizes.most_common():
        print_text("\n".join(["", *wrap(f"{kind} × {number}: {why}", "✖ ")]))
        for one in groups[kind, why][:SHOWN]:
            print_text("\n".join(wrap(f"{one.gpu}: {' '.join(params_words(one.params))}", "    ", "      ")))
    if any(kind == "false reject" for kind, _ in groups):
        code = next(one.codes[0] for one in found if one.outcome == "false reject")
        print_text(f"\nWhy a rule: attnsel rule {REGISTRY.pages[code].code}")
