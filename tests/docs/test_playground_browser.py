"""The playground in a real browser, offline: the command's own answers, by mouse, keyboard and address."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import zipfile
from urllib.parse import quote

import pytest

pytest.importorskip("tomllib", reason="the site is built with Python 3.11 or newer")

import playground_browser as browser
import playground_questions
from sitegen import playground
from sitegen.playground import bundle, form

pytestmark = pytest.mark.skipif(browser.why_not() != "", reason=browser.why_not() or "there is a browser")

SEED = 20
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The playground's files, below a folder."""
    root = tmp_path_factory.mktemp("site")
    try:
        browser.write(root)
    except bundle.NotFetched as error:
        pytest.skip(str(error))
    return root


@pytest.fixture(scope="module")
def address(root):
    with browser.served(root) as address:
        yield address


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as started:
        yield started


@pytest.fixture(scope="module")
def opened(chromium, address):
    """One page for many tests, with Python up: it must stay without a fault to the end."""
    watched = browser.Watched(chromium, viewport={"width": 1280, "height": 900})
    watched.open(address)
    yield watched
    watched.close()
    assert watched.problems == []
    assert watched.hosts == {"127.0.0.1"}


@pytest.fixture
def page(opened, address):
    browser.go(opened.page, playground.FIRST)
    return opened.page


@pytest.fixture
def fresh(chromium):
    """Pages of their own, with other settings."""
    made = []

    def make(**options):
        made.append(browser.Watched(chromium, **options))
        return made[-1]

    yield make
    for watched in made:
        watched.close()


def test_random_questions_are_answered_as_by_the_command(page):
    codes, different = browser.differing(page, itertools.islice(playground_questions.questions(SEED), 50))
    assert different == []
    assert codes[0] > 25
    assert codes[2] > 5


@pytest.mark.slow
def test_a_thousand_random_questions_are_answered_as_by_the_command(page):
    codes, different = browser.differing(page, itertools.islice(playground_questions.questions(SEED), 1000))
    assert different == []
    assert codes[0] > 500
    assert codes[2] > 100
    assert codes[3] > 20


# ---- the address --------------------------------------------------------------------------------------


def test_a_link_holds_its_question_for_every_field(page):
    draw = playground_questions
    for field in form.fields(playground.glue().NOT_HERE):
        values = [""] if field.yes_or_no else [*field.choices[:2], *map(str, field.suggestions[:1])]
        values = values or [str(draw._NUMBERS.get(field.name, draw._TEXTS.get(field.name, ("x",)))[0])]
        for name, value in itertools.product([n for n in (*field.names, field.negative) if n], values):
            asked = f"gpu=H200&{name}={value}" if value else f"gpu=H200&{name}"
            query = asked if field.name != "gpu" else f"{name}={value}"
            page.evaluate(
                "async (query) => (await import('./fields.js')).fill(document.forms[0], query)",
                query.replace(" ", "+"),
            )
            written = page.evaluate("async () => (await import('./fields.js')).asked(document.forms[0])")
            own = (value and f"{field.name}={value.replace(' ', '+')}") or name
            assert own in written.split("&"), (query, written)


def test_a_pasted_link_is_answered_and_fills_the_form(fresh, address):
    page = fresh().open(f"{address}?gpu=RTX+4090&heads=32&kv-heads=8&seqlen=8k&inference")
    page.wait_for_selector("#panel-report h3")
    assert page.input_value("#f-gpu") == "RTX 4090"
    assert page.input_value("#f-num-heads") == "32"
    assert page.input_value("#f-seqlen") == "8k"
    assert page.input_value("#f-training") == "inference"
    said = json.loads(page.text_content("#panel-json pre"))
    assert said["params"]["num_gqa_groups"] == 8
    assert page.inner_text("#command").startswith("attnsel explain '--gpu=RTX 4090' --heads=32")


def test_back_and_forward_go_through_the_questions(page):
    page.fill("#f-gpu", "A100")
    page.press("#f-gpu", "Enter")
    page.locator("#command", has_text="--gpu=A100").wait_for()
    page.select_option("#f-dtype", "fp32")
    page.locator("#command", has_text="--dtype=fp32").wait_for()
    page.go_back()
    page.locator("#command", has_text=re.compile("--gpu=A100(?!.*fp32)")).wait_for()
    assert page.input_value("#f-dtype") == ""
    page.go_back()
    page.locator("#command", has_text="--gpu=H100").wait_for()
    assert page.input_value("#f-gpu") == "H100"
    page.go_forward()
    page.go_forward()
    page.locator("#command", has_text="--dtype=fp32").wait_for()
    assert page.input_value("#f-dtype") == "fp32"
    assert page.url.endswith("?gpu=A100&cudnn=9.1.0&dtype=fp32&training&head-dim-qk=192&head-dim-v=128")


