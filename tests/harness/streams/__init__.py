"""Simulated streams on the CPU, and a detector of races between them.

A scenario runs in ranks whose process group has the backend :data:`STREAMS_BACKEND`::

    def _scenario(rank: int, world_size: int) -> None:
        ddp = DistributedDataParallel(model)        # made before: what it has is the device's
        with detecting() as detector:
            optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
            chain(AllReduce(), Step(optim)).register(ddp)
            for x, y in batches:
                loss(ddp(x), y).backward()
                optim.step()
        detector.report.check()                     # no race, no use after free, no wait of the host

    run_ranks(_scenario, 2, backend=STREAMS_BACKEND)

or in one process, which stands for two ranks with equal data, in ``with one_process(2):``. See [Note: simulated
streams] in :mod:`.detector` and [Note: simulated collectives] in :mod:`.group`.
"""

from .detector import Detector, active, detecting
from .group import STREAMS_BACKEND, StreamGroup
from .report import Fault, HostSync, Report
from .worlds import one_process

__all__ = [
    "STREAMS_BACKEND",
    "Detector",
    "Fault",
    "HostSync",
    "Report",
    "StreamGroup",
    "active",
    "detecting",
    "one_process",
]
