"""What cuDNN's messages need beside their rows."""

from __future__ import annotations

import re

from attnsel.diagnose.logs.message import Facts

_ERROR = re.compile(r"cuDNN (?:Frontend )?[Ee]rror: [^\n]*")


def whole(match: re.Match[str]) -> Facts:
    """The whole of what PyTorch raises, which is then cuDNN's message and not PyTorch's too."""
    raised = _ERROR.search(match.string)
    return {"text": raised[0] if raised and raised.end() >= match.end() else match[0]}
