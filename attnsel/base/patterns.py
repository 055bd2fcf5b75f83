"""What a regular expression says before it is tried."""

from __future__ import annotations

import re

_STEP = re.compile(
    r"\\(?P<escaped>.)|\[(?:\\.|[^\]\\])+\]|(?P<times>\{[\d,]+\}|[?*+])|(?P<sign>[()|.^$])|(?P<plain>.)"
)


def literals(pattern: str) -> list[list[str]]:
    """Of each of the alternatives of a pattern, the texts that stand in all that it matches: what lies in no
    group, no class of characters and before no quantifier."""
    branches, depth = [[""]], 0
    for step in _STEP.finditer(pattern):
        runs, sign, escaped = branches[-1], step["sign"], step["escaped"]
        depth += (sign == "(") - (sign == ")")
        if depth:
            runs += [""] if runs[-1] else []
        elif sign == "|":
            branches.append([""])
        elif step["plain"] or (escaped and not escaped.isalnum()):
            runs[-1] += step["plain"] or escaped
        else:
            if step["times"] and step["times"] != "+":
                runs[-1] = runs[-1][:-1]
            runs.append("")
    return branches
