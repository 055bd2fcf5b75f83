"""One hostile document for each writer: every field of every node holds what must not get out of it."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt

from attnsel.report.document import (
    Code,
    Document,
    Drawing,
    Facts,
    Fields,
    Item,
    Items,
    Link,
    Paragraph,
    Paste,
    Ref,
    Screen,
    Section,
    Strong,
    codes,
)
from attnsel.report.markdown import to_markdown
from attnsel.report.text import to_text
from tables import each

HOSTILE = [
    "[x](http://a.b)", "<script>", "*x*", "_x_", "__init__", "`x`", "a|b", "# x", "## x", "@someone", "#12",
    "~~x~~", "$x$", "&lt;", "![i](u)", "\\*x*", "\x1b[2J", "a\nb", "\u202e", "www.a.b", "https://a.b", "|",
    "``x``", "```", "> x", "- x", "+ x", "1. x", "12) x", "---", "===", "    x", "<!--", "-->", "[x]: y",
    "\ud800", "x" * 200, " ".join(["word"] * 60), "*", "!", "\rx", "\t- x",
]  # fmt: skip


def filled(bad: str) -> Document:
    """A document with ``bad`` in every field of every node that is text."""
    part = (bad, Code(bad), Ref(bad), Link(bad, "https://a.b"), Link(bad, ""), " ", Strong(bad))
    item = Item(
        part, bad, bad, part, part, more=(part,), below=(Paragraph(part), Item(part, below=(Item(bad),)))
    )
    entry = Item(part, "✔", 1, Code(bad), bad)
    screen = Screen((Paragraph(part), Items((entry, item._replace(number=" ")))))
    return Document(
        (
            Paragraph(Strong(part)),
            Facts(((bad, bad), Item(bad, "!"))),
            Fields(((bad, (part, bad)), (bad, (bad,)))),
            item._replace(number=""),
            Items((entry, item, Item(bad, label=part)), title=bad),
            Items((Item(bad, bad, label=bad, below=(Paste((bad, bad), why=(bad,)),)),)),
            Paste((bad,), "python"),
            Drawing(lambda width: f"{bad}\n{bad}"),
            Section(bad, (Paragraph(bad), Items((Item(bad),))), 1),
            screen,
        ),
        bad,
    )


def shape(markdown: str) -> list[str]:
    """What a reader of Markdown makes of it, without its words."""
    names = []
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown):
        names.append(token.type)
        kinds = [child.type for child in token.children or () if child.content != "<!-- -->"]
        names += [kind for kind in kinds if kind != "text"]
    return names


@each("bad", HOSTILE)
def test_in_markdown_nothing_becomes_markup_a_link_or_a_mention(bad):
    written = to_markdown(filled(bad))
    assert all(line.isprintable() for line in written.split("\n"))
    assert shape(written) == shape(to_markdown(filled("x")))
    outside = re.sub(
        r"(?ms)^ *(`{3,}).*?^ *\1$|(?<!`)(`+)(?!`).*?(?<!`)\2(?!`)|\[[^]]*\]\(.*?\)", "", written
    )
    assert not re.search(r"@\w|(?<!&)#\d|://|www\.", outside)


@each("bad", HOSTILE)
def test_in_text_a_line_stays_a_line(bad):
    lines = to_text(filled(bad), 60).split("\n")
    assert all(line.isprintable() and line == line.rstrip() for line in lines)


@each("width", [40, 60, 80, 100])
def test_no_line_of_words_is_wider_than_asked_for(width):
    words = " ".join(["word"] * 60)
    item = Item(words, "✔", 1, Code("name"), words, more=(words,), below=(Paragraph(words), Item(words)))
    remark = Item(
        words, "!", label="Who", below=(Paste((), why=(words,)), Fields((("name", (words, words)),)))
    )
    blocks = (
        Paragraph(words),
        Facts((("word",) * 60, remark)),
        Items((item, remark)),
        Section(words, (item,), 1),
    )
    assert max(map(len, to_text(Document(blocks), width).split("\n"))) <= width


def test_a_command_is_continued_before_its_flags_and_an_address_never_broken():
    paste = Paste(
        ("pip install 'a --b' --index-url https://x.org/y --pre", f"pip install https://{'x' * 60}")
    )
    assert to_text(Document((paste,)), 40).split("\n") == [
        "pip install 'a --b' \\",
        "   --index-url https://x.org/y --pre",
        f"pip install https://{'x' * 60}",
    ]


def test_the_rules_that_a_document_refers_to_are_found_wherever_they_stand():
    item = Item("a", below=(Item(("b", Ref("CUDNN001")), tag=Ref("HINT001")),))
    assert list(codes(Document((Section("c", (Items((item,)),)),)))) == ["CUDNN001", "HINT001"]
