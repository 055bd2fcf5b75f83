"""Pages that make a rule as an exercise: they use the code that was free when they were written.

A page says so in a comment, ``<!-- free code: CUDNN245 in rules/cudnn/since_9_8_backward.py -->``. Once a
real rule has that code, the page is run with the one that is free now: who adds a rule need not mend pages.
"""

from __future__ import annotations

import re

from attnsel.rules import load_all
from attnsel.rules.codes import all_ranges

_COMMENT = re.compile(r"<!-- free code: (\w+) in (\S+) -->")


def with_free_code(text: str) -> str:
    """The page with a code that no rule has. Raises LookupError where its range is full."""
    found = _COMMENT.search(text)
    if found is None:
        return text
    written, file = found.groups()
    load_all()
    (place,) = [one for one in all_ranges() if one.has(written)]
    if place.file != file:
        raise LookupError(f"{written} is of {place.file}, not of {file}")
    free = place.next_free()
    if free is None:
        raise LookupError(f"every code of the range of {written} is taken: the page needs another file")
    return text.replace(written, free)
