"""Which releases of a package have a name: ``data/names.csv``, made of them by tests/proof/api_names.py."""

import re
from functools import cache

from attnsel.base.rows import read_rows


@cache
def _rows() -> dict[tuple[str, str], dict[str, str]]:
    """By module and name, and by the name alone."""
    rows = read_rows("attnsel.environment", "names")
    return {(module, row["name"]): row for row in rows for module in ("", row["module"])}


def lacking(match: re.Match[str]) -> dict[str, str] | None:
    """Words for what a message does not find: a ``name`` in its ``module`` (or a class), an ``argument`` of a
    ``function``. A figure behind a group tells it from the same in other words."""
    said = {group.rstrip("23456789"): text for group, text in match.groupdict().items() if text}
    module, name, argument = (said.get(one, "") for one in ("module", "name", "argument"))
    name = f"{said['function']}({argument})" if argument else name
    if (row := _rows().get((module, name))) is None:
        return None
    what = f"{name} of {module}" if module and name else name or module
    what = f"the argument {argument} of {said['function']}" if argument else what
    spec = ",".join(sign + row[side] for sign, side in ((">=", "since"), ("<", "until")) if row[side])
    apart = "older" if not row["until"] else "newer" if not row["since"] else "another"
    more = {"what": what, "spec": spec, "apart": apart, "root": row["module"].partition(".")[0]}
    words = dict(row)
    heir = words.pop("instead")
    more |= {"then": heir and f", replaced by {heir}", "own": heir and f"; in own code {heir}"}
    return {**words, **more, "since": row["since"] or "0", "until": row["until"] or "9999"}
