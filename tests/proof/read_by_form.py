"""Which share of the errors that libraries print is read by its form alone, were their words in no row.

    python tests/proof/read_by_form.py           # of each library, and of all
    python tests/proof/read_by_form.py --left 30 # and so many that no form reads, drawn at random

The texts are those of the reports (printed_strings.py), which rows know: every row of a library is set
aside, and each text is asked as a stranger's, below a frame of attention. Words that nobody declared are
like these.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator

from attnsel.diagnose.logs import vocabulary
from attnsel.diagnose.logs.calls import ANY, SEEN, gather
from printed_strings import KNOWN, REPORTS, filled, rows_of, sources

_FRAMES = (
    "Traceback (most recent call last):",
    '  File "/opt/lib/python3.12/site-packages/octo/attention.py", line 61, in forward',
    "    out = run(q, k, v)",
)
_CHECKS = ("TORCH_CHECK", "STD_TORCH_CHECK", "TORCH_INTERNAL_ASSERT", "NVTE_CHECK", "throw")
_NO_CAUSE = "that is not known here"


def raised(library: str) -> Iterator[str]:
    """The errors of a report, as Python prints them."""
    for row in rows_of(REPORTS / f"{library}.csv"):
        how, _, kind = row["how"].partition(";")[0].partition(" ")
        if row["about"] == KNOWN and (how == "raise" or how in _CHECKS):
            yield f"{kind or 'RuntimeError'}: {next(filled(row['text']))}"


def is_read(error: str) -> bool:
    """Whether the answer has a cause, and not only that the words are not known."""
    calls = gather([*_FRAMES, *error.splitlines()]).calls
    return bool(calls) and _NO_CAUSE not in calls[0].findings[-1].known


def without_libraries() -> None:
    """Leaves the reader the forms, and what a log shows beside a message."""
    forms = tuple(one for one in vocabulary.libraries() if one.name in (ANY, SEEN, "the machine"))
    vocabulary.libraries = lambda: forms
    for made_of_them in (vocabulary._by_word, vocabulary.likely, vocabulary.gate, vocabulary._going_on):
        made_of_them.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--left", type=int, default=0, help="so many that no form reads")
    given = parser.parse_args()
    without_libraries()
    read, all_, left = Counter[str](), Counter[str](), []
    for library in dict.fromkeys(source.library for source in sources()):
        for error in dict.fromkeys(raised(library)):
            all_[library] += 1
            if is_read(error):
                read[library] += 1
            else:
                left.append(f"{library}: {error[:160]}")
    for library, number in all_.items():
        print(f"{library}: {read[library]} of {number}, {read[library] / number:.0%}")
    print(f"all: {read.total()} of {all_.total()}, {read.total() / all_.total():.0%}")
    print(*random.Random(61).sample(left, min(given.left, len(left))), sep="\n")


if __name__ == "__main__":
    main()
