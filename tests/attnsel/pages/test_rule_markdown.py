"""The page of a rule as Markdown: its first lines, its anchors, what the engine answers, what is escaped."""

from __future__ import annotations

import shlex

from attnsel.cli import main
from attnsel.pages.rule import cards_of, generations, gpu_words
from attnsel.pages.rule_markdown import Links, answer_to, beyond, page_document
from attnsel.report.document import Document, Paragraph, Prose
from attnsel.report.markdown import to_markdown
from attnsel.report.text import to_text
from attnsel.rules import find_rule, load_all
from attnsel.rules.api import removed
from tables import each, rows_of

load_all()
HEADINGS = ["## Fix", "## Why", "## Where it holds", "## Examples", "## Source", "## See also"]
SAMPLE = ["CUDNN204", "SDPA104", "BUG006", "INSTALL005", "CUDNN432", "HINT001", "TE002", "POLICY002"]


def page_markdown(page, links=Links()):  # noqa: B008
    return to_markdown(page_document(page, links), links.rule) + "\n"


def page_of(code, links=Links()):  # noqa: B008
    return page_markdown(find_rule(code), links)


@each("page", rows_of(__file__, "first_lines.csv"))
def test_the_first_lines_say_who_refuses_since_and_until_when(page):
    first = page_of(page["code"]).split("\n\n")[1]
    assert first.startswith(page["line"])


@each("code", SAMPLE)
def test_the_headings_are_the_same_on_every_page_and_in_one_order(code):
    found = [line for line in page_of(code).splitlines() if line.startswith("## ")]
    assert found == [line for line in HEADINGS if line in found]
    assert {"## Why", "## Where it holds", "## Source"} <= set(found)


@each("code", SAMPLE)
def test_the_answer_names_the_rule_and_is_what_the_command_prints(code, capsys):
    answer = answer_to(find_rule(code))
    lines = to_text(Document(answer.blocks)).split("\n")
    assert any(code in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert main(shlex.split(answer.command)[1:]) in (0, 3)
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if " ".join(line.split()) not in printed] == []


def test_beyond_its_gates_the_example_is_asked_again():
    (above,) = beyond(find_rule("CUDNN204"))
    assert (above.where, above.runs) == ("cuDNN 9.5.0", True)
    (above,) = beyond(find_rule("CUDNN106"))
    assert (above.runs, above.codes) == (False, ("CUDNN002",))
    below, above = beyond(find_rule("CUDNN403"))
    assert below.codes == ("CUDNN402",)
    assert "| With cuDNN 9.5.0 | the example runs |" in page_of("CUDNN204")


@each(
    "architectures, words",
    [
        ([80, 86, 87, 89], [("Ampere and Ada", "sm80 to sm89")]),
        ([80, 90], [("Ampere", "sm80"), ("Hopper", "sm90")]),
        ([100, 103, 110, 120, 121], [("Blackwell", "sm100 to sm121")]),
        ([100, 103], [("datacentre Blackwell", "sm100 to sm103")]),
        ([70, 72, 75], [("Volta", "sm70 to sm72"), ("Turing", "sm75")]),
    ],
)
def test_architectures_by_the_names_that_people_use(architectures, words):
    assert generations(architectures) == words
    assert gpu_words(find_rule("CUDNN106")) == "Volta (sm70 to sm72), Turing (sm75)"
    assert cards_of(find_rule("CUDNN106")) == ["V100", "T4"]
    assert gpu_words(find_rule("BUG001")) == ""


def test_an_added_rule_is_escaped_and_linked(added_rule):
    page = added_rule()
    links = Links(rule=lambda code: f"{code}.md", evidence=lambda word: f"e.md#{word}")
    text = page_markdown(page, links)
    assert text.startswith(
        "# CUDNN999: On Hopper a sliding window is refused &#124; by a &#60;test&#62; of the &#42;site&#42;"
    )
    assert "[pytorch#987654](https://github.com/pytorch/pytorch/issues/987654)" in text
    assert "[`source`](e.md#source)" in text
    assert "**Refused by `cudnn`** with cuDNN 9.8.0 and newer, on Hopper (sm90)." in text
    assert "quokka" in text


@each("prose", rows_of(__file__, "prose.csv"))
def test_prose(prose):
    document = Document((Paragraph(Prose(prose["text"])),))
    assert prose["markdown"] in to_markdown(document, lambda code: f"at/{code}")


def test_a_removed_code_says_what_took_over():
    links = Links(rule=lambda code: f"{code}.md")
    text = page_of("CUDNN354", links)
    assert text.startswith("# CUDNN354: removed in 0.1.0\n")
    assert "**Read instead:** [CUDNN353](CUDNN353.md): " in text
    assert "- [CUDNN354](CUDNN354.md): removed, which it replaces" in page_of("CUDNN353", links)


def test_a_preview_and_a_deprecated_rule_say_so_at_once(added_rule):
    from added_rule import TEXT

    preview = added_rule(TEXT.replace("fp8=False,", 'fp8=False,\n    status="preview",'))
    assert "**A preview:**" in page_markdown(preview).split("## ")[0]
    assert answer_to(preview).command.endswith("--preview")
    deprecated = added_rule(
        TEXT.replace("CUDNN999", "CUDNN998").replace("fp8=False,", 'fp8=False,\n    replaced_by="CUDNN204",')
    )
    assert "**Deprecated:** CUDNN204 took over." in page_markdown(deprecated).split("## ")[0]
    removed("CUDNN997", release="0.3.0", why="A test took it away.")
    assert page_of("CUDNN997").startswith("# CUDNN997: removed in 0.3.0")
