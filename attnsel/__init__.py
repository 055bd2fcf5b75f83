"""attnsel: which attention kernel will run, why each of the others cannot, and the way to a faster one."""

from pathlib import Path as _Path

# In a checkout rules/ and backends/ stand beside this folder; installed, they are inside it.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "rules").is_dir():
    __path__.append(str(_root))
del _root
