"""The site's pages of rules: one for each code, lists to find it in, the playground's links, the search."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from html import unescape
from urllib.parse import parse_qsl

import pytest

pytest.importorskip("griffe", reason="pages are made with it: pip install --group docs")

from attnsel.cli import main
from attnsel.pages.commands import example_commands
from attnsel.rules import REGISTRY, find_rule, load_all
from attnsel.verdicts.verdict import EVIDENCE
from sitegen import rules
from sitegen.build import build
from sitegen.model import File
from sitegen.sources import DOCS

load_all()
CODES = [*REGISTRY.pages, *REGISTRY.removed]
built = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("zensical", "selectolax", "griffe")),
    reason="the extra docs is not installed",
)


def page(code):
    return rules.page_file(find_rule(code), rules._links(playground=True))


# Pages and lists.


def test_a_page_has_the_address_of_its_code_and_links_to_its_family_and_to_evidence():
    file = page("CUDNN204")
    assert file.path == "rules/CUDNN204.md"
    assert "](../explanation/evidence.md#source)" in file.content
    assert "[all rules of the family CUDNN](cudnn.md)" in file.content
    assert "[CUDNN205](CUDNN205.md)" in file.content


def test_every_word_of_evidence_has_an_anchor():
    text = (DOCS / "explanation" / "evidence.md").read_text(encoding="utf-8")
    for word in EVIDENCE:
        assert f'<a id="{word}"></a>' in text


def test_every_code_is_in_the_list_of_its_family_once():
    listed = [
        code
        for family in rules.families()
        for code in re.findall(r"^\| \[([A-Z]+\d{3})\]\(\1\.md\)", rules.family_page(family), re.M)
    ]
    assert sorted(listed) == sorted(CODES)


def test_the_index_counts_every_family():
    text = rules.index_page()
    counts = re.findall(r"^\| \[[A-Z]+\]\(\w+\.md\) \|.*\| (\d+) \|$", text, re.M)
    assert sum(map(int, counts)) == len(REGISTRY.pages)
    assert f"{len(REGISTRY.pages)} rules" in text
    for family in rules.families():
        assert f"[{family}]({family.lower()}.md)" in text


def test_families_of_several_kernels_name_them():
    assert rules.about("FLASH") == "`flash_attn.2`, `flash_attn.3` and `flash_attn.4`"
    assert rules.about("CUDNN") == "cuDNN fused attention"
    assert all(rules.about(family) for family in rules.families())


def test_a_removed_code_is_listed_with_its_reason():
    assert "## Removed" in rules.family_page("TILED")
    assert "tiled read no paged key/value cache" in rules.family_page("TILED")
    assert page("TILED002").content.startswith("# TILED002: removed in 0.1.0")


# A question in an address.


def words(address):
    """The command that the playground reads in an address: its flags without their dashes."""
    query = unescape(address).partition("?")[2]
    pairs = parse_qsl(query, keep_blank_values=True)
    return ["explain", *(f"--{name}={value}" if value else f"--{name}" for name, value in pairs)]


@pytest.mark.parametrize("code", ["CUDNN204", "CUDNN411", "POLICY002", "FLASH214", "BUG006", "SDPA315"])
def test_the_playground_is_asked_what_the_command_asks(code, capsys):
    command = example_commands(find_rule(code))["fires_on"]
    address = rules.playground_address(command)
    assert address.startswith("../playground/index.html?gpu=")
    answers = []
    for asked in (shlex.split(command)[1:], words(address)):
        main([*asked, "--json"])
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]


def test_an_address_is_safe_in_html_and_a_question_in_json_has_none():
    assert rules.playground_address("attnsel explain --gpu 'RTX 4090' --window-size 128 0 --training") == (
        "../playground/index.html?gpu=RTX+4090&amp;window-size=128,0&amp;training"
    )
    assert rules.playground_address("echo '{}' | attnsel explain --params -") == ""


def test_without_a_playground_no_page_links_to_it():
    text = rules.page_file(find_rule("CUDNN204"), rules._links(playground=False)).content
    assert "playground" not in text
    assert "playground" in page("CUDNN204").content


# A rule that is added.


def test_an_added_rule_has_a_page_and_a_row_without_another_edit(added_rule):
    count = len(REGISTRY.pages)
    assert "CUDNN999" not in rules.family_page("CUDNN")
    added = added_rule()
    (row,) = (line for line in rules.family_page("CUDNN").splitlines() if "CUDNN999" in line)
    title = "On Hopper a sliding window is refused &#124; by a &#60;test&#62; of the &#42;site&#42;"
    assert row == f"| [CUDNN999](CUDNN999.md) | {title} | `cudnn` | cuDNN &#62;= 9.8.0, sm90 |"
    assert f"{count + 1} rules" in rules.index_page()
    assert "quokka" in rules.page_file(added, rules._links(playground=False)).content


@pytest.mark.slow
@built
def test_an_added_rule_is_built_and_found_by_the_search(added_rule, tmp_path):
    """The whole of rules/, with what its pages link to: strict, every link checked, no page over 300 kB."""
    added_rule()
    settings = (DOCS / "zensical.toml").read_text(encoding="utf-8")
    anchors = "".join(f'<a id="{word}"></a>\n' for word in EVIDENCE)
    files = [
        File("index.md", "# Home\n\n[evidence](explanation/evidence.md) [rules](rules/index.md)\n"),
        File("explanation/evidence.md", f"# Evidence\n\n{anchors}"),
        *(File(path, "") for path in sorted(set(re.findall(r'"(assets/[\w./-]+)"', settings)))),
        *rules.files(playground=False),
    ]
    site = build(files, tmp_path / "site")
    found = [str(path.relative_to(site.folder)) for path in (site.folder / "rules").glob("*/index.html")]
    assert {f"rules/{code}/index.html" for code in (*CODES, "CUDNN999")} <= set(found)
    assert max(path.stat().st_size for path in site.folder.rglob("*.html")) < 300_000
    html = (site.folder / "rules/CUDNN999/index.html").read_text(encoding="utf-8")
    for anchor in ("fix", "why", "where-it-holds", "examples", "source"):
        assert f'id="{anchor}"' in html
    assert "refused | by a <test> of the *site*" in unescape(html)
    assert "<test>" not in html.partition("<body")[2]  # within <title> it is text

    search = json.loads((site.folder / "search.json").read_text(encoding="utf-8"))
    apart = re.compile(search["config"]["separator"])

    def places(word):
        """Where the search finds a word: in a title or a text, as its separator parts them."""
        return {
            item["location"].partition("#")[0]
            for item in search["items"]
            if word in apart.split(re.sub(r"<[^>]+>", " ", f"{item['title']} {item['text']}").lower())
        }

    assert places("cudnn999") >= {"rules/CUDNN999/"}
    assert places("quokka") == {"rules/CUDNN999/"}
    assert places("987654") == {"rules/CUDNN999/"}  # of pytorch#987654
    assert "rules/BUG004/" in places("169849")
    assert "rules/CUDNN204/" in places("cudnn204") & places("1591") & places("hopper")
