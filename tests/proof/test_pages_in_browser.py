"""The pages of ``--html`` in a real browser: nothing is asked for, and every reason is reached by keys.

Nightly (.ci/full): it needs a Chromium, and what npm brings.
"""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("tomllib", reason="the site is built with Python 3.11 or newer")

import axe
import playground_browser as browser
from attnsel import cli
from sitegen.playground import bundle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.why_not() != "", reason=browser.why_not() or "there is a browser"),
]
MARKUP = '</script><script>alert(1)</script><img src="http://example.com/x" onerror="alert(2)">'
COMMANDS = {
    "call": "explain --gpu H100 --softcap 30 --head-dim 96",
    "other library": "explain --gpu A100 --as te --torch 2.6 --attn-mask-type padding_causal",
    "padded": "explain --gpu H100 --head-dim 100 --cp-size 4",
    "model": "explain --gpu T4 --model qwen3-next-80b-a3b",
    "markup": "explain --gpu H100 --model MODEL",
    "compare": "compare A100 T4 --model gemma-3-4b",
    "grid of questions": "compare gpu=H100,torch=2.6 gpu=H100,torch=2.14 B200",
    "features": "can-i-use --gpu H100",
    "gpus": "can-i-use softcap fp8",
    "plane": "can-i-use --gpu H100 --rows head_dim_qk=64,256,512 --cols attn_mask_type=causal,padding_causal",
}
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}
FOCUSED = "[...document.querySelectorAll('[data-tip]')].indexOf(document.activeElement)"
CODE = re.compile(r"\b[A-Z]{2,}\d{3}\b")


@pytest.fixture(scope="module")
def chromium():
    try:
        bundle.fetch()
    except bundle.NotFetched as error:
        pytest.skip(str(error))
    with browser.chromium() as started:
        yield started


@pytest.fixture(scope="module", params=COMMANDS)
def file(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    config = {"model_type": f"gemma3_text{MARKUP}", "architectures": [MARKUP], "num_hidden_layers": 2}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "hidden_size": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    words = COMMANDS[request.param].replace("MODEL", str(folder)).split()
    assert cli.main([*words, "--html", str(folder / "page.html")]) in (0, 3)
    return folder / "page.html"


@pytest.fixture
def opened(chromium, file):
    """The page in a context of its own; nothing may go wrong in it, and nothing may be asked for."""
    made = []

    def open_page(theme="light", size="desktop"):
        watched = browser.Watched(chromium, color_scheme=theme, viewport=SIZES[size], reduced_motion="reduce")
        made.append(watched)
        watched.page.goto(file.as_uri())
        return watched.page

    yield open_page
    for watched in made:
        assert watched.problems == []
        assert watched.hosts == {"data"}  # the file itself: it has no host
        assert watched.page.evaluate("performance.getEntriesByType('resource').map((one) => one.name)") == []
        watched.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_screen(opened, theme, size):
    page = opened(theme, size)
    for open_all in (False, True):
        if open_all and page.is_visible("#all"):
            page.click("#all")
        assert axe.violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_switch_turns_the_page_over(opened):
    page = opened("dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    page.click("#theme")
    assert page.evaluate(colour) != dark
    assert axe.violations(page) == []


def test_every_reason_is_reached_by_keys(opened):
    """Tab through the page, opening what is closed and walking through each map: what had the focus."""
    page = opened()
    reached: set[str] = set()
    words = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
    for _ in range(4000):
        page.keyboard.press("Tab")
        there = page.evaluate("document.activeElement.tagName")
        if there == "BODY":
            break
        reached.add(page.evaluate(words))
        if page.evaluate("document.activeElement.matches('details:not([open]) > summary')"):
            page.keyboard.press("Enter")
        if page.evaluate("document.activeElement.matches('[data-tip]')"):
            assert page.is_visible("#tip")
            page.keyboard.press("Escape")
            assert not page.is_visible("#tip")
    named = set(
        CODE.findall(
            page.evaluate("[...document.querySelectorAll('a.rule')].map((one) => one.textContent).join(' ')")
        )
    )
    assert named <= {code for text in reached for code in CODE.findall(text)}
    assert page.locator("details.fold:not([open])").count() == 0


def test_arrows_walk_through_every_tile(opened):
    page = opened()
    maps = page.locator("[data-roving]:visible")
    for number in range(min(2, maps.count())):
        tiles = maps.nth(number).locator("[data-tip]")
        tiles.first.focus()
        seen: set[int] = set()
        before = None
        while page.evaluate(FOCUSED) != before:  # row by row, until none is below
            _pressed(page, "ArrowLeft", seen)
            before = _pressed(page, "ArrowRight", seen)
            page.keyboard.press("ArrowDown")
        assert len(seen) == tiles.count()


def _pressed(page, key, seen):
    """A key until it leads no further: what had the focus goes into ``seen``; the last of it."""
    last = None
    while (here := page.evaluate(FOCUSED)) != last:
        last = here
        seen.add(here)
        page.keyboard.press(key)
    return last


def test_a_code_is_found(opened):
    page = opened()
    code = page.locator(".explained .rule").first
    if not code.count():
        return
    wanted = code.text_content()
    page.fill("#find", wanted.lower())
    assert re.fullmatch(r"\d+ places?", page.text_content("#found"))
    page.keyboard.press("Enter")
    page.fill("#find", "no such word")
    assert page.text_content("#found") == "nowhere"
    page.fill("#find", "")
    assert page.locator(".missed").count() == 0


def test_what_is_printed_is_open(opened):
    page = opened("dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details.fold:not([open])").count() == 0
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
