"""The texts that a compiled library can print, read from its machine code: x86-64 ELF with its symbols.

TORCH_CHECK and its like hand ``__FILE__`` and the pieces of a message to a function that does not return, or
to c10::warn. So the functions that load the address of a wanted source file's name are disassembled
(``objdump``), and between two such calls the strings whose addresses are loaded are the pieces of one
message, in their order, with a hole between two of them.
"""

from __future__ import annotations

import bisect
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from printed_in_source import Printed

_ENDS = {  # the functions that print what was gathered, by a part of their names
    "torchCheckFail": "TORCH_CHECK",
    "torchInternalAssertFail": "TORCH_INTERNAL_ASSERT",
    "_ZN3c104warnE": "TORCH_WARN",
    "__cxa_throw": "throw",
    "_ZN3c105ErrorC": "TORCH_CHECK",
}
_GAP = 1 << 14  # bytes between functions that are disassembled together
_LOAD = re.compile(r"^\s*([0-9a-f]+):\s+(\w+)\s+(.*?)(?:#\s+([0-9a-f]+)\b.*)?$")


class _Section(NamedTuple):
    name: str
    address: int
    offset: int
    size: int


class _Library:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = np.memmap(path, dtype=np.uint8, mode="r")
        self.sections = [
            _Section(found[1], *(int(found[n], 16) for n in (2, 3, 4)))
            for found in re.finditer(
                r"\] (\.[\w.]+)\s+PROGBITS\s+([0-9a-f]+) ([0-9a-f]+) ([0-9a-f]+)",
                _run("readelf", "-S", "-W", str(path)),
            )
        ]
        self.functions = self._functions()
        self.starts = [start for start, _, _ in self.functions]

    def _functions(self) -> list[tuple[int, int, str]]:
        found = []
        for line in _run("nm", "-S", "--defined-only", str(self.path)).splitlines():
            words = line.split(None, 3)
            if len(words) == 4 and words[2] in "tTwW":
                found.append((int(words[0], 16), int(words[1], 16), words[3]))
        return sorted(found)

    def texts_at(self) -> list[_Section]:
        return [one for one in self.sections if one.name in (".rodata", ".lrodata")]

    def string(self, address: int) -> str | None:
        """The string that begins at an address of constants, None where there is none."""
        for section in self.texts_at():
            if section.address <= address < section.address + section.size:
                place = section.offset + address - section.address
                content = bytes(self.content[place : place + 2000]).split(b"\0", 1)[0]
                try:
                    text = content.decode()
                except UnicodeDecodeError:
                    return None
                return text if text and all(one.isprintable() or one in "\n\t" for one in text) else None
        return None

    def addresses(self, wanted: re.Pattern[bytes]) -> dict[int, str]:
        """The addresses of strings that match."""
        found = {}
        for section in self.texts_at():
            content = bytes(self.content[section.offset : section.offset + section.size])
            for match in wanted.finditer(content):
                start = content.rfind(b"\0", 0, match.start()) + 1
                found[section.address + start] = content[start : content.find(b"\0", start)].decode(
                    errors="replace"
                )
        return found

    def users(self, addresses: set[int]) -> list[tuple[int, int, str]]:
        """The functions that load one of the addresses: ``lea register, [rip + distance]``."""
        found = set()
        for section in self.sections:
            if section.name not in (".text", ".ltext"):
                continue
            code = np.asarray(self.content[section.offset : section.offset + section.size])
            at = np.nonzero(
                (code[1:-5] == 0x8D) & ((code[:-6] & 0xFB) == 0x48) & ((code[2:-4] & 0xC7) == 0x05)
            )[0]
            distance = code[at + 3].astype(np.int64)
            for n in (1, 2, 3):
                distance |= code[at + 3 + n].astype(np.int64) << (8 * n)
            distance = np.where(distance >= 1 << 31, distance - (1 << 32), distance)
            target = section.address + at + 7 + distance
            for place in at[np.isin(target, np.fromiter(addresses, dtype=np.int64))]:
                known = bisect.bisect_right(self.starts, section.address + int(place)) - 1
                found.add(self.functions[known])
        return sorted(found)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def library_texts(path: Path, files: str, functions: str = "") -> Iterator[Printed]:
    """The texts of those of a library's sources whose names match ``files``."""
    library = _Library(path)
    named = library.addresses(re.compile(rb"[\w./-]*(?:" + files.encode() + rb")[\w./-]*"))
    used = library.users(set(named))
    names = _demangled([name for _, _, name in used])
    wanted = re.compile(functions) if functions else None
    for group in _groups(used):
        listing = _run(
            "objdump", "-d", "--no-show-raw-insn", f"--start-address={group[0][0]}",
            f"--stop-address={group[-1][0] + group[-1][1]}", str(path),
        )  # fmt: skip
        lines = listing.splitlines()
        places = [int(match[1], 16) if (match := _LOAD.match(line)) else -1 for line in lines]
        for start, size, name in group:
            short = plain_name(names[name])
            if wanted is not None and not wanted.search(short):
                continue
            own = [line for line, at in zip(lines, places, strict=True) if start <= at < start + size]
            for how, file, text in _messages(library, own, short, named):
                yield Printed(file, short, how, text)


