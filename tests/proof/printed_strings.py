"""Which texts about attention the libraries can print, and whether the reader of logs knows each.

    python tests/proof/printed_strings.py                     # all libraries: writes the reports anew
    python tests/proof/printed_strings.py torch flash-attn    # these alone
    python tests/proof/printed_strings.py --unknown xformers  # lists what is unknown too

``data/printed_strings/sources.csv`` says what is read: of each library its newest releases, how they are
fetched and which of their files hold attention. A new library is a row there. ``LIBRARY.csv`` beside it is
the report, a row for each text: ``known``, by which message of attnsel/diagnose/logs (the reader itself is
asked, with values in the holes); ``not about a choice``, and why; or ``unknown``. Why is written by hand in
``decisions.csv``, by library, function and text; everything else is made, so a new text comes up as unknown.

Sources come from PyPI (``pip download`` of wheels, some hundreds of MB; --cache keeps them), from git
(--mirrors: a folder with OWNER+NAME/repo; else they are cloned from GitHub) or lie unpacked below --sources,
as do source distributions that pip cannot fetch without building them. What a library's sources at one
release say is kept in --cache. Compiled libraries are read from their machine code, which takes ``objdump``.

Exit code: 0 nothing is unknown, 4 something is.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
REPORTS = HERE / "data" / "printed_strings"
if str(HERE) not in sys.path:  # as a program this folder is on the path anyway
    sys.path.insert(0, str(HERE))

from attnsel.diagnose.logs.calls import ANY, SEEN  # noqa: E402
from attnsel.diagnose.logs.message import Message  # noqa: E402
from attnsel.diagnose.logs.reader import entries  # noqa: E402
from attnsel.diagnose.logs.vocabulary import gate, libraries, more  # noqa: E402
from printed_in_source import Printed, cpp_texts, python_texts  # noqa: E402

KNOWN, APART, UNKNOWN = "known", "not about a choice", "unknown"
COLUMNS = ("text", "about", "by", "how", "function", "file", "releases")


# ---- what is read --------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A row of sources.csv.

    ``releases``: the newest ones. ``fetch``: "pip NAME==VERSION", "git OWNER/NAME REFERENCE" or
    "folder PATH", with {release} in it. ``files``: a pattern of paths; ``inside``: of a compiled library, of
    the paths of the sources that it names. ``functions``: a pattern of functions, all where there is none.
    ``reasons``: in which words texts are printed that a function collects or returns.
    """

    library: str
    releases: str
    fetch: str
    files: str
    inside: str
    functions: str
    reasons: str


class Places(NamedTuple):
    cache: Path
    mirrors: Path
    sources: Path


@lru_cache(maxsize=1)
def sources() -> list[Source]:
    return [Source(**row) for row in rows_of(REPORTS / "sources.csv")]


