"""One file of JSON lines for each process: its line, then one for each site. `attnsel report` reads them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from attnsel.base.schemas import stamped
from attnsel.diagnose.watching.report import Watched


def file_of(folder: str | Path, watched: Watched) -> Path:
    """Where the process's file lies: rank, machine and process id tell those of one job apart."""
    process = watched.process
    host = re.sub(r"[^A-Za-z0-9.-]", "-", process.host)[:60] or "host"
    return Path(folder) / f"watch-rank{process.rank}-{host}-{process.pid}.jsonl"


def write(folder: str | Path, watched: Watched) -> Path:
    """Write the file whole: a reader finds the old one or the new one, never a half. Raises OSError."""
    path = file_of(folder, watched)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [stamped("watch-process", watched.process.model_dump(mode="json"))]
    lines += [stamped("watch-site", site.model_dump(mode="json")) for site in watched.sites]
    part = path.with_suffix(f".part{os.getpid()}")
    try:
        part.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
