"""What is told of watched programs and of many ranks, as it was when it was read last.

Each function below gives a text of ``records/``, from what lies in ``records/given/``. What changed is
accepted as tests/support/records.py says.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

torch = pytest.importorskip("torch")

from attnsel import AttentionParams, Environment, InvalidInput, select  # noqa: E402
from attnsel.diagnose.framework_fixes import known_fixes, replacement, topics, ways_out  # noqa: E402
from attnsel.diagnose.ranks.answer import read  # noqa: E402
from attnsel.diagnose.ranks.document import nothing_found, ranks_document  # noqa: E402
from attnsel.diagnose.watching.hooks import OPERATORS  # noqa: E402
from attnsel.diagnose.watching.judge import Watched  # noqa: E402
from attnsel.diagnose.watching.record import Api, Process, Site  # noqa: E402
from attnsel.dispatchers import Refusal  # noqa: E402
from attnsel.report.markdown import to_markdown  # noqa: E402
from attnsel.report.text import to_text  # noqa: E402
from attnsel.rules import REGISTRY, load_all  # noqa: E402
from records import Record  # noqa: E402

FOLDER = Path(__file__).parent / "records"
GIVEN = FOLDER / "given"
FIGURES = json.loads((GIVEN / "figures.json").read_text())
ODD = AttentionParams(**FIGURES["everywhere"])
H100 = Environment.describe("H100", torch="2.9.1", cudnn="9.10.2")


def of(**fields: Any) -> AttentionParams:
    return AttentionParams(**{"num_heads": 8, "max_seqlen_q": 32, "head_dim_qk": 64, **fields})


# ---- fixes -------------------------------------------------------------------------------------------


def ways() -> Iterator[str]:
    """What a user of each library does about each topic, and how the figures of a call stand in it."""
    every = sorted({topic for topic, _ in known_fixes()} - {"written out"})
    for topic, api in product(every, get_args(Api)):
        yield from (f"{topic} / {api}: {fix}" for fix in ways_out(api, ODD, [topic]))
    for topic, fields in FIGURES["of one topic"]:
        yield from map(str, ways_out("F.scaled_dot_product_attention", of(**fields), [topic]))


def replacements() -> Iterator[str]:
    """What takes the place of lines by hand, and what candidates' reasons are about."""
    load_all()
    cases = {"odd": ODD, "plain": of(), "61": of(head_dim_qk=61, head_dim_v=61)}
    for code in sorted(code for code in REGISTRY.rules if code.startswith("SDPA")):
        about = {name: topics(p, Refusal("", "", code=code)) for name, p in cases.items()}
        yield f"{code}: {about}"
    for name, fields in json.loads((GIVEN / "questions.json").read_text()).items():
        p = of(**fields)
        for scale, folded, cast in ((0.125, False, False), (0.5, True, True), (0.5, False, True)):
            yield f"{name}, {scale}: {replacement(p, scale=scale, folded=folded, cast=cast)}"
        for one in select(p, H100):
            about = [topic for reason in (*one.reasons, *one.adaptations) for topic in topics(p, reason)]
            if one.name in ("sdpa.flash", "sdpa.efficient", "sdpa.cudnn", "cudnn", "flash_attn.2"):
                yield f"  {one.name}: {', '.join(dict.fromkeys(about))}"


# ---- a watched program -------------------------------------------------------------------------------


def watched() -> Iterator[str]:
    yield from (f"{one.name}: {one.candidate}, {one.gradient}" for one in OPERATORS.values())
    sites = [Site(**json.loads(line)) for line in (GIVEN / "sites.jsonl").read_text().splitlines()]
    here = Environment.describe("A100", torch="2.9.1")
    for process, asked, seen in (
        (Process(attnsel="1.2.3", program="train.py", environment=here), None, ()),
        (Process(attnsel="1.2.3", program="p|.py", rank=2, world_size=3, environment=here, exit_code=4,
                 unseen=("a GPU", "two")), H100, tuple(sites)),
        (Process(attnsel="1.2.3", program="p", rank=1, environment=here), None, tuple(sites[:6])),
    ):  # fmt: skip
        told = Watched(process, seen, asked)
        yield from (told.report(), told.report(60), to_markdown(told.document()))


# ---- many ranks --------------------------------------------------------------------------------------


def put_damaged_files(folder: Path) -> None:
    line = (GIVEN / "ranks" / "rank0.jsonl").read_bytes().splitlines()[0].replace(b'"rank": 0', b'"rank": 10')
    packed = gzip.compress(line + b"\n", compresslevel=0, mtime=0)
    (folder / "rank10.jsonl.gz").write_bytes(packed)
    (folder / "rank11.jsonl.gz").write_bytes(packed.replace(b'"rank": 10', b'"rank": 11')[:-9])
    (folder / "rank12.jsonl").write_bytes(line.replace(b'"rank": 10', b'"rank": 12') + b"\n" + line[:50])
    (folder / "rank13.bin").write_bytes(b"a\0b\n")
    (folder / "link").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder / "sub")


def ranks() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(GIVEN / "ranks", folder, dirs_exist_ok=True)
        put_damaged_files(folder)
        bytes_read: list[tuple[int, int]] = []
        answer = read([name], lambda done, total: bytes_read.append((done, total)))
        in_order = bytes_read == sorted(bytes_read)
        yield f"read {bytes_read[-1][0]} of {bytes_read[-1][1]} bytes, in order: {in_order}"
        yield json.dumps(answer.as_dict(), indent=1)
        document = ranks_document(answer)
        yield from (
            to_text(document),
            to_text(document, 50),
            to_markdown(ranks_document(answer, for_issue=True)),
        )
        yield nothing_found(answer)
        same = read([str(folder / "rank0.jsonl"), str(folder / "rank*.jsonl"), str(folder / "rank0.jsonl")])
        yield to_text(ranks_document(same))
        for nothing in ("none.txt", "none*.txt"):
            with pytest.raises(InvalidInput) as error:
                read([str(folder / nothing)])
            yield error.value.allowed


RECORDS: dict[str, Callable[[], Iterator[str]]] = {
    "ways": ways, "replacements": replacements, "watched": watched, "ranks": ranks,
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_told(name: str, record: Record) -> None:
    record.holds(
        FOLDER / f"{name}.txt", (line.rstrip() for part in RECORDS[name]() for line in part.splitlines())
    )
