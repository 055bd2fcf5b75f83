"""The playground in a real browser, offline: the command's own answers, and nothing from elsewhere.

Nightly (.ci/full): it needs a Chromium, and what npm brings.
"""

from __future__ import annotations

import itertools
import json

import pytest

pytest.importorskip("tomllib", reason="the site is built with Python 3.11 or newer")

import axe
import playground_browser as browser
import playground_questions
from sitegen import playground
from sitegen.playground import bundle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.why_not() != "", reason=browser.why_not() or "there is a browser"),
]
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
GRID = "gpu=H100&rows=head_dim_qk=64,192&cols=cudnn=8.9.7,9.5.0"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The playground's files, below a folder."""
    root = tmp_path_factory.mktemp("site")
    try:
        browser.write(root)
    except bundle.NotFetched as error:
        pytest.skip(str(error))
    with browser.served(root) as address:
        yield address


@pytest.fixture
def fresh(address):
    """Pages of their own, with other settings."""
    with browser.chromium() as chromium:
        made = []

        def make(**options):
            made.append(browser.Watched(chromium, **options))
            return made[-1]

        yield make
        for watched in made:
            watched.close()


def test_random_questions_are_answered_as_by_the_command_from_this_machine_alone(fresh, address):
    watched = fresh(**DESKTOP)
    page = watched.open(address)
    codes, different = browser.differing(page, itertools.islice(playground_questions.questions(20), 1000))
    assert different == []
    assert codes[0] > 500
    assert codes[2] > 100
    assert (watched.problems, watched.hosts) == ([], {"127.0.0.1"})


def test_an_address_fills_the_form_and_the_form_an_address(fresh, address):
    page = fresh().open(f"{address}?gpu=RTX+4090&heads=32&kv-heads=8&seqlen=8k&inference")
    page.wait_for_selector("#panel-report h3")
    assert (page.input_value("#f-gpu"), page.input_value("#f-training")) == ("RTX 4090", "inference")
    assert json.loads(page.text_content("#panel-json pre"))["params"]["num_gqa_groups"] == 8
    page.fill("#f-gpu", "A100")
    page.press("#f-gpu", "Enter")
    page.locator("#command", has_text="--gpu=A100").wait_for()
    assert "gpu=A100" in page.url
    page.go_back()
    page.locator("#command", has_text="--gpu=RTX 4090").wait_for()


@pytest.mark.parametrize(("theme", "size"), [("light", DESKTOP), ("dark", PHONE)], ids=["desktop", "phone"])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_screen(fresh, address, theme, size):
    # the checker is injected, which the page's own policy would refuse
    page = fresh(color_scheme=theme, bypass_csp=True, reduced_motion="reduce", **size).open(address)
    for query in (playground.FIRST, "gpu=H100&dtype=foo", GRID):
        browser.go(page, query)
        page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert axe.violations(page) == [], query
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), query
