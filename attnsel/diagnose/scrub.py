"""Secrets, paths, hosts and addresses taken out of a text, so that a report can be pasted anywhere.

What is shown of a log is only what a message matched, and that goes through here. In doubt something is
taken out: a report without a word is less harm than one with a password. What attention is about stays:
versions, sizes, times, names of kernels and of classes.

What the makers of tokens put before them is a table, ``data/secrets.csv``. It was read off a detector of
secrets that is kept up to date (its rows say which): a detector itself is hundreds of expressions and a
programme of its own, for texts that are a line long here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from attnsel.base.rows import read_rows

_SECRET = "<secret>"

# What is a secret by its name. A name that ends in "key" or "token" is mostly attention's own: see _value.
_NAMES = (
    r"passw(?:or)?d|passphrase|passcode|(?<![a-z])pwd|(?<![a-z])pass|secret|credentials?|"
    r"(?:api|access|account|private|shared|signing|encryption|master|license|ssh)[_\- ]?key(?:[_\-]?id)?|"
    r"auth(?:orization|[_\-]?token)?|access[_\-]?token|signature|(?<![a-z])sig"
)
_OF_ATTENTION = (
    r"(?:query|past|cross|self|attn|attention|head|kv|num|cache|dict|state|primary|sort|group|row|map|lookup|"
    r"pad|eos|bos|unk|sep|cls|mask|image|video|audio|special|stop|next|last|first|per|max|min|new)[_\-]"
)
_QUOTED_OR_BARE = r"(?:\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[^\s,;&'\"]+)"
_NUMBER = r"(?!(?:[\d.]+|true|false|none|null)(?![\w.\-+/=])|[\[({<]|torch\.)"
_IS = r"['\"]?\s*(?:=>|[:=]+(?!>))\s*"

# Before a number of four parts: what has versions of four parts.
_VERSIONED = (
    r"(?i:[~=<>!]=\s*|\b(?:version|release|driver|cu(?:da|dnn|blas|fft|rand|sparse|solver|dart)\w*|nccl|tensorrt|trt|"
    r"nvrtc|nvidia-[a-z0-9\-]+|toolkit|rocm|hip|magma|mkl|onednn|gcc|ninja|[a-z][\w\-]*-(?:cu\d\d|version))"
    r"[\s:=v\-_/\"'(]{1,4})"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_PUBLIC = (
    r"(?:[\w\-]+\.)*(?:github\.com|githubusercontent\.com|pytorch\.org|nvidia\.com|huggingface\.co|python\.org|"
    r"pypi\.org|readthedocs\.io|arxiv\.org|google\.com|openai\.com|readthedocs\.org)"
)
_WORD = r"(?:[A-Za-z]{1,12}(?: [A-Za-z0-9]{1,12}){0,2}|[^\s\\/:*?\"<>|,;]+(?: [^\s\\/:*?\"<>|,;]+){0,3})"


def _kept_if_versioned(match: re.Match[str]) -> str:
    return match[0] if match[1] else "<address>"


# A part of a name that somebody chose: a word, words in capitals or with one each, a size, a number.
_CHOSEN = re.compile(
    r"(?:[A-Z]{0,3}[a-z]+[A-Z]?|[A-Z]+|(?:[A-Z]{0,5}[a-z]{2,})+[A-Z]{0,3}|[a-z]*)"
    r"(?:\d{1,6}(?:[a-z]{1,8}\d{0,5}){0,4})?(?:TRUE|FALSE)?"
)


def _kept_if_chosen(match: re.Match[str]) -> str:
    parts = [part for part in re.split(r"[_\-/+=]", match[0]) if part]
    chosen = len(parts) > 2 and all(len(part) <= 24 and _CHOSEN.fullmatch(part) for part in parts)
    return match[0] if chosen or match[0].startswith("_Z") else _SECRET


def _of_path(match: re.Match[str]) -> str:
    name = re.split(r"[\\/]", match[0].rstrip("\\/"))[-1]
    return f"<path>/{name}" if _CODE.fullmatch(name) else "<path>"


def _of_makers() -> str:
    """Tokens by what their makers put before them; a name in small letters alone is none."""
    ways = [
        rf"{re.escape(row['prefix'])}(?=[\w\-.]*[A-Z0-9])[A-Za-z0-9_\-.+/=]{{{row['least']},}}"
        for row in read_rows("attnsel.diagnose", "secrets")
    ]
    return rf"(?<![A-Za-z0-9])(?:{'|'.join(ways)})"


def _patterns() -> tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]:
    return (
        (r"-----BEGIN [A-Z ]{0,40}-----.*?(?:-----END [A-Z ]{0,40}-----|$)", _SECRET),
        (r"\b(?:ssh-[a-z0-9]{2,12}|ecdsa-sha2-\S{1,20})\s+AAAA[A-Za-z0-9+/=]+(?:\s+\S+@\S+)?", _SECRET),
        (_of_makers(), _SECRET),
        (
            r"(?i)\b(bearer|(?:basic|digest|token)(?=\s+\S*(?-i:[\d+/=_.~\-A-Z])))\s+[A-Za-z0-9+/_.~\-]{8,}=*",
            rf"\1 {_SECRET}",
        ),
        (r"(?i)\b((?:set-)?cookie['\"]?\s*[:=]\s*)[^\n]+", rf"\1{_SECRET}"),
        (rf"(?i)((?:{_NAMES}){_IS}){_NUMBER}{_QUOTED_OR_BARE}", rf"\1{_SECRET}"),
        (
            rf"(?i)(?<![\w\-])(-{{0,2}}(?!{_OF_ATTENTION})(?:(?:[a-z0-9]+[_\-])*token|(?:[a-z0-9]+[_\-])+key){_IS})"
            rf"{_NUMBER}{_QUOTED_OR_BARE}",
            rf"\1{_SECRET}",
        ),
        (rf"(?i)(--?[a-z0-9_\-]*(?:{_NAMES}|[_\-]key|token)\s+){_NUMBER}{_QUOTED_OR_BARE}", rf"\1{_SECRET}"),
        (
            rf"(?i)\b((?:password|passphrase|passwd|passcode)\s+(?!(?:is\s+|was\s+)?<)(?:is\s+|was\s+)?){_QUOTED_OR_BARE}",
            rf"\1{_SECRET}",
        ),
        (r"\b(sshpass\s+-p\s*)\S+", rf"\1{_SECRET}"),
        (r"(?i)(\s(?:-u|--user)[\s=]+)['\"]?[^\s'\":]+:[^\s'\"]+['\"]?", rf"\1{_SECRET}"),
        (r"(?i)\b(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", _SECRET),
        # Addresses. A link to a public place of code stays: it says where a message comes from.
        (
            r"\b[a-zA-Z][a-zA-Z0-9+.\-]{1,20}://(?!(?:www\.)?(?:github\.com|pytorch\.org|docs\.nvidia\.com|"
            r"huggingface\.co/docs)[/\s)]|(?:www\.)?(?:github\.com|pytorch\.org)$)[^\s'\"<>)\]]+",
            "<url>",
        ),
        (r"(?i)\b(https?://[^\s?#'\"<>)]+)[?#][^\s'\"<>)]*", r"\1"),
        (r"[A-Za-z0-9._%+\-]{1,64}@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)+(?::[^\s'\"]+)?", "<email>"),
        (r"\b[A-Za-z0-9._\-]+@[A-Za-z0-9\-]+:[^\s'\"]+", "<host>"),
        (
            rf"({_VERSIONED})?(?<![\w.])(?:{_OCTET}\.){{3}}{_OCTET}(?:/\d{{1,2}})?(?::\d{{1,5}})?(?![\w.])",
            _kept_if_versioned,
        ),
        (r"(?i)(?<![\w:.\-])(?:[0-9a-f]{2}([:\-]))(?:[0-9a-f]{2}\1){4}[0-9a-f]{2}(?![\w:])", "<address>"),
        (r"(?i)(?<![\w:.])(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}(?:%\w+)?(?![\w:])", "<address>"),
        (
            r"(?i)(?<![\w:.])(?=[0-9a-f:]*::)(?=[a-f:]*\d)(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{1,4}(?:%\w+)?(?![\w:.])",
            "<address>",
        ),
        (
            r"(?i)(?<![a-z])((?:host(?:name)?|node(?:name|list)?|user(?:[_ ]?(?:name|id))?|master_addr|"
            r"server|"
            r"account|login|logname|pod|container)['\"]?\s*[:=]\s*['\"]?)[^\s,;'\")\]}]+",
            r"\1<name>",
        ),
        (
            r"(?i)(--(?:host(?:name)?|node(?:name|list|s)?|user(?:name)?|master[_\-]addr|server|account)\s+)[^\s\-]\S*",
            r"\1<name>",
        ),
        (r"(?i)\b(uid=\d+\()[^)]*\)", r"\1<name>)"),
        (
            r"\b[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)*\.(?:internal|local|lan|corp|intra|localdomain|cluster|svc|"
            r"amazonaws\.com|googleapis\.com|compute|private|home)\b(?:\.[a-z.]+)?(?::\d+)?",
            "<host>",
        ),
        # Hosts of any place: one name before .com and its like; two, or one with a hyphen, before the rest.
        (
            rf"(?i)(?<![\w.@/\-])(?!{_PUBLIC}\b)(?:(?:[a-z0-9\-]+\.)+(?:com|edu|gov|org|mil)|(?:[a-z0-9\-]+\.){{2,}}"
            r"(?:net|info|cloud|[a-z]{2})(?<!\.py)(?<!\.so)(?<!\.cu)(?<!\.h)(?<!\.cc)(?<!\.rs)(?<!\.io)(?<!\.nn)|"
            r"(?:[a-z0-9\-]+\.){2,}(?:io|ai|dev)(?=[:/])|"
            r"[a-z]*[\d\-][a-z0-9\-]*\.(?:[a-z0-9\-]+\.)*(?:io|ai|dev|net|cloud))(?![\w.\-(\[=])(?::\d+)?(?:/[^\s'\"]*)?",
            "<host>",
        ),
        (
            r"\b(?:node|host|dgx|gpu|worker|compute|server|srv|hpc)[a-z0-9\-]*\d[a-z0-9\-]*:\d{4,5}\b",
            "<host>",
        ),
        (r"\b(?:ip-\d+-\d+-\d+-\d+|[A-Za-z0-9]+@[A-Za-z0-9\-]+(?=[:#$ ]))\b", "<host>"),
        # Paths. The last part stays where it is a file of code: it says which library speaks.
        (r"(?<=\")(?:file:)?(?:(?:~[\w.\-]*)?/|[A-Za-z]:[\\/])(?=[^\"\n]*[ \\/])[^\"\n]+(?=\")", _of_path),
        (r"(?<=')(?:file:)?(?:(?:~[\w.\-]*)?/|[A-Za-z]:[\\/])(?=[^'\n]*[ \\/])[^'\n]+(?=')", _of_path),
        (
            rf"(?i)(?<![\w.])(?:file:)?[a-z]:[\\/](?:{_WORD}[\\/])*([^\s\\/:*?\"<>|,;)\]}}]*)",
            _of_path,
        ),
        (r"\\\\[^\s\\/]+\\[^\s,;'\")]+", "<path>"),
        (r"(?<![\w.:/])[A-Za-z][\w.\-]*:/(?!/)[\w.~\-][^\s'\",;()\[\]{}<>|]*", "<path>"),
        (
            r"(?i)(?<![\w.\-/])(?:/[\w.\-]+)*?/?(?:home|users|export|scratch|mnt|media|volumes)/"
            r"[^\s/:,;'\"()]+(?:'s)?(?: [^\s/:,;'\"()]+){0,3}"
            r"(?=/)(?:/[^\s/:,;'\"()\[\]{}<>=|]+)*/?",
            _of_path,
        ),
        (r"(?i)(?<![\w.\-/])(?:home|users)/[\w.\-]+/?", "<path>"),
        (
            r"(?<![\w.:/<>*\-+)\]\"'])(?:~[\w.\-]*|\$\{?HOME\}?)?(?:/[^\s/:,;'\"()\[\]{}<>=|]+)+/?",
            _of_path,
        ),
        (r"(?<![\w.])\.{1,2}/(?:[\w.\-]+/)*[\w.\-]+", _of_path),
        (r"(?<=[\"'(\[])(?:~[\w.\-]*)?/[^\s'\":,;()\[\]{}<>|]+", _of_path),
        # A long run of letters and figures that nobody chose: no symbol of C++ (_ZN3c10…) and no class.
        (
            r"(?<![A-Za-z0-9_])(?!(?:[A-Z][a-z]{1,24}){2,12}\d{0,2}\b)(?=[A-Za-z0-9+/_\-]*[0-9])"
            r"(?=[A-Za-z0-9+/_\-]*[A-Z])(?=[A-Za-z0-9+/_\-]*[a-z])"
            r"[A-Za-z0-9+/_\-]{32,}={0,2}",
            _kept_if_chosen,
        ),
        (r"(?i)(?<![A-Za-z0-9_])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{24,}(?![A-Za-z0-9_])", _SECRET),
    )


_LONG_WORD = re.compile(r"[^\s]{300,}")  # patterns are quadratic in the length of a word
_LAST_WORD = re.compile(r"\S{0,300}\Z")
_LONGEST = 4000
_CODE = re.compile(r"[\w\-]+\.(?:py|pyx|cpp|cc|cu|cuh|h|hpp|c|rs)")


@lru_cache(maxsize=1)
def _compiled() -> tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]:
    return tuple((re.compile(pattern, re.DOTALL), put) for pattern, put in _patterns())


@lru_cache(maxsize=4096)  # a message that is printed at every step is one text
def scrub(text: str) -> str:
    """``text`` without what is nobody else's business, and cut where it is long beyond reason."""
    text = _LONG_WORD.sub("<long>", text)
    if len(text) > _LONGEST:
        text = _LAST_WORD.sub("", text[:_LONGEST])  # no half of a secret
    for pattern, put in _compiled():
        text = pattern.sub(put, text)
    return text
