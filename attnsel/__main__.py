"""``python -m attnsel``: the command line."""

import sys

if __name__ == "__main__":
    try:
        from attnsel.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(main())
