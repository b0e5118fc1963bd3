"""A script that is done ends with status 0, and one that has failed with its own."""

import os
import subprocess
import sys
from pathlib import Path


def test_no_end_of_a_script_is_an_abort() -> None:
    script = Path(__file__).with_name("ends_of_scripts.py")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, str(script), "1"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


_DROPS_LATE = """
import threading, time
from overlap._threads import start

class Slow:
    def __del__(self):
        time.sleep(1)
        print("dropped", flush=True)

def begin():
    held, go = [Slow()], threading.Event()
    start(lambda: (go.wait(), held), "overlap-slow")
    return go

go = begin()
go.set()
time.sleep(0.2)  # What it runs is over; the thread drops what that held.
"""


def test_a_thread_that_is_done_is_waited_for_until_it_has_dropped_what_it_held() -> None:
    done = subprocess.run([sys.executable, "-c", _DROPS_LATE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "dropped\n"), done.stderr
