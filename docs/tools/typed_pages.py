"""Pages on which the reader makes files: typed from top to bottom into one shell, in an empty folder.

A page with a fence ``file: PATH`` or ``append: PATH`` is one. Its files are written, its ``sh`` lines and the
``$`` lines of its ``console`` blocks are run by one bash, so that ``cd`` and variables hold from block to
block. Python is a new virtual environment above the one that the tests run in: what a page installs is gone
afterwards, and ``pip`` reaches no index. ``$REPO`` is a repository with this checkout as its only commit.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pages
from free_code import with_free_code
from pages import Block, commands
from paths import IMPORTED_FROM, ROOT
from switches import without_switches

ANYTHING = "[…]"  # in what a page shows: any text, such as a time
TAKES = "takes "  # how the reason begins where a block is skipped for its time
WALK = 900  # seconds that a whole page may take a reader
_MARK = "\x1e"  # stands in no output
_SOMETIMES = ("git", "ruff")  # programs that pages call, and that tests do not bring
_MODULES = ("attnsel", "pip", "pytest")  # run by the page's Python, whatever lies on PATH


def is_typed(found: list[Block]) -> bool:
    """Whether the reader of a page with these blocks makes files."""
    return any(block.file for block in found)


def read(page: str, text: str | None = None) -> list[Block]:
    """The blocks of a page, with a code for its rule that is free."""
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    return pages.blocks(page, with_free_code(text))


TYPED = tuple(page for page in pages.PAGES if is_typed(pages.blocks(page)))


@dataclass(frozen=True)
class Printed:
    """What one block printed. ``code``: the exit code of its last command, -1 where the page ended in it."""

    block: Block
    text: str
    code: int
    seconds: float = 0.0


def missing_packages(found: list[Block]) -> list[str]:
    """What the Python files of a page import, and neither the page makes nor this environment has."""
    own = {Path(block.file).parts[0].removesuffix(".py") for block in found if block.file}
    folders = {part for block in found for part in Path(block.file).parts}
    names: set[str] = set()
    for block in found:
        if block.language == "python" and block.info.startswith("file"):
            names |= _imported(block.text)
    names -= {"flash_attn"}  # attnsel run answers to it, and pages show what there is without
    return sorted(name for name in names - own - folders if importlib.util.find_spec(name) is None)


def missing_programs(found: list[Block]) -> list[str]:
    """The programs that the blocks to be typed call and that this machine lacks, of those that some lack."""
    typed = "\n".join(block.text for block in found if is_run(block))
    called = {word for word in _SOMETIMES if re.search(rf"^(\$ )?{word} ", typed, re.MULTILINE)}
    return sorted(word for word in called if shutil.which(word) is None)


def _imported(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def is_run(block: Block, *, all_of_it: bool = False) -> bool:
    """Whether a block is typed. all_of_it: those as well that are skipped for the time they take."""
    skipped = block.skipped and not (all_of_it and block.skipped.startswith(TAKES))
    return block.language in ("console", "sh") and not skipped and not block.file


def script(found: list[Block], staged: Path, *, all_of_it: bool = False) -> str:
    """The page as a bash script, with a mark and a number before and after each block that prints.

    staged: a folder for the texts of the files.
    """
    lines = ["set -u"]
    for number, block in enumerate(found):
        if target := block.file:
            (staged / str(number)).write_text(block.text, encoding="utf-8")
            sign = ">>" if block.info.startswith("append") else ">"
            place = shlex.quote(target)
            lines.append(f'mkdir -p "$(dirname {place})"; cat {staged / str(number)} {sign} {place}')
        elif is_run(block, all_of_it=all_of_it):
            typed = commands(block.text) if block.language == "console" else [f"set -e\n{block.text}set +e"]
            lines.append("began=$EPOCHREALTIME")
            for index, command in enumerate(typed):
                lines += [f"printf '{_MARK}{number}.{index}{_MARK}'", command, "last=$?"]
            lines.append(f"printf '{_MARK}{number}.end{_MARK}%s %s %s' $last $began $EPOCHREALTIME")
    return "\n".join(lines) + "\n"


def typed(page: str, work: Path, text: str | None = None) -> list[Printed]:
    """Everything that the blocks of a page print now. work: an empty folder.

    Where a line of an ``sh`` block fails the page ends: nothing below it would be what the page means.
    """
    binaries = layered(work / "env")
    return _type(
        work,
        read(page, text),
        {
            "PATH": os.pathsep.join((str(binaries), str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join((".", str(IMPORTED_FROM))),  # a clone comes first
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip's word for none
        },
    )


def walked(page: str, work: Path) -> list[Printed]:
    """A page with what takes long, as a reader does it: with the system's Python, and pip's own index."""
    here = str(Path(sys.prefix) / "bin")
    path = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder != here]
    return _type(work, read(page), {"PATH": os.pathsep.join(path)}, all_of_it=True)


def _type(
    work: Path, found: list[Block], variables: dict[str, str], *, all_of_it: bool = False
) -> list[Printed]:
    staged, here = work / "files", work / "here"
    for folder in (staged, here):
        folder.mkdir()
    if any("$REPO" in block.text for block in found):
        variables["REPO"] = str(repository(work / "origin"))
    printed = work / "printed"
    with printed.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-c", script(found, staged, all_of_it=all_of_it)],
            cwd=here,
            env={**clean_environment(work), **variables},
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            shell.wait(WALK if all_of_it else 300)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)  # what it started too; the block that it was at has no end
            shell.wait()
    return list(outputs(found, printed.read_text(encoding="utf-8", errors="replace")))


def clean_environment(work: Path) -> dict[str, str]:
    """The variables of a reader: none of attnsel's, a terminal of 80 columns, a name for git."""
    keep = without_switches("GIT_")
    keep.pop("VIRTUAL_ENV", None)
    who = {"GIT_AUTHOR_NAME": "A Reader", "GIT_AUTHOR_EMAIL": "reader@example.org"}
    committer = {name.replace("AUTHOR", "COMMITTER"): value for name, value in who.items()}
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "GIT_CONFIG_NOSYSTEM": "1", "PYTEST_ADDOPTS": ""}
    terminal = {"COLUMNS": "80", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1", "LC_ALL": "C.UTF-8"}
    return {**keep, **who, **committer, **quiet, **terminal, "XDG_CACHE_HOME": str(work / "cache")}


def layered(folder: Path) -> Path:
    """A new virtual environment that also has what this one has; its folder of commands."""
    venv.create(folder, with_pip=False, symlinks=True)
    binaries = folder / "bin"
    (site,) = folder.glob("lib/python*/site-packages")
    below = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in below]
    (site / "zz_below.pth").write_text("".join(lines), encoding="utf-8")  # after what is installed here
    for module in _MODULES:
        command = binaries / module
        command.write_text(f'#!/bin/sh\nexec "{binaries}/python" -m {module} "$@"\n', encoding="utf-8")
        command.chmod(0o755)
    return binaries


