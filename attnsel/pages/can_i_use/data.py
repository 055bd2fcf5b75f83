"""The matrix as JSON: docs/schemas/can-i-use-1.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attnsel.base.schemas import stamped
from attnsel.pages.can_i_use.cells import Cell, Span
from attnsel.pages.can_i_use.feature import Feature, Mode
from attnsel.pages.can_i_use.releases import component_of, releases
from attnsel.pages.can_i_use.words import LOOKS, codes_of, command, evidence_words, title_of
from attnsel.pages.commands import jsonable
from attnsel.rules import REGISTRY


def as_dict(found: Sequence[Cell]) -> dict[str, Any]:
    """Cells, with what they are about: features, kernels, and the rules that they name."""
    features = {cell.feature.name: cell.feature for cell in found}
    kernels = dict.fromkeys(cell.kernel for cell in found)
    return stamped(
        "can-i-use",
        {
            "states": [{"state": state, **look._asdict()} for state, look in LOOKS.items()],
            "features": [_feature(feature) for feature in features.values()],
            "kernels": [_kernel(name) for name in kernels],
            "gpus": list(dict.fromkeys(cell.gpu for cell in found)),
            "cells": [_cell(cell) for cell in found],
            "rules": [_rule(code) for code in codes_of(found)],
        },
    )


def _feature(feature: Feature) -> dict[str, Any]:
    return {
        "name": feature.name,
        "title": feature.title,
        "group": feature.group,
        "about": feature.about,
        "modes": list(feature.modes),
        "changes": jsonable(feature.changes),
        "limits": jsonable(feature.policy),
    }


def _kernel(name: str) -> dict[str, Any]:
    known = releases(name)
    return {
        "name": name,
        "title": title_of(name),
        "component": component_of(name),
        "releases": [str(version) for version in known],
    }


def _rule(code: str) -> dict[str, Any]:
    page = REGISTRY.pages[code]
    about = {"code": code, "title": page.title, "when": page.when_text}
    return {**about, "evidence": page.evidence, "source": page.source}


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "feature": cell.feature.name,
        "kernel": cell.kernel,
        "gpu": cell.gpu,
        "at": str(cell.at),
        "state": cell.state,
        "since": None if cell.state in ("never", "version") else str(cell.since),
        "always": cell.always,
        "whenever": cell.whenever,
        "unlocked_at": str(cell.unlocked_at) if cell.state == "version" else None,
        "ranges": [
            {"first": str(each.first), "last": str(each.last), "state": each.state} for each in cell.ranges
        ],
        "modes": [_mode(cell, mode, spans) for mode, spans in cell.spans.items()],
    }


def _mode(cell: Cell, mode: Mode, spans: Iterable[Span]) -> dict[str, Any]:
    said = [_span(cell, span) for span in spans]
    return {"mode": mode, "command": command(cell, mode), "spans": said}


def _span(cell: Cell, span: Span) -> dict[str, Any]:
    changes = [
        {"name": made.name, "text": made.text, "bytes": made.bytes, "flops": made.flops}
        for made in span.candidate.adaptations
    ]
    return {
        "first": str(span.first),
        "last": str(span.last),
        "outcome": span.outcome,
        "codes": list(span.codes),
        "adaptations": changes,
        "evidence": evidence_words(cell, span),
    }
