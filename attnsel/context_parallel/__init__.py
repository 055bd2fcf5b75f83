"""One sequence over many ranks: planned without torch, run with it.

``plan``       who runs the steps of each exchange; ``schedule``, ``estimate``, ``report`` say what follows
``sharding``   tensors of whole sequences to those of a rank, and back
``run``        a call over ranks; ``question`` what it asks, ``consensus`` that all ask alike
``passes``     forward and backward around the exchanges; ``parts``, ``merge``, ``comm`` and ``group`` serve
it

Which ways of exchanging there are: ``attnsel/params/options.py``. Which parts of a sequence meet which, and
what a step asks of a kernel: ``step_geometry`` and ``steps`` of ``attnsel/selection``.

What needs torch is imported when it is asked for.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from attnsel.context_parallel.group import resolve as resolve
    from attnsel.context_parallel.run import attend as attend
    from attnsel.context_parallel.run import explain as explain
    from attnsel.context_parallel.run import fail as fail
    from attnsel.context_parallel.sharding import sequence_positions as sequence_positions
    from attnsel.context_parallel.sharding import shard_packed as shard_packed
    from attnsel.context_parallel.sharding import shard_sequence as shard_sequence
    from attnsel.context_parallel.sharding import unshard_packed as unshard_packed
    from attnsel.context_parallel.sharding import unshard_sequence as unshard_sequence

_PUBLIC = ("sequence_positions", "shard_packed", "shard_sequence", "unshard_packed", "unshard_sequence")
_FROM = dict.fromkeys(_PUBLIC, "sharding") | {"resolve": "group", "attend": "run"}
_FROM |= {"explain": "run", "fail": "run"}


def __getattr__(name: str) -> _Any:
    module = _FROM.get(name)
    if module is None:
        raise AttributeError(f"module 'attnsel.context_parallel' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f"attnsel.context_parallel.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
