"""What is said of cards, machines, wheels and versions, question by question, is what ``answers.txt`` says.

What changed is accepted as tests/support/records.py says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attnsel import Environment
from attnsel.environment import COMPONENTS, without_code
from attnsel.environment.gpus import figures_of, look_up_gpu
from attnsel.environment.releases import builds_of, bundled_frontend, default_build, fitting_build, no_code
from attnsel.environment.versions import Version, Versions, cudnn
from attnsel.environment.wheels import flash_attn_wheel, install_flash_attn_3, install_flash_attn_4
from records import Record, words_of

RECORD = Path(__file__).with_name("answers.txt")


def gpu(*words: str) -> Iterator[str]:
    card = look_up_gpu(" ".join(words))
    yield f"{card.name}, {card.target}, {card.memory_gib} GiB, {card.sm_count} SMs, {card.kind}"
    yield str(figures_of(" ".join(words)))


def machine(gpu: str, **given: str) -> Iterator[str]:
    env = Environment.describe(gpu, **given)
    yield f"{env.device.type} {env.device.name}: {env.device.memory} bytes, {env.device.shared_memory} shared"
    yield ", ".join(f"{name} {getattr(env, name)}{'?' * (name in env.assumed)}" for name in COMPONENTS)
    yield from env.warnings
    yield f"without code: {without_code(env.replace(assumed=()))}"


def wheel(*abi: str, platform: str = "linux", **given: str) -> Iterator[str]:
    env = Environment.describe("A100", **{"torch": "2.8.0", "cuda": "12.8", "python": "3.12", **given})
    env = env.replace(platform=platform)
    found = flash_attn_wheel(env, new_abi=None if not abi else abi[0] == "new")
    yield getattr(found, "url", str(found))
    yield install_flash_attn_3(env)
    yield install_flash_attn_4(env, ">=4")


def build(arch: str, **given: str) -> Iterator[str]:
    asked = {name: Version.parse(text) for name, text in given.items()}
    yield f"meant: {fitting_build(None if arch == '-' else int(arch), asked).name}"
    if arch != "-":
        found = no_code(int(arch), asked.get("torch"), asked.get("cuda"))
        yield "has code" if found is None else f"{found.field}: {found}; {[b.name for b in found.nearest]}"


def torch(release: str) -> Iterator[str]:
    for found in builds_of(Version.parse(release)):
        yield f"{found.name}: cuDNN {found.cudnn} ({found.pin}), NCCL {found.nccl}, Triton {found.triton}"
        yield f"code for {found.sass}, PTX of {found.ptx}; of Python 3.{found.pythons}; index {found.index!r}"
    yield f"by default {getattr(default_build(Version.parse(release)), 'name', None)}"


def frontend(release: str) -> Iterator[str]:
    yield str(bundled_frontend(Version.parse(release)))


def version(written: str) -> Iterator[str]:
    read = Version.parse(int(written.removeprefix("int:")) if written.startswith("int:") else written)
    yield f"{read}, after it {read.after}, before it {read.before}"


def versions(*specs: str) -> Iterator[str]:
    span: Versions = cudnn(*specs)
    yield f"{span}: edges {', '.join(map(str, span.edges()))}; {span.sample()} is one"


QUESTIONS = (gpu, machine, wheel, build, torch, frontend, version, versions)


def answered(question: str) -> Iterator[str]:
    (name, *words), given = words_of(question)
    ask = next(one for one in QUESTIONS if one.__name__ == name)
    try:
        yield from ask(*words, **given)
    except ValueError as error:
        yield f"{type(error).__name__}: {error}"


def test_every_question_is_answered_as_it_is_written_down(record: Record) -> None:
    record.answers(RECORD, answered)
