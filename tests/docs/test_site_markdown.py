"""Pages of the checkout as the site's generator reads them: fences, lists, links."""

from __future__ import annotations

import pytest

pytest.importorskip("griffe", reason="pages are made with it: pip install --group docs")

from sitegen import docstring, nav, sources
from sitegen.markdown import deep_lists, plain_fences, title_of, with_links
from sitegen.model import File
from sitegen.tables import table


def test_a_fence_keeps_its_language_and_loses_what_tests_do_with_it():
    text = "```sh skip: why\nls\n```\n\n1. x\n   ```text printed\n   y\n   ```\n\n"
    text += "````console\n```sh skip: a\n````\n"
    assert plain_fences(text) == text.replace("```sh skip: why", "```sh").replace("text printed", "text")


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("1. a\n   b\n\n   c\n2. d\n", "1.  a\n    b\n\n    c\n\n2.  d\n"),
        ("- the output is\n  0. And so on\n", "-   the output is\n    0\\. And so on\n"),
        ("in the year\n1984. So\n", "in the year\n1984\\. So\n"),
        ("- a\n  - b\n    - c\n- d\n", "-   a\n    -   b\n        -   c\n-   d\n"),
        ("said:\n- a\n- b\n", "said:\n\n-   a\n-   b\n"),
        ("- a\nlazy\n- b\n", "-   a\n  lazy\n-   b\n"),
        (
            "- a\n\n  ```sh\n  - b\n    c\n  ```\n\nd\n",
            "-   a\n\n    ```sh\n    - b\n      c\n    ```\n\nd\n",
        ),
        ("10. a\n    b\n", "10. a\n    b\n"),
        ("```text\n- a\n  - b\n```\n", "```text\n- a\n  - b\n```\n"),
        ("a\n\n    code\n", "a\n\n    code\n"),
    ],
)
def test_lists_get_four_spaces_for_each_level(text, new):
    assert deep_lists(text) == new


def test_links_are_put_where_their_target_stands_and_code_is_left_alone():
    text = (
        "[a](x.md) [`b`](x.md#y) [c\nd](x.md) [e](https://h/x.md) [f](#g) `[h](x.md)` [i](gone.py)\n\n"
        "```md\n[j](x.md)\n```\n"
    )
    asked = []

    def place(target):
        asked.append(target)
        return None if target.endswith(".py") else f"../{target}"

    assert with_links(text, place) == (
        "[a](../x.md) [`b`](../x.md#y) [c\nd](../x.md) [e](https://h/x.md) [f](#g) `[h](x.md)` i\n\n"
        "```md\n[j](x.md)\n```\n"
    )
    assert asked == ["x.md", "x.md#y", "x.md", "gone.py"]


@pytest.mark.parametrize(
    ("page", "target", "place"),
    [
        ("docs/how-to/ask.md", "run.md#part", "run.md#part"),
        ("docs/how-to/ask.md", "../explanation/evidence.md", "../explanation/evidence.md"),
        ("docs/how-to/ask.md", "../../CONTRIBUTING.md#checks", "../contributing.md#checks"),
        ("docs/how-to/ask.md", "../../README.md#set-up", "../index.md"),
        ("docs/how-to/ask.md", "../../rules", "../rules/index.md"),
        ("docs/how-to/ask.md", "../rules/X001.md", "../rules/X001.md"),
        ("docs/how-to/ask.md", "../schemas/plan-1.json", "../schemas/plan-1.json"),
        ("docs/how-to/ask.md", "../../attnsel/params.py", None),
        ("docs/how-to/ask.md", "gone.md", "gone.md"),
        ("docs/README.md", "../SECURITY.md", "security.md"),
        ("CONTRIBUTING.md", "docs/explanation/architecture.md", "explanation/architecture.md"),
        ("CONTRIBUTING.md", "SECURITY.md", "security.md"),
        ("CONTRIBUTING.md", "attnsel/cli", "reference/cli.md"),
    ],
)
def test_a_link_of_the_checkout_leads_to_its_page_on_the_site(page, target, place):
    pages = {path: sources.site_path(path) for path in sources._checkout_pages()}
    generated = {"rules/index.md", "rules/X001.md", "reference/cli.md"}
    assert sources._Places(page, pages[page], pages, generated, "")(target) == place


