"""What the fork server imports once, so that every rank forked from it starts with it in memory."""

import contextlib
import gc
import importlib
import os
import sys
import threading
import warnings

import torch

_MODULES = (
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",  # a second in each rank
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch._dynamo",  # the first DDP constructor imports it: 2.4 s
    "torch._inductor",
    "torch._functorch.aot_autograd",  # and so does the first torch.compile(): 1.2 s
    "numpy",
    "cloudpickle",
    "pytest",  # every test module that a rank imports needs these two
    "hypothesis",
    "overlap.compose",  # The package itself imports its parts when they are used.
    "overlap.optim.local_sgd",
    "overlap.optim.zero",
    "overlap.resume",
    "overlap.timeline",
)

# Options of the interpreter that started the server have come along; see tests/conftest.py.
sys.dont_write_bytecode = False

# What some tests need besides, where it is installed.
_MORE = os.environ.get("OVERLAP_TESTS_PRELOAD", "").split()

for _name in (*_MODULES, *_MORE):
    # A module that is broken or absent must fail in the rank that needs it, where the error has a name;
    # so must one that warns, since `python -W error` passes its options on to the server.
    with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
        importlib.import_module(_name)

# tqdm's own lock is a semaphore of the system, which a rank would leave behind.
with contextlib.suppress(ImportError):
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())

# For each kind of device that is not there torch.manual_seed() keeps the caller's stack, formatted, for later: most of
# its time, and loops of small models begin with it.
for _devices in (torch.cuda, torch.xpu, torch.mtia):
    if not _devices.is_available():
        _devices.manual_seed_all = lambda seed: None

# Keeps the collector off the preloaded objects, so that a rank's collection is quick and copies no pages.
gc.collect()
gc.freeze()
