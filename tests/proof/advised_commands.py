"""Every command that an output, README or docs/ advise, run in the place where it is advised.

    python tests/proof/advised_commands.py            # in a place that has the wheel and nothing else
    python tests/proof/advised_commands.py --python ENV/bin/python
    python tests/proof/advised_commands.py --index    # also ask the package index for what is installed

Outputs are the records of what attnsel prints: tests/net and the answers about logs. A place is an
environment that was made of a folder of wheels without an index (installed.py). A command of attnsel's own
runs there in an empty folder, without a network and for a minute at most, and must not end in "bad input";
each is a process of its own, forked from one that has read attnsel's commands and asked nothing. A command
with a place to fill in (PROGRAM, FILE) and one whose flags want a value are listed, and not run.

What installs is read as a list of requirements: with --index, PyPI must have such a release of each. What
names attnsel on an index needs a release of attnsel; until there is one, nothing may advise it.

Exit code: 0 every command worked or is listed, 4 one did not, or advises an index that has no attnsel.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

import installed
import package_index
from attnsel.cli import COMMANDS
from attnsel.cli.flags import FLAGS, SHORTHANDS

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ("tests/net/words", "tests/net/words_with_torch", "tests/attnsel/diagnose/logs")
PAGES = ("README.md", "docs/README.md", "docs/*/*.md", "examples/README.md")
PIPED = r"(?:echo '(?P<input>[^']*)' \| )?"
OWN = re.compile(rf"(?m){PIPED}(?<![\w/.-])(?P<words>attnsel (?:{'|'.join(COMMANDS)})(?= |$)[^;`|\n]*)")
INSTALLS = re.compile(r"(?<![\w-])((?:python -m )?pip install [^;`#()\n]*)")
ARGUMENT = re.compile(r"-|[A-Z]+\d{3}|--?[\w-]+(=\S+)?|sm\d+|[\w-]+\.(py|json|txt|jsonl|html)|\d\S*")
YES_OR_NO = {
    *("--json", "--short", "--markdown", "--csv", "--help", "--help-all"),
    *("--time", "--memory", "--measure", "--ranges", "--ask-library", "--sdpa", "--transformers"),
}
YES_OR_NO |= {name for flag in (*SHORTHANDS, *FLAGS) if flag.negative for name in (flag.name, flag.negative)}
SAYS = ("says", "prints", "shows", "lists", "gives", "names", "asks", "explains", "and", "or")
ALONE = ("explain", "can-i-use", "rules", "gpus", "doctor")  # the others say nothing without an argument
OF_A_PROGRAM = ("run", "watch", "replay", "prove")
TO_FILL_IN = re.compile(r"\b(PROGRAM|FILE|FOLDER|NAME|REQUEST)\b|\.(py|jsonl?|txt|log|csv)\b|\{|\$|/( |$)|…")
MADE_BY_ITS_READER = re.compile("ACME001|CUDNN245")  # rules that a page lets its reader write
TORCH_ALONE = "needs PyTorch, which is not installed here"
QUOTED = re.compile(r"\$ |---|> |.*\b(error|known|note): ")  # what was typed, and what other programs say
SECONDS = 60  # that one command may take
JOBS = 2
# Flags of pip's, and whether a value follows.
PIP_FLAGS = {"--index-url": True, "--target": True, "--group": True, "-e": True, "-r": True}
NO_NAME = re.compile(
    r"(it|the|a|of|and|or|with|without|where|in|from|for|on|before|beside|brings|builds|compiles|does|silences|takes|"
    r"which|then|what)"
)


def texts() -> Iterator[str]:
    """What was printed, without what was typed, and what pages say; a continued command in one line."""
    records = [path for folder in RECORDS for path in sorted((ROOT / folder).glob("*.txt"))]
    for path in records:
        if not path.name.startswith(("error_", "did_you_mean_")):  # what is wrong with what was typed
            yield "\n".join(line for line in joined(path).split("\n") if not QUOTED.match(line))
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            yield re.sub(r" +# .*", "", joined(path))


def joined(path: Path) -> str:
    return re.sub(r" \\\n\s*", " ", path.read_text(encoding="utf-8"))


def own(said: str) -> str:
    """The words of a sentence that belong to its command: flags, their values, codes, numbers and files."""
    try:
        words = shlex.split(said)
    except ValueError:  # an apostrophe behind the command
        words = said.split()
    kept = words[:2]
    for word in words[2:]:
        if word.strip('.,:"') in SAYS:
            break
        value = kept[-1].startswith("--") and "=" not in kept[-1] and kept[-1] not in YES_OR_NO
        if not value and not ARGUMENT.fullmatch(word.strip('.,:"')):
            break
        kept.append(word.strip('.,:"'))
    return shlex.join(kept)


def advised() -> tuple[dict[str, str], set[str]]:
    """attnsel's own commands with what they read, and those that install."""
    every = list(texts())
    commands = {own(found["words"]): found["input"] or "" for text in every for found in OWN.finditer(text)}
    return commands, {found[1].strip(" .,\"'") for text in every for found in INSTALLS.finditer(text)}


