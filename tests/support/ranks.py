"""Worker processes: one spawned group per test module runs many jobs and leaves what it found in files."""

from __future__ import annotations

import importlib.util
import inspect
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

TIMEOUT = 120  # seconds: hangs are noticed, a busy machine is no hang


class FromFile:
    """A function of a test module that a spawned process can call: it loads the module from its file.

    Pickled by its name, the function would be looked for on ``sys.path``, where no folder of tests is.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.file = inspect.getfile(function)
        self.module, self.name = function.__module__, function.__qualname__

    def __call__(self, *arguments: Any) -> Any:
        if self.module not in sys.modules:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[self.module] = module = importlib.util.module_from_spec(spec)
            for parent in accumulate(self.module.split(".")[:-1], "{}.{}".format):
                sys.modules.setdefault(parent, ModuleType(parent))  # pickle imports a class's module by name
            spec.loader.exec_module(module)
        return getattr(sys.modules[self.module], self.name)(*arguments)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _main(rank: int, size: int, port: int, job: Callable[..., Any], folder: str, timeout: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        found = job(rank, size)
    except BaseException:
        found = {"crash": traceback.format_exc()}
    torch.save(found, Path(folder) / f"{rank}.pt")
    os._exit(0)  # Gloo's teardown may wait for ranks that are gone


def run_to_the_end(work: Callable[..., None], arguments: tuple[Any, ...], size: int) -> None:
    """``work(rank, *arguments)`` in each of ``size`` processes. Raises what one raises, or that it hangs."""
    children = torch.multiprocessing.spawn(FromFile(work), args=arguments, nprocs=size, join=False)
    assert children is not None
    try:
        for _ in range(6):  # a call waits for one child
            if children.join(timeout=20):
                return
        raise AssertionError("a child hangs")
    finally:
        for process in children.processes:
            process.kill()


def run(job: Callable[[int, int], Any], size: int, folder: Path, timeout: int = TIMEOUT) -> list[Any]:
    """What ``job(rank, size)`` returned on each rank; None from one that died."""
    children = torch.multiprocessing.spawn(
        _main, args=(size, free_port(), FromFile(job), str(folder), timeout), nprocs=size, join=False
    )
    assert children is not None
    try:
        for process in children.processes:
            process.join(400)
            assert not process.is_alive(), "a rank hangs"
    finally:
        for process in children.processes:
            process.kill()
    files = [folder / f"{rank}.pt" for rank in range(size)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


class Told(NamedTuple):
    """An error's type and text, and the seconds after which it was raised; empty texts without one."""

    kind: str
    text: str
    seconds: float


def told(ask: Callable[[], Any]) -> Told:
    """What asking ends in."""
    began = time.monotonic()
    try:
        ask()
    except BaseException as error:
        return Told(type(error).__name__, str(error), time.monotonic() - began)
    return Told("", "", time.monotonic() - began)


def groups_of(comm: str, rank: int, size: int, made: dict[str, Any], timeout: int = TIMEOUT) -> Any:
    """The cp_group for an exchange: the world, or [a2a group, p2p group] with neighbours in an a2a group.

    timeout: of the latter; they do not inherit the world's.
    """
    limit = timedelta(seconds=timeout)
    if comm != "a2a+p2p":
        return dist.group.WORLD
    if not made:
        inner = 2
        for first in range(0, size, inner):
            group = dist.new_group(list(range(first, first + inner)), timeout=limit)
            if first <= rank < first + inner:
                made["a2a"] = group
        for start in range(inner):
            group = dist.new_group(list(range(start, size, inner)), timeout=limit)
            if rank % inner == start:
                made["p2p"] = group
    return [made["a2a"], made["p2p"]]
