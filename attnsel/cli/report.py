"""``attnsel report``: the files of many ranks in one answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

from cyclopts import Parameter

from attnsel.base.schemas import stamped
from attnsel.cli.flags import Json, Markdown, one_form
from attnsel.cli.output import (
    BAD_INPUT,
    FOUND,
    NO_BACKEND,
    bar,
    complain,
    print_document,
    print_json,
)
from attnsel.diagnose.ranks.answer import read
from attnsel.diagnose.ranks.words import nothing_found, ranks_document

DIFFER = 1


def report(
    *files: Annotated[str, Parameter(name="FILE", help="folders, files (also .gz) and patterns")],
    markdown: Markdown = False,
    json: Json = False,
) -> int:
    """What many ranks ran, from the files they left: who differs and why, fall-backs, slow paths.

    Read are the lines of ATTNSEL_DEBUG_FILE (ATTNSEL_DEBUG_FORMAT=json says most; ATTNSEL_DEBUG_RANKS=all,
    so that every rank speaks), the files of `attnsel watch --out`, and attnsel's lines in plain logs. Files
    may be larger than the memory: tables are bounded, and what does not fit is counted.

        ATTNSEL_DEBUG=1 ATTNSEL_DEBUG_FORMAT=json ATTNSEL_DEBUG_RANKS=all \\
          ATTNSEL_DEBUG_FILE='logs/rank{rank}.jsonl' torchrun --nproc-per-node 8 train.py
        attnsel report logs/

    Two ranks differ where they ran other kernels for one question: the smaller group is named, with what is
    otherwise in its versions, GPU, policy and strides. The other logs of a folder are for
    `attnsel explain --from-log`.

    Exit code: 0 the ranks agree; 1 they differ, or a self-check failed, a call could not run, or a rank is
    missing, cut off or ended with an error; 2 bad input; 3 nothing of attnsel's was found. Fall-backs and
    slow paths that are alike on all ranks are told and are no error.
    """
    one_form(markdown=markdown, json=json)
    if not files:
        complain("report needs a folder, files or a pattern: attnsel report logs/")
        return BAD_INPUT
    with _progress() as moved:
        answer = read(files, moved)
    if json:
        print_json(stamped("report", answer.as_dict()))
    elif answer.known:
        print_document(ranks_document(answer, for_issue=markdown), markdown)
    if not answer.known:
        complain(nothing_found(answer))
        return NO_BACKEND
    return DIFFER if answer.bad else FOUND


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar, once it is known how much there is."""
    shown: list[Callable[[int], None]] = []
    with ExitStack() as stack:

        def moved(done: int, total: int) -> None:
            if not shown:
                shown.append(stack.enter_context(bar("reading", total)))
            shown[0](done)

        yield moved
