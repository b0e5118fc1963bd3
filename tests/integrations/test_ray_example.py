"""The example with Ray Train learns the same with overlap as without; ``pip install 'ray[train]'`` to have it run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "frameworks" / "ray_train.py"


def _printed(*arguments: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    shown = subprocess.run(
        [sys.executable, EXAMPLE, *arguments], env=environment, check=True, capture_output=True, text=True, timeout=280
    )
    return sorted(set(re.findall(r"rank \d: loss \S+, weights \S+", shown.stdout + shown.stderr)))


@pytest.mark.timeout(600)  # A cluster is started for each, which may take two minutes.
def test_workers_of_ray_train() -> None:
    plain = _printed("--plain")
    assert len(plain) == 2
    assert _printed() == plain
