"""Which instructions there are: forms in the notation of the PTX ISA, matched as a whole.

``add{.sat}.s32`` reads there: ``.sat`` may stand or not. Here ``[.sat]`` is what may be left out and
``{type:u32|s32}`` a choice, with a name under which the translation finds it. An opcode that matches no form,
or comes with another number of operands, is Unsupported: no modifier is ever skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from ptx_interpreter.parse import Instruction

if TYPE_CHECKING:
    from ptx_interpreter.translate import Translator

Modifiers = dict[str, str]  # of the form's named choices; left out where the instruction has none
Translation = Callable[["Translator", Instruction, Modifiers], None]

_FORMS: dict[str, list[tuple[re.Pattern[str], tuple[int, ...], Translation]]] = {}
_CHOICE = re.compile(r"\{(?:(\w+):)?([^}]*)\}")


def form(syntax: str, *operands: int) -> Callable[[Translation], Translation]:
    """Register a translation of ``syntax`` with so many operands, destinations included."""

    def register(translation: Translation) -> Translation:
        root = syntax.split(".")[0].split("[")[0]
        _FORMS.setdefault(root, []).append((_pattern(syntax), operands, translation))
        _matching.cache_clear()
        return translation

    return register


def _pattern(syntax: str) -> re.Pattern[str]:
    text = syntax.replace(".", r"\.").replace("[", "(?:").replace("]", ")?")
    return re.compile(_CHOICE.sub(lambda c: f"(?P<{c[1]}>{c[2]})" if c[1] else f"(?:{c[2]})", text))


@lru_cache(maxsize=1024)
def _matching(op: str) -> tuple[tuple[tuple[int, ...], Translation, Modifiers], ...]:
    found = []
    for pattern, operands, translation in _FORMS.get(op.split(".")[0], ()):
        if match := pattern.fullmatch(op):
            given = {name: value for name, value in match.groupdict().items() if value is not None}
            found.append((operands, translation, given))
    return tuple(found)


def find(i: Instruction) -> tuple[Translation, Modifiers] | None:
    for operands, translation, modifiers in _matching(i.op):
        if len(i.operands) in operands:
            return translation, modifiers
    return None
