r"""What one message in a log says, and how a text is held against what is known of a message.

A message is a row of a file in ``data/`` (docs/how-to/logs.md): its pattern, such as ``Invalid attention
frobnication: head size (?P<head_dim_qk>\d+)``, what it does, the cause and the fix. Groups of the pattern
named as a field of AttentionParams, as a component of an environment or ``gpu`` are what the message states,
``major`` and ``minor`` its GPU's compute capability; other forms of values have groups in ``_FORMS``. What
needs more than that is a function (``read``).
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from attnsel.base.patterns import literals
from attnsel.base.records import json_fields
from attnsel.base.rows import read_rows
from attnsel.diagnose.scrub import scrub
from attnsel.environment import COMPONENTS
from attnsel.environment.mentions import known_name
from attnsel.environment.versions import meets
from attnsel.errors import printable, short
from attnsel.params import AttentionParams, read_dtype

_NEAR = 150  # lines between a frame of attention and the error that ends its traceback

Kind = Literal["question", "refusal", "chosen", "error", "note", "frame", "machine", "setting"]
"""What a message does:

- ``question``: describes a call before anything is chosen (TransformerEngine's configuration). Begins a call.
- ``refusal``: says why a kernel is not taken. The call goes on. Without candidates it is about those of the
  refusal before it (PyTorch's reasons stand below "Flash attention kernel not used because:").
- ``chosen``: names what runs. Ends a call; an error that follows belongs to it.
- ``error``: what is raised, or what a user is told at last. Ends a call.
- ``note``: worth telling and no refusal: a slow path, a copy. A call of its own where no call is open.
- ``frame``: a line of a traceback inside attention: it says only that an error below it is about attention.
- ``machine``: a GPU, versions. ``setting``: a variable or an argument that decides. They hold for all calls
  of the log, wherever they stand: people paste what is installed above or below an error.
"""

NOTHING: Mapping[str, Any] = MappingProxyType({})
_LONGEST_SHOWN, _LONGEST_WORD = 300, 400  # characters


@json_fields("library", "kind", "text", "candidates", "source")
class Finding(NamedTuple):
    """What one message says. Every text in it is scrubbed.

    ``library``: whose message it is, as its makers write it. ``text``: the message, shortened. ``params``:
    fields of AttentionParams, and ``environment``: ``gpu`` and components of Environment.describe, that are
    stated. ``supposed``: the same two together for what must be so for this message, where it is not stated
    (the newest release that prints it). ``candidates``: attnsel's names of the kernels it is about.
    ``codes``: rules that are the cause. ``known``: the cause in a sentence, where no rule computes it, and
    ``link``, where that is written. ``fix``: what to change, in that library's own API. ``unread``: what
    stands there and attnsel has no field for. ``source``: where the message is written: file and releases.
    ``near``: of an error of many causes (memory, a failed launch), how many lines below a frame of its own
    library it counts.
    ``variants``: causes of which the rest of the log decides; ``instead``: what the text means if for none.
    """

    library: str
    kind: Kind
    text: str
    params: Mapping[str, Any] = NOTHING
    environment: Mapping[str, Any] = NOTHING
    supposed: Mapping[str, Any] = NOTHING
    candidates: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    known: str = ""
    link: str = ""
    fix: str = ""
    unread: tuple[str, ...] = ()
    source: str = ""
    near: int = 0
    variants: tuple[Variant, ...] = ()
    instead: Finding | None = None


class Variant(NamedTuple):
    """One meaning of words that have another one on another GPU, or in another program.

    "FlashAttention only supports Ampere GPUs or newer" says that a Turing card is too old, or that flash-attn
    is too old for a Blackwell card. ``archs``: of GPUs between the two, both included, one of which the
    log names; ``unnamed``: or where it names none. ``seen``, ``unseen``: whose code, or what is missing, one
    of which is in the log, or none of them. ``at``: releases that the log states (vllm<0.11).
    """

    known: str
    fix: str
    codes: tuple[str, ...] = ()
    archs: tuple[int, int] | None = None
    unnamed: bool = False
    seen: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    at: tuple[str, ...] = ()

    def holds(self, arch: int | None, facts: Facts, seen: set[str]) -> bool:
        """In a log of this GPU and these releases, which shows these names."""
        if self.archs and not (self.unnamed if arch is None else self.archs[0] <= arch <= self.archs[1]):
            return False
        if not all(meets(facts, one) for one in self.at):
            return False
        return (not self.seen or bool(seen & set(self.seen))) and not seen & set(self.unseen)


Facts = Mapping[str, Any]
"""Fields of a Finding that a message gives beside what is declared, and words of its sentences by name."""

Reader = Callable[[re.Match[str]], "Facts | None"]

More = Literal["", "indented", "brackets"]


def _dtype_of(text: str) -> str | None:
    """attnsel's name for a dtype as C++ prints it ("struct c10::BFloat16", "Half", "float")."""
    name = read_dtype(text.strip().removeprefix("struct ").removeprefix("c10::").lower())
    return name if name in ("bf16", "fp16", "fp32", "fp64") else None


def _mask(text: str) -> Facts | None:
    told = {"shape": (1, 1, 1, 1), "stride": (1, 1, 1, 1), "dtype": _dtype_of(text)}
    return {"mask": told} if told["dtype"] else None


_FORMS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "on_sm": ("gpu", "sm{}".format),  # 120
    "card": ("gpu", known_name),  # as a program prints it
    "cu": ("cuda", lambda digits: f"{digits[:-1]}.{digits[-1]}"),  # 130, of torch 2.9.1+cu130
    "cudnn_number": ("cudnn", int),  # 91900
    "windows_path": ("platform", lambda path: "windows"),
    "c_dtype": ("dtype", _dtype_of),
    "mask_dtype": ("tensors", _mask),
    "of_rank": ("tensors", lambda digit: {"rank": int(digit)}),
    "tiles_qk": ("head_dim_qk", lambda tiles: 16 * int(tiles)),
    "tiles_vo": ("head_dim_v", lambda tiles: 16 * int(tiles)),
}
"""Groups of a pattern that state something in a form of their own: of what, and how it is read."""


@dataclass(frozen=True)
class Message:
    """One text of a library's.

    ``says``: the finding as far as it is declared. ``quick``: stands in the text literally, in this case; of
    several one. ``pattern``: searched in the text; without one ``quick`` is enough. Where ``quick`` is left
    out it is taken from the pattern. ``text``: what is shown, if not what matched. ``more``: which of the
    lines that follow belong to it: those that are "indented", or all until its "brackets" are closed; the
    pattern is searched in all of them, joined by line ends. ``read``: from the match, fields of Finding
    beside those declared and words of the sentences; None where it is not meant after all.

    Words of ``text``, ``known`` and ``fix`` may come from the message: ``{head_dim_qk}`` is the group of that
    name, or what ``read`` gives under it.
    """

    says: Finding
    quick: tuple[str, ...] = ()
    pattern: str = ""
    text: str = ""
    more: More = ""
    read: Reader | None = None

    @cached_property
    def quicks(self) -> tuple[str, ...]:
        return self.quick or tuple(max(runs, key=len) for runs in literals(self.pattern))

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern or "|".join(map(re.escape, self.quicks)), re.DOTALL)

    def find(self, text: str) -> Finding | None:
        """What ``text`` says if it holds this message."""
        match = self._compiled.search(text) if any(quick in text for quick in self.quicks) else None
        told = NOTHING if match is None or self.read is None else self.read(match)
        if match is None or told is None:
            return None
        params, environment = stated(match)
        says, fill = self.says, partial(_filled, words={**match.groupdict(""), **params, **told})
        given: dict[str, Any] = {
            "text": match[0],
            "known": fill(says.known),
            "fix": fill(says.fix),
            **{name: value for name, value in told.items() if name in Finding._fields},
        }
        shown = fill(self.text) or given["text"]
        given["text"] = short(scrub(" ".join(shown.split())), str, _LONGEST_SHOWN)
        if says.kind == "error" and re.search(_whole("{ENDS_NOTHING}"), text):
            given["kind"] = "note"
        given["params"] = {**says.params, **params, **told.get("params", NOTHING)}
        given["environment"] = {**says.environment, **environment, **told.get("environment", NOTHING)}
        given["variants"] = tuple(
            one._replace(known=fill(one.known), fix=fill(one.fix), at=tuple(map(fill, one.at)))
            for one in says.variants
        )
        return says._replace(**given)


