"""Asking a package: starts the worker, gives it time, and takes its death for an answer too."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from attnsel.base.processes import Child, Unready, python
from attnsel.params import AttentionParams
from flash_attention_ask.source import Missing, Source

_WORKER = f"""
import json, sys
sys.path.append({str(Path(__file__).resolve().parents[1])!r})
from flash_attention_ask.worker import main
main(json.loads(sys.argv[1]))
"""
_TIMEOUT = 300.0  # seconds for one question: six kernels, of which the slowest took 20 on two busy cores


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said of one call. ``supported`` None: no answer in time, or none that is the package's.

    ``stage`` is where it ended: "prepare" (attnsel's own checks), "forward", "backward", "done", "crashed"
    or "timeout"; ``where`` the file and line that refused; ``depth`` how far was asked.
    """

    supported: bool | None
    stage: str
    words: str
    where: str
    depth: str

    @property
    def crashed(self) -> bool:
        return self.stage == "crashed"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Package:
    """One package in a child process, asked as often as one likes. Use it in a ``with`` block.

    ``standins``: as if its compiler were not installed; None: only where it does not import with what is.
    """

    def __init__(self, source: Source, *, standins: bool | None = None, timeout: float = _TIMEOUT) -> None:
        self.source = source
        self.notes: list[str] = []
        self._standins, self._timeout = standins, timeout
        self._child: Child | None = None

    def __enter__(self) -> Package:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    @property
    def compiler(self) -> str | None:
        """The release of what builds its kernels; None where nothing does. Raises Missing."""
        compiler: str | None = self._started().first["ready"]["compiler"]
        return compiler

    def ask(self, p: AttentionParams, arch: int, sm_count: int, depth: str = "check") -> Answer:
        """Whether the package takes this call on that GPU. Raises Missing."""
        child = self._started()
        question = {"params": p.model_dump(mode="json"), "arch": arch, "sm_count": sm_count, "depth": depth}
        said = child.ask(question, self._timeout)
        if said is not None:
            return Answer(said["supported"], said["stage"], said["words"], said["where"], depth)
        died, log = child.death(), child.logged()
        self.close()
        if not died:
            return Answer(None, "timeout", f"no answer within {self._timeout:g} s", "", depth)
        # A compiler that aborts refuses: whoever calls the package dies too.
        last = log.strip().rpartition("\n")[-1]
        return Answer(False, "crashed", f"the process died ({died}): {last[-200:]}", "", depth)

    def _started(self) -> Child:
        if self._child is not None and self._child.alive:
            return self._child
        self.close()
        try:
            self._child = self._start(bool(self._standins))
        except Missing as missing:
            if self._standins is not None or self.source.backend != "flash_attn.4":
                raise
            self._standins = True
            self._child = self._start(True)
            self.notes.append(
                f"with its compiler it does not import ({missing}): checks before a compile only"
            )
        return self._child

    def _start(self, standins: bool) -> Child:
        settings = {"backend": self.source.backend, "source": str(self.source.folder), "standins": standins}
        folder = Path(tempfile.mkdtemp(prefix="attnsel-"))
        try:
            child = Child(python(_WORKER, json.dumps(settings)), os.environ, folder, self._timeout)
        except Unready as unready:
            how = f"dies ({unready.died})" if unready.died else f"is not ready within {self._timeout:g} s"
            raise Missing(
                f"the process that asks {self.source.backend} {how}: {unready.printed[-300:]}"
            ) from None
        if "ready" not in child.first:
            child.stop()
            raise Missing(str(child.first["message"]))
        return child
