"""Says of each `owner/name#number` given for what it may be read (to measure, to learn), and if it was.

A measure is of threads that nobody here has read: what a file of this repository names was read, and
read.txt lists what was read and is named by no other. Of all others half are kept for measures: the
last bit of their link's sha256 parts them.
"""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

LINK = re.compile(r"([\w.-]+/[\w.-]+)(?:#|/(?:issues|pull|discussions)/)(\d+)")
ROOT = Path(__file__).parents[5]


def links_that_files_name() -> set[str]:
    """The links in every file that git knows, in lower case."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (ROOT / name for name in listed.stdout.split("\0"))
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in paths if path.is_file())
    return {f"{repository}#{number}".lower() for text in texts for repository, number in LINK.findall(text)}


if __name__ == "__main__":
    named = links_that_files_name()
    for link in sys.argv[1:]:
        last_bit = int(hashlib.sha256(link.lower().encode()).hexdigest(), 16) % 2
        print(link, "measure" if last_bit else "learn", "read" if link.lower() in named else "fresh")