def test_a_link_to_source_leads_to_the_repository_where_one_is_named():
    pages = {"docs/how-to/ask.md": "how-to/ask.md"}
    place = sources._Places("docs/how-to/ask.md", "how-to/ask.md", pages, set(), "https://h/a/b")
    assert place("../../attnsel/params.py#L3") == "https://h/a/b/blob/main/attnsel/params.py#L3"


def again():
    yield File("how-to/ask.md", "# Again")


def test_every_path_of_the_site_is_made_once(monkeypatch):
    monkeypatch.setattr(sources, "generators", lambda linked: {"again": again})
    with pytest.raises(ValueError, match=r"how-to/ask\.md is made twice"):
        list(sources.files())


def test_what_a_page_is_made_from_lies_in_the_checkout():
    later = {"docs/playground", "docs/sitegen/can_i_use.py"}
    assert not [
        path for path in sources.MADE_FROM if path not in later and not (sources.ROOT / path).exists()
    ]


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("```sh\n# no\n```\n\n# The `title` of [it](x.md) {#id}\n\n# no\n", "The title of it"),
        ("none", ""),
    ],
)
def test_the_title_is_the_first_heading(text, title):
    assert title_of(text) == title


def test_the_navigation_follows_the_first_page_and_leaves_out_what_is_deeper():
    made = [
        File("index.md", "# Home\n\n[b](how-to/b.md)\n[a](how-to/a.md)"),
        *(File(f"how-to/{name}.md", f"# {name.upper()}: more") for name in "abc"),
        File("how-to/index.md", "# All", title="Overview"),
        File("how-to/deep/d.md", "# D"),
        File("rules/index.md", "# Rules"),
        File("rules/X001.md", "# X001"),
        File("playground/index.html", "<html>"),
    ]
    found = nav.navigation(made)
    assert found == [
        {"Home": "index.md"},
        {
            "How-to": [
                {"Overview": "how-to/index.md"},
                {"B": "how-to/b.md"},
                {"A": "how-to/a.md"},
                {"C": "how-to/c.md"},
            ]
        },
        {"Rules": "rules/index.md"},
        {"Playground": "playground/index.html"},
    ]
    tomllib = pytest.importorskip("tomllib")
    assert tomllib.loads(f"nav = {nav.as_toml(found)}") == {"nav": found}


def test_a_docstring_becomes_markdown():
    text = (
        "It takes ``q`` [b, s, h, d], with --mask and ATTNSEL_DEBUG=1. See docs/how-to/run.md::\n\n"
        "    a = 1\n\n    b * 2\n\nq, k: a * b\n    of <them>.\n"
        "max_*: **bold**; :func:`m.f` and :class:`~m.C`\n"
        "other: no argument\n"
    )
    assert docstring.rendered(text, ["q", "max_len"], {"m.f": "#f"}.get) == (
        "It takes `q` [b, s, h, d], with `--mask` and `ATTNSEL_DEBUG=1`. "
        "See [how-to/run](../how-to/run.md):\n\n"
        "```text\na = 1\n\nb * 2\n```\n\n"
        "- `q`, `k`: a \\* b of \\<them>.\n"
        "- `max_*`: **bold**; [`m.f`](#f) and `C` other: no argument"
    )


def test_a_table_leaves_out_a_last_column_that_is_empty():
    assert table(("a", "b"), [("1", ""), ("2|3", "")]) == "| a |\n| --- |\n| 1 |\n| 2\\|3 |"
    assert table(("a", "b"), [("1", ""), ("2", "x")]) == "| a | b |\n| --- | --- |\n| 1 |  |\n| 2 | x |"
