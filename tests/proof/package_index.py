"""Writes attnsel/environment/wheels.py: which builds of a recipe's packages PyPI has for Linux x86_64.

    python tests/proof/package_index.py

Asks ``pip index versions``, so it needs a package index. Development builds are left out: pip takes one only
where it is asked to.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "nvidia-cudnn-cu11",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "triton",
    "flash-attn",
    "flash-attn-4",
)
HEAD = '''"""Which builds of a package PyPI has for Linux x86_64, oldest first. Made: do not edit.

    python tests/proof/package_index.py

Source: `pip index versions --pre PACKAGE` on {date}; development builds are left out.
"""

from __future__ import annotations

PUBLISHED: dict[str, str] = {{
{rows}
}}
'''


def builds_of(package: str) -> list[str]:
    """Its versions as the index writes them, oldest first. Raises ValueError where it lists none."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "--pre", package]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120).stdout
    listed = re.search(r"Available versions: (.*)", said)
    if listed is None:
        raise ValueError(f"the index lists no version of {package}")
    versions = [text for text in listed[1].split(", ") if Version(text) >= Version("1")]
    return sorted((text for text in versions if not Version(text).is_devrelease), key=Version)


def row(package: str) -> str:
    """A line of the table, folded where it does not fit."""
    lines = [""]
    for text in builds_of(package):
        if len(lines[-1]) + len(text) > 95:
            lines[-1] += " "
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    body = "\n".join(f'        "{line}"' for line in lines)
    return f'    "{package}": (\n{body}\n    ),'


if __name__ == "__main__":
    date = datetime.datetime.now(datetime.timezone.utc).date()
    text = HEAD.format(date=date, rows="\n".join(row(package) for package in PACKAGES))
    target = ROOT / "attnsel" / "environment" / "published.py"
    target.write_text(text)
    print(target)
