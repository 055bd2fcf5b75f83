"""``attnsel prove`` from a checkout, whether attnsel is installed or not: the same flags, the same file.

python benchmarks/gpu.py                        # nine minutes at most, into gpu-NAME.json
python benchmarks/gpu.py --device cpu --only "plain" --budget 60   # without a GPU: a rehearsal
"""

from __future__ import annotations

import sys
from pathlib import Path

import needed

if __name__ == "__main__":
    missing = needed.missing()
    if missing:
        print(f"gpu.py: {missing}", file=sys.stderr)
        sys.exit(2)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from attnsel.cli import main

    sys.exit(main(["prove", *sys.argv[1:]]))