@pytest.mark.parametrize(
    "attack", ["<img src=x onerror=document.title='pwned'>", "</script><script>alert(1)</script>"]
)
def test_markup_in_an_address_stays_text(fresh, address, attack):
    watched = fresh()
    page = watched.open(f"{address}?gpu={quote(attack)}&dtype={quote(attack)}&{quote(attack)}")
    page.wait_for_selector("#error:not([hidden])")
    assert "<" in page.inner_text("#error")
    assert page.title() == "attnsel playground"
    assert page.locator("#answer img, #answer script, #answer b, form img, form script").count() == 0
    assert page.input_value("#f-gpu") == attack
    assert page.input_value("#f-dtype") == attack
    assert watched.problems == []


def test_a_very_long_address_is_refused_in_a_sentence(fresh, address):
    page = fresh().open(f"{address}?gpu=" + "x" * 20_000)
    page.wait_for_selector("#error:not([hidden])")
    assert re.fullmatch(r"the question has \d+ characters; at most 4000 are read", page.inner_text("#error"))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_bad_value_marks_its_field(page):
    browser.go(page, "gpu=H100&window-size=a,b")
    assert page.inner_text("#error").startswith("--window-size a: must be a whole number")
    assert page.get_attribute("#f-window-size", "aria-invalid") == "true"
    assert page.is_visible("#f-window-size")
    browser.go(page, "gpu=H100")
    assert page.get_attribute("#f-window-size", "aria-invalid") is None


# ---- the answer ---------------------------------------------------------------------------------------


def test_a_rule_of_the_report_is_a_link_to_its_page(page):
    link = page.locator("#panel-report a", has_text="CUDNN204").first
    assert link.get_attribute("href") == "../rules/CUDNN204/"


def test_the_report_has_the_words_of_the_command(page):
    page.click("#tab-text")
    page.locator("#panel-text pre", has_text="Why a rule").wait_for()
    page.click("#tab-report")
    headline = page.inner_text("#panel-report h3")
    text = " ".join(page.text_content("#panel-text pre").split())
    assert text.startswith(headline)
    rows = page.locator("#panel-report tbody tr")
    assert rows.count() == len(json.loads(page.text_content("#panel-json pre"))["candidates"])
    assert page.locator("#panel-report .paste code").first.inner_text() == "pip install 'torch==2.7.0'"


def test_a_cell_of_a_grid_opens_its_answer(page):
    browser.go(page, "gpu=H100&rows=head_dim_qk=64,192&cols=cudnn=8.9.7,9.5.0&candidate=cudnn")
    page.locator("#panel-report tbody tr", has_text="192").locator("a").first.click()
    page.locator("#command", has_text="attnsel explain --head-dim-qk=192 --cudnn=8.9.7").wait_for()
    page.wait_for_selector("#panel-report h3")
    assert json.loads(page.text_content("#panel-json pre"))["params"]["head_dim_qk"] == 192


def test_what_is_copied_is_the_command_and_the_link(fresh, address):
    watched = fresh(permissions=["clipboard-read", "clipboard-write"])
    page = watched.open(f"{address}?gpu=RTX+4090&window-size=128,0")
    page.wait_for_selector("#panel-report h3")
    page.click("#copy-command")
    read = "navigator.clipboard.readText()"
    assert page.evaluate(read) == "attnsel explain '--gpu=RTX 4090' --window-size=128,0"
    page.click("#copy-link")
    assert page.evaluate(read) == f"{address}?gpu=RTX+4090&window-size=128,0"


def test_the_whole_page_works_from_the_keyboard(fresh, address):
    page = fresh(viewport={"width": 1280, "height": 900}).open(address)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the answer"
    page.focus("#f-gpu")
    page.keyboard.press("Control+A")
    page.keyboard.type("T4")
    page.keyboard.press("Control+Enter")
    page.locator("#command", has_text="--gpu=T4").wait_for()
    assert page.evaluate("document.activeElement.id") == "answer"
    page.focus("#tab-report")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-text"
    assert page.is_visible("#panel-text")
    page.keyboard.press("ArrowLeft")
    assert page.is_visible("#panel-report")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_the_theme_is_remembered(fresh, address):
    watched = fresh(color_scheme="light")
    page = watched.page
    page.goto(address)
    assert page.inner_text("#theme") == "Theme: system"
    page.click("#theme")
    page.click("#theme")
    page.reload()
    assert page.inner_text("#theme") == "Theme: dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"


