"""Every command that an output advises, run in the place where it was advised.

    python tests/proof/advised_commands.py                    # with this environment's attnsel
    python tests/proof/advised_commands.py --python ENV/bin/python --pip

Outputs are the records of what attnsel prints: tests/net and the answers about logs. A command of attnsel's
own runs in an empty folder with the attnsel of ``--python`` (a checkout's, a wheel's) and must not end in
"bad input". What installs is asked of pip, with ``--pip`` (which fetches metadata): there must be such a
release. What names attnsel on a package index needs a release of attnsel and is listed as such; until there
is one, nothing may advise it. A command with a place to fill in (PROGRAM, FILE) is listed, and not run.

Exit code: 0 every command worked or is listed, 4 one did not, or advises an index that has no attnsel.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ("tests/net/words", "tests/net/words_with_torch", "tests/attnsel/diagnose/logs")
COMMANDS = "explain|can-i-use|rules?|gpus|doctor|watch|run|report|replay|prove|completion"
OWN = re.compile(rf"(?<![\w/.-])(attnsel (?:{COMMANDS})(?= |$)[^;`|\n]*)")
INSTALLS = re.compile(r"(?<![\w-])((?:python -m )?pip install [^;`#()\n]*)")
ARGUMENT = re.compile(r"[A-Z]+\d{3}|--?[\w-]+(=\S+)?|sm\d+|[\w-]+\.(py|json|txt|jsonl)|\d\S*")
YES_OR_NO = re.compile(
    r"--(json|short|markdown|help|help-all|training|inference|time|memory|sdpa|ask-library)"
)
SAYS = ("says", "prints", "shows", "lists", "gives", "names", "asks", "explains", "and", "or")
ALONE = ("explain", "can-i-use", "rules", "gpus", "doctor")  # the others say nothing without an argument
TO_FILL_IN = re.compile(r"\b(PROGRAM|FILE|FOLDER|NAME|REQUEST)\b|\.py\b|\.jsonl?\b|\.txt\b|\{")


def texts() -> Iterator[str]:
    """What was printed, without what was typed; a continued command in one line."""
    for folder in RECORDS:
        for path in sorted((ROOT / folder).glob("*.txt")):
            if path.name.startswith(("error_", "did_you_mean_")):
                continue  # what is wrong with what was typed
            text = re.sub(r" \\\n\s+", " ", path.read_text(encoding="utf-8"))
            yield "\n".join(line for line in text.split("\n") if not line.startswith(("$ ", "---")))


def own(said: str) -> str:
    """The words of a sentence that belong to its command: flags, their values, codes, numbers and files."""
    try:
        words = shlex.split(said)
    except ValueError:  # an apostrophe behind the command
        words = said.split()
    kept = words[:2]
    for word in words[2:]:
        if word.rstrip(".,:") in SAYS:
            break
        value = kept[-1].startswith("--") and not YES_OR_NO.fullmatch(kept[-1])
        if not value and not ARGUMENT.fullmatch(word.rstrip(".,:")):
            break
        kept.append(word.rstrip(".,:"))
    return shlex.join(kept)


def advised() -> tuple[set[str], set[str]]:
    """attnsel's own commands, and those that install."""
    every = list(texts())
    commands = {own(found[1]) for text in every for found in OWN.finditer(text)}
    return commands, {found[1].strip(" .,") for text in every for found in INSTALLS.finditer(text)}


def complete(words: list[str]) -> bool:
    """Whether a command says what it is about."""
    if words[-1].startswith("--") and not YES_OR_NO.fullmatch(words[-1]):
        return False
    return bool(words[2:]) or words[1] in ALONE


def works(python: str, words: list[str]) -> str:
    """What went wrong; "" where nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([python, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=600)
    return done.stderr.strip().split("\n")[-1] if done.returncode in (1, 2) else ""


def main() -> int:
    """All of them, told one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="of the environment whose attnsel is asked")
    parser.add_argument("--pip", action="store_true", help="also ask pip for what is to be installed")
    options = parser.parse_args()
    commands, installs = advised()
    failed = 0
    for command in sorted(commands | installs):
        words = shlex.split(command) if command in commands else command.replace("'", "").split()
        if command in installs and any(re.match(r"attnsel(\[|$|=)", word) for word in words):
            said, bad = "needs a release", True
        elif command in installs and not options.pip:
            said, bad = "installs: not asked", False
        elif command in installs:
            bad = bool(
                why := works(options.python, ["pip", *words[1:2], "--dry-run", "--no-deps", *words[2:]])
            )
            said = why or "worked"
        elif TO_FILL_IN.search(command) or words[1] == "prove" or not complete(words):
            said, bad = "to be filled in", False
        else:
            said, bad = (why, True) if (why := works(options.python, words)) else ("worked", False)
        failed += bad
        print(f"{'✖' if bad else '✔'} {command}: {said}", flush=True)
    print(f"{len(commands)} commands of attnsel's, {len(installs)} that install: {failed} did not work")
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
