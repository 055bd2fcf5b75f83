"""``python -m attnsel``: the command line."""

import sys

from attnsel.cli import main

if __name__ == "__main__":
    sys.exit(main())
