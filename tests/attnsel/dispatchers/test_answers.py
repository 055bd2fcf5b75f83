"""What the three choosers are said to do, question by question, is what ``answers.txt`` says.

A question: the chooser, the machine and its versions | switches | fields of the call. What changed is
accepted as tests/support/records.py says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attnsel import AttentionParams, Environment, InvalidInput
from attnsel.dispatchers import Offer, dispatched_by
from records import Record, literals, words_of

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
