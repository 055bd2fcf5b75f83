"""Where this checkout lies, and where the attnsel that is tested was imported from."""

from __future__ import annotations

from pathlib import Path

import attnsel

ROOT = Path(__file__).resolve().parents[2]
IMPORTED_FROM = Path(attnsel.__file__).resolve().parents[1]
"""The folder above the package: this checkout, or site-packages where a wheel is tested."""
