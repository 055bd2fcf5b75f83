"""The whole site in a real browser, by keyboard alone, in both themes, on a desk and a phone.

Nightly (.ci/full): it needs a Chromium, what npm brings, and minutes.
"""

from __future__ import annotations

import itertools
import re
import time

import pytest

pytest.importorskip("tomllib", reason="the site is built with Python 3.11 or newer")
pytest.importorskip("griffe", reason="the site is built with: griffe")

import axe
import playground_browser as browser
from sitegen import sources
from sitegen.build import build
from sitegen.playground import bundle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.why_not() != "", reason=browser.why_not() or "there is a browser"),
]
SIZES = {"desk": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}
VIEWS = [
    pytest.param(theme, size, id=f"{theme}-{size}")
    for theme, size in itertools.product(("light", "dark"), SIZES)
]
PAGES = (
    "",
    "rules/",
    "rules/cudnn/",
    "rules/CUDNN204/",
    "can-i-use/",
    "can-i-use/sm75/",
    "can-i-use/softcap/",
    "how-to/ask/",
    "reference/cli/",
    "reference/cli/explain/",
    "reference/environment/",
    "reference/glossary/",
    "reference/messages/",
    "reference/messages/pytorch/",
    "tutorials/first-question/",
)
SECTIONS = {
    "rules": "Rules",
    "can-i-use": "Can I use it?",
    "how-to": "How-to",
    "reference": "Reference",
    "tutorials": "Tutorials",
}
PASTED = {
    "No available kernel": "pytorch/#no-available-kernel",
    "flash attention was not used": "pytorch/#flash-attention-kernel-not-used",
    "no kernel image is available": "cuda/#no-kernel-image-is-available",
    "cutlassF: no kernel found to launch": "pytorch/#cutlassf-no-kernel-found",
    "RuntimeError: FlashAttention only supports Ampere GPUs or newer": "flash-attn/#flashattention-only",
}
MOST = 40  # keys until a control has the focus


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The built site, below a folder."""
    root = tmp_path_factory.mktemp("site")
    try:
        build(sources.files(), root / browser.FOLDER)
    except bundle.NotFetched as error:
        pytest.skip(str(error))
    with browser.served(root) as address:
        yield address.removesuffix("playground/")


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as started:
        yield started


@pytest.fixture
def watched(chromium, theme, size):
    """A page that must fetch nothing from elsewhere, and print nothing on its console."""
    looks = {"color_scheme": theme, "viewport": SIZES[size], "reduced_motion": "reduce"}
    may = {"bypass_csp": True, "permissions": ["clipboard-read", "clipboard-write"]}
    made = browser.Watched(chromium, **looks, **may)
    yield made
    hosts, problems = made.hosts - {"data"}, made.problems
    made.close()
    assert (problems, hosts) == ([], {"127.0.0.1"})


def tab_to(page, selector):
    """Press Tab until the control has the focus."""
    for _ in range(MOST):
        if page.evaluate("selector => document.activeElement?.matches(selector)", selector):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{MOST} times Tab do not lead to {selector}")


def type_into(page, selector, text):
    tab_to(page, selector)
    page.keyboard.press("Control+A")
    page.keyboard.type(text)


def asked(page, words):
    """Wait until the answer is that of a command with these words, and no older one's."""
    page.locator("#command", has_text=words).wait_for()
    page.wait_for_selector("#answer:not(.stale):not([aria-busy])")