_STATED = ("gpu", "platform", "vllm", "sglang", "transformers", "diffusers", "xformers", "sageattention")


def stated(match: re.Match[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the call and of the environment that groups of a pattern state."""
    params: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    for group, text in match.groupdict().items():
        name, form = _FORMS.get(group, (group, str))
        value = None if text is None else form(text)
        if value is not None and name in AttentionParams.model_fields:
            params[name] = value
        elif value is not None and name.removeprefix("built_") in (*_STATED, *COMPONENTS):
            environment[name] = value
    if "major" in match.re.groupindex and match["major"]:
        environment["gpu"] = f"sm{match['major']}{match['minor']}"
    return params, environment


def messages(
    file: str, part: str, library: str = "", readers: Mapping[str, Reader] = NOTHING, reader: str = ""
) -> tuple[Message, ...]:
    """The rows of ``data/FILE.csv`` with this ``part``, in their order. ``readers``: the functions that they
    name; ``reader``: the one of rows that name none.

    The columns are fields of Finding and of Message: ``does`` is its kind, ``issue`` its link, of several
    quick texts " | " stands between, of codes and candidates a space, and ``params``, ``environment``,
    ``supposed`` and ``when`` are Python literals (dtype='fp32'; softcap=50.0). A row that does "or" is one
    meaning more (Variant) of the message above it. What rows share has its name in braces: ``texts.csv``.
    """
    rows = [defaultdict(str, row) for row in _rows(file) if row["part"] == part]  # no file has all columns
    begins = [place for place, row in enumerate(rows) if row["does"] != "or"]
    return tuple(_message(library, rows[a:b], readers, reader) for a, b in pairwise((*begins, len(rows))))


def _message(
    library: str, rows: list[defaultdict[str, str]], readers: Mapping[str, Reader], reader: str
) -> Message:
    row = rows[0]
    says = Finding(
        library,
        row["does"],  # type: ignore[arg-type]  # tests hold the column against Kind
        "",
        facts_of(row["params"]),
        facts_of(row["environment"]),
        facts_of(row["supposed"]),
        tuple(row["candidates"].split()),
        tuple(row["codes"].split()),
        _whole(row["known"]),
        row["issue"],
        _whole(row["fix"]),
        source=row["source"],
        near=_NEAR if row["near"] == "yes" else int(row["near"] or 0),
    )
    if row["when"]:
        says = says._replace(known="", fix="", codes=(), variants=tuple(map(_variant, rows)))
    name = row["reader"] or reader
    return Message(
        says,
        tuple(row["quick"].split(" | ")) if row["quick"] else (),
        _whole(row["pattern"]),
        row["text"],
        row["more"],  # type: ignore[arg-type]  # and this one against More
        readers[name] if name else None,
    )


def _variant(row: Mapping[str, str]) -> Variant:
    codes = tuple(row["codes"].split())
    return Variant(_whole(row["known"]), _whole(row["fix"]), codes, **facts_of(row["when"]))


_rows = cache(partial(read_rows, "attnsel.diagnose.logs"))
_NAME = re.compile(r"\{([A-Z][A-Z_0-9]+)\}")


@cache
def _shared() -> dict[str, list[Variant]]:
    """What rows share, by its name; of several meanings the first that holds in a log."""
    by_name = defaultdict(list)
    for row in _rows("texts"):
        for name in row["name"].split(" | "):
            by_name[name].append(Variant("", row["text"], **facts_of(row["when"])))
    return by_name


def _whole(cell: str) -> str:
    """With what rows share in the place of its name, but for that of which the log decides."""
    return _NAME.sub(lambda name: name[0] if len(_shared()[name[1]]) > 1 else _shared()[name[1]][0].fix, cell)


def for_this_log(text: str, holds: Callable[[Variant], bool]) -> str:
    """With the meaning that holds in the log in the place of the names that are left, and of those in it."""
    return _NAME.sub(
        lambda n: next((for_this_log(x.fix, holds) for x in _shared().get(n[1], ()) if holds(x)), n[0]), text
    )


@cache
def elsewhere() -> list[tuple[str, Variant]]:
    """Platforms for which nothing of a library is: what is so there, and what helps."""
    return [(r["library"], Variant(r["known"], r["fix"], **facts_of(r["when"]))) for r in _rows("elsewhere")]


def harmless(fix: str) -> bool:
    """Whether a message breaks nothing, which what helps against it says first ("nothing to repair")."""
    return fix.startswith("nothing")


def facts_of(cell: str) -> dict[str, Any]:
    """Names and values of a cell: dtype='fp32'; softcap=50.0."""
    given = (one.partition("=") for one in cell.split("; ") if one)
    return {name: literal_eval(value) for name, _, value in given}


def clean(value: str | int) -> str:
    """A word of the log's as it may stand in a report: without paths and secrets, on one line, not long."""
    return short(printable(scrub(" ".join(str(value).split()))), str, _LONGEST_WORD)


def _filled(sentence: str, words: Mapping[str, Any]) -> str:
    """With the words in the place of their names in braces; other braces stay."""

    def word(name: re.Match[str]) -> str:
        value = words.get(name[1])
        return clean(value) if isinstance(value, (str, int)) else name[0]

    return re.sub(r"\{(\w+)\}", word, sentence)
