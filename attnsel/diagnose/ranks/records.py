"""What one line says: of a debug file, of a watched program, or of a log that attnsel wrote into.

Nothing is believed: a line may come from another version, or from anybody. What is of another type than it
should be is as if it were not there.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.schemas import VERSIONS
from attnsel.environment import COMPONENTS
from attnsel.errors import short
from attnsel.settings import VARIABLES
from attnsel.verdicts.reasons import REFUSED, WRONG_NUMBERS

NOTHING = "nothing"  # in the place of a kernel: nothing could run the call
_LONGEST_NAME = 60
_LONGEST_MESSAGE = 300

# Newest version that is read of each kind of line.
READ: dict[str, int] = {
    "debug": VERSIONS["debug"],
    "watch-process": VERSIONS["watch-process"],
    "watch-site": VERSIONS["watch-site"],
}
_SCHEMA = re.compile(r"attnsel\.([a-z-]{1,40})/(\d{1,6})")


class Broken(ValueError):
    """A line that should be JSON of ours and is not; the message says why."""


class UnknownSchema(ValueError):
    """JSON of ours that this version does not read; the message is its ``schema``."""


class Process(NamedTuple):
    """Who wrote. What is not known is None or empty."""

    rank: int | None = None
    world_size: int = 0
    host: str = ""
    pid: int = 0
    time: str = ""


class Setback(NamedTuple):
    """A candidate that this rank's own run found wanting for the question."""

    candidate: str
    code: str
    message: str


class Choice(NamedTuple):
    """One question and what ran for it. ``params`` is None where ``words`` are all there is.

    ``calls``: 0 where nobody counted. ``slow``: a last resort on a GPU, or attention by hand.
    """

    kind: str  # "debug", "watch" or "log"
    params: dict[str, Any] | None
    words: str
    kernel: str
    calls: int = 0
    setbacks: tuple[Setback, ...] = ()
    slow: bool = False
    why: str = ""
    fix: str = ""
    where: str = ""


class Record(NamedTuple):
    """One line. ``circumstances``: environment, policy and attnsel's version as they stand in it."""

    process: Process = Process()
    choice: Choice | None = None
    setback: Setback | None = None  # of a warning, which names no question
    circumstances: dict[str, Any] | None = None
    ended: int | None = None  # exit code of a watched program
    begins: bool = False  # the line of a watched process


def read_line(text: bytes) -> Record | None:
    """None for a line that is not attnsel's. Raises Broken or UnknownSchema."""
    if text.startswith(b"{"):
        return _of_json(text)
    return _of_text(text.decode("utf-8", "replace")) if b"attnsel" in text or b"Warning" in text else None


def _of_json(text: bytes) -> Record | None:
    try:
        data = json.loads(text)
    except RecursionError:
        raise Broken("nested too deeply") from None
    except UnicodeDecodeError:
        raise Broken("no UTF-8") from None
    except json.JSONDecodeError as error:
        raise Broken(f"no JSON: column {error.colno}: {error.msg}") from None
    except ValueError:
        raise Broken("holds a number that is far too large") from None
    schema = data.get("schema")
    found = _SCHEMA.fullmatch(schema) if isinstance(schema, str) else None
    if found is None:
        return None
    name, version = found[1], int(found[2])
    if not 1 <= version <= READ.get(name, 0):
        raise UnknownSchema(found[0])
    if name == "debug":
        return _of_debug(data)
    return _of_process(data) if name == "watch-process" else _of_site(data)


# ---- values of another's making -----------------------------------------------------------------------


def _name(data: dict[str, Any], key: str, limit: int = _LONGEST_NAME) -> str:
    value = data.get(key)
    return short(value, str, limit) if isinstance(value, str) else ""


def _number(data: dict[str, Any], key: str, most: int = 1 << 60) -> int:
    value = data.get(key)
    return value if type(value) is int and 0 <= value <= most else 0