def in_view(page):
    """Whether the headline of the answer is on the screen."""
    return page.evaluate(
        "() => { const at = document.querySelector('#panel-report h3').getBoundingClientRect();"
        " return at.top >= 0 && at.bottom <= innerHeight; }"
    )


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("theme", "size"), VIEWS)
def test_the_playground_is_asked_changed_shared_and_left_by_keyboard(address, watched, theme, size):
    page = watched.page
    began = time.monotonic()
    page.goto(f"{address}playground/")
    page.locator(".note", has_text="Worked out when this page was built").wait_for()
    assert axe.violations(page) == []
    page.wait_for_selector(browser.UP, timeout=browser.MOST)
    print(f"ready after {time.monotonic() - began:.1f} s")

    type_into(page, "#f-gpu", "A100")  # live: nothing was pressed
    asked(page, "--gpu=A100")
    page.keyboard.press("Enter")
    assert in_view(page)
    assert page.evaluate("document.activeElement.id") == "answer"

    page.keyboard.press("Tab")  # from the answer on
    tab_to(page, "#copy-link")
    page.keyboard.press("Enter")
    page.locator("#said", has_text="Copied").wait_for(state="attached")
    shared = page.evaluate("navigator.clipboard.readText()")
    assert shared == page.url
    page.goto(shared)  # as who gets the link
    page.wait_for_selector(browser.UP, timeout=browser.MOST)
    asked(page, "--gpu=A100")

    type_into(page, "#f-head-dim", "256")
    asked(page, "--head-dim=256")
    page.go_back()
    asked(page, "--head-dim=128")
    assert page.input_value("#f-head-dim") == "128"

    type_into(
        page, "#f-gpu", "A1"
    )  # no GPU: the answer before it stays, dimmed, and is not taken for this one's
    page.wait_for_selector("#answer.stale #error:not([hidden])")
    page.reload()
    page.wait_for_selector(browser.UP, timeout=browser.MOST)

    tab_to(page, "#presets li:nth-child(3) a")
    page.keyboard.press("Enter")
    asked(page, "--cudnn=9.1.0")
    assert in_view(page)
    assert fits(page)
    assert axe.violations(page) == []


@pytest.mark.parametrize(("theme", "size"), VIEWS)
def test_pages_break_no_rule_of_axe_and_are_no_wider_than_the_screen(address, watched, theme, size):
    page = watched.page
    found = {}
    for path in PAGES:
        page.goto(address + path, wait_until="load")
        page.wait_for_timeout(300)  # the theme's script builds buttons
        found[path] = (axe.violations(page), fits(page))
        if path:
            section = page.locator(".md-tabs__item--active a").first.inner_text(timeout=1000)
            assert section == SECTIONS[path.split("/")[0]], path
    assert {path: what for path, what in found.items() if what != ([], True)} == {}


@pytest.mark.parametrize(("theme", "size"), [VIEWS[0], VIEWS[3]])
def test_a_filter_and_a_search_by_keyboard(address, watched, theme, size):
    page = watched.page
    page.goto(f"{address}can-i-use/")
    type_into(page, "#ciu-filter", "softcap")
    assert page.locator(".ciu-table tbody tr:visible").count() == 1
    assert page.url.endswith("can-i-use/?filter=softcap")
    page.reload()
    assert page.locator(".ciu-table tbody tr:visible").count() == 1
    page.locator("article a", has_text="sm75").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/sm75/?filter=softcap")
    assert page.locator(".ciu-table tbody tr:visible").count() == 1

    for words, place in PASTED.items():
        page.goto(f"{address}rules/CUDNN204/")
        page.locator("article h1").wait_for()
        page.keyboard.press("/")
        page.wait_for_timeout(300)
        page.keyboard.type(words)
        first = page.locator("css=ol li a:visible", has_text=re.compile("Messages of")).first
        first.wait_for(timeout=20_000)
        page.wait_for_timeout(300)
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"reference/messages/"), timeout=20_000)
        library, anchor = place.split("/")
        assert f"/{library}/" in page.url, words
        assert anchor in page.url, words


@pytest.mark.parametrize(("theme", "size"), [VIEWS[0]])
def test_the_front_page_shows_and_copies_its_own_command(address, watched, theme, size):
    page = watched.page
    page.goto(address)
    page.wait_for_selector(".language-console button")
    cut = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth).length"
    assert page.eval_on_selector_all("article pre > code", cut) == 0
    page.locator(".language-console button").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    command = page.evaluate("navigator.clipboard.readText()")
    assert re.fullmatch(r"attnsel explain [^\n$]+ --short", command)
    page.goto(f"{address}rules/CUDNN204/")
    assert page.locator(".md-path a").all_inner_texts() == ["Home", "Rules", "CUDNN"]
