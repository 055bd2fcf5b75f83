"""What the records of candidates say about calls whose backward autograd does not record.

Such are traced calls (``compiled.py``): forward and backward are operators, with plain tensors between them.
"""

from __future__ import annotations

from functools import lru_cache

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import Environment
from attnsel.runtime.call import Config
from attnsel.verdicts.record import CandidateRecord


def can(config: Config, record: CandidateRecord) -> bool:
    """Whether it replays dropout from a seed, and gives gradients without autograd."""
    if config.attention_dropout and record.dropout == "generator":
        return False
    return record.explicit_backward or not config.is_training


@lru_cache(maxsize=1024)
def carries_lse(config: Config, dtype: str, env: Environment) -> bool:
    """Whether the output and log-sum-exp of any forward are all that any backward of such a call needs.

    Both are chosen when they run, and settings or refusals may change in between. So every candidate that
    may be chosen at all has to give a log-sum-exp, and where there is dropout all of them have to drop the
    same entries. Nothing that may change enters, so that forward and backward agree.
    """
    asked = {dtype, env.device.type, "training"}
    if config.attention_dropout:
        asked.add("dropout")
    able = [
        record
        for name, record in CANDIDATES.items()
        if config.backend in (None, name)
        and asked.issubset(record.takes)
        and all(getattr(env, component) is not None for component in record.needs)
        and can(config, record)
    ]
    if config.attention_dropout and len(able) > 1 and any(record.dropout != "contract" for record in able):
        return False
    return all(record.gives_lse for record in able)