def _groups(functions: list[tuple[int, int, str]]) -> list[list[tuple[int, int, str]]]:
    groups: list[list[tuple[int, int, str]]] = []
    for one in functions:
        if groups and one[0] - groups[-1][-1][0] - groups[-1][-1][1] < _GAP:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _demangled(names: list[str]) -> dict[str, str]:
    made = subprocess.run(
        ["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True
    ).stdout
    return dict(zip(names, made.splitlines(), strict=True))


def plain_name(name: str) -> str:
    """A function's name without arguments, templates and what a compiler adds."""
    name = name.replace("(anonymous namespace)::", "").replace("[abi:cxx11]", "")
    name = re.sub(r"\[clone [^\]]*\]|\.cold\b", "", name).partition("::{lambda")[0]
    while (less := re.sub(r"<[^<>]*>", "", name)) != name:
        name = less
    while (less := re.sub(r"\([^()]*\)", "", name)) != name:
        name = less
    words = name.replace(" const", "").split()
    return words[-1].rpartition("::")[2] if words else ""


_PATH = re.compile(r"[\w./-]+\.(?:h|hpp|cpp|cc|cu|cuh):?")
_ASSERT = re.compile(r'(.*?) INTERNAL ASSERT FAILED at "?(?:[^"]*?/(?=aten/))?([\w./-]*).*', re.DOTALL)
_REST = (
    ".",
    ",",
    ")",
    ";",
    "and ",
    "instead",
    "for K",
    "kb)",
    "key/value tokens",
    "dims but",
    "-D tensor",
    "didn't",
)
_COULD = re.compile(r"\s*\(Could this error message be improved\?.*?\)\s*$", re.DOTALL)


_FROM_ELSEWHERE = (": ", " in function ", "cannot create std::vector larger than max_size()")


def _messages(
    library: _Library, lines: list[str], function: str, files: Mapping[int, str]
) -> Iterator[tuple[str, str, str]]:
    """What each call of a printing function prints, and where it stands in the sources."""
    pieces: list[str] = []
    for line in lines:
        found = _LOAD.match(line)
        if found is None:
            continue
        name, operands, target = found[2], found[3], found[4]
        if name == "lea" and target:
            string = library.string(int(target, 16))
            if string is not None:
                pieces.append(string)
        elif name in ("call", "jmp"):
            how = next((how for part, how in _ENDS.items() if part in operands), "")
            if how:
                paths = [one for one in pieces if _PATH.fullmatch(one)]
                if paths and paths[-1] in files.values():
                    file = re.sub(
                        r"^.*?/(?=aten/|transformer_engine/common/|c10/)", "", paths[-1].rstrip(":")
                    )
                    text = _text([one for one in pieces if not _PATH.fullmatch(one)], function)
                    if len(re.findall(r"[A-Za-z]{3}", text.replace("value", ""))) > 1:
                        yield how, file, text
                pieces.clear()


def _text(pieces: list[str], function: str) -> str:
    """The pieces as one text. A word alone is the name of a tensor or of a function, as long as there are
    others."""
    told = [_COULD.sub("", one) for one in dict.fromkeys(pieces) if one != function]
    kept = [one for one in told if not re.fullmatch(r"[\w:]+|operator\(\)", one)] or told
    kept = [one for one in kept if one not in _FROM_ELSEWHERE]
    if not kept:
        return ""
    last_first = kept[0].lstrip().startswith(_REST) or "Assertion failed" in "".join(kept[1:])
    if last_first:  # the pieces are arguments, which are put on the stack from the last on
        kept.reverse()
    asserted = [match for one in kept if (match := _ASSERT.match(one))]
    if asserted:
        others = [one for one in kept if not _ASSERT.match(one)]
        failed = f'{asserted[0][1]} INTERNAL ASSERT FAILED at "{asserted[0][2]}":⟨line⟩'
        return " ".join([f"{failed}, please report a bug to PyTorch.", *others[:1]]).strip()
    text = "⟨value⟩".join(kept)
    return f"{text.strip()} ⟨value⟩" if text[-1:].isspace() else text.strip()
