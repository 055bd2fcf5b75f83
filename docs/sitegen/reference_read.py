"""``reference/read.md``: how old each table of facts is, made from the rows that say so."""

from __future__ import annotations

from collections.abc import Iterator

from attnsel.environment.read import Read, everything_read, unread_release
from attnsel.environment.versions import Version
from sitegen.model import File
from sitegen.tables import table

PATH = "reference/read.md"
_TOP = """\
# How old is what attnsel knows?

Every answer rests on releases that somebody read. A release newer than those is answered as the newest one
that was read, and every form of the answer says so:

```text
{example}.
```

A patch release, a beta and a development build of a newer release count as newer too. Builds of one release
(`2.8.3.post2`, `2.15.0+cu130`, cuDNN's last number) count as that release. A release of then that is newer
than the newest read was there on that day, and nobody read it.
"""
_END = """\
Drivers, CUDA and Python have no row: what depends on them is a rule of its own. `Selection.unread` has the
same in Python, `unread` in JSON. To list what package indexes have beyond this table:
`python tests/proof/package_index.py --newer`.
"""
_SUBJECTS = {"gpus": "GPUs", "bugs": "known bugs"}


def files() -> Iterator[File]:
    """The page of all rows."""
    rows = [
        (_SUBJECTS.get(row.subject, row.name), row.newest, row.on, row.released, row.source, _tables(row))
        for row in everything_read().values()
    ]
    head = ("of", "newest read", "on", "newest release then", "read from", "for")
    text = f"{_TOP.format(example=unread_release('cudnn', Version(9, 99)))}\n{table(head, rows)}\n\n{_END}"
    yield File(PATH, text, title="How old is what attnsel knows?")


def _tables(row: Read) -> str:
    return ", ".join(f"`{table}`" for table in row.tables)


def last_day() -> str:
    """The day on which something was read last, for the foot of every page."""
    return max(row.on for row in everything_read().values())
