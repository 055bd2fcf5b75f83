"""Distributions in a temporary folder: files, and the metadata that pip would have written for them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

# What the compiled parts of real packages say where they do not fit: each as reported by users, the symbol
# and library names from flash-attention#1644, #1783, #723 and their like.
OLD_ABI = "_ZN3c105ErrorC2ENS_14SourceLocationESs"
NEW_ABI = "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
OTHER_TORCH = "_ZN3c104cuda9SetDeviceEa"


def undefined(symbol: str) -> str:
    return f"/site/flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so: undefined symbol: {symbol}"


def put(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str] | None = None,
    *,
    requires: Iterable[str] = (),
    url: str | None = None,
    record: bool = True,
) -> None:
    """Install ``files`` (path → text) as the distribution ``name``, over whatever lies there."""
    for path, text in (files or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
    tops = dict.fromkeys(path.split("/")[0].removesuffix(".py") for path in files or {})
    (info / "top_level.txt").write_text("\n".join(tops))
    if record:
        (info / "RECORD").write_text(
            "".join(f"{path},sha256={_hash(text)},{len(text)}\n" for path, text in (files or {}).items())
        )
    if url is not None:
        (info / "direct_url.json").write_text(json.dumps({"url": url, "archive_info": {}}))


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def flash_attn(*, error: str = "", cute: bool = False) -> dict[str, str]:
    """The files of flash-attn, as far as importing goes; its compiled part fails with ``error``."""
    files = {
        "flash_attn/__init__.py": "from flash_attn.flash_attn_interface import flash_attn_func\n",
        "flash_attn/flash_attn_interface.py": "import flash_attn_2_cuda\ndef flash_attn_func(): ...\n",
        "flash_attn_2_cuda.py": f"raise ImportError({error!r})\n" if error else "",
    }
    if cute:  # 2.8.1 to 2.8.3
        files |= {
            "flash_attn/cute/__init__.py": "from .interface import flash_attn_func\n__version__ = '0.1.0'\n",
            "flash_attn/cute/interface.py": "import cutlass\ncutlass.ThrMma\n\n",
        }
    return files


def flash_attn_3(*, error: str = "") -> dict[str, str]:
    return {
        "flash_attn_interface.py": "import flash_attn_3._C\ndef flash_attn_func(): ...\n",
        "flash_attn_3/_C.py": f"raise ImportError({error!r})\n" if error else "",
    }


def flash_attn_4() -> dict[str, str]:
    """Without flash_attn/__init__.py: alone it is a namespace."""
    return {
        "flash_attn/cute/__init__.py": "from .interface import flash_attn_func\n",
        "flash_attn/cute/interface.py": "def flash_attn_func(): ...\n",
    }