def _object(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _objects(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = data.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _process(data: dict[str, Any]) -> Process:
    has_rank = type(data.get("rank")) is int and 0 <= data["rank"] < 10**9
    return Process(
        data["rank"] if has_rank else None,
        _number(data, "world_size", 10**9),
        _name(data, "host"),
        _number(data, "pid"),
        _name(data, "time", 40),
    )


# ---- ATTNSEL_DEBUG_FORMAT=json ------------------------------------------------------------------------


def _of_debug(data: dict[str, Any]) -> Record:
    params = data.get("params")
    if not isinstance(params, dict) or not isinstance(data.get("environment"), dict):
        raise Broken("a debug line without params or environment")
    candidates = _objects(data, "candidates")
    kernel = _name(data, "backend") or NOTHING
    slow = kernel in CANDIDATES and CANDIDATES[kernel].last_resort and _on_gpu(data["environment"])
    why, fix = _better(data, candidates) if slow or kernel == NOTHING else ("", "")
    setbacks = tuple(_setbacks(candidates))
    label = _name(data, "label")
    choice = Choice("debug", params, "", kernel, 0, setbacks, slow, why, fix, label)
    held = {key: data.get(key) for key in ("environment", "policy", "attnsel")}
    return Record(_process(data), choice, circumstances=held)


def _on_gpu(environment: dict[str, Any]) -> bool:
    return _object(environment, "device").get("type") in ("cuda", "rocm")


def _setbacks(candidates: list[dict[str, Any]]) -> list[Setback]:
    return [
        Setback(_name(one, "name"), reason["code"], _name(reason, "observed", _LONGEST_MESSAGE) or message)
        for one in candidates
        for reason in _objects(one, "reasons")
        if reason.get("code") in (REFUSED, WRONG_NUMBERS)
        for message in (_name(reason, "message", _LONGEST_MESSAGE),)
    ]


def _better(data: dict[str, Any], candidates: list[dict[str, Any]]) -> tuple[str, str]:
    """Why a better kernel did not run, and the first way to it that takes no other GPU and no risk."""
    for way in _objects(data, "unlocks"):
        if way.get("effect") in ("risk", "hardware"):
            continue
        name = _name(way, "candidate")
        reasons = [r for one in candidates if one.get("name") == name for r in _objects(one, "reasons")]
        why = "; ".join(f"{_name(r, 'code', 20)} {_name(r, 'message', 160)}" for r in reasons[:2])
        return f"{name}: {why}" if why else "", f"to get {name}: {_name(way, 'change', 200)}"
    return "", ""


# ---- attnsel watch --out ------------------------------------------------------------------------------


def _of_process(data: dict[str, Any]) -> Record:
    if not isinstance(data.get("environment"), dict):
        raise Broken("a watched process without an environment")
    code = data.get("exit_code")
    held = {key: data.get(key) for key in ("environment", "attnsel")}
    ended = code if type(code) is int and abs(code) < 1 << 31 else None
    return Record(_process(data), circumstances=held, ended=ended, begins=True)


def _of_site(data: dict[str, Any]) -> Record:
    params = data.get("params")
    api, where = _name(data, "api"), _name(data, "where", 120)
    candidate = _name(data, "candidate")
    kernel = candidate or _name(data, "forward") or NOTHING
    slow = api == "by hand" or (candidate in CANDIDATES and CANDIDATES[candidate].last_resort)
    why = data.get("why")
    reasons = [short(one, str, 160) for one in why if isinstance(one, str)] if isinstance(why, list) else []
    best, fix = _name(data, "best"), _name(data, "fix", 200)
    said = f"{best}: {'; '.join(reasons[:2])}" if best and reasons else "; ".join(reasons[:2])
    words = "" if isinstance(params, dict) else f"{api} at {where}"
    known = params if isinstance(params, dict) else None
    choice = Choice(
        "watch", known, words, kernel, _number(data, "calls"), (), slow, said, fix, f"{api} at {where}"
    )
    return Record(choice=choice)


# ---- text that attnsel writes -------------------------------------------------------------------------

_PREFIX = re.compile(
    r"\[(?:rank|default|[A-Za-z_]{1,30})(\d{1,6})\]:\s*"
)  # torch's own, and torchrun --tee's
_OURS = re.compile(
    r"attnsel: (?:\[rank (\d{1,9}) of (\d{1,9})\] )?(?:([^:;\[]{1,120}): )?(\S{1,60}) runs[ ;\[(]"
)
_QUESTION = re.compile(r"\[([^\[\]]{1,400})\]\s*$")
_FIX = re.compile(r"; (to get [^\[;]{1,200}) \[")
_SELECTED = re.compile(r"attnsel: (?:\[rank (\d{1,9}) of (\d{1,9})\] )?(?:.{1,120}: )?selected \S{1,60}$")
_FELL_BACK = re.compile(
    r"FallbackWarning: (\S{1,60}) (refused when it ran|gave other numbers than tiled): (.{0,4000}); "
    r"the next candidate runs"
)
_SLOW = re.compile(r"SlowPathWarning: (\S{1,60}) runs[ ;\[(]")


def _of_text(line: str) -> Record | None:
    prefix = _PREFIX.match(line)
    rank = int(prefix[1]) if prefix else None
    if found := _FELL_BACK.search(line):
        code = WRONG_NUMBERS if found[2].startswith("gave") else REFUSED
        setback = Setback(found[1], code, short(found[3], str, _LONGEST_MESSAGE))
        return Record(Process(rank), setback=setback)
    if found := _OURS.search(line):
        return Record(_spoken(rank, found), _told(line, found[4], slow=False, where=found[3] or ""))
    if found := _SLOW.search(line):
        return Record(Process(rank), _told(line, found[1], slow=True))
    if found := _SELECTED.search(line):
        return Record(_spoken(rank, found))
    return None


def _spoken(rank: int | None, found: re.Match[str]) -> Process:
    if found[1] is None:
        return Process(rank)
    return Process(int(found[1]), int(found[2]))


def _told(line: str, kernel: str, *, slow: bool, where: str = "") -> Choice:
    question, fix = _QUESTION.search(line), _FIX.search(line)
    words = short(question[1], str, 400) if question else "a question that the line does not say"
    way = fix[1] if fix else ""
    return Choice("log", None, words, kernel, slow=slow, fix=way, where=where)


# ---- circumstances ------------------------------------------------------------------------------------

_VARIABLE_OF = {field: variable for variable, field in VARIABLES.items()}
_MACHINE = ("platform", "torch_flash", "missing")


def in_words(held: dict[str, Any]) -> dict[str, str]:
    """Circumstances as texts by the name that a reader knows: "torch", "GPU", "policy.deny", "tensors"."""
    environment, policy = _object(held, "environment"), _object(held, "policy")
    device = _object(environment, "device")
    words = {"GPU" if _on_gpu(environment) else "device": _plain(device.get("name") or device.get("type"))}
    if device.get("arch") is not None:
        words["architecture"] = f"sm{_plain(device['arch'])}"
    words |= {name: _plain(environment.get(name)) for name in (*COMPONENTS, *_MACHINE)}
    words |= {_setting(name): _plain(value) for name, value in list(policy.items())[:30]}
    words["attnsel"] = _plain(held.get("attnsel"))
    words["tensors"] = _lying(_object(held, "tensors"))
    return words


def _setting(field: str) -> str:
    """The variable of a policy's field; of one that has none, that it is an argument of calls."""
    return _VARIABLE_OF.get(field) or f"the argument {short(field, str, 30)}"


def _plain(value: Any) -> str:
    if value is None or value in ("", [], {}, False):
        return "none"
    if isinstance(value, list):
        return short(", ".join(map(str, value[:8])), str, 80)
    return short(value, str, 80) if isinstance(value, (str, int, float)) else short(value, limit=80)


def _lying(tensors: dict[str, Any]) -> str:
    """Strides and addresses of those that are described."""
    words = []
    for name in ("q", "k", "v", "mask"):
        spec = _object(tensors, name)
        stride = spec.get("stride")
        if isinstance(stride, list):
            words.append(f"{name} strides {','.join(short(n, str, 20) for n in stride[:8])}")
        if type(spec.get("alignment")) is int and spec["alignment"] < 16:
            words.append(f"{name} on {spec['alignment']} bytes")
    return short("; ".join(words), str, 160) or "dense"