def repository(folder: Path) -> Path:
    """A repository whose branch main is this checkout as it lies here, changes included, in one commit.

    Raises RuntimeError where this is no checkout of git's.
    """
    git = ["git", "-c", "init.defaultBranch=main", "-c", "core.autocrlf=false"]
    listed = subprocess.run(
        [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        raise RuntimeError(f"{ROOT} is no git checkout")
    work = folder.with_name(folder.name + ".work")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # not one that was removed and is not committed
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes((ROOT / name).read_bytes())
            (work / name).chmod((ROOT / name).stat().st_mode)
    who = ["-c", "user.name=attnsel", "-c", "user.email=attnsel@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "attnsel"]):
        subprocess.run([*git, *command], cwd=work, check=True)
    subprocess.run([*git, "clone", "-q", "--bare", str(work), str(folder)], check=True)
    return folder


def outputs(found: list[Block], printed: str) -> Iterator[Printed]:
    """The output of a script, by block, each as its block on the page would show it."""
    texts: dict[int, list[str]] = {}
    ends: dict[int, list[str]] = {}
    for number, part, text in re.findall(rf"{_MARK}(\d+)\.(\w+){_MARK}([^{_MARK}]*)", printed):
        if part == "end":
            ends[int(number)] = text.split()
        else:
            texts.setdefault(int(number), []).append(text)
    for number, parts in texts.items():
        block = found[number]
        if block.language == "console":
            shown = zip(commands(block.text), parts, strict=False)
            text = "\n".join(f"$ {command}\n{part.rstrip()}".rstrip() + "\n" for command, part in shown)
        else:
            text = "".join(parts)
        code, began, ended = ends.get(number, ("-1", "0", "0"))  # it ended in an error
        yield Printed(block, text, int(code), float(ended) - float(began))


def agrees(shown: str, now: str) -> bool:
    """Whether a page shows what is printed; ``[…]`` stands for any text."""
    pattern = ".*?".join(re.escape(part) for part in shown.split(ANYTHING))
    return re.fullmatch(pattern, now, re.DOTALL) is not None
