"""Pages on which the reader makes files: typed from top to bottom they do what they show."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

import pages
import typed_pages
import update_docs
from paths import ROOT

AGAIN = "what it prints has changed; if that is right: python docs/tools/update_docs.py"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="pages are typed into bash")


def can_be_typed(found: list[pages.Block], page: str) -> None:
    """Skips where something that the page uses is not here."""
    if missing := typed_pages.missing_packages(found) + typed_pages.missing_programs(found):
        pytest.skip(f"{page} needs {', '.join(missing)}")
    text = "".join(block.text for block in found)
    if "pip install" in text and importlib.util.find_spec("setuptools") is None:
        pytest.skip(f"{page} installs a package, which needs setuptools here")
    if "$REPO" in text and not (ROOT / ".git").exists():
        pytest.skip(f"{page} clones this checkout, which is none of git's")


@pytest.mark.parametrize("page", typed_pages.TYPED)
def test_a_page_shows_what_its_reader_sees(page, tmp_path):
    found = typed_pages.read(page)
    can_be_typed(found, page)
    printed = typed_pages.typed(page, tmp_path)
    wrong = []
    for ran in printed:
        if ran.block.language == "sh" and ran.code:
            wrong.append(f"{ran.block}: exit code {ran.code}\n{ran.text}")
        if ran.block.language == "console" and not typed_pages.agrees(ran.block.text, ran.text):
            wrong.append(f"{ran.block}: {AGAIN}\n{ran.text}")
    assert not wrong, "\n".join(wrong)
    due = [str(block) for block in found if typed_pages.is_run(block)]
    assert [str(ran.block) for ran in printed] == due


# ---- a page of our own, to see what is done with it -------------------------------------------------------

PAGE = """
```python file: folder/hello.py
print("hello")
```

```sh
cd folder && WORD=there
```

```console
$ python hello.py
hello
$ echo $WORD in 3.14 s; false
there in […] s
```

```python append: hello.py
print("again")
```

```console
$ python hello.py
hello
hello
```
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[typed_pages.Printed]:
    return typed_pages.typed("page.md", tmp_path_factory.mktemp("page"), PAGE)


def test_files_are_made_and_commands_share_a_shell(printed):
    assert [ran.text for ran in printed] == [
        "",
        "$ python hello.py\nhello\n\n$ echo $WORD in 3.14 s; false\nthere in 3.14 s\n",
        "$ python hello.py\nhello\nagain\n",
    ]
    assert [ran.code for ran in printed] == [0, 1, 0]


def test_what_is_shown_may_leave_out_what_differs_and_nothing_else(printed):
    shown = [block.text for block in pages.blocks("page.md", PAGE) if block.language == "console"]
    now = [ran.text for ran in printed if ran.block.language == "console"]
    assert typed_pages.agrees("$ a\nin […] s\n", "$ a\nin 3 s\n")
    assert not typed_pages.agrees(shown[1], now[1])


def test_the_tool_writes_what_is_printed_and_keeps_what_is_left_out():
    new = update_docs.with_commands("page.md", PAGE)
    assert "there in […] s" not in new  # the block as a whole had changed: it lacked an empty line
    assert new.endswith("$ python hello.py\nhello\nagain\n```\n")
    kept = new.replace("in 3.14 s", "in […] s").replace("echo $WORD in […] s", "echo $WORD in 3.14 s")
    assert update_docs.with_commands("page.md", kept) == kept


def test_a_package_that_a_page_makes_is_not_missing():
    text = "```python file: acme/made.py\nimport acme, torch_of_nobody\nfrom . import x\n```\n"
    assert typed_pages.missing_packages(pages.blocks("page.md", text)) == ["torch_of_nobody"]


def test_a_program_that_is_not_here_is_told_and_not_typed(monkeypatch):
    found = pages.blocks("page.md", "```sh\nruff check rules\n```\n\n```console\n$ git log\n```\n")
    monkeypatch.setenv("PATH", "")
    assert typed_pages.missing_programs(found) == ["git", "ruff"]
    assert typed_pages.missing_programs(pages.blocks("page.md", "```sh\necho ruff check\n```\n")) == []