# ---- before Python is up, and without it --------------------------------------------------------------


def test_the_first_answer_is_there_before_python(fresh, address):
    watched = fresh()
    watched.context.route("**/pyodide.asm.wasm.gzip*", lambda route: None)  # under way for ever
    page = watched.page
    page.goto(address)
    assert page.inner_text("#panel-report h3").startswith("sdpa.flash runs and pads head_dim_v 128")
    assert re.match(r"Python is loading: \d+\.\d of \d+\.\d MB, \d+\.\d s", page.inner_text("#state"))
    page.fill("#f-gpu", "A100")
    page.press("#f-gpu", "Enter")
    page.locator("#panel-report", has_text="The answer comes when Python is up.").wait_for()


def test_without_scripts_the_answer_can_be_read(fresh, address):
    watched = fresh(java_script_enabled=False)
    watched.page.goto(address)
    assert "To get cudnn: upgrade cuDNN" in watched.page.inner_text("#panel-report pre")
    assert "Other questions need JavaScript here" in watched.page.inner_text("noscript")


def test_python_that_does_not_start_is_told(fresh, address):
    for name in ("pyodide.asm.wasm.gzip", "packages.zip.gzip", "pyodide.asm.mjs"):
        watched = fresh()
        watched.context.route(f"**/{name}*", lambda route: route.fulfill(status=404))
        page = watched.page
        page.goto(f"{address}?gpu=A100")
        page.wait_for_selector(browser.FAILED, timeout=browser.MOST)
        assert page.inner_text("#state").startswith("Python did not start: "), name
        assert name in page.inner_text("#state"), page.inner_text("#state")
        assert page.is_visible("#again")
        page.wait_for_selector("#error:not([hidden])")


def test_a_module_that_no_answer_needed_is_fetched_when_it_is_missed(fresh, address, root):
    """With the chooser of PyTorch moved out of what is loaded first."""
    moved = "attnsel/dispatchers/torch/"
    files = root / browser.FOLDER / "playground/python"
    packages, rest = (_unpacked(files / f"{name}.zip.gzip") for name in ("packages", "rest"))
    for name in [name for name in packages if name.startswith(moved)]:
        rest[f"packages/{name}"] = packages.pop(name)
    watched, asked = fresh(), []
    watched.context.route("**/packages.zip.gzip*", lambda route: route.fulfill(body=_packed(packages)))
    watched.context.route("**/rest.zip.gzip*", lambda route: route.fulfill(body=_packed(rest)))
    watched.page.on("request", lambda request: asked.append(1) if "rest.zip" in request.url else None)
    page = watched.open(address)
    browser.go(page, "gpu=A100")
    assert not asked
    for _ in range(2):
        said = browser.go(page, "gpu=A100&as=torch")
        assert said["json"]["out"] == browser.printed(["explain", "--gpu=A100", "--as=torch", "--json"])[1]
    assert len(asked) == 1


def _unpacked(file):
    with zipfile.ZipFile(io.BytesIO(gzip.decompress(file.read_bytes()))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _packed(files):
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return gzip.compress(written.getvalue(), 1)


# ---- accessibility ------------------------------------------------------------------------------------


SLOWER = pytest.mark.slow


@pytest.mark.parametrize(
    ("theme", "size"),
    [
        ("light", "desktop"),
        ("dark", "phone"),
        pytest.param("dark", "desktop", marks=SLOWER),
        pytest.param("light", "phone", marks=SLOWER),
    ],
)
def test_axe_finds_nothing(fresh, address, theme, size):
    options = PHONE if size == "phone" else {"viewport": {"width": 1280, "height": 900}}
    # the checker is injected, which the page's own policy would refuse
    watched = fresh(color_scheme=theme, bypass_csp=True, reduced_motion="reduce", **options)
    page = watched.open(address)
    for query in (
        playground.FIRST,
        "gpu=H100&dtype=foo",
        "gpu=H100&rows=head_dim_qk=64,192&cols=cudnn=8.9.7,9.5.0",
    ):
        browser.go(page, query)
        page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert browser.axe(page) == [], query


def test_nothing_is_wider_than_a_phone(fresh, address):
    page = fresh(**PHONE).open(address)
    grid = "gpu=H100&rows=head_dim_qk=64,128,192,256&cols=cudnn=8.9.7,9.1.0,9.5.0,9.10.0,9.14.0,9.20.0"
    for query in (playground.FIRST, "gpu=H100&as=te", grid):
        browser.go(page, query)
        assert page.evaluate("document.documentElement.scrollWidth") == 360, query
