"""``attnsel.watch()``: begins, ends, and what was seen."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any

from attnsel.backends.registry import CANDIDATES
from attnsel.debug import process_record
from attnsel.diagnose.watching.hooks import Hooks
from attnsel.diagnose.watching.judge import Watched, judge
from attnsel.diagnose.watching.observe import Observer, Places, Recorder, load, record_medians
from attnsel.diagnose.watching.record import Process, Site
from attnsel.environment import Environment
from attnsel.environment.gpus import figures_of
from attnsel.errors import InvalidInput
from attnsel.params import ITEMSIZE, AttentionParams
from attnsel.selection.evaluate import memory_parts, tensor_bytes

# --------------------------------------------------------------------------------------------------------
# What a measured call should have taken, beside what it took: EXPLAIN ANALYZE. Imports no torch.
#
# Bytes: those of the result, and what the kernel allocates by its own record; of attention written by hand
# those of the result alone, which is all that a fused kernel makes. Seconds: arithmetic at the GPU's rate on
# paper, or reading and writing the call's tensors at its bandwidth, whichever is longer: a lower bound. None
# where the GPU has no figures, and for float32, whose rate is another.


def with_expectation(site: Site, env: Environment) -> Site:
    """The site with an expectation beside each measurement of a forward."""
    p = site.params
    if p is None or (site.seconds is None and site.peak_bytes is None):
        return site
    changes: dict[str, float | int | None] = {}
    if site.peak_bytes is not None:
        changes["expected_bytes"] = _bytes(site, p, env)
    if site.seconds is not None:
        changes["expected_seconds"] = _seconds(p, env)
    return site.replace(**changes)


def _bytes(site: Site, p: AttentionParams, env: Environment) -> int | None:
    result = p.batch_size * p.max_seqlen_q * p.num_heads * p.head_dim_v * ITEMSIZE[p.dtype]
    if site.candidate in CANDIDATES:
        return result + sum(size for _, size in memory_parts(site.candidate, p, env))
    return result if site.materialised else None


def _seconds(p: AttentionParams, env: Environment) -> float | None:
    figures = figures_of(env.device.name)
    if figures is None or p.dtype not in ("bf16", "fp16"):
        return None
    forward = p.derive(is_training=False)
    return max(forward.flops / (figures.tflops * 1e12), tensor_bytes(forward) / (figures.memory * 1e9))


class Watch:
    """The attention of what runs inside ``with``; of the whole process, with the threads that it starts.

        with attnsel.watch() as w:
            model(batch).loss.backward()
        print(w.report())

    ``time``, ``memory``: also measure. ``program``: the folder that file names are relative to. May be
    entered again, and inside another one: the inner one sees the calls inside it, the outer one all.
    """

    def __init__(self, *, time: bool = False, memory: bool = False, program: str | None = None) -> None:
        self.program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
        self.recorder = Recorder(Places(program or os.getcwd()), time=time, memory=memory)
        self._observers: list[Observer] = []
        self._hooks: Hooks | None = None

    def __enter__(self) -> Watch:
        if self._hooks is not None:
            raise RuntimeError("this watch has begun already")
        # torch loads it under a mode, at the first call: it must not meet our hooks.
        import torch._dynamo  # noqa: F401

        self._observers = load()
        for observer in self._observers:
            if observer.begin is not None:
                self.recorder.safely(observer.begin, self.recorder)
        self._hooks = Hooks(self.recorder, self._observers)
        self.recorder.safely(self._hooks.enter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            self.recorder.safely(hooks.leave)
            for observer in self._observers:
                if observer.finish is not None:
                    self.recorder.safely(observer.finish, self.recorder)

    @property
    def sites(self) -> tuple[Site, ...]:
        """What was seen so far, without a judgement: that is worked out by ``watched``."""
        record_medians(self.recorder.book.tallies())
        return self.recorder.book.sites()

    def watched(self, *, gpu: str | None = None, exit_code: int | None = None) -> Watched:
        """What was seen so far, judged for this machine or for another one: ``gpu`` is a catalogue's name.

        Raises InvalidInput for a GPU that there is not.
        """
        here = Environment.detect()
        asked = None if gpu is None else elsewhere(gpu, here)
        seen = process_record()
        dropped = self.recorder.book.dropped
        unseen = list(self.recorder.unseen)
        if dropped:
            unseen.append(f"where {dropped} calls stand: there are more places than are kept apart")
        process = Process(
            attnsel=seen["attnsel"],
            program=self.program,
            rank=seen["rank"],
            world_size=seen["world_size"],
            host=seen["host"],
            pid=seen["pid"],
            environment=here,
            exit_code=exit_code,
            unseen=tuple(unseen),
        )
        sites = judge(self.sites, here, asked)
        sites = tuple(with_expectation(site, here) for site in sites)
        return Watched(process, sites, asked)

    def report(self, width: int = 80, *, gpu: str | None = None) -> str:
        """What was seen so far, as text."""
        return self.watched(gpu=gpu).report(width)

    def as_dict(self, *, gpu: str | None = None) -> dict[str, Any]:
        """What was seen so far, as JSON."""
        return self.watched(gpu=gpu).as_dict()


def elsewhere(gpu: str, here: Environment) -> Environment:
    """The machine that is asked about: that GPU, with the torch that is here. Raises InvalidInput."""
    if here.torch is None:
        return Environment.describe(gpu)
    try:
        return Environment.describe(gpu, torch=str(here.torch))
    except InvalidInput as error:
        if error.field == "gpu":
            raise
        return Environment.describe(gpu)  # no wheel of this torch for that GPU


def watch(**options: Any) -> Watch:
    """See the attention of what runs inside ``with``: where it is called, how often, what kernel ran.

        with attnsel.watch() as w:
            model(batch).loss.backward()
        print(w.report())

    options: ``time=True`` and ``memory=True`` also measure; ``program`` is the folder that file names are
        relative to. ``w.sites`` is what was seen; ``w.watched(gpu="H100")`` judges it for another GPU.
    """
    return Watch(**options)
