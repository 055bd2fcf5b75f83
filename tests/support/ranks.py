"""Ranks: processes that compute together, forked from one that has imported torch and attnsel already."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
import torch.distributed as dist

TIMEOUT = 600  # seconds, of groups: longer than LIMIT, so that who waits for it is found to hang
LIMIT = 240  # seconds, then ranks hang


class FromFile:
    """A function of a test module that another process can call: it loads the module from its file.

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


_left = Path()  # where this rank leaves what it found


def leave(found: Any) -> NoReturn:
    """End this process at once with what the rank found: Gloo's teardown may wait for ranks that are gone."""
    torch.save(found, _left)
    os._exit(0)


def _main(rank: int, size: int, store: str, timeout: int, job: Callable[..., Any], *arguments: Any) -> None:
    global _left
    _left = Path(f"{store}.{rank}")
    try:
        limit = timedelta(seconds=timeout)
        where = f"file://{store}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
        found = job(rank, size, *arguments)
    except BaseException:
        found = {"crash": traceback.format_exc()}
    leave(found)


def run(
    job: Callable[..., Any], size: int, folder: Path, *arguments: Any, timeout: int = TIMEOUT
) -> list[Any]:
    """What ``job(rank, size, *arguments)`` returned on each of ``size`` processes; None from one that died.
    Raises what one raised, and where one hangs.

    One server a session imports what ranks need, and forks them.
    """
    store = folder / uuid.uuid4().hex
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_imports"])
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # Python < 3.13 hands the server none
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()
    given = (size, str(store), timeout, FromFile(job), *arguments)
    children = [context.Process(target=FromFile(_main), args=(rank, *given)) for rank in range(size)]
    try:
        for child in children:
            child.start()
        until = time.monotonic() + LIMIT
        for child in children:
            child.join(max(0.0, until - time.monotonic()))
        ends = [child.exitcode for child in children]
        assert None not in ends, f"ranks hang: {ends}"
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
    files = [Path(f"{store}.{rank}") for rank in range(size)]
    found = [torch.load(file, weights_only=False) if file.exists() else None for file in files]
    for part in found:
        assert not (isinstance(part, dict) and "crash" in part), part["crash"]
    return found


def arrive(name: str, count: int) -> Any:
    """This rank is here, of ``count`` that are to come; the store, which tells when they have."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(name, 1) == count:
        store.set(f"{name}, all", "")
    return store


def wait_for_all(name: str, count: int) -> None:
    """Until ``count`` ranks have come here. No collective, which a group that is done for would refuse."""
    arrive(name, count).wait([f"{name}, all"], timedelta(seconds=LIMIT))


class Told(NamedTuple):
    """An error's type and text; empty without one."""

    kind: str
    text: str


def told(ask: Callable[[], Any]) -> Told:
    """What asking ends in."""
    try:
        ask()
    except BaseException as error:
        return Told(type(error).__name__, str(error))
    return Told("", "")


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
        for begin in range(inner):
            group = dist.new_group(list(range(begin, size, inner)), timeout=limit)
            if rank % inner == begin:
                made["p2p"] = group
    return [made["a2a"], made["p2p"]]
