"""What the three choosers are said to do, question by question, is what ``answers.txt`` says.

A question: the chooser, the machine and its versions | switches | fields of the call. What changed is
accepted as tests/support/records.py says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attnsel import AttentionParams, Environment, InvalidInput, select
from attnsel.dispatchers import Offer, dispatched_by
from attnsel.report.short import report_document, short_document
from attnsel.report.text import to_text
from records import Record, literals, words_of
from tables import each, rows_of

RECORD = Path(__file__).with_name("answers.txt")


def offered(offer: Offer) -> Iterator[str]:
    yield f"{offer.name} = {offer.candidate or 'none of ours'}{offer.note and ': ' + offer.note}"
    for refusal in offer.refusals:
        about = [refusal.code, refusal.switch, refusal.source, refusal.told and f"told {refusal.told}"]
        yield f"    not: {refusal.text} [{'; '.join(filter(None, about))}]"


def answered(question: str) -> Iterator[str]:
    machine, switches, fields = (words_of(part) for part in question.split(" | "))
    (chooser, gpu), versions = machine
    flash = versions.pop("torch_flash", "FA2")
    env = Environment.describe(gpu, **versions).replace(torch_flash=flash)
    try:
        said = dispatched_by(chooser, AttentionParams(**literals(fields[1])), env, switches[1])
    except InvalidInput as error:
        yield f"{error.field}: {error}"
        return
    yield f"{said.release} as {said.read} {said.inferred}".rstrip()
    yield said.call
    yield f"takes {None if said.chosen is None else said.chosen.name} {said.error}".rstrip()
    for offer in said.offers:
        yield from offered(offer)
    for note in said.notes:
        yield f"note: {note}"


def test_every_question_is_answered_as_it_is_written_down(record: Record) -> None:
    record.answers(RECORD, answered)


@each("row", rows_of(__file__, "truth.csv"))
def test_it_is_what_the_line_of_the_source_says(row: dict[str, str]) -> None:
    machine, switches, fields = (words_of(part) for part in row["asked"].split(" | "))
    (chooser, gpu), versions = machine
    p, env = AttentionParams(**literals(fields[1])), Environment.describe(gpu, **versions)
    selection = select(p, env, dispatcher=chooser, switches=switches[1])
    said = selection.dispatched
    bugs = [bug.code or bug.text for bug in said.known_bugs]
    told = " ".join((said.call, said.error, *said.notes, *bugs))
    assert ("none" if said.chosen is None else said.chosen.name) == row["taken"]
    assert all(piece in told for piece in row["says"].split(" & ")), told
    assert all(bug in row["says"] or row["says"] in bug for bug in bugs), bugs
    for document in (report_document(selection), short_document(selection)):
        first = to_text(document, 1000).split("\n")[0]
        assert (first, [bug for bug in bugs if bug not in first]) == (selection.difference, [])
