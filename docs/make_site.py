"""Build the documentation site, and check it.

    python docs/make_site.py                      # into site/, which git ignores
    python docs/make_site.py --serve              # and show it on http://127.0.0.1:8000

The first build takes about a minute on two idle cores. A warning is an error. The folder is replaced only by
a site that is whole.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))  # the pages are about this checkout

from sitegen import sources  # noqa: E402
from sitegen.build import SiteError, build  # noqa: E402
from sitegen.playground.bundle import NotFetched  # noqa: E402


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="the folder to write")
    parser.add_argument(
        "--address", default="", help="where it will be published, such as https://host/attnsel/"
    )
    parser.add_argument(
        "--without",
        action="append",
        choices=["playground"],
        default=[],
        help="leave it out: the playground takes npm, and 20 s of CPU the first time",
    )
    parser.add_argument("--external", action="store_true", help="list the links to other hosts")
    parser.add_argument("--serve", action="store_true", help="then serve it, until interrupted")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args(words)
    began = time.monotonic()
    try:
        built = build(sources.files(asked.without), asked.output.resolve(), asked.address)
    except (SiteError, NotFetched) as error:
        print(error, file=sys.stderr)
        if isinstance(error, NotFetched):
            print("the rest of the site: --without playground", file=sys.stderr)
        return 1
    for address, page in sorted(built.external.items()) if asked.external else ():
        print(f"{page}: {address}")
    took = time.monotonic() - began
    print(f"{built.folder}: {built.pages} pages, {built.bytes / 1e6:.1f} MB, {took:.1f} s, links checked")
    if asked.serve:
        serve(built.folder, asked.port)
    return 0


def serve(folder: Path, port: int) -> None:
    """Show a folder to this machine alone, until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    sys.exit(main())
