"""What messages of TransformerEngine need beside their rows: a configuration, reasons in a sentence."""

from __future__ import annotations

import re
from typing import Any

from attnsel.diagnose.logs.message import Facts
from attnsel.diagnose.logs.parsers import messages
from attnsel.dispatchers.te.config import configs
from attnsel.environment.releases import bundled_frontend
from attnsel.environment.versions import Version

_UNFUSED = "UnfusedDotProductAttention"  # plain torch operators: no candidate of attnsel's
_ALL = ("flash_attn.2", "flash_attn.3", "flash_attn.4", "cudnn", _UNFUSED)


def question(match: re.Match[str]) -> Facts | None:
    """The configuration that is printed, unless it is cut off or another library's."""
    config = next(configs(match[0]), None)
    if config is None:
        return None
    environment = {**({} if config.gpu is None else {"gpu": config.gpu}), **config.versions}
    release = config.versions.get("transformer_engine")
    frontend = None if release is None else bundled_frontend(Version.parse(release))
    if frontend is not None and config.versions.get("cudnn") is not None:
        environment["cudnn_frontend"] = str(frontend)  # the one inside, whatever is installed beside it
    return {"params": config.params, "environment": environment, "unread": config.unread}


def disabled(match: re.Match[str]) -> Facts:
    """What the reason says of the call, and what helps; what is said later wins."""
    told: dict[str, Any] = {"candidates": _backends(match["backend"]), "params": {}, "environment": {}}
    reasons = (one.find(match[0]) for one in messages("transformer_engine", "TransformerEngine reasons"))
    for reason in (one for one in reasons if one is not None):
        figures = {name: int(value) for name, value in reason.params.items() if str(value).isdecimal()}
        told["params"] |= {**reason.params, **figures}
        told["environment"] |= reason.environment
        told |= {name: said for name in ("known", "fix", "link") if (said := getattr(reason, name))}
    return told


def chosen(match: re.Match[str]) -> Facts:
    """Whose version stands behind its name: of FlashAttention that says which one it is."""
    if match["backend"] == "NoBackend":
        return {"kind": "error", "candidates": ()}
    major = (match["version"] or "").partition(".")[0]
    if match["backend"] == "FlashAttention":
        return {"candidates": (f"flash_attn.{major}",) if major in ("2", "3", "4") else ()}
    return {"candidates": _backends(match["backend"])}


def _backends(name: str) -> tuple[str, ...]:
    """attnsel's candidates: of "FlashAttention 2 and 4" these two, of "FlashAttention" all."""
    if name.startswith("FlashAttention"):
        return tuple(f"flash_attn.{major}" for major in re.findall(r"\d", name) or "234")
    return {"FusedAttention": ("cudnn",), "all backends": _ALL}.get(name, (name,))
