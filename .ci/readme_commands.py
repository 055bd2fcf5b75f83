"""README.md's set-up commands, as they stand: what the gate pastes.

    python .ci/readme_commands.py 1      # installs, and shows attention computed and explained
    python .ci/readme_commands.py 2      # installs what the tests need, and runs them

They are the two ``sh`` blocks below the heading "Set up". Anything but two is an error, not a guess.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
MUST_HOLD = ("pip install", "pytest")


def commands(text: str) -> list[str]:
    """Both commands. Raises ValueError that says what was found instead."""
    section = re.search(r"^## Set up\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if section is None:
        raise ValueError('there is no heading "## Set up"')
    found = re.findall(r"^```sh\b[^\n]*\n(.*?)^```$", section[1], re.M | re.S)
    if len(found) != len(MUST_HOLD):
        raise ValueError(f'below "## Set up" stand {len(found)} sh blocks, not {len(MUST_HOLD)}')
    for number, (command, word) in enumerate(zip(found, MUST_HOLD, strict=True), 1):
        if word not in command:
            raise ValueError(f"set-up command {number} holds no {word!r}: {command.strip()}")
    return [command.strip() for command in found]


def main(words: list[str]) -> int:
    if words not in (["1"], ["2"]):
        print("usage: readme_commands.py 1|2", file=sys.stderr)
        return 2
    try:
        print(commands(README.read_text(encoding="utf-8"))[int(words[0]) - 1])
    except ValueError as error:
        print(f"README.md: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
