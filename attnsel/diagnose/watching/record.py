"""What is kept of a watched program: one record for each call site, shape and kernel; the lines of a file.

A file has one line of JSON for its process (:class:`Process`) and one for each :class:`Site`, whose counts
are those of the whole run. Nothing in it is a path outside the program's own folder, or a value of a tensor.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from attnsel.base.model import FrozenModel
from attnsel.environment import Environment
from attnsel.params import AttentionParams

Api = Literal[
    "F.scaled_dot_product_attention",
    "nn.MultiheadAttention",
    "transformers",
    "diffusers",
    "flash_attn",
    "flex_attention",
    "varlen_attn",
    "TransformerEngine",
    "attnsel",
    "by hand",
    "aten",
]
"""Whose attention was called; "by hand" is a softmax between two products, "aten" an operator itself."""


class Materialised(FrozenModel):
    """A tensor that exists only because of how attention was asked for, in bytes per call."""

    what: str
    bytes: int = Field(ge=0)


class Site(FrozenModel):
    """One place in the program, one shape, one kernel."""

    where: str = Field(description="file, line and function, relative to the program")
    api: Api
    params: AttentionParams | None = Field(default=None, description="the call in attnsel's words")
    switches: tuple[str, ...] = Field(
        default=(),
        description="what held beside the call, NAME=VALUE as for attnsel explain --as torch --switch",
    )
    unread: str = Field(default="", description="why the call could not be put in attnsel's words")
    forward: str = Field(description="the operator or library function that ran")
    backward: str = ""
    candidate: str = Field(default="", description="attnsel's candidate that is the same kernel")
    calls: int = Field(default=0, ge=0)
    backward_calls: int = Field(default=0, ge=0)
    compiled: bool = False
    seconds: float | None = Field(default=None, description="median of one forward, when asked")
    backward_seconds: float | None = None
    peak_bytes: int | None = Field(default=None, description="allocated at most during one call, when asked")
    expected_bytes: int | None = Field(default=None, description="what such a call should take")
    expected_seconds: float | None = None
    materialised: tuple[Materialised, ...] = ()
    planned: str = Field(default="", description="what the same call would run on the GPU asked about")
    best: str = Field(default="", description="what attnsel would choose")
    why: tuple[str, ...] = Field(default=(), description="why the best did not run, with codes")
    fix: str = Field(default="", description="what to change, in the program's own API")
    notes: tuple[str, ...] = ()
    dropout_name: str = Field(default="", description="what the model's own configuration calls its dropout")


class Process(FrozenModel):
    """The process that was watched."""

    attnsel: str
    program: str
    rank: int = 0
    world_size: int = 1
    host: str = ""
    pid: int = 0
    environment: Environment
    exit_code: int | None = None
    unseen: tuple[str, ...] = Field(default=(), description="what could not be seen, and why")
