"""The pictures of the playground in README.md: the page as it opens, light and dark.

    python docs/tools/playground_pictures.py

It needs a Chromium and `pip install -e . --group browser pillow`. The same page gives the same picture.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs"), str(HERE)]

import playground_browser as browser  # noqa: E402

NAMES = {"light": "playground.png", "dark": "playground-dark.png"}
SIZE = {"width": 1200, "height": 860}
COLOURS = 128
LARGEST = 150_000  # bytes


def main() -> int:
    if browser.why_not():
        print(browser.why_not(), file=sys.stderr)
        return 2
    images = ROOT / "docs" / "images"
    images.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        browser.write(Path(folder))
        with browser.served(Path(folder)) as address, browser.chromium() as chromium:
            for theme, name in NAMES.items():
                watched = browser.Watched(chromium, viewport=SIZE, color_scheme=theme)
                page = watched.open(address)
                # seconds and bytes differ from run to run
                page.evaluate("document.getElementById('loading').hidden = true")
                small = smaller(page.screenshot())
                watched.close()
                assert len(small) < LARGEST, f"{name} has {len(small)} bytes"
                (images / name).write_bytes(small)
                print(f"{images / name}: {len(small)} bytes")
    return 0


def smaller(png: bytes) -> bytes:
    """The picture with a palette."""
    from PIL import Image

    written = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    rare_too = Image.Quantize.MAXCOVERAGE  # the green of a mark is a few points
    picture.quantize(COLOURS, method=rare_too, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return written.getvalue()


if __name__ == "__main__":
    sys.exit(main())
