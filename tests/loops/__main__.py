"""``python tests/loops`` writes docs/reports/loops.md; with ``--play`` it plays loops or topics and reports."""

import sys
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from loops.table import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