def rows_of(path: Path) -> list[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def texts_of(source: Source, release: str, places: Places) -> list[Printed]:
    """What one release prints, read once."""
    reader = HERE / ("printed_in_library.py" if source.inside else "printed_in_source.py")
    key = hashlib.sha256(json.dumps([source[:-1], release]).encode() + reader.read_bytes()).hexdigest()[:24]
    kept = places.cache / "texts" / f"{key}.json"
    if kept.exists():
        return [Printed(*one) for one in json.loads(kept.read_text(encoding="utf-8"))]
    found = list(dict.fromkeys(_read(source, release, places)))
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    return found


def _read(source: Source, release: str, places: Places) -> Iterator[Printed]:
    wanted = re.compile(source.files)
    for path, content in _files(source.fetch.format(release=release), wanted, places):
        if path.endswith(".py"):
            yield from python_texts(path, content.decode("utf-8", "replace"), source.functions)
        elif re.search(r"\.(?:cpp|cc|cu|cuh|h|hpp|mm|jinja)$", path):
            yield from cpp_texts(path, content.decode("utf-8", "replace"), source.functions)
        else:
            from printed_in_library import library_texts

            with tempfile.NamedTemporaryFile(suffix=".so") as file:
                file.write(content)
                file.flush()
                yield from library_texts(Path(file.name), source.inside, source.functions)


def _files(fetch: str, wanted: re.Pattern[str], places: Places) -> Iterator[tuple[str, bytes]]:
    kind, _, what = fetch.partition(" ")
    if kind == "pip":
        with zipfile.ZipFile(_wheel(what, places)) as wheel:
            for name in wheel.namelist():
                if wanted.search(name):
                    yield name, wheel.read(name)
    elif kind == "git":
        owned, _, reference = what.partition(" ")
        git = _repository(owned, places)
        for name in _git(git, "ls-tree", "-r", "--name-only", reference).decode().splitlines():
            if wanted.search(name):
                yield name, _git(git, "show", f"{reference}:{name}")
    else:
        root = places.sources / what
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and wanted.search(name):
                yield name, path.read_bytes()


def _wheel(requirement: str, places: Places) -> Path:
    folder = places.cache / "wheels" / requirement.replace("==", "-")
    if not list(folder.glob("*.whl")):
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        for_ = ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.12", "-d", str(folder)]
        subprocess.run([*pip, *for_, requirement], check=True, stderr=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


def _repository(owned: str, places: Places) -> Path:
    mirror = places.mirrors / owned.replace("/", "+") / "repo"
    if mirror.exists():
        return mirror
    clone = places.cache / "git" / owned
    if not clone.exists():
        subprocess.run(
            ["git", "clone", "-q", "--bare", f"https://github.com/{owned}", str(clone)], check=True
        )
    return clone


def _git(folder: Path, *command: str) -> bytes:
    return subprocess.run(["git", "--git-dir", str(folder), *command], check=True, capture_output=True).stdout


# ---- whether the reader knows it -----------------------------------------------------------------------

_VALUES = (  # what is put into a hole, by its name
    (r"^x$|^(?:tensor_)?name$", "cu_seqlens_q"),
    (r"^device_name$", "cuda"),
    (r"^get_device_capability$", "(9, 0)"),
    (r"^reasons_str$", "{FLASH_ATTN: [head_size not supported]}"),
    (r"invalid_reasons$", "['head_size not supported']"),
    (r"VA_ARGS", "batch_size, seqlen_k, num_heads_k, head_size"),
    (r"(?i)dtype|scalar_type|type$", "torch.float32"),
    (r"(?i)version|__version__|release", "2.8.3"),
    (r"(?i)layout|format", "bshd"),
    (r"(?i)device", "cuda:0"),
    (r"(?i)shape|sizes|stride", "[2, 8, 1024, 72]"),
    (r"(?i)arch|capab|sm_|^cc$|^sm$|major", "90"),
    (
        r"(?i)dim|size|num|len|head|seq|block|page|max|min|align|limit|count|batch|rank|index|^[abndhswm]$",
        "72",
    ),
    (
        r"(?i)backend|impl|kernel|name|module|package|attn|layout|mask|path|file|func|cls|method|mode|key",
        "flash_attn",
    ),
    (r"(?i)exc|err|^e$|reason|msg|message|why", "something went wrong here"),
)  # fmt: skip
_ALIKE = (
    "72",
    "3",
    "flash_attn",
    "FLASH_ATTN",
    "torch.float32",
    "2.8.3",
    "[2, 8, 1024, 72]",
    "90",
    "cuda:0",
    "cpu",
    "(9, 0)",
    "Float",
    "memory_efficient_attention_forward",
    "FusedAttention",
    "False",
    "{'compute_capability': 'sm90', 'head_dim_qk': 64}",
)
_NO_CAUSE = ("frame", "machine", "setting")
_NVTE = "RuntimeError: /{file}:72 in function {function}: "
_PREFIX = {
    **dict.fromkeys(("TORCH_WARN", "warn"), "UserWarning: "),
    **dict.fromkeys(("log", "print", "stream", "reason", "printf", "fprintf"), ""),
    **dict.fromkeys(("NVTE_CHECK", "NVTE_ERROR", "throw"), _NVTE),
    "RETURN_CUDNN_FRONTEND_ERROR_IF": "RuntimeError: cuDNN Frontend error: ",
}


def filled(text: str) -> Iterator[str]:
    """A text with values in its holes, in each of some ways."""

    def by_name(at: re.Match[str]) -> str:
        return next((value for pattern, value in _VALUES if re.search(pattern, at[1])), "72")

    yield re.sub("⟨([^⟩]*)⟩", by_name, text)
    if "⟨value⟩" in text:  # of machine code nobody knows whether something stands between two pieces
        yield re.sub(r"(?<=[:=(\[{])( ?)⟨value⟩", r"\g<1>72", text).replace("⟨value⟩", "")
    if "⟨" in text:
        for value in _ALIKE:
            yield re.sub("⟨[^⟩]*⟩", lambda at, value=value: value, text)
        yield re.sub("⟨[^⟩]*⟩", "FLASH_ATTN", re.sub("⟨[^⟩]*⟩", "72", text, count=1))


@lru_cache(maxsize=1)
def _messages() -> dict[str, list[tuple[str, Message]]]:
    """What can know a text, under the name that a report has for it: "library: what happened"."""
    found: dict[str, list[tuple[str, Message]]] = {}
    for library in libraries():
        if library.name not in (ANY, SEEN, "the machine"):
            for message in library.messages:
                if message.says.kind not in _NO_CAUSE:
                    only = message.says.variants[0].known if len(message.says.variants) == 1 else ""
                    name = f"{library.name}: {(message.says.known or only or message.quicks[0]).strip()[:90]}"
                    found.setdefault(name, []).append((library.name, message))
    return found


def known_by(text: str, how: str, file: str, function: str, reasons: str = "", by: str = "") -> str:
    """Which message of attnsel/diagnose/logs knows a text, "" for none; ``by``: the one that is asked."""
    kind = how.partition(" ")[2]
    prefix = _PREFIX.get(how, f"{kind or 'RuntimeError'}: ").format(file=file, function=function)
    among = {by: _messages().get(by, [])} if by else _messages()
    for one in filled(text):
        printed = reasons.format(one) if how == "reason" and reasons else prefix + one
        for entry in entries(printed.splitlines(), gate(), more):
            for name, messages in among.items():
                if any(message.find(entry.text) for library, message in messages):
                    return name
    return ""


def _ways(library: str, row: Mapping[str, str]) -> Iterator[tuple[str, str, str, str, str]]:
    """How a row's text is printed: by each of the ways and functions, six at most."""
    reads = (one for one in sources() if one.library == library and one.reasons)
    reasons = next((one.reasons for one in reads if re.search(one.files, row["file"])), "")
    reasons = reasons.replace("\\n", "\n")  # a cell is one line
    both = product(row["how"].split("; "), row["function"].split("; "))
    return ((row["text"], how, row["file"], function, reasons) for how, function in islice(both, 6))


def still_known(library: str, row: Mapping[str, str]) -> bool:
    """Whether the message that a report names knows the row's text."""
    return any(known_by(*way, row["by"]) for way in _ways(library, row))


# ---- the report ----------------------------------------------------------------------------------------


def decisions(library: str) -> dict[tuple[str, str], str]:
    """Why a text is not about a choice, by the functions that print it and the text."""
    rows = rows_of(REPORTS / "decisions.csv")
    return {(row["function"], row["text"]): row["why"] for row in rows if row["library"] == library}


def report(library: str, places: Places) -> list[dict[str, str]]:
    """A row for each text of a library, by file and text."""
    found: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    for source in sources():
        if source.library == library:
            for release in source.releases.split():
                for one in texts_of(source, release, places):
                    told = found.setdefault((one.file, one.text), {"how": {}, "function": {}, "releases": {}})
                    told["how"][one.how] = told["function"][one.function] = told["releases"][release] = None
    decided = decisions(library)
    made = []
    for (file, text), told in sorted(found.items()):
        row = {"text": text, "file": file, **{name: "; ".join(values) for name, values in told.items()}}
        by, about = next((by for way in _ways(library, row) if (by := known_by(*way))), ""), KNOWN
        if not by:
            by = decided.get((row["function"], text), "")
            about = APART if by else UNKNOWN
        made.append({**row, "about": about, "by": by})
    return made


def write(library: str, rows: list[dict[str, str]]) -> None:
    with (REPORTS / f"{library}.csv").open("w", encoding="utf-8", newline="") as file:
        file.write("# Made by tests/proof/printed_strings.py. ⟨…⟩ is a hole where a value is put in.\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = list(dict.fromkeys(source.library for source in sources()))
    parser.add_argument("library", nargs="*", help=", ".join(names))
    parser.add_argument("--unknown", action="store_true", help="list what is unknown")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "printed_strings")
    parser.add_argument(
        "--mirrors", type=Path, default=Path("mirrors"), help="git directories: OWNER+NAME/repo"
    )
    parser.add_argument("--sources", type=Path, default=Path("sources"), help="unpacked sources")
    given = parser.parse_args()
    if unheard := sorted(set(given.library) - set(names)):
        parser.error(f"no such library: {', '.join(unheard)} (of {', '.join(names)})")
    left = 0
    for library in given.library or names:
        rows = report(library, Places(given.cache, given.mirrors, given.sources))
        write(library, rows)
        counts = {about: sum(row["about"] == about for row in rows) for about in (KNOWN, APART, UNKNOWN)}
        print(f"{library}: {len(rows)} texts, " + ", ".join(f"{n} {about}" for about, n in counts.items()))
        left += counts[UNKNOWN]
        for row in rows if given.unknown else []:
            if row["about"] == UNKNOWN:
                print(f"  {row['file']} | {row['function']} | {row['how']} | {row['text']}")
    return 4 if left else 0


if __name__ == "__main__":
    sys.exit(main())