def complete(words: list[str]) -> bool:
    """Whether a command says what it is about."""
    if words[-1].startswith("--") and "=" not in words[-1] and words[-1] not in YES_OR_NO:
        return False
    return bool(words[2:]) or words[1] in ALONE


def to_be_run(command: str, reads: str) -> str:
    """Why a command is only listed; "" where it is run."""
    words = shlex.split(command)
    if TO_FILL_IN.search(command) or words[1] in OF_A_PROGRAM or not complete(words):
        return "to be filled in"
    if MADE_BY_ITS_READER.search(command):
        return "of a rule that the page makes"
    return "reads what is piped into it" if "-" in words and not reads else ""


# Runs in the place. For each [words, input] of standard input a line with [exit code, last line of errors].
SERVER = f"""
import importlib, json, os, signal, sys, tempfile
from attnsel.cli import COMMANDS, main
for target, _ in COMMANDS.values():
    importlib.import_module(target.partition(":")[0])
for words, reads in json.load(sys.stdin):
    file = tempfile.TemporaryFile
    with tempfile.TemporaryDirectory() as folder, file() as given, file() as said:
        given.write(reads.encode())
        given.seek(0)
        child = os.fork()
        if not child:
            signal.alarm({SECONDS})
            os.chdir(folder)
            for number, stream in enumerate((given, file(), said)):
                os.dup2(stream.fileno(), number)
            sys.stdin, sys.argv = open(0, closefd=False), words
            try:
                code = main(words[1:])
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                code = 1
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        print(json.dumps([code, said.read().decode(errors="replace").strip().split("\\n")[-1]]), flush=True)
"""


def answers(python: Path, questions: list[tuple[str, str]]) -> list[str]:
    """What went wrong with each command and its input; "" where nothing did."""
    given = json.dumps([[shlex.split(command), reads] for command, reads in questions])
    begins = installed.without_network()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*begins, python, "-c", SERVER],
            cwd=folder,
            env=installed.variables(),
            input=given,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(questions), "the place gave too few answers"
    late = -signal.SIGALRM
    return [
        f"not ended after {SECONDS} s" if code == late else error * (code in (1, 2)) for code, error in told
    ]


def requirements(line: str) -> tuple[list[Requirement], bool]:
    """What a line installs, up to the first word that names no package; and whether PyPI is asked for it."""
    found, elsewhere = [], False
    try:
        words = iter(shlex.split(re.split(r", |\\n", line)[0])[line.startswith("python") * 2 + 2 :])
    except ValueError:
        words = iter(re.split(r", |\\n", line)[0].replace("'", "").replace('"', "").split()[2:])
    for word in words:
        if word.startswith("-"):
            elsewhere |= PIP_FLAGS.get(word, False) and bool(next(words, ""))
            continue
        if word.startswith((".", "/", "http", "git+", "$")):
            return found, True
        try:
            if NO_NAME.fullmatch(word):
                break
            found.append(Requirement(word))
        except InvalidRequirement:
            break
    return found, elsewhere


@functools.cache
def on_index(package: str) -> tuple[str, ...]:
    return tuple(package_index.released(package))


def installs(line: str, ask_index: bool) -> tuple[bool, str]:
    """Whether what installs can be installed, and what is said about it."""
    wanted, elsewhere = requirements(line)
    if any(one.name == "attnsel" for one in wanted):
        return False, "needs a release of attnsel"
    if elsewhere:
        return True, "of a checkout, a file or another index: not asked"
    if not wanted:
        return True, "to be filled in"
    if not ask_index:
        return True, "installs: needs an index"
    for one in wanted:
        try:
            listed = on_index(one.name)
        except (OSError, ValueError, KeyError) as error:
            return False, f"{one.name}: {error}"
        if not any(one.specifier.contains(text, prereleases=True) for text in listed):
            return False, f"the index has no {one}"
    return True, "the index has it"


def main() -> int:
    """All of them, told one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", type=Path, help="of the environment whose attnsel is asked")
    parser.add_argument("--index", action="store_true", help="also ask PyPI for what is to be installed")
    options = parser.parse_args()
    commands, lines = advised()
    said = {command: to_be_run(command, reads) for command, reads in commands.items()}
    run = [(command, reads) for command, reads in sorted(commands.items()) if not said[command]]
    wrong: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(JOBS) as pool:
        python = options.python or installed.place(Path(work))
        parts = [run[place::JOBS] for place in range(JOBS)]
        for part, told in zip(parts, pool.map(answers, [python] * JOBS, parts), strict=True):
            for (command, _), error in zip(part, told, strict=True):
                lacking = TORCH_ALONE in error
                wrong |= {command: error} if error and not lacking else {}
                said[command] = "works where PyTorch is" if lacking else error or "worked"
    for line in sorted(lines, key=str.casefold):
        right, said[line] = installs(line, options.index)
        wrong |= {} if right else {line: said[line]}
    for command, words in said.items():
        print(f"{'✖' if command in wrong else '✔'} {command}: {words}")
    counted = Counter("did not work" if command in wrong else words for command, words in said.items())
    print(f"{len(commands)} commands of attnsel's, {len(lines)} that install: ", end="")
    print(*(f"{count} {words}" for words, count in counted.most_common()), sep="; ")
    return 4 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
