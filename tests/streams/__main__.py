"""``python tests/streams`` writes the tables of docs/reports/streams.md."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]
    from streams.play import PAGE, page

    PAGE.write_text(page())
