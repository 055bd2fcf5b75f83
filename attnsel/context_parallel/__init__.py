"""One sequence over many ranks. What needs torch is imported when it is asked for."""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from attnsel.context_parallel.sharding import sequence_positions as sequence_positions
    from attnsel.context_parallel.sharding import shard_packed as shard_packed
    from attnsel.context_parallel.sharding import shard_sequence as shard_sequence
    from attnsel.context_parallel.sharding import unshard_packed as unshard_packed
    from attnsel.context_parallel.sharding import unshard_sequence as unshard_sequence

_FROM = {
    "sequence_positions": "attnsel.context_parallel.sharding",
    "shard_packed": "attnsel.context_parallel.sharding",
    "shard_sequence": "attnsel.context_parallel.sharding",
    "unshard_packed": "attnsel.context_parallel.sharding",
    "unshard_sequence": "attnsel.context_parallel.sharding",
}


def __getattr__(name: str) -> _Any:
    module = _FROM.get(name)
    if module is None:
        raise AttributeError(f"module 'attnsel.context_parallel' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(_FROM)
