"""What each text of a library says, against a record: every message that is known, and texts beside them.

``messages.txt`` has what is declared of each library, and then lines of logs behind "> " and below them all
that is found in them, without fields that nothing is said of. The lines are the libraries' own wording, typed
again with sizes that are all different. What changed is accepted as tests/support/records.py says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from attnsel.base.rows import read_rows
from attnsel.diagnose import logs
from attnsel.diagnose.logs.message import _FORMS, Finding, Message, More, Variant, facts_of
from attnsel.diagnose.logs.reader import entries
from attnsel.diagnose.logs.vocabulary import Library, gate, libraries, likely, more, shape_of
from attnsel.environment import Device
from attnsel.rules import find_rule
from records import Record
from tables import rows_of

RECORD = Path(__file__).with_name("messages.txt")
DATA = Path(logs.__file__).parent / "data"
LEFT_OUT = ("", (), {}, False)
BEGINNING = 80  # characters
SILENT = {  # a message above it takes all its texts, or the reader takes the mark that it begins with
    "cuDNN": ["Num hidden_dim should be less than or equal to "],
    "the machine": ["NVIDIA "],
}


def texts() -> list[list[str]]:
    lines = RECORD.read_text(encoding="utf-8").splitlines()
    typed = groupby(lines, key=lambda line: line.startswith("> "))
    return [[line[2:] for line in group] for is_text, group in typed if is_text]


def plain(value: Any) -> Any:
    """Values as they are written down: named tuples by their names, without what is left as it comes."""
    if hasattr(value, "_asdict"):
        return {name: plain(one) for name, one in value._asdict().items() if one not in LEFT_OUT and one}
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    return {name: plain(one) for name, one in value.items()} if hasattr(value, "items") else value


def fields(finding: Finding) -> Iterator[str]:
    """What is stated, and which row says it: by the beginnings of its sentences, which stand whole there."""
    row = finding._replace(variants=(), instead=None, source="")
    for name, value in plain(row).items():
        if name not in ("library", "kind", "text"):
            yield f"    {name}: {value[:BEGINNING] if name in ('known', 'fix') else value}"
    yield from (f"    or: {one.known[:BEGINNING]}" for one in finding.variants)
    if finding.instead is not None:
        yield from (f"  {line}" for line in fields(finding.instead))


def answered(log: list[str]) -> str:
    said = [*(f"> {line}" for line in log)]
    for entry in entries(log, gate(), more):
        for library, among in likely(shape_of(entry.text)):
            for finding in library.findings(entry.text, among):
                said += [f"  {library.name}, {finding.kind}: {finding.text}", *fields(finding)]
    return "\n".join(said if len(said) > len(log) else [*said, "  nothing"])


def declared(library: Library) -> str:
    facts = {name: value for name, value in vars(library).items() if value}
    kind = {"all": "Library", "first": "FirstOf", "alone": "FirstOf"}[facts.pop("takes")]
    del facts["messages"]
    return "\n".join([kind, *(f"  {name}: {plain(value)}" for name, value in facts.items())])


def speaking(text: str) -> Iterator[Message]:
    """The messages that say something of an entry: the first of a library, and those behind it."""
    for library, among in likely(shape_of(text)):
        behind, said = [*library.findings(text, among)], list[Finding]()
        while behind:
            one = behind.pop()
            said.append(one._replace(instead=None))
            behind += [one.instead] if one.instead else []
        if said:
            yield from (message for message in among if message.find(text) in said)


def test_texts_of_libraries_say_what_is_written_down(record: Record) -> None:
    now = "\n\n".join([*map(declared, libraries()), *map(answered, texts())])
    record.holds(RECORD, now.splitlines())


def test_what_is_likely_leaves_no_message_out() -> None:
    """Of every fortieth text: to hold each against each message takes a minute."""
    for text in (entry.text for log in texts()[::40] for entry in entries(log, gate(), more)):
        found = [one for library in libraries() for one in library.findings(text)]
        assert found == [
            one for library, among in likely(shape_of(text)) for one in library.findings(text, among)
        ]


def may_say(text: str) -> bool:
    """Whether a message's own text stands in it: what stands before a line may let it through for nothing."""
    among = (message for _, messages in likely(shape_of(text)) for message in messages)
    return any(quick in text for message in among for quick in message.quicks)


def test_each_text_is_read_behind_what_programs_put_before_lines() -> None:
    """But for the marks that a list or a table of ``nvidia-smi`` begins with."""

    def told(lines: list[str]) -> list[str]:
        return [one.text for one in entries(lines, gate(), more)]

    def said(read: list[str]) -> list[str]:
        return re.findall(r"[^\s|-]+", " ".join(filter(may_say, read)))

    prefixes = [row["prefix"].replace("ESC", chr(27)) for row in rows_of(__file__, "prefixes.csv")]
    for log in texts():
        plain = told(log)
        for prefix in prefixes:
            behind = told([prefix + line for line in log])
            assert behind == plain or said(behind) == said(plain), prefix


