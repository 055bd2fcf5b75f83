"""Secrets, paths, hosts and addresses taken out of a text, so that a report can be pasted anywhere.

What is shown of a log is only what a message matched, and that goes through here. In doubt something is
taken out: a report without a word is less harm than one with a password.
"""

from __future__ import annotations

import re
from functools import lru_cache

_SECRET = "<secret>"

_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"-----BEGIN [A-Z ]{0,40}-----.*?(?:-----END [A-Z ]{0,40}-----|$)", _SECRET),
    # What the makers of tokens prefix them with.
    (
        r"\b(?:hf|gh[pousr]|github_pat|glpat|xox[abeprs]|npm|pypi|dop_v1|ya29|sk|pk|rk|nvapi|wandb_v1|r8|gsk)"
        r"[-_.][A-Za-z0-9_\-.]{10,}",
        _SECRET,
    ),
    (r"\b(?:AKIA|ASIA|AIza)[A-Za-z0-9_\-]{12,}", _SECRET),
    (r"\beyJ[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*){0,2}", _SECRET),  # a JSON web token
    (r"(?i)\b(bearer|basic|digest|token)\s+[A-Za-z0-9+/_.~\-]{8,}=*", rf"\1 {_SECRET}"),
    (
        r"(?i)([a-z0-9_\-]*(?:passw(?:or)?d|passphrase|secret|api[_\-]?key|access[_\-]?key|auth(?:orization)?|"
        r"credentials?|private[_\-]?key|(?<![a-z])token|[_\-]token|cookie|[_\-]key))"
        r"(['\"]?\s*[:=]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;&'\"]+)",
        rf"\1\2{_SECRET}",
    ),
    # Addresses. A link to a public place of code stays: it says where a message comes from.
    (
        r"\b[a-zA-Z][a-zA-Z0-9+.\-]{1,20}://(?!(?:www\.)?(?:github\.com|pytorch\.org|docs\.nvidia\.com|"
        r"huggingface\.co/docs)[/\s)]|(?:www\.)?(?:github\.com|pytorch\.org)$)[^\s'\"<>)\]]+",
        "<url>",
    ),
    (r"(?i)\b(https?://[^\s?#'\"<>)]+)[?#][^\s'\"<>)]*", r"\1"),
    (r"[A-Za-z0-9._%+\-]{1,64}@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)+", "<email>"),
    (r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?:/\d{1,2})?(?::\d{1,5})?(?![\w.])", "<address>"),
    (r"(?i)(?<![\w:.])(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{1,4}(?![\w:])", "<address>"),
    (r"(?i)(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}:?[0-9a-f]{1,4}(?:%\w+)?(?![\w:.])", "<address>"),
    (
        r"(?i)(?<![a-z])((?:host(?:name)?|node(?:name|list)?|user(?:name)?|master_addr|server|account|login|"
        r"pod|container)['\"]?\s*[:=]\s*['\"]?)[^\s,;'\")\]}]+",
        r"\1<name>",
    ),
    (
        r"\b[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)*\.(?:internal|local|lan|corp|intra|localdomain|cluster|svc|"
        r"amazonaws\.com|googleapis\.com|compute|private|home)\b(?:\.[a-z.]+)?(?::\d+)?",
        "<host>",
    ),
    (r"\b(?:ip-\d+-\d+-\d+-\d+|[A-Za-z0-9]+@[A-Za-z0-9\-]+(?=[:#$ ]))\b", "<host>"),
    # Paths. The last part stays where it is a file of code: it says which library speaks.
    (
        r"(?i)(?<![\w.])(?:file:)?[a-z]:[\\/](?:[^\s\\/:*?\"<>|,;]+(?: [^\s\\/:*?\"<>|,;]+)?[\\/])*"
        r"([^\s\\/:*?\"<>|,;)\]}]*)",
        "PATH",
    ),
    (r"\\\\[^\s\\/]+\\[^\s,;'\")]+", "<path>"),
    (r"(?<![\w.:/>*\-+)\]\"'])(?:~[\w.\-]*|\$\{?HOME\}?)?(?:/[^\s/:,;'\"()\[\]{}<>=|]+)+/?", "PATH"),
    (r"(?<=[\"'(\[])(?:~[\w.\-]*)?/[^\s'\":,;()\[\]{}<>|]+", "PATH"),
    # A long run of letters and figures that is no word, version, symbol of C++ (_ZN3c10…) or name of a class.
    (
        r"(?<![A-Za-z0-9_])(?!_Z[A-Z0-9])(?!(?:[A-Z][a-z]{1,24}){2,12}\d{0,2}\b)(?=[A-Za-z0-9+/_\-]*[0-9])"
        r"(?=[A-Za-z0-9+/_\-]*[A-Z])(?=[A-Za-z0-9+/_\-]*[a-z])"
        r"[A-Za-z0-9+/_\-]{32,}={0,2}",
        _SECRET,
    ),
    (r"(?i)(?<![A-Za-z0-9_])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{24,}(?![A-Za-z0-9_])", _SECRET),
)
_COMPILED = tuple((re.compile(pattern, re.DOTALL), put) for pattern, put in _PATTERNS)
_LONG_WORD = re.compile(r"[^\s]{300,}")  # patterns are quadratic in the length of a word
_LAST_WORD = re.compile(r"\S{0,300}\Z")
_LONGEST = 4000
_CODE = re.compile(r"[\w\-]+\.(?:py|pyx|cpp|cc|cu|cuh|h|hpp|c|rs)")


@lru_cache(maxsize=4096)  # a message that is printed at every step is one text
def scrub(text: str) -> str:
    """``text`` without what is nobody else's business, and cut where it is long beyond reason."""
    text = _LONG_WORD.sub("<long>", text)
    if len(text) > _LONGEST:
        text = _LAST_WORD.sub("", text[:_LONGEST])  # no half of a secret
    for pattern, put in _COMPILED:
        text = pattern.sub(_of_path if put == "PATH" else put, text)
    return text


def _of_path(match: re.Match[str]) -> str:
    name = re.split(r"[\\/]", match[0].rstrip("\\/"))[-1]
    return f"<path>/{name}" if _CODE.fullmatch(name) else "<path>"
