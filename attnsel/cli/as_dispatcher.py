"""``--as`` and ``--switch``: another library's chooser asked beside attnsel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from cyclopts import Parameter

from attnsel.cli.flags import OTHER
from attnsel.decision import Selection, select
from attnsel.dispatchers import DISPATCHERS, held_by, switches_of
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.policy import Policy

As = Annotated[
    str | None,
    Parameter(
        name="--as",
        group=OTHER,
        help=f"what this library would choose by itself, and why: {', '.join(DISPATCHERS)}",
    ),
]

SwitchFlag = Annotated[
    list[str] | None,
    Parameter(
        name="--switch",
        group=OTHER,
        negative="",
        help="with --as: something of the library's that is set, as NAME=VALUE, such as NVTE_FUSED_ATTN=0; "
        "it wins over what is set in this process. Any number of times",
    ),
]


class Asked(NamedTuple):
    """The chooser that a command line asks beside attnsel, if any."""

    dispatcher: str | None
    switches: tuple[tuple[str, str], ...] = ()

    def select(self, p: AttentionParams, env: Environment, policy: Policy) -> Selection:
        """attnsel's answer, beside the other's. Raises InvalidInput."""
        if self.dispatcher is None:
            return select(p, env, policy=policy)
        switches = {**held_by(self.dispatcher, env), **dict(self.switches)}
        try:
            return select(p, env, policy=policy, dispatcher=self.dispatcher, switches=switches)
        except InvalidInput as error:
            if error.field in switches:
                given = f"{error.field}={error.value}"
                raise InvalidInput("--switch", given, error.allowed) from None
            raise


def asked_of(dispatcher: str | None, switches: Sequence[str] | None) -> Asked:
    """Raises InvalidInput for a library or a switch that there is not."""
    if dispatcher is None:
        if switches:
            raise InvalidInput("--switch", switches[0], "says nothing without --as")
        return Asked(None)
    if dispatcher not in DISPATCHERS:
        raise InvalidInput("--as", dispatcher, f"allowed: {', '.join(DISPATCHERS)}")
    pairs: dict[str, str] = {}
    for text in switches or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            has = ", ".join(switches_of(dispatcher))
            raise InvalidInput("--switch", text, f"must be NAME=VALUE; {dispatcher} has: {has}")
        if name in pairs:
            raise InvalidInput("--switch", text, f"{name} is given twice")
        pairs[name] = value
    return Asked(dispatcher, tuple(pairs.items()))
