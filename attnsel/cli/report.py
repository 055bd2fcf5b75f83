"""``attnsel report``: the files of many ranks in one answer."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from attnsel.base.records import stamped
from attnsel.cli.form import TEXT, Form
from attnsel.cli.output import BAD_INPUT, FOUND, NO_BACKEND, bar, complain
from attnsel.diagnose.ranks.answer import read
from attnsel.diagnose.ranks.document import nothing_found, ranks_document

DIFFER = 1


def report(
    *files: Annotated[str, Parameter(name="FILE", help="folders, files (also .gz) and patterns")],
    form: Form = TEXT,
) -> int:
    """What many ranks ran, from the files they left: who differs and why, and what fell back.

    Read are the lines of ATTNSEL_DEBUG_FILE (ATTNSEL_DEBUG_FORMAT=json says most; ATTNSEL_DEBUG_RANKS=all,
    so that every rank speaks), the files of `attnsel watch --out`, and attnsel's lines in plain logs. Files
    may be larger than the memory: they are read line by line.

        ATTNSEL_DEBUG=1 ATTNSEL_DEBUG_FORMAT=json ATTNSEL_DEBUG_RANKS=all \\
          ATTNSEL_DEBUG_FILE='logs/rank{rank}.jsonl' torchrun --nproc-per-node 8 train.py
        attnsel report logs/

    Two ranks differ where they ran other kernels for one question: the smaller group is named, with what is
    otherwise in its versions, GPU, policy and strides. The other logs of a folder are for
    `attnsel explain --from-log`.

    Exit code: 0 the ranks agree; 1 they differ, or a self-check failed, a call could not run, or a rank is
    missing, cut off or ended with an error; 2 bad input; 3 nothing of attnsel's was found. Fall-backs
    that are alike on all ranks are told and are no error.
    """
    form.require_one()
    if not files:
        complain("report needs a folder, files or a pattern: attnsel report logs/")
        return BAD_INPUT
    with bar("reading", 100) as percent:
        answer = read(files, lambda done, total: percent(100 * done // max(total, 1)))
    if answer.known or form.json:
        form.print(
            lambda: ranks_document(answer, for_issue=form.markdown),
            lambda: stamped("report", answer.as_dict()),
        )
    if not answer.known:
        complain(nothing_found(answer))
        return NO_BACKEND
    return FOUND if answer.agreed else DIFFER
