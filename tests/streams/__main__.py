"""``python tests/streams`` plays all scenarios and mutants for docs/reports/streams.md; ``--play WORD`` plays some."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    # Ranks import the library and the tests as this process does.
    sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]
    from streams.table import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
