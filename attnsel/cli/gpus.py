"""``attnsel gpus [FILTER]``: the GPUs that ``--gpu`` knows."""

from __future__ import annotations

import re
from typing import Annotated, Any

from cyclopts import Parameter

from attnsel.base.schemas import stamped
from attnsel.cli.flags import Json, Markdown, one_form
from attnsel.cli.output import BAD_INPUT, FOUND, complain, print_json, print_text
from attnsel.environment.gpus import CATALOGUE, Gpu, look_up_gpu
from attnsel.errors import short
from attnsel.report.markdown import escape, table

_HEAD = ("name", "architecture", "memory", "SMs", "kind")


def gpus(
    *words: Annotated[str, Parameter(name="FILTER", help="only those with all of these: H100, sm89, laptop")],
    markdown: Markdown = False,
    json: Json = False,
) -> int:
    """The GPUs that --gpu knows: name, architecture, memory, SMs. "-" is not known.

    A filter is a part of the name, an architecture (sm89, 8.9), a kind (GeForce, workstation, data center,
    Jetson, mining) or a whole name as a driver or a shop spells it. --gpu takes those too, and parts of a
    card: "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "GRID T4-8Q".

    --json prints a list of objects: name, arch (90 is sm90), memory_gib and sm_count (null: not known), kind.
    """
    one_form(markdown=markdown, json=json)
    shown = [gpu for gpu in CATALOGUE.values() if all(_has(gpu, word) for word in words)]
    if words and not shown:
        try:
            shown = [look_up_gpu(" ".join(words))]
        except ValueError as error:
            complain(f"{short(' '.join(words), str)}: {error}")
            return BAD_INPUT
    if json:
        print_json([stamped("gpus", gpu._asdict()) for gpu in shown])
    elif markdown:
        print_text(table(_HEAD, [tuple(map(escape, _row(gpu))) for gpu in shown]))
    else:
        print_text("\n".join(_lines([_row(gpu) for gpu in shown])))
    return FOUND


def _has(gpu: Gpu, word: str) -> bool:
    asked = _squeezed(word)
    archs = (f"sm{gpu.arch}", f"{gpu.arch // 10}.{gpu.arch % 10}")
    return asked in archs or asked in _squeezed(gpu.name) or asked in _squeezed(gpu.kind)


def _squeezed(text: str) -> str:
    return re.sub(r"[\s_-]", "", text.casefold())


def _row(gpu: Gpu) -> tuple[str, ...]:
    memory = "-" if gpu.memory_gib is None else f"{gpu.memory_gib} GB"
    return gpu.name, f"sm{gpu.arch}", memory, str(gpu.sm_count or "-"), gpu.kind


def _lines(rows: list[tuple[Any, ...]]) -> list[str]:
    name = max(len(_HEAD[0]), *(len(row[0]) for row in rows))
    lines = [
        f"{n:<{name}}  {arch:<12}  {memory:>6}  {sms:>3}  {kind}"
        for n, arch, memory, sms, kind in (_HEAD, *rows)
    ]
    count = "1 GPU" if len(rows) == 1 else f"{len(rows)} GPUs"
    return [*lines, "", f"{count}.  Any of them: attnsel explain --gpu NAME"]
