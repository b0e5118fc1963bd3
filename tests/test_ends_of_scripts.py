"""A script that is done ends with status 0, and one that has failed with its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# `python tests/ends_of_scripts.py 50` plays all of them fifty times. "device, an exception on one rank" is not here:
# the simulated device sends over Gloo, whose own thread may drop a work, and what PyTorch has put into it, when the
# interpreter has gone. That aborts a rank in about one of a hundred runs.
ENDS = (
    "destroy_process_group",
    "nothing, kept in a cycle",
    "destroy_process_group, wait",
    "remove",
    "between backward and step",
    "an exception in backward",
    "sys.exit",
    "auto_quantize",
    "device, an exception",
)


def test_no_end_of_a_script_is_an_abort() -> None:
    script = Path(__file__).with_name("ends_of_scripts.py")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, str(script), "1", *ENDS], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