def test_every_message_speaks_in_a_text_of_the_record() -> None:
    told = {entry.text for log in texts() for entry in entries(log, gate(), more)}
    spoken = {id(message) for text in told for message in speaking(text)}
    for library in libraries():
        silent = [one.quicks[0] for one in library.messages if id(one) not in spoken]
        assert silent == (SILENT.get(library.name, []) if silent else []), library.name


def test_each_meaning_has_a_message_above_it_and_none_stands_behind_one_that_always_holds() -> None:
    """What is the message's own (its pattern, whom it refuses) is said once, where it stands."""
    meaning = {"part", "does", "known", "fix", "codes", "when", "source", "read"}
    for path in DATA.glob("*.csv"):
        above: dict[str, str] = {}
        for row in read_rows("attnsel.diagnose.logs", path.stem):
            if row.get("does") == "or":
                assert above["part"] == row["part"], row
                assert above.get("when"), row
                assert {name for name, cell in row.items() if cell} <= meaning, row
            above = row


def test_every_word_of_a_sentence_is_a_group_of_its_pattern() -> None:
    """But where a function computes them: a name in braces would be told as it stands."""
    for message in (one for library in libraries() for one in library.messages if one.read is None):
        groups = {*re.compile(message.pattern).groupindex}
        given = {*groups, *(_FORMS[name][0] for name in groups & {*_FORMS}), *message.says.params}
        told: list[Finding | Variant] = [message.says, *message.says.variants]
        words = " ".join([message.text, *(f"{one.known} {one.fix}" for one in told)])
        assert {*re.findall(r"\{([a-z]\w*)\}", words)} <= given, message.pattern or message.quick


def test_every_text_of_a_name_can_be_taken() -> None:
    """The first that holds is taken: none stands behind one that always does (a name given twice)."""
    always = set[str]()
    for row in read_rows("attnsel.diagnose.logs", "texts"):
        names = {*row["name"].split(" | ")}
        assert not names & always, row
        always |= set() if row["when"] else names


def test_no_text_stands_in_every_line() -> None:
    """A pattern that is one group leaves no text of its own, and then every line of a log is read."""
    told = (message for library in libraries() for message in library.messages)
    assert not [message.pattern for message in told if min(map(len, map(str.strip, message.quicks))) < 2]


def test_every_name_of_a_text_is_asked_for() -> None:
    files = [*DATA.parent.glob("*.py"), *DATA.glob("*.csv")]
    asked = set(re.findall(r"\{([A-Z][A-Z_0-9]+)\}", "".join(map(Path.read_text, files))))
    named = {name for row in read_rows("attnsel.diagnose.logs", "texts") for name in row["name"].split(" | ")}
    assert named - asked == set()


def test_every_message_can_be_reached_and_names_rules_that_exist() -> None:
    for library in libraries():
        for message in library.messages:
            for quick in message.quicks:
                assert any(word in quick.lower() for word in gate()), quick
                assert len(quick.strip()) > 2 or not quick.isascii() or library.takes == "all", (
                    f"{message.pattern}: say what is quick"
                )
            for code in (*message.says.codes, *(one for v in message.says.variants for one in v.codes)):
                find_rule(code)
            assert message.says.source or message.says.kind == "machine" or library.name in ("seen", "caught")
            assert message.more in get_args(More), message.more


def test_every_name_that_a_meaning_asks_for_is_given_by_a_row() -> None:
    """A name that no row gives would never hold: the meaning would be silent, or speak where it may not."""
    rows = [row for path in DATA.glob("*.csv") for row in read_rows("attnsel.diagnose.logs", path.stem)]
    given = {row["text"] for row in rows if row.get("part") in ("frames", "seen", "caught")}
    given |= {one.says.environment.get("missing") for library in libraries() for one in library.messages}
    given |= {*get_args(Device.model_fields["type"].annotation), "warnings alone"}  # calls.py, _with_meanings
    for when in (facts_of(row["when"]) for row in rows if row.get("when")):
        assert {*when.get("seen", ()), *when.get("unseen", ())} <= given, when


def test_what_says_that_a_log_names_a_card_counts_where_it_does() -> None:
    for message in (one for library in libraries() for one in library.messages):
        for one in message.says.variants:
            if one.archs and re.search(
                r"(?:names?|the log speaks of) (?:a|the) [\w ]{0,12}(?:GPU|card)", one.known
            ):
                assert not one.unnamed or one.seen, one.known
