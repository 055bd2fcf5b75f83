"""What was meant by a flag or a command that there is not: by its meaning first, then by its spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from cyclopts import (
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from attnsel.base.suggestions import near, other_names, said
from attnsel.cli.flags import FLAGS, SHORTHANDS, Flag, blame
from attnsel.errors import InvalidInput, short


def _dashed(words: str) -> str:
    return words.replace("_", "-")


# By what to say instead: how other libraries and tools name it, without dashes.
_MEANT = {f"--{_dashed(field)}": _dashed(words) for field, words in other_names("field").items()}
_MEANT |= other_names("flag")


def in_words(error: CycloptsError | InvalidInput, words: list[str], commands: Sequence[str]) -> str:
    """A mistake in what was typed, in one sentence."""
    command = words[0] if words and words[0] in commands else ""
    if isinstance(error, InvalidInput):
        return blame(error)
    if isinstance(error.__cause__, InvalidInput):  # of a converter
        return blame(error.__cause__)
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        return unknown_command(error.unused_tokens[0], commands)
    if isinstance(error, UnknownOptionError):
        return unknown_flag(error, command, known_flags(error))
    if isinstance(error, RepeatArgumentError):
        return repeated(error, words, (*SHORTHANDS, *FLAGS))
    if isinstance(error, MissingArgumentError) and words and words[-1].startswith("--"):
        return f"{short(words[-1], str)} needs a value behind it"
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected: {short(' '.join(error.unused_tokens or ()), str)}; flags begin with --"
    return str(error)


def unknown_flag(error: UnknownOptionError, command: str, known: Iterable[str]) -> str:
    """One sentence about a flag that ``command`` does not have; ``known``: those that it has."""
    typed = error.token.keyword or error.token.value
    name = typed.split("=", 1)[0]
    told = f"there is no flag {short(name, str)}"
    bare = name.lstrip("-").replace("_", "-").casefold()
    for row in said():
        if row.argument == "--gpu" and bare in row.names.split() and "--gpu" in known:
            return f"{told}: {row.why}"
    meant = meant_flag(name, known)
    if meant is None:
        return f"{told}; attnsel {command} --help-all shows every flag"
    return f"{told}. Did you mean {meant}?"


def meant_flag(name: str, known: Iterable[str]) -> str | None:
    """The flag of ``known`` that means what ``name`` says, or else is spelt much like it."""
    names = list(known)
    no = name.startswith("--no-")
    bare = name.lstrip("-").replace("_", "-").casefold()
    positive = bare.removeprefix("no-") if no else bare
    for word in dict.fromkeys((bare, positive)):
        if f"--{word}" in names:
            return f"--{word}"
        for flag, others in _MEANT.items():
            negative = f"--no-{flag.removeprefix('--')}"
            if word in others.split() and flag in names:
                return negative if no and word == positive and negative in names else flag
    close = difflib.get_close_matches(f"--{bare}", names, n=1, cutoff=0.75)
    return close[0] if close else None


def unknown_command(typed: str, commands: Sequence[str]) -> str:
    """One sentence about a command that there is not."""
    if typed.startswith("-"):
        where = "write it behind, such as attnsel explain --gpu H100"
        return f"{short(typed, str)} comes before the command; {where}"
    word = typed.casefold().replace("_", "-")
    told = f'there is no command "{short(typed, str)}"'
    meant = near(word, commands, other_names("command"))
    if meant is not None:
        return f'{told}. Did you mean "{meant}"?'
    return f"{told}; there are {', '.join(commands)}"


def repeated(error: RepeatArgumentError, words: Sequence[str], flags: Iterable[Flag]) -> str:
    """One sentence about a flag that was given twice, under one of its names or under two."""
    name = error.token.keyword or ""
    for flag in flags:
        names = [*flag.names, *([flag.negative] if flag.negative else [])]
        if name in names:
            used = [word.split("=", 1)[0] for word in words]
            other = next((used_name for used_name in used if used_name in names and used_name != name), None)
            if other is not None:
                return f"{other} and {name} are one flag; leave out one of them"
    return f"{short(name, str)} is given twice"


def known_flags(error: CycloptsError) -> list[str]:
    """Every name that the command of an error has a flag for."""
    arguments = getattr(error, "argument_collection", None) or ()
    return [name for argument in arguments for name in argument.names if name.startswith("--")]
