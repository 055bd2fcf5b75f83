"""What the engine says beside a question, at other lengths and head dimensions: pictures of a page."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from attnsel.backends.registry import CANDIDATES
from attnsel.decision import Selection
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.report.html import Line, Plane, Plot, Tile, tone
from attnsel.report.words import short_length
from attnsel.selection.evaluate import memory_parts, tensor_bytes

Ask = Callable[[AttentionParams, Environment], Selection]
_HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256, 512)
_LENGTHS = tuple(1 << power for power in range(7, 18))


def drawn(selection: Selection, ask: Ask) -> tuple[Plot, Plane] | None:
    """Memory over length and the choice over head dimension and length, as ``ask``, the engine, says; None of
    a call whose tensors are stated, since they hold for these sizes alone."""
    tensors = selection.params.tensors
    if any((tensors.q, tensors.k, tensors.v, tensors.mask)):
        return None
    return memory(selection, ask), plane(selection, ask)


def _asked(selection: Selection, ask: Ask, length: int, head_dim: int | None = None) -> Selection | str:
    """The answer at another length, of its queries too where they are as many as its keys, and head
    dimension; or why that is no question."""
    p = selection.params
    changes = {"max_seqlen_kv": length}
    changes |= {"max_seqlen_q": length} if p.max_seqlen_q == p.max_seqlen_kv else {}
    if head_dim is not None:
        changes |= {"head_dim_qk": head_dim}
        changes |= {"head_dim_v": head_dim} if p.head_dim_qk == p.head_dim_v else {}
    try:
        return ask(p.replace(**changes), selection.environment)
    except InvalidInput as error:
        return str(error)


def memory(selection: Selection, ask: Ask) -> Plot:
    """What each kernel takes beside the call's own tensors, as far as it runs; and what these take."""
    points: dict[str, list[tuple[int, int]]] = {}
    ends: dict[str, tuple[str, ...]] = {}
    tensors = []
    for length in sorted({selection.params.max_seqlen_kv, *_LENGTHS[1:]}):
        answer = _asked(selection, ask, length)
        if isinstance(answer, str):
            continue
        tensors.append((length, tensor_bytes(answer.params)))
        for c in answer.candidates:
            if c.verdict == "refused" and c.name in points:
                ends.setdefault(c.name, tuple(dict.fromkeys(reason.code for reason in c.reasons)))
            elif c.verdict != "refused" and c.name not in ends:
                own = memory_parts(c.name, answer.params, answer.environment, c.adaptations)
                points.setdefault(c.name, []).append((length, sum(amount for _, amount in own)))
    alike: dict[tuple[tuple[tuple[int, int], ...], tuple[str, ...]], list[str]] = {}
    for name, found in points.items():
        alike.setdefault((tuple(found), ends.get(name, ())), []).append(name)
    lines = [Line(", ".join(names), tone(names[0]), *key) for key, names in alike.items()]
    room = selection.environment.device.memory
    of_the_gpu = tuple((length, room) for length, _ in tensors if room)
    limits = {"the call's own tensors": tuple(tensors), "memory of the GPU": of_the_gpu}
    lines += [Line(name, "limit", among) for name, among in limits.items() if among]
    return Plot("Memory of each kernel beside the call's own tensors, over the length", tuple(lines))


def plane(selection: Selection, ask: Ask) -> Plane:
    """Which kernel runs over head dimension and length, and what keeps this call's own from it; neighbours
    with one answer are one tile."""
    p, own = selection.params, selection.taken
    lengths = sorted({p.max_seqlen_kv, *_LENGTHS})

    def said(dim: int, length: int) -> tuple[bool, str, str, str]:
        here = (dim, length) == (p.head_dim_qk, p.max_seqlen_kv)
        answer = selection if here else _asked(selection, ask, length, dim)
        if isinstance(answer, str):
            return here, "invalid", tone("invalid"), answer
        name, why = answer.taken, ""
        if own in CANDIDATES and name != own and answer.dispatched is None:
            why = f"against {own}: {', '.join(answer.keeps_away(own))}"
        return here, name or "nothing", tone(name), why

    rows = []
    for dim in sorted({p.head_dim_qk, *_HEAD_DIMS}):
        tiles: list[Tile] = []
        for (here, name, look, why), among in groupby(lengths, key=lambda length: said(dim, length)):
            ends = list(among)
            keys = " to ".join(dict.fromkeys(map(short_length, (ends[0], ends[-1]))))
            tip = (f"head_dim {dim}, {keys} keys: {name}", why)
            tiles.append(Tile(name, look, tip, here, lengths.index(ends[0]), len(ends)))
        rows.append((str(dim), tuple(tiles)))
    caption = "Which kernel is taken, over the head dimension and the length"
    return Plane(caption, ("head_dim", "length"), tuple(map(short_length, lengths)), tuple(rows))
