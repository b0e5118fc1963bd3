"""`python -m overlap`."""

from __future__ import annotations

import sys

from overlap.cli import main

if __name__ == "__main__":
    sys.exit(main())
