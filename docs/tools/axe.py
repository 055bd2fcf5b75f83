"""What axe-core finds wrong in a page that Playwright drives: one place for every test that asks it.

axe-core comes from npm into the user's cache, as ``docs/sitegen/playground/package.json`` pins it.
It is injected, which a page's own policy would refuse: the context must be made with ``bypass_csp=True``.
"""

from __future__ import annotations

from typing import Any

from sitegen.playground import bundle


def violations(page: Any) -> list[tuple[str, str, str]]:
    """Of each rule of axe-core's that the page breaks: its name, how serious it is, the first element.

    Raises bundle.NotFetched where npm cannot bring axe-core.
    """
    page.evaluate((bundle.fetch().axe / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert len(found["passes"]) > 10, "axe-core looked at next to nothing"
    return [(one["id"], one["impact"], one["nodes"][0]["html"]) for one in found["violations"]]
